"""What a table is asked for: the options of ``table``, and the papers' own layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.report.groups import RATE, STEP, Scaling, needed
from hpcbench.report.names import COMPUTED, DERIVED, PREDICTED, Condition, column_of, short_of, sources_of
from hpcbench.results.columns import schema


@dataclass(frozen=True)
class Question:
    """What a table is asked for; names are columns."""

    by: tuple[str, ...] = ()
    pivot: str | None = None
    metrics: tuple[str, ...] = ()
    where: Condition | None = None
    baseline: Condition | None = None
    scaling: Scaling | None = None
    best: bool = False
    sort: str | None = None
    """A key or metric; with ``-`` the largest first."""

    @property
    def is_grouped(self) -> bool:
        """Whether configurations are put together, rather than each being a row."""
        return bool(self.by or self.pivot or self.metrics or self.scaling or self.best)

    @property
    def speedups(self) -> bool:
        """Whether a figure against the baseline is asked for."""
        return any(name in COMPUTED for name in self.metrics)

    @property
    def predictions(self) -> bool:
        """Whether a figure of the oracle is asked for."""
        return any(name in PREDICTED for name in self.metrics)

    def columns(self) -> list[str]:
        """The columns of a results frame that answer it."""
        named = [*self.by, *([self.pivot] if self.pivot else []), *self.metrics]
        asked = [column for one in (self.where, self.baseline) if one for column in one.columns]
        rank = [RATE] if self.best else []
        whole = [STEP, *(f"spec.{name}" for name in RunSpec.__struct_fields__)] if self.predictions else []
        return needed([*sources_of(named), *asked, *rank, *whole, "warnings"], speedups=self.speedups)


def complete(question: Question) -> Question:
    """``question`` with what was left out: how strategies scale, or throughput and step time by strategy."""
    if question.scaling and not question.pivot:
        question = replace(question, pivot="devices")
    if question.scaling and not question.metrics:
        question = replace(question, metrics=(RATE, "speedup", "efficiency"))
    if not question.metrics:
        question = replace(question, metrics=("metrics.step_time_s.median", RATE))
    if not question.by:
        question = replace(question, by=("devices",) if question.pivot == "spec.strategy" else ("spec.strategy",))
    if question.pivot in question.by:
        raise ConfigError(f"--by and --pivot name the same: {short_of(question.pivot)}", hint="keep one of them")
    return question


LAYOUTS: dict[str, Question] = {
    # Jansen et al. (DDLBench), figures 3.1 and 3.2: speed-up over one device by model, data set and framework.
    "ddlbench": Question(
        by=("spec.model", "spec.dataset", "devices"), pivot="spec.strategy", metrics=("speedup",), best=True,
    ),
    # As Kahira et al. 2021 (ParaDL) show theirs: computation and communication of an iteration by strategy and devices.
    "paradl": Question(
        by=("spec.model", "spec.strategy", "devices"),
        metrics=("metrics.compute_s", "metrics.comm_s", "metrics.exposed_comm_s", "metrics.step_time_s.median"),
    ),
}  # fmt: skip


def layout(name: str) -> Question:
    """The question that a paper's table answers."""
    if name not in LAYOUTS:
        raise ConfigError(f"no layout {name!r}", hint=did_you_mean(name, LAYOUTS))
    return LAYOUTS[name]


def question(**asked: Any) -> Question:
    """The question of ``by, pivot, metrics, where, baseline, scaling, best, sort, layout``; absent ones are ``None``.

    A layout gives what no other option says. Raises ``ConfigError`` for names of no column.
    """
    base = layout(asked["layout"]) if asked.get("layout") else Question()
    given: dict[str, Any] = {}
    for option in ("by", "metrics"):
        if asked.get(option):
            given[option] = tuple(column_of(name.strip()) for name in asked[option].split(","))
    for name in given.get("metrics", ()):
        if name not in {*COMPUTED, *DERIVED, *PREDICTED} and schema().get(name) not in ("Float64", "Int64"):
            raise ConfigError(f"--metric {short_of(name)}: no figure", hint=f"choices: {', '.join(figures())}")
    if asked.get("pivot"):
        given["pivot"] = column_of(asked["pivot"])
    for option in ("where", "baseline"):
        if asked.get(option):
            given[option] = Condition(asked[option], f"--{option}")
    for option in ("scaling", "best", "sort"):
        if asked.get(option):
            given[option] = asked[option]
    found = replace(base, **given)
    return complete(found) if found.is_grouped else found


def figures() -> list[str]:
    """What the cells of a table can hold, by their short names."""
    return [*COMPUTED, *PREDICTED, *(short_of(name) for name in schema() if name.startswith("metrics."))]
