"""Comparison of two sets of results, configuration by configuration, with multiplicity correction.

The unit is the launch: steps of one launch share its nodes, placement and clocks, so many steps of one launch carry
little information about another launch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import polars as pl
from pydantic import Field, model_validator

from hpcbench.config.run_spec import LAUNCH_PARAMETERS, RunSpec
from hpcbench.config.toml_tables import TomlSource, TomlTable, load_table
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report import hypothesis_tests
from hpcbench.report.column_names import own_metric_name, resolve_column
from hpcbench.report.configurations import run_spec_of
from hpcbench.report.load_results import LAUNCH_KEY
from hpcbench.report.table_model import short_name
from hpcbench.results.frame import column_types
from hpcbench.results.schema import STATUS_OK
from hpcbench.units import join_words, parse_quantity, pluralize

_QUANTITY_KINDS = {"_bytes": "size", "_per_s": "", "_s": "time"}
"""Kind of quantity of a value with a unit, by the end of the metric's name; a rate per second has none of its own."""


class Band(TomlTable):
    """The band of a metric, for the configurations that ``where`` fits."""

    where: Annotated[str, Field(description="an expression over parameters and cluster")]
    metric: Annotated[str, Field(description="as in --metric of table")] = "step_time_s"
    value: Annotated[float | str, Field(description="in SI units, or '12.5 ms', '8 GiB'")]
    low: Annotated[float | None, Field(le=0, description="-0.05: at most 5 % below; without it no bound")] = None
    high: Annotated[float | None, Field(ge=0, description="0.1: at most 10 % above; without it no bound")] = None

    @model_validator(mode="after")
    def _checked(self) -> Band:
        if self.low is None and self.high is None:
            raise ValueError("low, high or both are needed")
        if self.si_value <= 0:
            raise ValueError(f"value is {self.value!r}, and has to be above 0")
        return self

    @property
    def si_value(self) -> float:
        """``value`` in SI units. Raises ``ValueError`` where its unit is none of the metric's."""
        if not isinstance(self.value, str):
            return self.value
        kind = next((kind for end, kind in _QUANTITY_KINDS.items() if self.metric.partition(".")[0].endswith(end)), "")
        if not kind:
            raise ValueError(f"value is {self.value!r}: {self.metric} is a plain number")
        return parse_quantity(self.value, kind)


class BandsFile(TomlTable):
    """The whole file."""

    band: Annotated[list[Band], Field(min_length=1)]


def load_bands(path: Path) -> tuple[list[Band], TomlSource]:
    """The bands of a TOML file. Raises ``ConfigErrors`` with everything that is wrong in it."""
    file, source = load_table(BandsFile, path)
    return file.band, source


_COMPARED_CONFIGURATIONS = 200
"""Configurations of each side in the search for the most similar pair."""
WORSE, BETTER, FAILS = "worse", "better", "fails"
COMPARISON_VERDICTS = (FAILS, WORSE, BETTER, hypothesis_tests.INCONCLUSIVE, hypothesis_tests.EQUIVALENT)
"""Verdicts in the order of the table."""
REGRESSIONS = frozenset({WORSE, FAILS})
LARGER_IS_BETTER = frozenset(
    {"samples_per_s", "tokens_per_s", "tokens_per_s_per_device", "flops_per_s", "mfu", "hfu", "accuracy"}
)
_FAILED_STATUSES = frozenset({"oom", "unsupported", "failed", "timeout"})
"""Statuses whose reason is the run itself, not the scheduler or a user."""


@dataclass
class ConfigurationPair:
    """One configuration on both sides: the metric of each launch that is ok, and the statuses of the others."""

    cluster: str
    config_id: str
    spec: RunSpec
    base: list[float]
    new: list[float]
    ends: Counter[str] = field(default_factory=Counter)
    """Statuses of launches of the new side that are not ok."""
    verdict: str = hypothesis_tests.INCONCLUSIVE
    reason: str = ""
    shift: hypothesis_tests.LogRatioEstimate | None = None
    chance: float | None = None
    """Adjusted one-sided p-value in the direction of the estimate."""


