"""The cost of every strategy, a file per family."""
