"""Dry runs: configurations are built and stepped on fake tensors, without devices and without other ranks."""
