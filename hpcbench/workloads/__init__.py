"""Models and data sets: their names, options and shapes. Nothing here imports torch."""
