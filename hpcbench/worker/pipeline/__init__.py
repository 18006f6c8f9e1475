"""The point-to-point runtime that executes ``parallel.schedule``."""
