"""Microbenchmarks of a calibration run: layers, optimizer updates and collectives."""
