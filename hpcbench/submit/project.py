"""A project folder to start from, for people who have installed hpcbench without its repository."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcbench.fileio import make_folder, write_atomic
from hpcbench.paths import shared_folder

_README = """# An hpcbench project

    hpcbench run quickstart                        # six short trainings on this machine
    hpcbench plan quickstart --cluster my-cluster  # what they would be on a cluster
    hpcbench submit quickstart --cluster my-cluster
    hpcbench table quickstart

Copy `clusters/generic-slurm.toml` to `clusters/my-cluster.toml`, set its `name`, and go through its keys.
Sweeps are in `sweeps/`, results land in `results/`. Templates in `templates/` override the shipped ones by name.
"""


def write_project(folder: Path) -> list[Path]:
    """Write what is missing in ``folder``; files that exist are left alone. Returns what was written."""
    shipped = {
        folder / "README.md": _README.encode(),
        folder / ".gitignore": b"/results/\n",
        folder / "sweeps" / "quickstart.toml": _copy("sweeps", "quickstart.toml"),
        folder / "clusters" / "generic-slurm.toml": _copy("clusters", "generic-slurm.toml"),
        folder / "templates" / "README.md": _copy("templates", "README.md"),
        folder / "schemas" / "sweep.json": _schema("sweep"),
        folder / "schemas" / "cluster.json": _schema("cluster"),
    }
    written = []
    for path, data in shipped.items():
        if not path.exists():
            make_folder(path.parent)
            write_atomic(path, data)
            written.append(path)
    return written


def _copy(kind: str, name: str) -> bytes:
    """A shipped file; its schema line points to the project's own schemas."""
    return (shared_folder(kind) / name).read_bytes().replace(b"../docs/schemas/", b"../schemas/")


def _schema(kind: str) -> bytes:
    from hpcbench.results.json_schema import json_schema

    return msgspec.json.format(msgspec.json.encode(json_schema(kind)), indent=1) + b"\n"
