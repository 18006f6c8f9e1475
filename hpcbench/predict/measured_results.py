"""The measured results of a cluster from which factors on its predictions are learned."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import RunSpec, config_id, run_id, run_label
from hpcbench.errors import StorageError
from hpcbench.predict.calibration.calibration_store import StoredCalibration
from hpcbench.predict.decoder.site import NEW_DEVICE_SCALE, Site, SiteRun, learn_site
from hpcbench.predict.fitted_decoders import PricedCommand, device_of_profile
from hpcbench.predict.measured_factors import MeasuredFactors, MeasuredRatio
from hpcbench.predict.prediction import NotPredicted, Prediction
from hpcbench.predict.strategy_cost import find_cost
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.strategies.catalog import STRATEGIES

MAX_LEARNED_RESULTS, MAX_LEARNED_CONFIGURATIONS = 1000, 300
"""The newest ones: a plan must stay quick."""
_MAX_DATED = 20_000
"""Largest number of runs whose age is read; in larger trees they are chosen evenly by their ids."""
IMPLAUSIBLE_S = 1e9


def results_of_partition(tree: ClusterTree, profile: ClusterProfile, partition: str | None) -> list[RunResult]:
    """Return the newest measured results of a partition, ``None`` being the default, the newest first."""
    default = profile.default_partition
    return [result for result in _newest_results(tree) if (result.spec.partition or default) == (partition or default)]


def measured_launches(tree: ClusterTree, run_ids: Iterable[str]) -> list[float]:
    """Return the median step time (s) of each run that ended well."""
    results = (tree.read_result(key) for key in run_ids)
    steps = (result.metrics.step_time_s for result in results if result is not None and result.status == STATUS_OK)
    return [step.median for step in steps if step is not None]


def learn_factors(
    stored: Sequence[StoredCalibration],
    results: Sequence[RunResult],
    predict: Callable[[RunSpec], Prediction | NotPredicted],
) -> MeasuredFactors:
    """Learn factors on the predictions by ``predict`` from the results of a partition.

    Left out: runs that a calibration was fitted to, probes, and results whose spec is not that of their id.

    Args:
        stored: the calibrations of the cluster.
        results: of measured runs that ended well, the newest first.
        predict: the prediction of a run by the machine's numbers alone.
    """
    fitted = {key for entry in stored for key in entry.calibration.run_ids}
    launches: dict[str, list[float]] = defaultdict(list)
    specs: dict[str, RunSpec] = {}
    for result in results:
        spec, times = result.spec, result.metrics.step_time_s
        if times is None or result.run_id in fitted or result.run_id != run_id(spec):
            continue
        if spec.strategy not in STRATEGIES or find_cost(spec.strategy) is None:
            continue
        if 0 < times.median < IMPLAUSIBLE_S:
            # Not the stored one, so that a run's own results are always held out.
            key = config_id(spec)
            specs.setdefault(key, spec)
            launches[key].append(times.median)
    ratios = []
    for key in [*specs][:MAX_LEARNED_CONFIGURATIONS]:
        prediction = predict(specs[key])
        if not isinstance(prediction, NotPredicted) and 0 < prediction.step_time_s < IMPLAUSIBLE_S:
            times_s = tuple(launches[key])
            ratios.append(MeasuredRatio(key, specs[key], times_s, median(times_s), prediction.step_time_s))
    return MeasuredFactors(ratios)


def learn_commands(
    results: Iterable[RunResult],
    price: Callable[[RunSpec], PricedCommand | NotPredicted],
    profile: ClusterProfile,
    partition: str | None,
) -> Site:
    """Learn the factors of a partition from its measured commands that have a declared layout.

    Args:
        results: of measured runs that ended well, the newest first.
        price: the decoder, layout and machine of a command's run.
        profile: of the cluster.
        partition: ``None`` is the default.
    """
    launches: dict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        if result.spec.workload == "command" and result.run_id == run_id(result.spec):
            launches[config_id(result.spec)].append(result)
    runs = []
    for key in [*launches][:MAX_LEARNED_CONFIGURATIONS]:
        priced = price(launches[key][0].spec)
        if not isinstance(priced, NotPredicted):
            runs.append(_site_run(key, priced, launches[key]))
    device = device_of_profile(profile, partition)
    return learn_site(runs, 1.0 if device is not None and device.fitted is not None else NEW_DEVICE_SCALE)


def _site_run(key: str, priced: PricedCommand, launches: Sequence[RunResult]) -> SiteRun:
    """Return a measured configuration of a command as an observation of its site."""
    steps = (result.metrics.step_time_s for result in launches)
    times_s = [step.median for step in steps if step is not None and 0 < step.median < IMPLAUSIBLE_S]
    peaks = [peak for result in launches if (peak := result.metrics.peak_memory_bytes)]
    return SiteRun(
        key,
        priced.work,
        priced.figures,
        median(times_s) if times_s else None,
        len(times_s),
        median(peaks) / priced.memory.total if peaks else None,
        run_label(msgspec.structs.replace(launches[0].spec, repeat=0)),
    )


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
