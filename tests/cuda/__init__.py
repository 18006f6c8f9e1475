"""CUDA paths on GPUs that are not there: torch's CUDA build with a stub of the CUDA runtime, fake tensors and ranks.

``make test-cuda`` runs these tests in an environment of their own; other test runs leave them out. They tell nothing of
numbers, of time and of NCCL.
"""
