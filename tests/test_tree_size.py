"""The size of what a clone of the repository checks out."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_BYTES = 12 * 2**20
"""A machine without a network gets the tree and the packages for it through a channel of tens of megabytes."""


def test_tracked_files_are_small() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sizes_bytes = {
        name: (ROOT / name).lstat().st_size for name in listed.split("\0") if name and (ROOT / name).exists()
    }
    largest = sorted(sizes_bytes, key=sizes_bytes.__getitem__, reverse=True)[:5]
    total_bytes = sum(sizes_bytes.values())
    assert total_bytes <= LIMIT_BYTES, f"{total_bytes / 2**20:.1f} MiB; the largest: {', '.join(largest)}"
