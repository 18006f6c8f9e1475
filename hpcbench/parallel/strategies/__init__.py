"""The registry's entries, a file per family."""
