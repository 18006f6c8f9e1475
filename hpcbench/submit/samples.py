"""Making samples in files: the worker's maker as a subprocess, since what it needs belongs to the worker."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcbench.config.cluster import ClusterProfile
from hpcbench.errors import SubmitError
from hpcbench.render.script import python_of
from hpcbench.submit.environment import clean_environment


class Order(NamedTuple):
    """What to make; ``None`` leaves it to the maker."""

    dataset: str
    size: int | None
    samples: int | None
    workers: int | None


class Made(msgspec.Struct):
    """How far the maker is."""

    done: int
    samples: int


def make_samples(profile: ClusterProfile, folder: Path, order: Order) -> Iterator[Made]:
    """Run the maker in the profile's own environment and pass on what it says.

    ``SubmitError`` where it fails (it has said why on standard error), or can only be run in a job.
    """
    environment = profile.environment(None)
    words = ["-m", "hpcbench.worker", "data", "make", order.dataset, "--folder", str(folder)]
    for name, value in (("--size", order.size), ("--samples", order.samples), ("--workers", order.workers)):
        words += [] if value is None else [name, str(value)]
    if environment.modules or environment.container or environment.setup:
        raise SubmitError(
            f"the environment of {profile.name} is made by modules, setup lines or a container",
            hint=f"run this inside it: {shlex.join(['python', *words])}",
        )
    command = [python_of(environment), *words]
    try:
        process = subprocess.Popen(
            command, env=clean_environment() | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise SubmitError(f"cannot run {command[0]}: {error.strerror}") from error
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Made)
    finally:
        _end(process)
    if process.returncode:
        raise SubmitError(f"{order.dataset} was not made: {shlex.join(command)} ended with {process.returncode}")


def _end(process: subprocess.Popen[str]) -> None:
    """Its own end, or one that is asked for where nobody listens any more."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGTERM)
        process.wait()
