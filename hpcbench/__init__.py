"""hpcbench: how should this model be parallelised on that cluster, and how sure are we?"""

__version__ = "0.1.0"
