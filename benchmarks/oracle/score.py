"""Scores of the oracle: calibrate, write predictions down, measure, and compare.

    python -m benchmarks.oracle.score box calibrate    measure kernels and collectives
    python -m benchmarks.oracle.score box probe        measure the blocks and messages of box.toml (calibrate --for)
    python -m benchmarks.oracle.score box predict      write box_predictions.json.gz and calibrations/box; commit both
    python -m benchmarks.oracle.score box measure      box.toml, in slices of --minutes; measured launches stay
    python -m benchmarks.oracle.score box cases        add the measured launches to box_cases.json.gz; commit it
    python -m benchmarks.oracle.score box table        compare; counts as a look
    python -m benchmarks.oracle.score box all          all missing parts, in this order, with predictions of its own;
                                                       with --commit, which needs git, these and the cases are committed

``box``, and ``paradl`` and ``ddlbench``, the papers' matrices, need the SLURM box, so root. ``local`` is scored on this
machine itself, ``local_busy`` on the same beside a process that computes all the time. The results tree lies under
``--work``: slices of one score need the same one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli

from benchmarks.oracle import cases, registered, tables, timelines
from benchmarks.oracle.baselines import BASELINES, baseline_predictor
from benchmarks.oracle.registered import SCORES, Score
from benchmarks.oracle.scoring import ORACLE_NAME, SCORED_COLUMNS, CasePredictor, oracle_predictor
from benchmarks.testbed import Testbed
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import config_id
from hpcbench.config.sweep_file import sweep_toml
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.predict.calibration.calibration_store import StoredCalibration, read_calibrations
from hpcbench.report.load_results import load_frame
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.plan import SweepPlan, make_plan

_CALIBRATING_JOBS = 2
"""Jobs of the plain calibration at once."""
SOME_FAILED = 1
"""How ``hpcbench run`` ends where runs did: they are cases, too."""
_MEASURING = ("calibrate", "probe", "measure", "all")
_BUSY = 0.3
"""Load of the machine above which nothing is measured."""


def calibrate(bed: Testbed, score: Score) -> int:
    """Calibrate without any shape of the sweep."""
    bed.at(score.calibrated_mbit, _CALIBRATING_JOBS)
    return bed.hpcbench("cluster", "calibrate", bed.cluster, *_busy(score))


def probe(bed: Testbed, score: Score) -> int:
    """Measure the blocks and messages of the sweep."""
    bed.at(score.scored_mbit, score.probing_jobs)
    return bed.hpcbench("cluster", "calibrate", bed.cluster, "--for", str(score.sweep), *_busy(score))


def _busy(score: Score) -> list[str]:
    """Return the option for runs that others disturb: ranks of the virtual nodes, which share two cores, do."""
    return ["--busy"] if score.shape is not None or score.busy_processes else []


@contextlib.contextmanager
def _other_work(score: Score) -> Iterator[None]:
    """Have the score's other processes compute meanwhile."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(score.busy_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _plan(bed: Testbed, sweep: Path) -> SweepPlan:
    """Plan a sweep on the box, in the folder of the work."""
    os.chdir(bed.work)
    profile, _ = load_cluster(bed.cluster)
    return make_plan(load_sweep(sweep), profile, ResultsTree(bed.results).cluster(bed.cluster))


def _calibrations(bed: Testbed) -> list[StoredCalibration]:
    """Return those of the tree itself, not of the user's own folder."""
    tree = ResultsTree(bed.results).cluster(bed.cluster)
    return [stored for stored in read_calibrations(tree, bed.cluster)[0] if stored.path.is_relative_to(tree.root)]


def predict(bed: Testbed, score: Score) -> int:
    """Predict every configuration of the sweep by every predictor that needs no measured runs of it."""
    bed.describe(score.scored_mbit, score.scored_jobs)
    specs = list({config_id(spec): spec for spec in _plan(bed, score.sweep).runs.values()}.values())
    shutil.rmtree(score.calibrations, ignore_errors=True)
    make_folder(score.calibrations)
    for stored in _calibrations(bed):
        packed = score.calibrations / f"{stored.path.name}.gz"
        packed.write_bytes(cases.compressed(stored.path.read_bytes()))
    forecasts = cases.forecasts_by_kind(score, bed.work / "predicted")
    predictors: dict[str, CasePredictor] = {name: oracle_predictor(own) for name, own in forecasts.items()}
    ours = forecasts[ORACLE_NAME]
    predictors |= {name: baseline_predictor(ours, rule, ()) for name, rule in BASELINES.items()}
    for spec in specs:
        ours.predict(bed.cluster, spec)
    sources = sorted({machine.source for machine in ours.machines()})
    registered.write(score.predictions, bed.cluster, specs, predictors, sources)
    print(f"{score.predictions}: {len(specs)} configurations, from {'; '.join(sources)}")
    return 0


