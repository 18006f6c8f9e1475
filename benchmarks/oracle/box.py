"""``make oracle-score``: calibrate the box, write predictions down, measure, and compare.

    python -m benchmarks.oracle.box calibrate    measure kernels and collectives, at another rate of the links
    python -m benchmarks.oracle.box probe        measure the blocks and messages of box.toml (calibrate --for)
    python -m benchmarks.oracle.box predict      write box_predictions.json; commit it before going on
    python -m benchmarks.oracle.box measure      box.toml, in slices of --minutes; measured launches stay
    python -m benchmarks.oracle.box cases        write box_cases.json from all measured launches; commit it
    python -m benchmarks.oracle.box table        compare; counts as a look
    python -m benchmarks.oracle.box all          all missing parts, in this order, with predictions of its own

Needs the SLURM box, so root. The results tree lies under ``--work``: slices of one score need the same one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import polars
import tomli

from benchmarks.oracle import cases, registered, tables
from benchmarks.oracle.registered import SWEEP
from benchmarks.testbed import CLUSTER, FOUR_NODES, Testbed
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import REFERENCE_REPEAT, config_id
from hpcbench.config.sweep_file import sweep_toml
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
from hpcbench.fileio import make_folder, write_atomic
from hpcbench.oracle.baselines import BASELINES
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.report.load_results import load_frame
from hpcbench.report.oracle_validation import (
    ORACLE_NAME,
    VALIDATION_COLUMNS,
    CasePredictor,
    ClusterForecasts,
    baseline_predictor,
    oracle_predictor,
)
from hpcbench.report.reference_drift import DRIFT_COLUMNS, drift_notes, reference_drifts, remove_drift
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.plan import SweepPlan, make_plan

CALIBRATED_MBIT, SCORED_MBIT = 200, 100
"""With the scored rate the links of four nodes carry 0.4 Gbit/s in all."""
_CALIBRATING_JOBS, _SCORED_JOBS = 2, 1
"""At once: two probes of one node are in each other's way as the ranks of a scored job on two nodes are."""
_SOME_FAILED = 1
"""How ``hpcbench run`` ends where runs did: they are cases, too."""
_BUSY = 0.3
"""Load of the machine above which nothing is measured."""
LAUNCHES = "oracle-score-launches"
"""The sweep of the measured launches, which is made from box.toml."""
_MORE_LAUNCHES = 5
"""Of data parallelism and of recommended configurations: small differences between these matter."""


def calibrate(bed: Testbed) -> int:
    """Calibrate with links of another rate than those of the score."""
    bed.at(CALIBRATED_MBIT, _CALIBRATING_JOBS)
    # The virtual nodes share two cores: ranks of other nodes may mark every run.
    return bed.hpcbench("cluster", "calibrate", CLUSTER, "--busy")


def probe(bed: Testbed) -> int:
    """Measure the blocks and messages of the sweep."""
    bed.at(SCORED_MBIT, _CALIBRATING_JOBS)
    return bed.hpcbench("cluster", "calibrate", CLUSTER, "--for", str(SWEEP), "--busy")


def _plan(bed: Testbed, sweep: Path = SWEEP) -> SweepPlan:
    """Plan a sweep on the box, in the folder of the work."""
    os.chdir(bed.work)
    profile, _ = load_cluster(CLUSTER)
    return make_plan(load_sweep(sweep), profile, ResultsTree(bed.results).cluster(CLUSTER))


def _tree_with(bed: Testbed, name: str, *, is_calibrated: bool) -> ResultsTree:
    """Return a tree without results, and without calibrations or with those that know no shape of a sweep."""
    folder = bed.work / "predicted" / name
    shutil.rmtree(folder, ignore_errors=True)
    tree = ResultsTree(folder)
    stored, _ = read_calibrations(ResultsTree(bed.results).cluster(CLUSTER), CLUSTER)
    target = tree.cluster(CLUSTER).path("calibrations")
    make_folder(target)
    for one in stored:
        if is_calibrated and one.calibration.machine.measured is None:
            shutil.copy(one.path, target)
    return tree


