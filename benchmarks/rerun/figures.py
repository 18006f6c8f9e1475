"""The tables of ``benchmarks/rerun/README.md``, made from the committed data of a rerun: a cell for each question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hpcbench.units import format_percent

FAMILIES = {
    "data": ("ddp", "horovod"),
    "`model`": ("model",),
    "synchronous pipeline": ("gpipe", "1f1b", "fairscale_pipe"),
    "`pipedream`": ("pipedream",),
}
"""Systems of each kind of parallelism; of a kind the best of its systems counts."""
PREDICTORS = {
    "hpcbench": "all of them",
    "paradl": "ParaDL's formulas (ours on the same)",
    "ddlbench": "DDLBench's equations (ours)",
    "compute_only": "computation alone (ours)",
    "flat": "the largest smaller scale, unchanged (ours)",
    "perfect": "two devices, scaled perfectly (ours)",
    "log_p": "a line over log p (ours)",
}
RECOMMENDERS = {
    "hpcbench": "hpcbench",
    "ddlbench": "DDLBench's equations",
    "paradl": "ParaDL's formulas",
    "always_ddp": "always `ddp`",
    "ddp_else_fsdp": "`ddp`, `fsdp` where it does not fit",
}
TIME, MEMORY = "samples_per_s", "peak_memory_bytes"

Row = Mapping[str, Any]
Cell = tuple[str, str, int]
"""Model, data set, devices."""


def ratios(rows: Iterable[Row], figure: str) -> dict[tuple[Cell, str], float]:
    """``figure`` of every cell and strategy over that of one device with the same model and data, if that was measured.

    ``rows`` are of the data table, which leaves out degrees that no row sets; hybrids of data parallelism have names
    of their own.
    """
    fine = [row for row in rows if row["status"] == "ok"]
    alone = {(row["model"], row["dataset"]): row[figure] for row in fine if row["strategy"] == "single"}
    return {
        ((row["model"], row["dataset"], _devices(row)), named(row)): row[figure] / alone[row["model"], row["dataset"]]
        for row in fine
        if row["strategy"] != "single" and (row["model"], row["dataset"]) in alone
    }


def named(row: Row) -> str:
    """The strategy as the papers call it."""
    is_hybrid = row["strategy"] in ("filter", "spatial") and (row.get("dp_degree") or 1) > 1
    return f"data+{row['strategy']}" if is_hybrid else str(row["strategy"])


def _devices(row: Row) -> int:
    return int(row["nodes"] * row["tasks_per_node"] * (row.get("devices_per_task") or 1))


def best_of_families(found: Mapping[tuple[Cell, str], float], best: Any) -> dict[tuple[Cell, str], float]:
    """Return the best system of each family, ``best`` being ``max`` or ``min``."""
    own: dict[tuple[Cell, str], list[float]] = {}
    for (cell, strategy), value in found.items():
        for family, members in FAMILIES.items():
            if strategy in members:
                own.setdefault((cell, family), []).append(value)
    return {key: best(values) for key, values in own.items()}


def families_on_two(rows: Sequence[Row], figure: str) -> str:
    """Return by model and family the median over the data sets, on two devices; for times also minimum and maximum."""
    found = best_of_families(ratios(rows, figure), max if figure == TIME else min)
    body = []
    for model in _models(rows):
        cells = [model]
        for family in FAMILIES:
            own = [
                value
                for ((its, _, devices), name), value in found.items()
                if (its, devices, name) == (model, 2, family)
            ]
            span = f" [{min(own):.2f}, {max(own):.2f}]" if own and figure == TIME else ""
            cells.append(f"{median(own):.2f}{span}" if own else "-")
        body.append(cells)
    return table(["model", *FAMILIES], body)


def families_at_scale(rows: Sequence[Row]) -> str:
    """Samples a second on 2, 4 and 8 devices over one, where there are as many."""
    found = best_of_families(ratios(rows, TIME), max)
    large = sorted({(model, data) for (model, data, devices), _ in found if devices > 2})
    head = ["model, data set", *(f"{name}, 2, 4, 8" if name == "data" else name for name in FAMILIES)]
    return table(
        head,
        [[f"{model}, {data}", *(_along(found, model, data, family) for family in FAMILIES)] for model, data in large],
    )


def strategies_by_model(rows: Sequence[Row], figure: str) -> str:
    """Return every strategy and model relative to one device, by ascending number of devices."""
    found = ratios(rows, figure)
    models, strategies = _models(rows), sorted({strategy for _, strategy in found})
    data = {model: next(data for (its, data, _), _ in found if its == model) for model in models}
    return table(
        ["strategy", *models],
        [[f"`{name}`", *(_along(found, model, data[model], name) for model in models)] for name in strategies],
    )


def _along(found: Mapping[tuple[Cell, str], float], model: str, data: str, name: str) -> str:
    """Return the values by ascending number of devices; a dash where others have one."""
    scales = sorted({devices for (*at, devices), _ in found if at == [model, data]})
    own = [found.get(((model, data, devices), name)) for devices in scales]
    return ", ".join("-" if value is None else f"{value:.2f}" for value in own)


def fastest(rows: Sequence[Row]) -> str:
    """Return the number of cells in which each strategy is the fastest."""
    found = ratios(rows, TIME)
    wins: dict[tuple[str, int], int] = {}
    for cell in {cell for cell, _ in found}:
        winner = max((value, name) for (at, name), value in found.items() if at == cell)[1]
        wins[winner, cell[2]] = wins.get((winner, cell[2]), 0) + 1
    scales = sorted({devices for _, devices in wins})
    total = {name: sum(wins.get((name, one), 0) for one in scales) for name, _ in wins}
    names = sorted(total, key=lambda name: (-total[name], name))
    return table(
        ["fastest", *(f"on {devices} devices" for devices in scales)],
        [[f"`{name}`", *(str(wins.get((name, one), 0)) for one in scales)] for name in names],
    )


def accuracy(documents: Mapping[str, Any]) -> str:
    """Accuracy and signed error of every strategy, predictor and of memory, a column a document of scores."""
    scores = next(iter(documents.values()))["scores"]
    body = [
        [f"`{name}`", *(_scored(one["scores"][0]["strategies"].get(name)) for one in documents.values())]
        for name in scores[0]["strategies"]
    ]
    body += [
        [words, *(_whole(one, name) for one in documents.values())]
        for name, words in PREDICTORS.items()
        if any(_score(one, name) for one in documents.values())
    ]
    memory = [one["scores"][0]["parts"].get(MEMORY) for one in documents.values()]
    return table(["", *documents], [*body, ["memory of a rank", *map(_scored, memory)]])


def _score(document: Any, name: str) -> Any:
    return next((one for one in document["scores"] if one["predictor"] == name), None)


def _whole(document: Any, name: str) -> str:
    score = _score(document, name)
    if score is None or not score["total"] or not score["total"]["count"]:
        return ""
    ours = "" if score["other"] is None else f" ({format_percent(score['other'], 1)})"
    return f"{_scored(score['total'])}{ours} of {score['total']['count']}"


def _scored(summary: Any) -> str:
    return (
        ""
        if not summary or not summary["count"]
        else f"{format_percent(summary['mean'], 1)}, {format_percent(summary['signed'], 1, sign='+')}"
    )


def choices(documents: Mapping[str, Any]) -> str:
    """Return how often each recommender chose the fastest, and its regret, a column a document."""
    body = [
        [words, *(_chosen(document, name) for document in documents.values())] for name, words in RECOMMENDERS.items()
    ]
    return table(["recommender", *documents], body)


def _chosen(document: Any, name: str) -> str:
    score = _score(document, name)
    if score is None or not score["ranking"]["groups"]:
        return ""
    every = [one for one in document["choices"] if one.get(name)]
    right, ranking = sum(one[name] == one["best"] for one in every), score["ranking"]
    share = f"{right} of {len(every)}; " if every else ""
    return f"{share}{format_percent(ranking['regret'], 1)}, worst {format_percent(ranking['worst_regret'])}"


def _models(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
