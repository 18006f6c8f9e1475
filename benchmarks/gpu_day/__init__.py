"""The first day on a GPU: one command, seven minutes, one device (docs/gpu-check.md)."""
