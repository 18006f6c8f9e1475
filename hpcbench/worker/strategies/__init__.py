"""Runtimes of the parallel strategies. A family imports the shared modules and its own, never another family."""
