"""How much memory a rank needed at its peak."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")


class Peak(NamedTuple):
    """Bytes. On a cpu the resident set of the process, interpreter and libraries included; on cuda the allocator's."""

    memory_bytes: int
    reserved_bytes: int | None


def peak(device: torch.device | None) -> Peak:
    """The peak since the process began."""
    if device is not None and device.type == "cuda":
        import torch

        return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    return Peak(peak_resident_bytes(), None)


def peak_resident_bytes(status: Path = _STATUS) -> int:
    """Peak resident set of this process.

    The kernel's ``VmHWM`` begins anew when a program starts. ``ru_maxrss`` does not: it begins with what the parent
    held when it started this process, so under a large launcher it is the launcher's.
    """
    try:
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
