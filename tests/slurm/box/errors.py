"""The one exception that people see: what is wrong, the numbers, and the fix."""

from __future__ import annotations


class BoxError(Exception):
    """Something the user can act on; the command line prints it without a traceback and exits 2."""
