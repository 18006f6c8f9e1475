"""Recommended strategies per number of nodes as tables and JSON, and a sweep that measures the best of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from hpcbench.config.run_spec import spec_document, strategy_label
from hpcbench.fileio import printable_excerpt
from hpcbench.oracle.recommend import OBJECTIVES, Candidate, Recommendation, candidate_sweep_points
from hpcbench.report.prediction_view import interval_text, memory_text, time_split_text
from hpcbench.report.table_model import Column, View
from hpcbench.units import format_bytes, format_rate

MEASURED_PER_SCALE = 3
"""Of so many of the best the sweep makes runs."""
SWEEP_REPEATS = 3
_REFUSAL_KINDS = {"limit": "excluded", "memory": "too large", "formulas": "not priced"}


def ranking_view(found: Recommendation, title: str, most: int) -> View:
    """The best candidates of one number of nodes, ``most`` at the most."""
    columns = [
        Column("place", "", is_key=True),
        Column("strategy", "strategy", is_key=True, is_number=False),
        Column("ratio", "to best [90 %]"),
        Column("step_time_s", "step [90 %]"),
        Column("split", "split"),
        Column("samples_per_s", "samples/s"),
        Column("memory", "memory"),
        Column("bound_by", "bound by", is_number=False),
        Column("largest_batch_size", "batch to"),
    ]
    view = View(title, columns, [], [])
    for place, one in enumerate(found.candidates[:most], 1):
        told = one.predicted
        view.raw.append([
            place, candidate_name(one), one.ratio, told.step_time_s, time_split_text(told), told.samples_per_s,
            told.peak_memory_bytes, told.bound_by, one.largest_batch_size,
        ])  # fmt: skip
        view.cells.append([
            str(place), candidate_name(one), _ratio_text(one, is_best=place == 1), interval_text(told),
            time_split_text(told),
            format_rate(told.samples_per_s), memory_text(told, limit=False), told.bound_by,
            str(one.largest_batch_size or ""),
        ])  # fmt: skip
    view.notes = list(_ranking_notes(found, most))
    return view


def candidate_name(one: Candidate) -> str:
    """The strategy with its degrees, and what else makes it: ``fsdp shard_degree=8 recomputing``."""
    spec = one.spec
    words = [strategy_label(spec), *(f"{key}={value}" for key, value in sorted(spec.options.items()))]
    words += [f"in {spec.micro_batches}"] if spec.micro_batches > 1 else []
    words += ["recomputing"] if spec.activation_checkpointing else []
    return " ".join(words)


def _ratio_text(one: Candidate, *, is_best: bool) -> str:
    if is_best:
        return "1"
    mark = "" if one.is_told_apart else " ~"
    return f"{one.ratio:.2f} [{one.ratio_low:.2f} {one.ratio_high:.2f}]{mark}"


def _ranking_notes(found: Recommendation, most: int) -> Iterable[str]:
    alike = [one for one in found.candidates[1:] if not one.is_told_apart]
    if alike:
        yield f"~: cannot be told apart from the first ({len(alike)}): only measuring them can tell"
    yield "to best: the ratio's own interval; what the machine's numbers do to both of two steps is not in it"
    if len(found.candidates) > most:
        yield f"{len(found.candidates) - most} more rank behind; --top shows them, --json all"
    limits = {one.predicted.memory_limit_bytes for one in found.candidates}
    known = next(iter(limits), None)
    if known is not None:
        yield f"memory: of the fullest rank, out of {format_bytes(known)}; batch to: the largest per replica that fits"
    elif found.candidates:
        yield "the profile says nothing of memory: whether these fit is not known"
    if any(one.spec.micro_batches > 1 for one in found.candidates[:most]):
        yield "in n: the batch of a replica is cut into n micro-batches"


def refused_table(found: Sequence[Recommendation]) -> Table:
    """What stops the others: by strategy and limit, the points of all numbers of nodes together."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("cannot run", no_wrap=True)
    table.add_column("points", justify="right")
    table.add_column("because, for instance")
    points: dict[tuple[str, str], int] = {}
    reasons: dict[tuple[str, str], str] = {}
    for one in (refused for recommendation in found for refused in recommendation.refused):
        key = (one.strategy, one.kind)
        points[key] = points.get(key, 0) + one.points
        reasons.setdefault(key, one.reason)
    for (strategy, kind), count in points.items():
        table.add_row(
            Text(strategy), str(count), Text(printable_excerpt(f"{_REFUSAL_KINDS[kind]}: {reasons[strategy, kind]}"))
        )
    return table


