"""``make test-torch VERSION=2.11.0``: hpcbench with another release of torch, as a table.

It makes the environment of that torch first (``environment.py``), then runs there, on this machine's processors: the
private names of torch, one verified training and one dry run of every strategy, the quickstart, the dry run of a sweep
for a cluster of GPUs, and the commands of a login node. The exit code is 1 if one of them fails, or if what is listed
in ``KNOWN_LIMITS`` works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.environments import EnvironmentMissing
from tests.torch_versions.environment import ROOT, TorchEnvironment, make_torch_environment

KNOWN_LIMITS: Mapping[tuple[str, str], str] = {("2.6", "verify fsdp"): "does not train on cpus"}
"""By release of torch and row: words of the error of what that torch cannot do on processors, and does on GPUs."""
LIMIT_S = 600
COMMANDS = (
    "check quickstart", "plan quickstart", "predict quickstart", "status quickstart", "table quickstart",
    "table quickstart --out runs.xlsx", "table quickstart --out runs.parquet", "report quickstart",
    "report quickstart --out page.html", "plot scaling quickstart --out plot.svg", "validate quickstart --busy",
    "recommend --model resnet18 --dataset digits --cluster snellius --batch-size 16 --nodes 1", "doctor", "models",
    "cluster list", "dry-run --help", "cluster calibrate --help",
)  # fmt: skip
"""Commands of a login node, after the quickstart in the same folder."""


class Row(NamedTuple):
    """One line of the table; ``problem`` is empty if it is as expected."""

    part: str
    answer: str
    seconds: float | None
    problem: str = ""


class Answer(NamedTuple):
    """The end of one process."""

    code: int
    output: str
    errors: str
    seconds: float


def run(environment: TorchEnvironment, folder: Path, words: Sequence[str]) -> Answer:
    """Run the environment's Python with ``words`` in ``folder``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("HPCBENCH_", "PYTEST_"))}
    variables |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    variables.pop("VIRTUAL_ENV", None)
    began = time.monotonic()
    try:
        done = subprocess.run(
            [str(environment.python), *words], cwd=folder, env=variables, capture_output=True, text=True, check=False,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"no end in {LIMIT_S} s", time.monotonic() - began)
    return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def last_lines(answer: Answer, count: int = 2) -> str:
    """Return the end of what a process reported."""
    lines = [line.strip() for line in (answer.errors or answer.output).splitlines() if line.strip()]
    return " / ".join(lines[-count:])[-300:] or f"exit code {answer.code}"


def command_row(environment: TorchEnvironment, folder: Path, part: str, words: Sequence[str]) -> Row:
    """Return the row of a process that must end with 0 and without a traceback or a warning of Python's."""
    answer = run(environment, folder, words)
    told = [word for word in ("Traceback (most recent call last)", "Warning: ") if word in answer.errors]
    if answer.code == 0 and not told:
        return Row(part, "ok", answer.seconds)
    return Row(part, "FAILED", answer.seconds, f"exit code {answer.code}: {last_lines(answer)}")


def strategy_rows(environment: TorchEnvironment, folder: Path) -> Iterator[Row]:
    """Yield a row for the verification and one for the dry run of each strategy."""
    answer = run(environment, folder, ["-m", "tests.torch_versions.strategies"])
    if answer.code != 0:
        yield Row("strategies", "FAILED", answer.seconds, last_lines(answer))
        return
    yield Row("strategies", "ran", answer.seconds)
    for kind, found in json.loads(answer.output).items():
        for key, told in found.items():
            part = f"{kind.replace('_', ' ')} {key}"
            yield judged(environment.torch, part, told)


def judged(torch: str, part: str, told: str) -> Row:
    """Return the row of a strategy whose process told ``ok`` or an error."""
    limit = KNOWN_LIMITS.get((torch.rpartition(".")[0], part))
    if limit is None:
        return Row(part, "ok", None) if told == "ok" else Row(part, "FAILED", None, told)
    if told == "ok":
        return Row(part, "works", None, f"it works: remove it from KNOWN_LIMITS ({limit})")
    if limit not in told:
        return Row(part, "FAILED", None, f"another error than that of KNOWN_LIMITS ({limit}): {told}")
    return Row(part, f"known limit of torch {torch}: {limit}", None)


def all_rows(environment: TorchEnvironment, folder: Path) -> Iterator[Row]:
    """Yield the rows of one environment; ``folder`` is empty."""
    hpcbench = ["-m", "hpcbench"]
    yield from strategy_rows(environment, folder)
    yield command_row(environment, folder, "quickstart", [*hpcbench, "run", "quickstart"])
    words = [*hpcbench, "dry-run", str(ROOT / "sweeps/quickstart.toml"), "--cluster", "snellius"]
    yield command_row(environment, folder, "dry-run of the quickstart", words)
    for command in COMMANDS:
        yield command_row(environment, folder, f"hpcbench {command}", [*hpcbench, *command.split()])


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if a row is not as expected, 2 if the environment cannot be made."""
    parser = argparse.ArgumentParser(prog="make test-torch", description=__doc__)
    parser.add_argument("version", help="release of torch, such as 2.11.0")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    chosen = parser.parse_args(arguments)
    try:
        environment = make_torch_environment(chosen.version, chosen.python)
    except EnvironmentMissing as error:
        print(f"make test-torch: {error}", file=sys.stderr)
        return 2
    problems = 0
    with tempfile.TemporaryDirectory(prefix="hpcbench-torch-") as folder:
        for row in all_rows(environment, Path(folder)):
            problems += bool(row.problem)
            seconds = f"{row.seconds:6.1f} s" if row.seconds is not None else ""
            print(f"{row.part:45.45} {seconds:9} {row.answer}{': ' if row.problem else ''}{row.problem}", flush=True)
    lowest = ", every dependency the lowest that pyproject.toml allows" if environment.is_lowest else ""
    print(f"torch {environment.torch}{lowest}: {problems} problems")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