def comparison_metric(name: str) -> str:
    """Return the column of a metric whose ratio is meaningful; ``ConfigError`` with the choices for any other."""
    column = resolve_column(name)
    if own_metric_name(column):
        return column
    metrics = [metric for metric in column_types() if metric.startswith("metrics.")]
    endings = (".median", "_s", "_bytes", "_j", "idle_power_w", *(f"metrics.{metric}" for metric in LARGER_IS_BETTER))
    choices = [metric for metric in metrics if metric.endswith(endings)]
    if column not in choices:
        hint = did_you_mean(name, map(short_name, choices))
        raise ConfigError(f"--metric {name}: not a figure to compare", hint=hint)
    return column


def is_larger_better(column: str, frame: pl.DataFrame) -> bool:
    """Whether a larger figure of ``column`` is the better one; the sweep states it of a command's metric."""
    own = own_metric_name(column)
    if own is None:
        return short_name(column) in LARGER_IS_BETTER
    directions = (msgspec.json.decode(text) for text in frame["better"].unique().drop_nulls())
    return any(known.get(own) == "higher" for known in directions)


def pair_configurations(
    base: pl.DataFrame, new: pl.DataFrame, column: str
) -> tuple[list[ConfigurationPair], list[str]]:
    """Return the configurations that both sides have launches of, and notes on those of one side only.

    Pairs have the same cluster and ``config_id``; if the sides share no cluster, the same ``config_id``.
    """
    sides = [frame.filter(pl.col("config_id").is_not_null()) for frame in (base, new)]
    notes = []
    common = sides[0].select(LAUNCH_KEY).unique().join(sides[1], on=LAUNCH_KEY, how="semi", nulls_equal=True)
    if len(common):
        notes.append(f"{pluralize(len(common), 'launch', 'launches')} are in both inputs and were ignored")
        sides = [side.join(common, on=LAUNCH_KEY, how="anti", nulls_equal=True) for side in sides]
    clusters = [set(side["cluster"]) for side in sides]
    keys = ["cluster", "config_id"]
    if clusters[0] and clusters[1] and not clusters[0] & clusters[1]:
        notes.append(" is compared with ".join(", ".join(sorted(names)) for names in clusters))
        keys = ["config_id"]
    base_groups, new_groups = (group_launches(side, keys, column) for side in sides)
    pairs = [
        ConfigurationPair(
            after["_cluster"], key[-1], run_spec_of(after), base_groups[key]["_values"], after["_values"],
            Counter(after["_ends"]),
        )
        for key in base_groups if (after := new_groups.get(key))
    ]  # fmt: skip
    for name, groups, others in (("base", base_groups, new_groups), ("new", new_groups, base_groups)):
        alone = len(groups.keys() - others.keys())
        if alone:
            notes.append(f"{pluralize(alone, 'configuration')} only in {name}")
    return pairs, notes


