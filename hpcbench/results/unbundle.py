"""The results of a bundle, as ``collect`` gives those of a tree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.results.bundle import HEADER, BundleHeader, BundleReader, read_header
from hpcbench.results.collect import Collected
from hpcbench.results.decode import decode_result

_RESULT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})/runs/([0-9a-f]{2})/(\2[0-9a-f]{14})/result\.json")
_MOST_PROBLEMS = 20


def collect_bundle(path: Path, clusters: Sequence[str] | None = None) -> list[Collected]:
    """The results in a bundle, in the order of its sweeps; of some clusters, or of all.

    What is broken, or was passed over, is an entry with its reason. Raises ``ConfigError`` where the file is no bundle.
    """
    reader = BundleReader(path)
    header: BundleHeader | None = None
    found: dict[tuple[str, str], tuple[str, Collected]] = {}
    for name, data in reader.files():
        if name == HEADER:
            header = read_header(data, path)
        elif match := _RESULT.fullmatch(name):
            found[match[1], match[3]] = (name, _collected(match[1], match[3], data))
    if header is None:
        raise ConfigError(f"{path} holds no {HEADER}")
    wanted = dict.fromkeys((sweep.cluster, run_id) for sweep in header.sweeps for run_id in sweep.run_ids)
    for key in found.keys() - wanted.keys():
        reader.problems[found[key][0]] = f"passed over: no sweep of {HEADER} means this run"
    entries = [_proven(*found[key], reader.problems) for key in wanted if key in found]
    listed = [entry for entry in entries if not clusters or entry.cluster in clusters]
    return listed + _problems(path, reader.problems)


def _collected(cluster: str, run_id: str, data: bytes) -> Collected:
    try:
        return Collected(cluster, run_id, decode_result(data, run_id))
    except msgspec.MsgspecError as error:
        return Collected(cluster, run_id, None, f"result.json is broken: {error}")


def _proven(name: str, entry: Collected, problems: dict[str, str]) -> Collected:
    """``entry``, or what the manifest says against it."""
    problem = problems.pop(name, None)
    return entry if problem is None else Collected(entry.cluster, entry.run_id, None, f"{name}: {problem}")


def _problems(path: Path, problems: dict[str, str]) -> list[Collected]:
    shown = [Collected(path.name, name, None, reason) for name, reason in list(problems.items())[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        rest = len(problems) - _MOST_PROBLEMS
        shown.append(Collected(path.name, "...", None, f"{rest} or more other members were passed over, too"))
    return shown
