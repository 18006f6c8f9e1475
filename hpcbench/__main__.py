"""Entry point of ``python -m hpcbench``."""

from hpcbench.cli.main import entry_point

entry_point()