def predict(bed: Testbed, path: Path) -> int:
    """Predict every configuration of the sweep by every predictor that needs no measured runs of it."""
    bed.describe(SCORED_MBIT, _SCORED_JOBS)
    specs = list({config_id(spec): spec for spec in _plan(bed).runs.values()}.values())
    forecasts = ClusterForecasts(ResultsTree(bed.results), SWEEP.parent)
    predictors: dict[str, CasePredictor] = {ORACLE_NAME: oracle_predictor(forecasts, learns=False)}
    for name in (tables.BLIND, tables.CALIBRATED):
        tree = _tree_with(bed, name, is_calibrated=name == tables.CALIBRATED)
        predictors[name] = oracle_predictor(ClusterForecasts(tree, SWEEP.parent), learns=False)
    predictors |= {name: baseline_predictor(forecasts, one, ()) for name, one in BASELINES.items()}
    for spec in specs:
        forecasts.predict(CLUSTER, spec)
    sources = sorted({machine.source for machine in forecasts.machines()})
    registered.write(path, CLUSTER, specs, predictors, sources)
    _keep_calibrations(bed)
    print(f"{path}: {len(specs)} configurations, from {'; '.join(sources)}")
    return 0


def _keep_calibrations(bed: Testbed) -> None:
    """Copy the calibrations of these predictions into the tree, to be committed with them."""
    shutil.rmtree(registered.CALIBRATIONS, ignore_errors=True)
    make_folder(registered.CALIBRATIONS)
    stored, _ = read_calibrations(ResultsTree(bed.results).cluster(CLUSTER), CLUSTER)
    for entry in stored:
        shutil.copy(entry.path, registered.CALIBRATIONS)


def measure(bed: Testbed, path: Path, minutes: float) -> int:
    """Measure the missing launches in shuffled order. Stops after ``minutes``; the same command continues."""
    bed.at(SCORED_MBIT, _SCORED_JOBS)
    sweep = _sweep_of_launches(bed, path)
    command = bed.start("run", str(sweep), "--cluster", CLUSTER)
    try:
        return command.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        command.wait()
        bed.hpcbench("cancel", load_sweep(sweep).name, "--cluster", CLUSTER, "--wait")
        print(f"stopped after {minutes:g} minutes; the same command continues", file=sys.stderr)
        return _SOME_FAILED


def _sweep_of_launches(bed: Testbed, path: Path) -> Path:
    """Write the sweep with a point per launch, whose seed is its number: some points are launched more often."""
    document = tomli.loads(SWEEP.read_text(encoding="utf-8"))
    settings = {"name": LAUNCHES, "model_folder": str(SWEEP.parent)}
    more_often = _more_often(registered.read(path).configurations)
    target = bed.work / "box_launches.toml"

    launches: list[dict[str, Any]] = []
    for point in document["include"]:
        write_atomic(target, sweep_toml(settings, document["fixed"], [point]).encode())
        own_ids = {config_id(spec) for spec in _plan(bed, target).runs.values()}
        count = _MORE_LAUNCHES if own_ids & more_often else document["repeats"]
        launches += [point | {"seed": number} for number in range(count)]
    write_atomic(target, sweep_toml(settings | {"submit": document["submit"]}, document["fixed"], launches).encode())
    return target


def _more_often(configurations: Iterable[registered.Foretold]) -> set[str]:
    """Return the ``config_id`` of data parallelism, and of the predicted best of each model and number of devices."""
    fastest: dict[tuple[object, ...], tuple[float, str]] = {}
    ids = set()
    for one in configurations:
        spec, step_s = one.spec, one.said[ORACLE_NAME].step_time_s
        if spec.strategy in tables.DATA_PARALLEL:
            ids.add(one.config_id)
        if step_s is not None:
            key = (spec.model, spec.dataset, spec.devices)
            candidate = (step_s / (spec.batch_size * spec.dp_degree), one.config_id)
            fastest[key] = min(fastest.get(key, candidate), candidate)
    return ids | {name for _, name in fastest.values()}


