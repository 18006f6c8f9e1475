"""Predictions that are written down, and committed, before the first run that they are scored on."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcbench.config.spec import RunSpec, config_id
from hpcbench.fileio import write_atomic
from hpcbench.oracle.cases import Said
from hpcbench.report.validation import Predictor

HERE = Path(__file__).parent
PREDICTIONS = HERE / "box_predictions.json"
LOOKS = HERE / "box_looks.json"


class Foretold(msgspec.Struct, kw_only=True):
    """One configuration, and by predictor what was said of it."""

    config_id: str
    spec: RunSpec
    said: dict[str, Said]


class Register(msgspec.Struct, kw_only=True):
    """The file of predictions."""

    source: str
    """What they were made from."""
    made_unix_s: float
    configurations: list[Foretold]


class Commit(NamedTuple):
    """Which commit holds the file as it is, and when that was made."""

    name: str
    unix_s: float


def write(source: str, specs: list[RunSpec], say: dict[str, Predictor], measured_of: dict[str, object]) -> Register:
    """Write what ``say`` says of each of ``specs``."""
    raise NotImplementedError


def read() -> Register:
    """The file of predictions."""
    return msgspec.json.decode(PREDICTIONS.read_bytes(), type=Register)


def commit() -> Commit | None:
    """The commit of the file, if it is in one as it stands."""
    changed = _git("status", "--porcelain", "--", str(PREDICTIONS))
    found = _git("log", "-1", "--format=%h %ct", "--", str(PREDICTIONS))
    if changed or not found:
        return None
    name, unix_s = found.split()
    return Commit(name, float(unix_s))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
