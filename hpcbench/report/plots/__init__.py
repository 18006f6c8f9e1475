"""Plots of results: the plotted data, and charts of it for files, pages and terminals."""
