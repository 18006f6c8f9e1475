"""Predictions that are written down, and committed, before the first run that they are scored on."""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.fileio import write_atomic
from hpcbench.oracle.scoring import MeasuredConfiguration, PredictorResult
from hpcbench.report.oracle_validation import CasePredictor

HERE = Path(__file__).parent
SWEEP = HERE / "box.toml"
PREDICTIONS = HERE / "box_predictions.json"
LOOKS = HERE / "box_looks.json"
CALIBRATIONS = HERE / "calibrations" / "box"
"""Of the predictions: a calibration without and one with the shapes of the sweep."""


class Foretold(msgspec.Struct, kw_only=True):
    """One configuration, and by predictor what was said of it."""

    config_id: str
    spec: RunSpec
    said: dict[str, PredictorResult]


class Register(msgspec.Struct, kw_only=True):
    """The file of predictions."""

    sources: list[str]
    """What they were made from."""
    made_unix_s: float
    configurations: list[Foretold]


class Commit(NamedTuple):
    """Which commit holds the file as it is, and when that was made."""

    name: str
    unix_s: float


class Look(msgspec.Struct, kw_only=True):
    """Somebody saw how predictions compare with measurements. A new set of predictions after that is a new look."""

    predictions: str
    """The beginning of the file's SHA-256."""
    unix_s: float


def write(
    path: Path, cluster: str, specs: Sequence[RunSpec], predictors: dict[str, CasePredictor], sources: list[str]
) -> None:
    """Write what the predictors say of each of ``specs`` into ``path``."""
    found = []
    for spec in specs:
        asked = MeasuredConfiguration(cluster=cluster, config_id=config_id(spec), spec=spec)
        found.append(
            Foretold(config_id=asked.config_id, spec=spec, said={name: say(asked) for name, say in predictors.items()})
        )
    register = Register(sources=sources, made_unix_s=time.time(), configurations=found)
    write_atomic(path, msgspec.json.format(msgspec.json.encode(register), indent=1) + b"\n")


def read(path: Path) -> Register:
    """The file of predictions."""
    return msgspec.json.decode(path.read_bytes(), type=Register)


def commit(path: Path) -> Commit | None:
    """The commit of the file, if it is in one as it stands."""
    changed = _git("status", "--porcelain", "--", str(path))
    found = _git("log", "-1", "--format=%h %ct", "--", str(path))
    if changed or not found:
        return None
    name, unix_s = found.split()
    return Commit(name, float(unix_s))


def looks(path: Path) -> list[Look]:
    """Every set of predictions that was compared with measurements, in order, this one included from now on."""
    before = msgspec.json.decode(LOOKS.read_bytes(), type=list[Look]) if LOOKS.exists() else []
    now = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    if all(one.predictions != now for one in before):
        before.append(Look(predictions=now, unix_s=time.time()))
        write_atomic(LOOKS, msgspec.json.format(msgspec.json.encode(before), indent=1) + b"\n")
    return before


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