def scales_view(found: Sequence[Recommendation]) -> View:
    """The best of every number of nodes, what it brings and what an epoch costs."""
    columns = [
        Column("nodes", "nodes", is_key=True),
        Column("strategy", "best", is_key=True, is_number=False),
        Column("samples_per_s", "samples/s"),
        Column("per_node", "per node"),
        Column("node_hours", "node-h/epoch"),
        Column("alike", "alike"),
    ]
    view = View("the best at every scale", columns, [], [])
    for one in found:
        if not one.candidates:
            view.raw.append([one.nodes, None, None, None, None, None])
            view.cells.append([str(one.nodes), "none can run", "", "", "", ""])
            continue
        best = one.candidates[0]
        rate = best.predicted.samples_per_s
        hours = OBJECTIVES["node_hours"](best.spec, best.predicted)
        alike = sum(not other.is_told_apart for other in one.candidates[1:])
        view.raw.append([one.nodes, candidate_name(best), rate, rate / one.nodes, hours, alike])
        view.cells.append(
            [
                str(one.nodes),
                candidate_name(best),
                format_rate(rate),
                format_rate(rate / one.nodes),
                f"{hours:.3g}",
                str(alike),
            ]
        )
    view.notes = ["alike: others that cannot be told apart from it"]
    return view


def recommendation_json(found: Sequence[Recommendation], objective: str) -> dict[str, Any]:
    """``{"objective", "recommendations": [{nodes, tasks_per_node, candidates, refused, priced}]}``."""
    return {"objective": objective, "recommendations": [_recommendation_entry(one) for one in found]}


def _recommendation_entry(found: Recommendation) -> dict[str, Any]:
    return {
        "nodes": found.nodes,
        "tasks_per_node": found.tasks_per_node,
        "candidates": [
            {
                "spec": spec_document(one.spec),
                "predicted": msgspec.to_builtins(one.predicted),
                "ratio": {"value": one.ratio, "low": one.ratio_low, "high": one.ratio_high},
                "told_apart": one.is_told_apart,
                "largest_batch_size": one.largest_batch_size,
            }
            for one in found.candidates
        ],
        "refused": [one._asdict() for one in found.refused],
        "priced": found.priced,
    }


def recommended_sweep_toml(found: Sequence[Recommendation], name: str, model_folder: str | None = None) -> str:
    """A sweep that measures the best few of every number of nodes, each in several launches.

    ``custom_model_folder`` is where a model of one's own is.
    """
    best = [one for recommendation in found for one in recommendation.candidates[:MEASURED_PER_SCALE]]
    assert best, "a sweep of no candidates"
    spec = best[0].spec
    shared = {"model": spec.model, "dataset": spec.dataset, "precision": spec.precision}
    shared |= {key: value for key in ("input_size", "partition") if (value := getattr(spec, key)) is not None}
    shared |= {"optimizer": spec.optimizer} if spec.optimizer != "sgd" else {}
    lines = [f"name = {_toml_value(name)}", f"repeats = {SWEEP_REPEATS}"]
    lines += [f"model_folder = {_toml_value(model_folder)}"] if model_folder else []
    lines += ["", "[fixed]"]
    lines += [f"{key} = {_toml_value(value)}" for key, value in shared.items()]
    for point in candidate_sweep_points(best):
        lines += ["", "[[include]]"]
        lines += [f"{key} = {_toml_value(value)}" for key, value in point.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml_value(one)}" for key, one in value.items()) + " }"
    # JSON's text, numbers and truth values are TOML's, too.
    return json.dumps(value)
