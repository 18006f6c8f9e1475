"""A page as somebody follows it: its files written, its commands called, from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


_BLOCK = re.compile(r"((?:^ {4}[^\n]*\n)+)|^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps(page: str) -> list[str]:
    """Lines for a shell: each command as it stands, and each file that the page shows under the name it gives."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: list[str] = []
    for indented, fenced in _BLOCK.findall(text):
        lines = fenced.splitlines() or [line[4:] for line in indented.splitlines()]
        named = re.fullmatch(r"# (\S+\.toml)", lines[0])
        if named:
            found.append(f"mkdir -p $(dirname {named[1]})\ncat > {named[1]} <<'END'\n" + "\n".join(lines[1:]) + "\nEND")
        else:
            found += lines
    return found


def follow(
    folder: Path, page: str, wanted: Callable[[str], bool], **variables: str
) -> subprocess.CompletedProcess[str]:
    """The wanted steps of ``page`` in ``folder`` by a new user, who has nothing; the first that fails is the last."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    (bin_folder / "hpcbench").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcbench "$@"\n')
    (bin_folder / "hpcbench").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCBENCH_", "XDG_"))}
    # One thread a rank: nodes that share two cores have none to wait with.
    kept["OMP_NUM_THREADS"] = "1"
    environment = {**kept, "HOME": str(folder), "PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(step for step in steps(page) if wanted(step))
    return subprocess.run(
        ["bash", "-exc", script], cwd=folder, env={**environment, **variables},
        capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
