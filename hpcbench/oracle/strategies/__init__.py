"""The cost of every strategy (traffic, memory, step time), one file per family."""
