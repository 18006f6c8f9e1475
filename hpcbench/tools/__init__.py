"""Command-line tools that neither jobs nor the command line of hpcbench import."""