def measure(bed: Testbed, score: Score, minutes: float, most: int = 10) -> int:
    """Measure the launches that neither the results tree nor the file of cases has, in shuffled order.

    Stops after ``minutes``; the same command continues. At most ``most`` launches of a configuration are measured.
    """
    bed.at(score.scored_mbit, score.scored_jobs)
    sweep, options = score.sweep, _first_launches(score.sweep, most)
    if score.launches:
        sweep, options = _sweep_of_launches(bed, score, most), []
    command = bed.start("run", str(sweep), "--cluster", bed.cluster, *options)
    try:
        return command.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        command.wait()
        bed.hpcbench("cancel", load_sweep(sweep).name, "--cluster", bed.cluster, "--wait")
        print(f"stopped after {minutes:g} minutes; the same command continues", file=sys.stderr)
        return SOME_FAILED


def _first_launches(path: Path, most: int) -> list[str]:
    """Return the options for at most ``most`` launches of a configuration, by the repeats or the seeds."""
    sweep = load_sweep(path)
    seeds = sweep.values("seed")
    if len(seeds) > most:
        return ["--set", f"grid.seed={','.join(map(str, seeds[:most]))}"]
    return ["--set", f"repeats={most}"] if sweep.repeats > most else []


def _launches_name(score: Score) -> str:
    """Return the name of the sweep of the measured launches."""
    name = load_sweep(score.sweep).name
    return f"{name}-launches" if score.launches else name


def _sweep_of_launches(bed: Testbed, score: Score, most: int = 10) -> Path:
    """Write the sweep with a point per launch, whose seed is its number: some points are launched more often."""
    document = tomli.loads(score.sweep.read_text(encoding="utf-8"))
    settings = {"name": _launches_name(score), "model_folder": str(score.sweep.parent)}
    more_often = _more_often(registered.read(score.predictions).configurations)
    stored = cases.read(score.cases).cases if score.cases.exists() else []
    known = {run_id for case in stored for run_id in case.run_ids}
    target = bed.work / f"{score.name}_launches.toml"
    launches: list[dict[str, Any]] = []
    for point in document["include"]:
        own = [point | {"seed": number} for number in range(min(score.launches, most))]
        write_atomic(target, sweep_toml(settings, document["fixed"], own).encode())
        runs = _plan(bed, target).runs
        is_frequent = any(config_id(spec) in more_often for spec in runs.values())
        missing = {spec.seed for run_id, spec in runs.items() if run_id not in known}
        launches += [own[seed] for seed in sorted(missing) if is_frequent or seed < document["repeats"]]
    write_atomic(target, sweep_toml(settings | {"submit": document["submit"]}, document["fixed"], launches).encode())
    return target


def _more_often(configurations: Iterable[registered.Foretold]) -> set[str]:
    """Return the ``config_id`` of data parallelism, and of the predicted best of each model and number of devices."""
    fastest: dict[tuple[object, ...], tuple[float, str]] = {}
    ids = set()
    for one in configurations:
        spec, step_s = one.spec, one.said[ORACLE_NAME].step_time_s
        if spec.strategy in registered.DATA_PARALLEL:
            ids.add(one.config_id)
        if step_s is not None:
            key = (spec.model, spec.dataset, spec.devices)
            candidate = (step_s / (spec.batch_size * spec.dp_degree), one.config_id)
            fastest[key] = min(fastest.get(key, candidate), candidate)
    return ids | {name for _, name in fastest.values()}


