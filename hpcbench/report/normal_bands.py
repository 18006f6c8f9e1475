"""Normal bands of configurations, from the launches that a machine has run before."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import msgspec
import polars as pl
import scipy

from hpcbench.config.run_spec import run_label
from hpcbench.errors import ConfigError
from hpcbench.fileio import printable_excerpt
from hpcbench.report.comparison import group_launches
from hpcbench.report.configurations import run_spec_of
from hpcbench.report.hypothesis_tests import pooled_spread
from hpcbench.report.table_model import short_name
from hpcbench.units import pluralize

MIN_BAND_LAUNCHES = 3
"""Launches of one configuration that a band needs."""
MIN_BAND_WIDTH = 0.02
"""Smallest width of a band, as a share: the smallest change that ``compare`` counts."""
_CONFIDENCE = 0.999
"""Of a thousand checks of an unchanged machine, a single one lies outside by chance."""


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
    groups = [row for row in group_launches(frame, ["cluster", "config_id"], column).values() if row["_values"]]
    several = [row for row in groups if len(row["_values"]) >= MIN_BAND_LAUNCHES]
    if not several:
        most = max((len(row["_values"]) for row in groups), default=0)
        raise ConfigError(
            f"no configuration has {MIN_BAND_LAUNCHES} launches with {short_name(column)}, the most is {most}",
            hint="repeats = 5 in a sweep makes five launches of each configuration",
        )
    pooled = pooled_spread((row["cluster"], row["_values"]) for row in several)
    bands = [_band(row, column, *pooled[row["cluster"]], larger_is_better) for row in several]
    few = len(groups) - len(several)
    head = "# The normal range here: hpcbench compare SOURCE --bands THIS_FILE\n"
    if few:
        head += f"# Left out: {pluralize(few, 'configuration')} with fewer than {MIN_BAND_LAUNCHES} launches.\n"
    return "\n".join([head, *bands])


def _band(row: dict[str, Any], column: str, pooled: float, freedom: int, larger_is_better: bool) -> str:
    values = row["_values"]
    count, logs = len(values), [math.log(value) for value in values]
    own = statistics.stdev(logs)
    spread, degrees = (own, count - 1) if own > 2 * pooled else (pooled, freedom)
    limit = float(scipy.stats.t.ppf(_CONFIDENCE, degrees)) * spread * math.sqrt(1 + 1 / count)
    if larger_is_better:
        bound = f"low = {min(math.exp(-limit) - 1, -MIN_BAND_WIDTH):.4f}"
    else:
        bound = f"high = {max(math.exp(limit) - 1, MIN_BAND_WIDTH):.4f}"
    where = f"config_id == {row['config_id']!r} and cluster == {row['cluster']!r}"
    label = run_label(msgspec.structs.replace(run_spec_of(row), repeat=0))
    return "\n".join([
        f"# {printable_excerpt(label)}: {pluralize(count, 'launch', 'launches')}", "[[band]]",
        f"where = {json.dumps(where, ensure_ascii=False)}", f"metric = {json.dumps(short_name(column))}",
        f"value = {statistics.geometric_mean(values):.6g}", bound, "",
    ])  # fmt: skip
