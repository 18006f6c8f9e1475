"""Spatial parallelism with halo exchange."""
