"""Small trees of /proc and /sys, written from ``{path: text}``."""

from __future__ import annotations

from pathlib import Path


def write_tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root
