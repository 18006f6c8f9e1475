"""Plots: what is drawn, independent of whether a page, a file or a terminal shows it."""
