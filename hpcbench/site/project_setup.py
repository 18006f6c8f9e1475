"""Set-up of a project on disk: its folder with a sweep, a profile and JSON Schemas, and its data sets as files."""

from __future__ import annotations

import contextlib
import grp
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.sweep_file import SweepFile
from hpcbench.errors import ConfigError, SubmitError, did_you_mean
from hpcbench.fileio import encode_indented_json, make_folder, write_error, write_file
from hpcbench.paths import shared_folder
from hpcbench.results.schema import RunResult
from hpcbench.strategies.catalog import selectable_strategies
from hpcbench.submit.scheduler import scrubbed_environment
from hpcbench.workloads.datasets import DATASETS
from hpcbench.workloads.models import CUSTOM_MODEL_PATTERN, MODELS

_PROJECT_README = """# An hpcbench project

    hpcbench run quickstart                        # six short trainings on this machine
    hpcbench table quickstart
    hpcbench plot throughput quickstart

For a cluster, copy `clusters/generic-slurm.toml` to `clusters/my-cluster.toml`, set its `name`, and go through its
keys:

    hpcbench check clusters/my-cluster.toml
    hpcbench plan quickstart --cluster my-cluster  # its jobs and node-hours there
    hpcbench submit quickstart --cluster my-cluster

Sweeps are in `sweeps/`, results land in `results/`. Templates in `templates/` override the shipped ones by name.
"""


def write_project(folder: Path) -> list[Path]:
    """Write the missing files of a project; existing ones are left alone. Returns the files that were written."""
    shipped = {
        folder / "README.md": _PROJECT_README.encode(),
        folder / ".gitignore": b"/results/\n",
        folder / "sweeps" / "quickstart.toml": _shipped_file("sweeps", "quickstart.toml"),
        folder / "clusters" / "generic-slurm.toml": _shipped_file("clusters", "generic-slurm.toml"),
        folder / "templates" / "README.md": _shipped_file("templates", "README.md"),
        folder / "schemas" / "sweep.json": _schema_file("sweep"),
        folder / "schemas" / "cluster.json": _schema_file("cluster"),
        folder / "schemas" / "result.json": _schema_file("result"),
    }
    written = []
    for path, data in shipped.items():
        if not path.exists():
            write_file(path, data)
            written.append(path)
    return written


def share_results(folder: Path, group: str) -> Path:
    """Make the results folder of a project, whose new folders belong to ``group`` and are writable for it.

    Raises ``ConfigError`` if there is no such group, ``StorageError`` if this user may not give the folder to it.
    """
    results = folder / "results"
    try:
        gid = grp.getgrnam(group).gr_gid
    except KeyError:
        groups = {entry.gr_name for entry in grp.getgrall() if entry.gr_gid in os.getgroups()}
        raise ConfigError(f"--shared {group}: no such group", hint=did_you_mean(group, groups)) from None
    make_folder(results)
    try:
        os.chown(results, -1, gid)
        results.chmod(0o2775)
    except OSError as error:
        raise write_error(error, results) from error
    return results


def _shipped_file(kind: str, name: str) -> bytes:
    """A shipped file; its schema line points to the project's own schemas."""
    return (shared_folder(kind) / name).read_bytes().replace(b"../docs/schemas/", b"../schemas/")


def _schema_file(kind: str) -> bytes:
    return encode_indented_json(make_json_schema(kind))


class SampleProgress(msgspec.Struct):
    """A line of output of the sample maker."""

    done: int
    samples: int


def make_samples(
    profile: ClusterProfile, folder: Path, dataset: str, **options: int | None
) -> Iterator[SampleProgress]:
    """Run the sample maker in the profile's environment and yield its progress.

    ``options``: ``size``, ``samples`` and ``workers``; ``None`` stands for the default.

    Raises ``SubmitError`` if it fails (the reason is on standard error), or can only be run in a job.
    """
    environment = profile.environment(None)
    words = ["-m", "hpcbench.worker", "data", "make", dataset, "--folder", str(folder)]
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    if environment.is_made_in_job:
        raise SubmitError(
            f"the environment of {profile.name} is made by modules, setup lines or a container",
            hint=f"run this inside it: {shlex.join(['python', *words])}",
        )
    command = [environment.python, *words]
    try:
        process = subprocess.Popen(
            command, env=scrubbed_environment() | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise SubmitError(f"cannot run {command[0]}: {error.strerror}") from error
    assert process.stdout is not None
    try:
        for line in process.stdout:
            # Wrappers of the interpreter may print, too.
            with contextlib.suppress(msgspec.DecodeError):
                yield msgspec.json.decode(line, type=SampleProgress)
    finally:
        _stop_process(process)
    if process.returncode:
        raise SubmitError(f"{dataset} was not made: {shlex.join(command)} ended with {process.returncode}")


def _stop_process(process: subprocess.Popen[str]) -> None:
    """Wait for the end of the process; stop it if its output is not read any more."""
    assert process.stdout is not None
    process.stdout.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGTERM)
        process.wait()


def make_json_schema(kind: str) -> dict[str, Any]:
    """The schema of ``cluster``, ``sweep`` or ``result`` (JSON Schema 2020-12)."""
    if kind == "result":
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(RunResult)}
    if kind == "cluster":
        return ClusterProfile.model_json_schema()
    return _make_sweep_schema()


def _make_sweep_schema() -> dict[str, Any]:
    """Pydantic's schema with the names that exist, so that an editor can complete them."""
    document = SweepFile.model_json_schema()
    names = {
        "model": sorted(MODELS),
        "dataset": sorted(DATASETS),
        "strategy": sorted(selectable_strategies()),
    }
    for table in ("Fixed", "Grid", "Exclude"):
        properties = document["$defs"][table]["properties"]
        for parameter, choices in names.items():
            for node in _find_string_nodes(properties[parameter]):
                # A user's own model has a name of its own.
                constraint = {"anyOf": [{"enum": choices}, {"pattern": CUSTOM_MODEL_PATTERN}]}
                node.update(constraint if parameter == "model" else {"enum": choices})
    return document


def _find_string_nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, dict):
        nodes = [node] if node.get("type") == "string" else []
        return nodes + [string_node for value in node.values() for string_node in _find_string_nodes(value)]
    if isinstance(node, list):
        return [string_node for value in node for string_node in _find_string_nodes(value)]
    return []
