"""What becomes of host memory that tensors give back."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's ``malloc.h``."""
_LARGEST_KEPT_BYTES = 32 * 2**20
"""The most that ``mallopt`` takes for the second: what is larger goes back to the system at once."""
_NEVER_BYTES = 2**31 - 1
_OWN_CHOICES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_freed_memory(env: Mapping[str, str]) -> bool:
    """Have the process keep what is freed, for the tensors to come, as CUDA's caching allocator does; whether it will.

    By default glibc gives large blocks back, and every step takes its activations and gradients anew, page by page
    from the system: 18 to 30 % of a step of a small convolutional network, more or less by the layout of the heap.
    What ``env`` sets of this stays. Other C libraries have no such call, or ignore it.
    """
    if any(name in env for name in _OWN_CHOICES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _NEVER_BYTES))
