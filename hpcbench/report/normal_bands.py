"""Normal bands of configurations, from the launches that a machine has run before."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import polars as pl
import scipy

from hpcbench.config.run_spec import run_label
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable_excerpt
from hpcbench.report.configurations import ok_results, run_spec_of
from hpcbench.report.hypothesis_tests import pooled_spread
from hpcbench.report.table_model import short_name
from hpcbench.units import pluralize

MIN_BAND_LAUNCHES = 3
"""Launches of one configuration that a band needs."""
MIN_BAND_WIDTH = 0.02
"""Smallest width of a band, as a share: the smallest change that ``compare`` counts."""
_CONFIDENCE = 0.999
"""Of a thousand checks of an unchanged machine, a single one lies outside by chance."""


class _Launches(NamedTuple):
    """The metric of the launches of a configuration on one cluster."""

    label: str
    cluster: str
    config_id: str
    values: list[float]


def bands_toml(frame: pl.DataFrame, column: str, *, larger_is_better: bool) -> str:
    """Return a file for ``compare --bands`` with a band for each configuration of ``frame``.

    The value is the geometric mean of the launches. The bound, on the worse side alone, is the prediction limit for one
    more launch: exp(+- t s sqrt(1 + 1/n)), with Student's t. The spread s of a logarithm is pooled over the
    configurations of a cluster, because a few launches do not determine their own; it is the configuration's own where
    that is more than twice as large.

    Args:
        frame: launches, with the columns of a specification.
        column: the metric, positive.
        larger_is_better: its better direction.

    Raises:
        ConfigError: no configuration has ``MIN_BAND_LAUNCHES`` launches.
    """
    groups = list(_launches_of(frame, column))
    several = [group for group in groups if len(group.values) >= MIN_BAND_LAUNCHES]
    if not several:
        most = max((len(group.values) for group in groups), default=0)
        raise ConfigError(
            f"no configuration has {MIN_BAND_LAUNCHES} launches with {short_name(column)}, the most is {most}",
            hint="repeats = 5 in a sweep makes five launches of each configuration",
        )
    pooled = pooled_spread((group.cluster, group.values) for group in several)
    bands = [_band(group, column, *pooled[group.cluster], larger_is_better) for group in several]
    few = len(groups) - len(several)
    head = "# The normal range here: hpcbench compare SOURCE --bands THIS_FILE\n"
    if few:
        head += f"# Left out: {pluralize(few, 'configuration')} with fewer than {MIN_BAND_LAUNCHES} launches.\n"
    return "\n".join([head, *bands])


def _launches_of(frame: pl.DataFrame, column: str) -> Iterator[_Launches]:
    measured = ok_results(frame).filter(pl.col(column) > 0)
    for (cluster, config_id), rows in measured.group_by("cluster", "config_id", maintain_order=True):
        label = run_label(msgspec.structs.replace(run_spec_of(rows.row(0, named=True)), repeat=0))
        yield _Launches(label, str(cluster), str(config_id), rows[column].to_list())


def _band(group: _Launches, column: str, pooled: float, freedom: int, larger_is_better: bool) -> str:
    count, logs = len(group.values), [math.log(value) for value in group.values]
    own = statistics.stdev(logs)
    spread, degrees = (own, count - 1) if own > 2 * pooled else (pooled, freedom)
    limit = float(scipy.stats.t.ppf(_CONFIDENCE, degrees)) * spread * math.sqrt(1 + 1 / count)
    if larger_is_better:
        bound = f"low = {min(math.exp(-limit) - 1, -MIN_BAND_WIDTH):.4f}"
    else:
        bound = f"high = {max(math.exp(limit) - 1, MIN_BAND_WIDTH):.4f}"
    where = f"config_id == {group.config_id!r} and cluster == {group.cluster!r}"
    return "\n".join([
        f"# {printable_excerpt(group.label)}: {pluralize(count, 'launch', 'launches')}", "[[band]]",
        f"where = {json.dumps(where, ensure_ascii=False)}", f"metric = {json.dumps(short_name(column))}",
        f"value = {statistics.geometric_mean(group.values):.6g}", bound, "",
    ])  # fmt: skip
