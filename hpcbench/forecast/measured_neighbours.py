"""Measured configurations in a results tree, with what the machine's numbers alone predict for them."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.errors import StorageError
from hpcbench.oracle.calibration.calibration_store import read_calibrations
from hpcbench.oracle.measured_factors import MeasuredFactors, MeasuredRatio
from hpcbench.oracle.prediction import NotPredicted, Prediction
from hpcbench.parallel.catalog import STRATEGIES
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, RunResult

MAX_LEARNED_RESULTS, MAX_LEARNED_CONFIGURATIONS = 1000, 300
"""The newest ones: a plan must stay quick."""
_MAX_DATED = 20_000
"""Largest number of runs whose age is read; in larger trees they are chosen evenly by their ids."""
_IMPLAUSIBLE_S = 1e9


def learn_factors(
    tree: ClusterTree,
    profile: ClusterProfile,
    partition: str | None,
    predict: Callable[[RunSpec], Prediction | NotPredicted],
) -> MeasuredFactors:
    """Return what the newest results of a partition say of predictions by ``predict``.

    Left out: runs that a calibration was fitted to, rehearsed ones, probes, results whose spec is not that of their
    id, and all that did not end well.

    Args:
        tree: of the cluster.
        profile: its profile.
        partition: of the runs; ``None`` is the profile's default.
        predict: the prediction of a run by the machine's numbers alone.
    """
    fitted, default = _fitted_runs(tree, profile.name), profile.default_partition
    launches: dict[str, list[float]] = defaultdict(list)
    specs: dict[str, RunSpec] = {}
    for result in _newest_results(tree):
        spec, times = result.spec, result.metrics.step_time_s
        if times is None or spec.rehearse is not None or result.run_id in fitted or result.run_id != run_id(spec):
            continue
        if (spec.partition or default) != (partition or default):
            continue
        if spec.strategy not in STRATEGIES or STRATEGIES[spec.strategy].cost is None:
            continue
        if 0 < times.median < _IMPLAUSIBLE_S:
            # Not the stored one, so that a run's own results are always held out.
            key = config_id(spec)
            specs.setdefault(key, spec)
            launches[key].append(times.median)
    ratios = []
    for key in [*specs][:MAX_LEARNED_CONFIGURATIONS]:
        prediction = predict(specs[key])
        if not isinstance(prediction, NotPredicted) and 0 < prediction.step_time_s < _IMPLAUSIBLE_S:
            times_s = tuple(launches[key])
            ratios.append(MeasuredRatio(key, specs[key], times_s, median(times_s), prediction.step_time_s))
    return MeasuredFactors(ratios)


def _fitted_runs(tree: ClusterTree, cluster: str) -> frozenset[str]:
    stored, _ = read_calibrations(tree, cluster)
    return frozenset(key for entry in stored for key in entry.calibration.run_ids)


def _newest_results(tree: ClusterTree) -> list[RunResult]:
    """The newest results that can be read and are ok, at most ``MAX_LEARNED_RESULTS``, the newest first."""
    dated = []
    for key in sorted(tree.existing_runs())[:_MAX_DATED]:
        with contextlib.suppress(OSError):
            # Only its age; `read_result` follows no links.
            dated.append((os.lstat(f"{tree.root}/runs/{key[:2]}/{key}/result.json").st_mtime_ns, key))
    results = []
    for _, key in sorted(dated, reverse=True)[:MAX_LEARNED_RESULTS]:
        with contextlib.suppress(msgspec.MsgspecError, StorageError):
            result = tree.read_result(key)
            if result is not None and result.status == STATUS_OK:
                results.append(result)
    return results
