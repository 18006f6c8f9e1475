"""Calibration of a cluster: the sweep that measures it, the fits, and the files that hold the results."""
