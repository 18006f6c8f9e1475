"""``make oracle-score``: calibrate the box, write predictions down, measure, and compare.

    python -m benchmarks.oracle.box calibrate    measure kernels and collectives, at another rate of the links
    python -m benchmarks.oracle.box predict      write box_predictions.json; commit it before going on
    python -m benchmarks.oracle.box measure      the sweep box.toml; what is done stays
    python -m benchmarks.oracle.box table        compare; counts as a look
    python -m benchmarks.oracle.box all          whatever is missing, in this order, with predictions of its own

Needs the SLURM box, so root. All but the predictions lies under ``--work``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.oracle import registered, tables
from benchmarks.oracle.registered import SWEEP
from benchmarks.testbed import CLUSTER, Testbed
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import config_id
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
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
from hpcbench.results.results_tree import ResultsTree
from hpcbench.submit.plan import make_plan

CALIBRATED_MBIT, SCORED_MBIT = 200, 100
"""With the scored rate the links of eight nodes carry 0.8 Gbit/s in all."""
_CALIBRATING_JOBS, _SCORED_JOBS = 2, 1
"""At once: more would be in each other's way more than the ranks of one are."""
_SOME_FAILED = 1
"""How ``hpcbench run`` ends where runs did: they are cases, too."""
_BUSY = 0.3
"""Load of the machine above which nothing is measured."""


def calibrate(bed: Testbed) -> int:
    """Calibrate with links of another rate than those of the score."""
    bed.at(CALIBRATED_MBIT, _CALIBRATING_JOBS)
    # The virtual nodes share two cores: ranks of other nodes may mark every run.
    return bed.hpcbench("cluster", "calibrate", CLUSTER, "--busy")


def predict(bed: Testbed, path: Path) -> int:
    """Predict every configuration of the sweep by every predictor that needs no measured runs of it."""
    bed.describe(SCORED_MBIT, _SCORED_JOBS)
    os.chdir(bed.work)
    tree = ResultsTree(bed.results)
    profile, _ = load_cluster(CLUSTER)
    plan = make_plan(load_sweep(SWEEP), profile, tree.cluster(CLUSTER))
    specs = list({config_id(spec): spec for spec in plan.runs.values()}.values())
    forecasts = ClusterForecasts(tree, SWEEP.parent)
    predictors: dict[str, CasePredictor] = {ORACLE_NAME: oracle_predictor(forecasts, learns=False)}
    predictors |= {name: baseline_predictor(forecasts, one, ()) for name, one in BASELINES.items()}
    for spec in specs:
        forecasts.predict(CLUSTER, spec)
    sources = sorted({machine.source for machine in forecasts.machines()})
    registered.write(path, CLUSTER, specs, predictors, sources)
    print(f"{path}: {len(specs)} configurations, from {'; '.join(sources)}")
    return 0


def measure(bed: Testbed) -> int:
    """Measure one launch of the whole grid after another, so that noise contains the machine's drift. Results stay."""
    bed.at(SCORED_MBIT, _SCORED_JOBS)
    launches = load_sweep(SWEEP).repeats
    rounds = (_first_launches(bed, number, launches) for number in range(1, launches + 1))
    return max(bed.hpcbench("run", str(sweep), "--cluster", CLUSTER) for sweep in rounds)


def _first_launches(bed: Testbed, number: int, launches: int) -> Path:
    """The sweep with fewer launches: runs are the same ones."""
    text = SWEEP.read_text(encoding="utf-8")
    for told, instead in (
        (f"repeats = {launches}\n", f"repeats = {number}\n"),
        ('model_folder = "."\n', f"model_folder = {json.dumps(str(SWEEP.parent))}\n"),
    ):
        assert text.count(told) == 1, f"{SWEEP.name} says {told!r} once"
        text = text.replace(told, instead)
    path = bed.work / SWEEP.name
    path.write_text(text, encoding="utf-8")
    return path


def table(bed: Testbed, path: Path) -> int:
    """The scores, on standard output."""
    os.chdir(bed.work)
    results = ResultsTree(bed.results)
    frame, register = (
        load_frame(results, [load_sweep(SWEEP).name], [CLUSTER], VALIDATION_COLUMNS),
        registered.read(path),
    )
    cases = tables.cases_of(frame, results, register)
    if not cases:
        print("nothing that was foretold has been measured yet: there is nothing to look at", file=sys.stderr)
        return 2
    tables.show(cases, register, registered.commit(path), registered.looks(path))
    return 0


def _all(bed: Testbed) -> int:
    """Run all parts, or continue an interrupted score. These predictions are in no commit, and the table states so."""
    path = bed.work / registered.PREDICTIONS.name
    stored, _ = read_calibrations(ResultsTree(bed.results).cluster(CLUSTER), CLUSTER)
    if not stored and (code := calibrate(bed)):
        return code
    if not path.exists() and (code := predict(bed, path)):
        return code
    code = measure(bed)
    return table(bed, path) if code in (0, _SOME_FAILED) else code


def main() -> int:
    """Do one step, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle.box", description=__doc__)
    parser.add_argument("step", choices=("calibrate", "predict", "measure", "table", "all"))
    parser.add_argument("--work", type=Path, default=Path(".oracle"), help="(default: %(default)s)")
    parser.add_argument("--unregistered", action="store_true", help="measure without committed predictions")
    parser.add_argument("--busy", action="store_true", help="on a machine that has other work, too")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    if given.step in ("calibrate", "measure", "all") and load > _BUSY and not given.busy:
        print(f"the machine is busy (load {load:.2f}, at most {_BUSY}): wait, or say --busy", file=sys.stderr)
        return 2
    path = registered.PREDICTIONS
    if given.step == "measure" and registered.commit(path) is None and not given.unregistered:
        print(f"commit {path.name} first, or say --unregistered", file=sys.stderr)
        return 2
    bed = Testbed(given.work)
    steps: dict[str, Callable[[], int]] = {
        "calibrate": lambda: calibrate(bed),
        "predict": lambda: predict(bed, path),
        "measure": lambda: measure(bed),
        "table": lambda: table(bed, path),
        "all": lambda: _all(bed),
    }
    try:
        return steps[given.step]()
    except HpcbenchError as error:
        print(error.message, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