def write_cases(bed: Testbed, score: Score) -> int:
    """Add the measured launches, beside their predictions, to the file of cases."""
    bed.describe(score.scored_mbit, score.scored_jobs)
    os.chdir(bed.work)
    results = ResultsTree(bed.results)
    launches = load_frame(results, [_launches_name(score)], [bed.cluster], SCORED_COLUMNS)
    register = registered.read(score.predictions)
    measured = tables.measured_cases(launches, results, register, score.sweep.parent)
    if not measured:
        print("nothing that was predicted has been measured yet", file=sys.stderr)
        return 2
    document = cases.ScoreCases(
        sweep=_launches_name(score), cluster=bed.cluster, sources=register.sources,
        cases=[cases.ScoreCase.of(case) for case in measured],
    )  # fmt: skip
    if score.cases.exists():
        document = cases.with_earlier_launches(document, cases.read(score.cases))
    cases.write(score.cases, document)
    timelines.write(score, results.cluster(bed.cluster))
    count = sum(len(case.run_ids) for case in document.cases)
    print(f"{score.cases}: {len(document.cases)} configurations, {count} launches")
    return 0


def table(score: Score) -> int:
    """Print the scores."""
    path = score.predictions
    looks = registered.looks(path, score.looks)
    tables.show(cases.read(score.cases).scored_cases(), registered.read(path), registered.commit(path), looks)
    return 0


def _all(bed: Testbed, score: Score, minutes: float, commits: bool) -> int:
    """Run all parts, or continue an interrupted score, in files of the work folder.

    With ``commits`` these replace the project's files and are committed: the predictions before the first launch, the
    launches after a slice. Without, the predictions are in no commit, and the table states so.
    """
    if commits:
        registered.require_git(score.folder)
    own = score._replace(folder=bed.work)
    stored = _calibrations(bed)
    if not stored and (code := calibrate(bed, own)):
        return code
    if not any(one.calibration.sweeps for one in stored) and (code := probe(bed, own)):
        return code
    if not own.predictions.exists() and (code := predict(bed, own)):
        return code
    sources = "Predicted from " + "; ".join(registered.read(own.predictions).sources) + "."
    if commits:
        files = registered.copy_files([own.predictions, own.calibrations], own, score)
        registered.commit_files(files, score.folder, f"Register predictions of the score {score.name}", sources)
    code = measure(bed, own, minutes)
    if code in (0, SOME_FAILED):
        code = write_cases(bed, own)
    if code or not commits:
        return code or table(own)
    files = registered.copy_files([own.cases, timelines.path_of(own)], own, score)
    table(score)
    files.append(score.looks)
    registered.commit_files(files, score.folder, f"Add measured launches of the score {score.name}", sources)
    return 0


def main() -> int:
    """Do one step, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle.score", description=__doc__)
    parser.add_argument("score", choices=SCORES)
    parser.add_argument("step", choices=("calibrate", "probe", "predict", "measure", "cases", "table", "all"))
    parser.add_argument("--work", type=Path, help="folder of profile and results (default: .oracle-SCORE)")
    parser.add_argument("--minutes", type=float, default=120.0, help="of a slice of measure (default: %(default)g)")
    parser.add_argument("--launches", type=int, default=10, help="of a configuration, at most (default: all)")
    parser.add_argument("--unregistered", action="store_true", help="measure without committed predictions")
    parser.add_argument("--commit", action="store_true", help="all: commit predictions, then launches, in the project")
    parser.add_argument("--busy", action="store_true", help="on a machine that has other work, too")
    arguments = parser.parse_args()
    score = SCORES[arguments.score]
    load = os.getloadavg()[0]
    if arguments.step in _MEASURING and load > _BUSY and not arguments.busy:
        print(f"the machine is busy (load {load:.2f}, at most {_BUSY}): wait, or give --busy", file=sys.stderr)
        return 2
    if arguments.step == "measure" and registered.commit(score.predictions) is None and not arguments.unregistered:
        print(f"commit {score.predictions.name} first, or give --unregistered", file=sys.stderr)
        return 2
    # A shell's background jobs ignore Ctrl-C, and so would the commands that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    bed = score.bed(arguments.work or Path(f".oracle-{score.name}"))
    steps: dict[str, Callable[[], int]] = {
        "calibrate": lambda: calibrate(bed, score),
        "probe": lambda: probe(bed, score),
        "predict": lambda: predict(bed, score),
        "measure": lambda: measure(bed, score, arguments.minutes, arguments.launches),
        "cases": lambda: write_cases(bed, score),
        "table": lambda: table(score),
        "all": lambda: _all(bed, score, arguments.minutes, arguments.commit),
    }
    try:
        with _other_work(score) if arguments.step in _MEASURING else contextlib.nullcontext():
            return steps[arguments.step]()
    except HpcbenchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