def write_cases(bed: Testbed, path: Path, target: Path) -> int:
    """Write what was measured beside what was predicted; the machine's drift is removed."""
    os.chdir(bed.work)
    results = ResultsTree(bed.results)
    columns = tuple(dict.fromkeys((*VALIDATION_COLUMNS, *DRIFT_COLUMNS)))
    frame = load_frame(results, [LAUNCHES], [CLUSTER], columns)
    for note in drift_notes(list(reference_drifts(frame)), removed=True):
        print(note)
    # The drift is computed from the reference's launches: once it is removed, they hardly differ.
    launches = remove_drift(frame).filter(polars.col("spec.repeat") < REFERENCE_REPEAT)
    found = tables.measured_cases(launches, results, registered.read(path))
    if not found:
        print("nothing that was predicted has been measured yet", file=sys.stderr)
        return 2
    document = cases.RerunCases(
        sweep=LAUNCHES, sources=registered.read(path).sources, cases=[cases.RerunCase.of(case) for case in found]
    )
    write_atomic(target, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    print(f"{target}: {len(found)} configurations, {sum(len(case.measured.launches_s) for case in found)} launches")
    return 0


def table(path: Path, target: Path) -> int:
    """Print the scores."""
    tables.show(
        cases.read(target).validation_cases(), registered.read(path), registered.commit(path), registered.looks(path)
    )
    return 0


def _all(bed: Testbed, minutes: float) -> int:
    """Run all parts, or continue an interrupted score. These predictions are in no commit, and the table states so."""
    path, target = bed.work / registered.PREDICTIONS.name, bed.work / cases.BOX.name
    stored, _ = read_calibrations(ResultsTree(bed.results).cluster(CLUSTER), CLUSTER)
    if not stored and (code := calibrate(bed)):
        return code
    if all(one.calibration.machine.measured is None for one in stored) and (code := probe(bed)):
        return code
    if not path.exists() and (code := predict(bed, path)):
        return code
    code = measure(bed, path, minutes)
    if code in (0, _SOME_FAILED):
        code = write_cases(bed, path, target) or table(path, target)
    return code


def main() -> int:
    """Do one step, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle.box", description=__doc__)
    parser.add_argument("step", choices=("calibrate", "probe", "predict", "measure", "cases", "table", "all"))
    parser.add_argument("--work", type=Path, default=Path(".oracle"), help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=120.0, help="of a slice of measure (default: %(default)g)")
    parser.add_argument("--unregistered", action="store_true", help="measure without committed predictions")
    parser.add_argument("--busy", action="store_true", help="on a machine that has other work, too")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    if arguments.step in ("calibrate", "probe", "measure", "all") and load > _BUSY and not arguments.busy:
        print(f"the machine is busy (load {load:.2f}, at most {_BUSY}): wait, or give --busy", file=sys.stderr)
        return 2
    path = registered.PREDICTIONS
    if arguments.step == "measure" and registered.commit(path) is None and not arguments.unregistered:
        print(f"commit {path.name} first, or give --unregistered", file=sys.stderr)
        return 2
    bed = Testbed(arguments.work, FOUR_NODES)
    steps: dict[str, Callable[[], int]] = {
        "calibrate": lambda: calibrate(bed),
        "probe": lambda: probe(bed),
        "predict": lambda: predict(bed, path),
        "measure": lambda: measure(bed, path, arguments.minutes),
        "cases": lambda: write_cases(bed, path, cases.BOX),
        "table": lambda: table(path, cases.BOX),
        "all": lambda: _all(bed, arguments.minutes),
    }
    try:
        return steps[arguments.step]()
    except HpcbenchError as error:
        print(error.message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
