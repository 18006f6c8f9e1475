"""``doctor --gpu``: run the sweep of the GPU check, show what it found, write the file to be sent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.text import Text

from hpcbench.cli.common import make_console, plain_table, print_json, print_message, project_relative
from hpcbench.cli.load_plan import keep_one_off, load_plan
from hpcbench.cli.run_commands import submit_and_watch
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.errors import EXIT_OK, EXIT_RUNS_FAILED, EXIT_SYSTEM_REFUSED, ConfigError
from hpcbench.fileio import encode_indented_json, printable_text, write_file
from hpcbench.forecast.forecast import Forecast
from hpcbench.forecast.gpu_check import (
    MAX_LOOP_RATIO,
    MAX_RANKS,
    SWEEP_NAME,
    GpuCheck,
    StrategyCheck,
    evaluate_check,
    make_check_sweep,
)
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.site.cluster_doctor import DoctorCheck
from hpcbench.submit.scheduler import check_scheduler
from hpcbench.submit.submit import RunSelection
from hpcbench.units import format_bytes, format_seconds

EXIT_CODES = {"ok": EXIT_OK, "findings": EXIT_OK, "failed": EXIT_RUNS_FAILED, "no_gpu": EXIT_SYSTEM_REFUSED}
_STYLES = {"ok": "green", "unsupported": "yellow", "infeasible": "yellow"}


def refuse_no_devices(profile: ClusterProfile) -> None:
    """Raise ``ConfigError`` if the profile computes on GPUs and does not state how many a node has."""
    devices = profile.node_of(None).devices
    if profile.device == "cuda" and not devices:
        stated = "node.devices is not set" if devices is None else "node.devices is 0"
        hint = f"set node.devices to the number of GPUs of a node; the check takes 2 to {MAX_RANKS} of them"
        raise ConfigError(f"cluster {profile.name} computes on cuda, but {stated}", hint=hint)


def refuse_unwritable(out: Path) -> None:
    """Raise ``ConfigError`` if no file can be written to ``out``, before runs are spent on its content."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder", hint=f"name the file: --out {out / (SWEEP_NAME + '.json')}")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    try:
        # The permissions of a folder do not show a file system that is read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {folder}: {error.strerror}") from error


def require_gpus(profile: ClusterProfile, checks: Sequence[DoctorCheck]) -> list[DoctorCheck]:
    """Return ``checks`` with visible GPUs as a required part if the profile computes on GPUs."""
    mend = "run where GPUs are visible (nvidia-smi), with a torch built for them"
    return [
        msgspec.structs.replace(check, needed=True, mend="" if check.works else mend)
        if profile.device == "cuda" and check.what == "accelerators"
        else check
        for check in checks
    ]


def run_gpu_check(cluster_name: str, results: ResultsTree, out: Path | None, *, as_json: bool) -> int:
    """Submit the runs of the check that have no result from this environment, wait, evaluate, write the file.

    Args:
        cluster_name: Name or path of the profile.
        results: The results tree.
        out: The file to write.
        as_json: Print the file's content instead of tables.

    Returns:
        The exit code, by ``EXIT_CODES``.
    """
    profile, _ = load_cluster(cluster_name)
    check_scheduler(profile)
    if profile.device != "cuda":
        print_message(
            f"cluster {profile.name} computes on the cpu: nothing is checked on a GPU. "
            'A profile with device = "cuda" and node.devices checks GPUs'
        )
    plan = load_plan(make_check_sweep(profile), cluster_name, results)
    keep_one_off(plan.sweep, plan.tree)
    # Results of another environment are no answer for this one.
    go_on = f"the same command goes on with it: hpcbench doctor --cluster {cluster_name} --gpu"
    states = submit_and_watch(plan, RunSelection(remeasure=True), go_on)
    check = evaluate_check(plan, plan.tree, states, Forecast(profile, plan.tree))
    path = out or Path(f"{SWEEP_NAME}-{profile.name}.json")
    write_file(path, encode_indented_json(check))
    if as_json:
        print_json(check)
    else:
        _print_check(check)
    print_message(f"wrote {project_relative(path)}: its reasons may name people, machines and folders")
    return EXIT_CODES[check.outcome]


def _print_check(check: GpuCheck) -> None:
    console = make_console()
    headings = ("strategy", "outcome", "step", "memory", "predicted", "waits")
    console.print(plain_table(headings, map(_row, check.strategies), right_aligned=headings[2:]))
    for line in _lines(check):
        console.print(Text(printable_text(line)))


def _row(check: StrategyCheck) -> list[str | Text]:
    measured, predicted = (
        "-" if value is None else format_bytes(value)
        for value in (check.peak_memory_bytes, check.predicted_peak_memory_bytes)
    )
    return [
        check.strategy,
        Text(printable_text(check.outcome), style=_STYLES.get(check.outcome, "red")),
        "-" if check.step_time_s is None else format_seconds(check.step_time_s),
        measured,
        predicted,
        "-" if check.host_syncs is None else str(check.host_syncs.per_step),
    ]


def _lines(check: GpuCheck) -> Iterator[str]:
    """Reasons, step times of loops, findings and the verdict; the console folds them at its width."""
    loops = check.loops
    outcomes = [(part.strategy, part.outcome, part.reason) for part in check.strategies]
    for name, outcome, reason in [*outcomes, ("loops", loops.outcome, loops.reason)]:
        if outcome != STATUS_OK:
            yield f"{name}: {outcome}: {reason or 'no reason is known'}"
    for loop in loops.loops:
        ratio = loops.ratios.get(loop.loop)
        text = f"loop {loop.loop} ({loop.model}): {format_seconds(loop.seconds)} a step"
        yield text if ratio is None else f"{text}; hpcbench takes {ratio:.2f} times as long (limit {MAX_LOOP_RATIO:g})"
    yield from (f"finding: {text}" for text in check.findings)
    if check.outcome == "failed":
        yield f"{check.cluster}: failed: {', '.join(check.failed_parts())}"
    elif check.outcome != "no_gpu":
        findings = f"{len(check.findings) or 'no'} finding{'s' if len(check.findings) != 1 else ''}"
        yield f"{check.cluster}: every strategy that can run here trains as one device does; {findings}"
    if not check.on_gpu:
        yield f"{check.cluster}: NOTHING WAS CHECKED ON A GPU"
