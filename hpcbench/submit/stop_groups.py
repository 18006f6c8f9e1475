"""Groups of runs that a stop rule compares, and the runs that a rule excludes by the results of smaller ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcbench.config.run_spec import DEGREE_NAMES, RunSpec
from hpcbench.config.sweep_file import TABLE_PARAMETERS, ParameterPath, StopRule
from hpcbench.config.sweep_loader import Sweep
from hpcbench.parallel.catalog import get_model, get_strategy
from hpcbench.parallel.workloads import sample_shape
from hpcbench.results.stop_rules import StopGroup, format_stop_reason, is_smaller_run

_IGNORED_PARAMETERS = frozenset({("repeat",), ("seed",), ("time_limit_min",), ("spec_version",)})
_WORLD_SIZE_PARAMETERS = frozenset({("nodes",), ("tasks_per_node",), ("devices_per_task",)})


@dataclass(frozen=True)
class StopGroups:
    """The lines of ``stop.jsonl``, and for each run the numbers of its lines."""

    groups: list[StopGroup]
    of_run: dict[str, list[int]]

    def lines(self) -> bytes:
        """The bytes of ``stop.jsonl``; empty where no run can stop another."""
        encoder = msgspec.json.Encoder()
        return b"".join(encoder.encode(group) + b"\n" for group in self.groups)


def stop_groups(sweep: Sweep, runs: Mapping[str, RunSpec]) -> StopGroups:
    """The groups of runs that differ only in the parameters that a rule compares; groups of one run are left out."""
    groups: list[StopGroup] = []
    of_run: dict[str, list[int]] = {}
    for rule in sweep.stops:
        key_of = _equality_key(sweep, rule)
        members: dict[Any, list[tuple[str, list[float]]]] = {}
        for run_id, spec in runs.items():
            values = [_compared_value(spec, parameter) for parameter in rule.along]
            if None not in values:
                members.setdefault(key_of(spec), []).append((run_id, values))  # type: ignore[arg-type]
        for group in members.values():
            if len(group) > 1:
                for run_id, _ in group:
                    of_run.setdefault(run_id, []).append(len(groups))
                groups.append(StopGroup(rule.statuses, [".".join(parameter) for parameter in rule.along], group))
    return StopGroups(groups, of_run)


def stopped_runs(stops: StopGroups, statuses: Mapping[str, str]) -> dict[str, str]:
    """``run_id`` to reason, for the runs without a result that a rule excludes.

    ``statuses``: the status of each result, by ``run_id``.
    """
    stopped: dict[str, str] = {}
    for group in stops.groups:
        smallest = list(_smallest_stopped(group, statuses))
        for run_id, values in group.runs if smallest else ():
            if run_id not in statuses and run_id not in stopped:
                below = next((entry for entry in smallest if is_smaller_run(entry[1], values)), None)
                if below is not None:
                    stopped[run_id] = format_stop_reason(group, *below, statuses[below[0]])
    return stopped


def _smallest_stopped(group: StopGroup, statuses: Mapping[str, str]) -> Iterator[tuple[str, list[float]]]:
    """The runs with one of the rule's statuses, without those that are larger than another of them."""
    kept: list[list[float]] = []
    ended = [(values, run_id) for run_id, values in group.runs if statuses.get(run_id) in group.statuses]
    for values, run_id in sorted(ended):
        if not any(values == other or is_smaller_run(other, values) for other in kept):
            kept.append(values)
            yield run_id, values


def _compared_value(spec: RunSpec, parameter: ParameterPath) -> float | None:
    """The value of a compared parameter; ``None`` for an option of another strategy. Defaults are not in the spec."""
    table, name = parameter[0], parameter[-1]
    if table in TABLE_PARAMETERS:
        known = get_strategy(spec.strategy).options if table == "options" else get_model(spec.model).options
        value = getattr(spec, table).get(name, known[name].default if name in known else None)
    elif name == "input_size":
        value = sample_shape(spec.dataset, spec.input_size)[-1]
    else:
        value = getattr(spec, "batch_size" if name == "global_batch_size" else name)
    return value if isinstance(value, (int, float)) else None


def _equality_key(sweep: Sweep, rule: StopRule) -> Callable[[RunSpec], Any]:
    """The key that two runs must have in common to be compared."""
    ignored = _free_parameters(sweep, rule)
    names = [name for name in RunSpec.__struct_fields__ if name not in TABLE_PARAMETERS and (name,) not in ignored]
    if sweep.values("global_batch_size") and "batch_size" in names:
        # The batch size of a replica follows from the global one.
        names[names.index("batch_size")] = "global_batch_size"
    plain = operator.attrgetter(*names)
    tables = operator.attrgetter(*TABLE_PARAMETERS)

    def key(spec: RunSpec) -> Any:
        nested = tuple(
            tuple(sorted(item for item in table.items() if (name, item[0]) not in ignored)) if table else ()
            for name, table in zip(TABLE_PARAMETERS, tables(spec), strict=True)
        )
        return plain(spec), nested

    return key


def _free_parameters(sweep: Sweep, rule: StopRule) -> set[ParameterPath]:
    """The parameters that may differ: compared ones, those that change with them or are computed, and free degrees."""
    along = set(rule.along)
    ignored = {*_IGNORED_PARAMETERS, *along, *sweep.derived}
    for axis in sweep.axes:
        for step in axis.steps:
            if along & step.keys():
                ignored.update(step)
    if along & _WORLD_SIZE_PARAMETERS:
        ignored.update((degree,) for degree in DEGREE_NAMES if not sweep.values(degree))
    if ("global_batch_size",) in ignored:
        ignored.add(("batch_size",))
    return ignored