def group_launches(launches: pl.DataFrame, keys: list[str], column: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return by ``keys`` the specification of launches, and as ``_values`` their positive figures in ``column``.

    ``_cluster`` is that of the first launch, ``_ends`` are statuses other than ok.
    """
    is_ok = pl.col("status") == STATUS_OK
    groups = launches.group_by(keys, maintain_order=True).agg(
        pl.col("^spec\\..*$").first(), pl.col("cluster").first().alias("_cluster"),
        pl.col(column).filter(is_ok & (pl.col(column) > 0)).alias("_values"),
        pl.col("status").filter(~is_ok).alias("_ends"),
    )  # fmt: skip
    return {tuple(row[name] for name in keys): row for row in groups.iter_rows(named=True)}


def separating_parameters(base: pl.DataFrame, new: pl.DataFrame) -> list[str]:
    """Return the parameters in which the sides share no value, with the values: no configuration is on both sides.

    If they share some value of every parameter, it is those in which the two most similar configurations differ.
    """
    sides = [list(_configuration_values(frame)) for frame in (base, new)]
    if not all(sides):
        return [f"{name} has no runs" for name, side in zip(("base", "new"), sides, strict=True) if not side]
    reasons = []
    for name in sides[0][0]:
        before, after = ({values[name] for values in side} for side in sides)
        if not before & after:
            reasons.append(f"{name}: {join_words(sorted(before), 4)} in base, {join_words(sorted(after), 4)} in new")
    if reasons:
        return reasons
    pairs = itertools.product(*(side[:_COMPARED_CONFIGURATIONS] for side in sides))
    nearest = min(([name for name in first if first[name] != second[name]] for first, second in pairs), key=len)
    return [f"the most similar configurations differ in {join_words(nearest)}"] if nearest else []


def _configuration_values(frame: pl.DataFrame) -> Iterator[dict[str, str]]:
    """The parameters of each configuration, as text."""
    rows = frame.drop_nulls("config_id").unique("config_id", maintain_order=True)
    for row in rows.iter_rows(named=True):
        spec = msgspec.structs.asdict(run_spec_of(row))
        yield {name: str(value) for name, value in spec.items() if name not in LAUNCH_PARAMETERS}


def judge_pairs(pairs: Sequence[ConfigurationPair], larger_is_better: bool, threshold: float) -> None:
    """Set the verdict of every pair.

    A change is significant at ``SIGNIFICANCE_LEVEL`` for all pairs together (Holm 1979) and at least ``threshold``;
    pairs with ``MIN_LAUNCHES_RANK_TEST`` launches per side must differ in the rank test too.

    Args:
        pairs: configurations with launches of both sides; changed in place.
        larger_is_better: the better direction of the metric.
        threshold: the smallest change that counts, as a share (0.02).
    """
    tested = []
    for pair in pairs:
        failures = {status: count for status, count in pair.ends.items() if status in _FAILED_STATUSES}
        if pair.base and not pair.new and failures:
            pair.verdict = FAILS
            pair.reason = ", ".join(f"{count} {status}" for status, count in sorted(failures.items()))
        elif min(len(pair.base), len(pair.new)) < hypothesis_tests.MIN_LAUNCHES_T_TEST:
            pair.reason = (
                f"at least {hypothesis_tests.MIN_LAUNCHES_T_TEST} launches per side are needed, "
                f"better {hypothesis_tests.MIN_LAUNCHES_RANK_TEST}"
            )
        else:
            pair.shift = hypothesis_tests.estimate_log_ratio(pair.base, pair.new)
            tested.append((pair, pair.shift))
    shifts = [shift for _, shift in tested]
    greater, less = (hypothesis_tests.adjusted_p_values(shifts, greater=direction) for direction in (True, False))
    for (pair, shift), p_greater, p_less in zip(tested, greater, less, strict=True):
        is_larger = shift.estimate > 0
        p_value = p_greater if is_larger else p_less
        pair.chance = p_value if shift.estimate else None
        pair.verdict = hypothesis_tests.classify(shift, p_value, threshold, greater=is_larger)
        if pair.verdict == hypothesis_tests.SIGNIFICANT:
            pair.verdict = BETTER if is_larger == larger_is_better else WORSE
        elif pair.verdict == hypothesis_tests.INCONCLUSIVE:
            pair.reason = "the 95 % interval exceeds the threshold"


def change_ratio(pair: ConfigurationPair) -> float | None:
    """Return new over base: the estimate of the tests, else of the medians; ``None`` where a side has no launch."""
    if pair.shift is not None:
        return math.exp(pair.shift.estimate)
    if not pair.base or not pair.new:
        return None
    return statistics.median(pair.new) / statistics.median(pair.base)
