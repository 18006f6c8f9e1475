"""The scores of the oracle, and their predictions, which are committed before the first scored run."""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.oracle.scoring import CasePredictor, PredictorResult, ScoredConfiguration
from benchmarks.testbed import EIGHT_NODES, FOUR_NODES, RATE_MBIT, LocalMachine, Shape, Testbed
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import write_atomic

HERE = Path(__file__).parent
SWEEPS = HERE.parents[1] / "sweeps"
DATA_PARALLEL = ("ddp", "horovod")


class Score(NamedTuple):
    """A sweep that predictors are scored on, and its files in the tree."""

    name: str
    sweep: Path
    shape: Shape | None
    """Of the SLURM box; without it the runs are on this machine itself."""
    calibrated_mbit: int = 0
    """Rate of the box's links during the plain calibration."""
    scored_mbit: int = 0
    """Rate during the probes of the sweep's own shapes and the scored runs."""
    launches: int = 0
    """Of data parallelism and of recommended configurations, where small differences matter; 0: those of the sweep."""
    busy_processes: int = 0
    """Processes of others, each of which uses a core all the time."""
    probing_jobs: int = 1
    """Probes of the sweep's shapes at once: as many as ranks in most of the scored jobs that run at once."""
    scored_jobs: int = 1
    """Scored jobs at once."""
    folder: Path = HERE
    """Of its files."""

    def bed(self, work: Path) -> Testbed:
        """Return the machine of the score, with its results in ``work``."""
        return LocalMachine(work) if self.shape is None else Testbed(work, self.shape)

    @property
    def predictions(self) -> Path:
        """Return the path of the registered predictions."""
        return self.folder / f"{self.name}_predictions.json.gz"

    @property
    def calibrations(self) -> Path:
        """Return the folder of the calibrations that the predictions follow from: without and with its own shapes."""
        return self.folder / "calibrations" / self.name

    @property
    def looks(self) -> Path:
        """Return the path of the sets of predictions that were compared with measurements."""
        return self.folder / f"{self.name}_looks.json"

    @property
    def cases(self) -> Path:
        """Return the path of the measured launches beside the registered predictions."""
        return self.folder / f"{self.name}_cases.json.gz"


BOX = Score("box", HERE / "box.toml", FOUR_NODES, calibrated_mbit=200, scored_mbit=100, launches=5)
"""With the scored rate the links of four nodes carry 0.4 Gbit/s in all."""
SCORES = {
    score.name: score
    for score in (
        BOX,
        # Most jobs have two nodes or four: as many ranks compute beside a probe as beside a rank of a scored run.
        Score("paradl", SWEEPS / "paradl-small.toml", EIGHT_NODES, RATE_MBIT, RATE_MBIT, probing_jobs=4, scored_jobs=2),
        Score(
            "ddlbench", SWEEPS / "ddlbench-small.toml", EIGHT_NODES, RATE_MBIT, RATE_MBIT, probing_jobs=4, scored_jobs=2
        ),
        Score("local", HERE / "local.toml", None),
        Score("local_busy", HERE / "local.toml", None, busy_processes=1),
    )
}


RERUNS = ("paradl", "ddlbench")
"""Scores on the papers' matrices."""


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
        asked = ScoredConfiguration(cluster=cluster, config_id=config_id(spec), spec=spec)
        found.append(
            Foretold(config_id=asked.config_id, spec=spec, said={name: say(asked) for name, say in predictors.items()})
        )
    register = Register(sources=sources, made_unix_s=time.time(), configurations=found)
    write_atomic(path, gzip.compress(msgspec.json.format(msgspec.json.encode(register), indent=1) + b"\n", mtime=0))


def read(path: Path) -> Register:
    """The file of predictions."""
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=Register)


def commit(path: Path) -> Commit | None:
    """The first commit that holds the predictions of the file, compressed or as plain JSON; none if it has changed."""
    if _git(path.parent, "status", "--porcelain", "--", path.name):
        return None
    predictions = _unpacked(path.read_bytes())
    for line in _git(path.parent, "log", "--reverse", "--format=%h %ct", "--", path.name, path.stem).splitlines():
        name, unix_s = line.split()
        if any(_unpacked(_committed(path.parent, name, file)) == predictions for file in (path.name, path.stem)):
            return Commit(name, float(unix_s))
    return None


def looks(path: Path, looks_path: Path) -> list[Look]:
    """Every set of predictions that was compared with measurements, in order, this one included from now on."""
    before = msgspec.json.decode(looks_path.read_bytes(), type=list[Look]) if looks_path.exists() else []
    now = hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()[:12]
    if all(one.predictions != now for one in before):
        before.append(Look(predictions=now, unix_s=time.time()))
        write_atomic(looks_path, msgspec.json.format(msgspec.json.encode(before), indent=1) + b"\n")
    return before


def require_git(folder: Path) -> None:
    """Raise HpcbenchError where nothing can be committed in ``folder``: no repository, or nobody to commit as."""
    if not (_git(folder, "rev-parse", "--show-toplevel") and _git(folder, "var", "GIT_COMMITTER_IDENT")):
        raise HpcbenchError(
            f"{folder} is in no git repository, or git has no user name",
            hint="clone the project and set user.name and user.email, or score without --commit",
        )


def copy_files(paths: Sequence[Path], own: Score, score: Score) -> list[Path]:
    """Copy files and folders of ``own`` over those of ``score``, and return the copies."""
    copies = [score.folder / path.relative_to(own.folder) for path in paths]
    for path, target in zip(paths, copies, strict=True):
        if path.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(path, target)
        else:
            shutil.copy(path, target)
    return copies


def commit_files(paths: Sequence[Path], folder: Path, subject: str, body: str) -> None:
    """Commit ``paths`` alone in the repository of ``folder``, if any of them has changed.

    Raises:
        HpcbenchError: Git refused the commit.
    """
    names = [str(path) for path in paths]
    if not _git(folder, "status", "--porcelain", "--", *names):
        return
    for arguments in (["add", "--all", "--", *names], ["commit", "-m", subject, "-m", body, "--only", "--", *names]):
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HpcbenchError(
                f"git {arguments[0]} failed: {(done.stderr or done.stdout).strip()}", hint="the same command continues"
            )


def _unpacked(data: bytes) -> bytes:
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def _committed(folder: Path, commit_name: str, file: str) -> bytes:
    """Return what ``file`` of ``folder`` holds in a commit; nothing where the commit lacks it."""
    arguments = ["git", "show", f"{commit_name}:./{file}"]
    return subprocess.run(arguments, cwd=folder, capture_output=True, check=False).stdout


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
