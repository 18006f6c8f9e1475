"""Held-out errors of the GPU oracle as Markdown: by source, by column, choices, intervals, memory, ablation."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import log
from operator import attrgetter

import numpy as np

from benchmarks.oracle.gpu import STEP_PREDICTIONS, error_bounds, fits_threshold, fullest_gib, held_out_seconds
from benchmarks.oracle.gpu_fit import (
    NODES,
    Array,
    fit_figures,
    fit_memory,
    predicted_first_rank_gib,
    predicted_seconds,
    prior_fit,
)
from benchmarks.oracle.gpu_tables import EXAM, FIT, FITS_FIT, PublishedRow, read_outcomes, read_rows
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.decoder.machines import interval_class
from hpcbench.units import format_percent

PLAYBOOK = "nanotron_playbook"
COLUMNS = ("gpus", "tensor", "pipeline", "micro_batch", "zero")


def print_tables() -> None:
    """Print all tables."""
    rows, _ = read_rows(FIT)
    measured = np.array([row.step_time_s or 1.0 for row in rows])
    held = held_out_seconds(rows)
    _print_groups("source", rows, held / measured, lambda row: row.source)
    _print_groups("model", rows, held / measured, lambda row: row.shape.name)
    is_playbook = np.array([row.source == PLAYBOOK for row in rows])
    playbook = [row for row in rows if row.source == PLAYBOOK]
    for column in COLUMNS:
        _print_groups(column, playbook, (held / measured)[is_playbook], attrgetter(f"layout.{column}"))
    _print_groups("source held out", rows, _without_source(rows) / measured, lambda row: row.source)
    _print_choices(playbook, held[is_playbook])
    _print_coverage(rows, held)
    _print_ablation(playbook, held[is_playbook])
    _print_memory(playbook)
    print_exam_choices()


def _print_groups(
    title: str, rows: Sequence[PublishedRow], ratio: Array, key: Callable[[PublishedRow], object]
) -> None:
    groups: dict[object, list[float]] = defaultdict(list)
    for row, value in zip(rows, ratio, strict=True):
        groups[key(row)].append(float(value))
    print(f"\n| {title} | runs | mean error | signed |\n|---|---|---|---|")
    for name, values in sorted(groups.items(), key=lambda item: (not isinstance(item[0], int), item[0])):
        errors = np.array(values) - 1
        signed = format_percent(np.log(values).mean(), 1, sign="+")
        print(f"| {name} | {len(values)} | {format_percent(abs(errors).mean(), 1)} | {signed} |")


def _without_source(rows: Sequence[PublishedRow]) -> Array:
    """Predict every row by a fit without its source."""
    everything = fit_figures(rows)
    predicted = np.zeros(len(rows))
    for source in sorted({row.source for row in rows}):
        held = np.array([row.source == source for row in rows])
        fit = fit_figures([row for row, out in zip(rows, held, strict=True) if not out], everything)
        predicted[held] = predicted_seconds(fit, [row for row, out in zip(rows, held, strict=True) if out])
    return predicted


def choice_losses(rows: Sequence[PublishedRow], predicted: Array) -> dict[tuple[str, int], float]:
    """Return by model and number of GPUs how much slower the chosen layout is than the best measured one."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for row, seconds in zip(rows, predicted, strict=True):
        groups[row.shape.name, row.layout.gpus].append((float(seconds), row.step_time_s or 1.0))
    return {key: min(pairs)[1] / min(time for _, time in pairs) - 1 for key, pairs in groups.items() if len(pairs) > 1}


def _print_choices(rows: Sequence[PublishedRow], predicted: Array) -> None:
    habit = np.array([1.0 / (row.layout.replicas + row.layout.micro_batch / 1e3) for row in rows])
    print("\n| model, GPUs | chosen over best | most data parallelism |\n|---|---|---|")
    losses, habits = choice_losses(rows, predicted), choice_losses(rows, habit)
    for key, loss in sorted(losses.items()):
        print(f"| {key[0]}, {key[1]} | {format_percent(loss, 1)} | {format_percent(habits[key], 1)} |")
    mean_loss, mean_habit = (np.mean(list(each.values())) for each in (losses, habits))
    print(f"| mean | {format_percent(float(mean_loss), 1)} | {format_percent(float(mean_habit), 1)} |")


def print_exam_choices() -> None:
    """Print for each model and number of GPUs of the exam the layout chosen by the committed predictions.

    Results of these configurations are not in the project. The last column is the predicted loss of the habit, the most
    data parallelism.
    """
    with STEP_PREDICTIONS.open(newline="", encoding="utf-8") as file:
        predictions = {entry["id"]: entry for entry in csv.DictReader(file)}
    groups: dict[tuple[str, int, int, int], list[PublishedRow]] = defaultdict(list)
    for row in read_rows(EXAM)[0]:
        groups[row.shape.name, row.layout.gpus, row.layout.global_batch, row.layout.sequence].append(row)
    print("\n| model, GPUs | layouts | chosen | predicted step (90 %) | predicted loss of most data parallelism |")
    print("|---|---|---|---|---|")
    for (model, gpus, _, _), rows in sorted(groups.items()):
        if len(rows) == 1:
            continue
        seconds = {row.id: float(predictions[row.id]["step_time_s"]) for row in rows}
        chosen = min(rows, key=lambda row: seconds[row.id])
        habit = min(rows, key=lambda row: (-row.layout.replicas, -row.layout.micro_batch))
        low, high = (float(predictions[chosen.id][f"step_time_{end}_s"]) for end in ("low", "high"))
        print(
            f"| {model}, {gpus} | {len(rows)} | {_layout_text(chosen.layout)} | {seconds[chosen.id]:.3g} s "
            f"({low:.3g} to {high:.3g}) | {format_percent(seconds[habit.id] / seconds[chosen.id] - 1)} |"
        )


def _layout_text(layout: Layout) -> str:
    degrees = {"dp": layout.replicas, "fsdp": layout.shards, "tp": layout.tensor, "pp": layout.pipeline}
    text = " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
    return f"{text or 'one GPU'}, micro-batch {layout.micro_batch}" + (f", ZeRO {layout.zero}" if layout.zero else "")


def _print_coverage(rows: Sequence[PublishedRow], predicted: Array) -> None:
    """Bounds from the other models' held-out errors, counted on each model's own."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for name in sorted({row.shape.name for row in rows}):
        others = [index for index, row in enumerate(rows) if row.shape.name != name]
        low, high = error_bounds([rows[index] for index in others], predicted[others])
        for row, seconds in zip(rows, predicted, strict=True):
            kind = interval_class(row.layout, NODES[row.device])
            if row.shape.name == name and kind in low:
                error = log((row.step_time_s or 1.0) / float(seconds))
                inside[row.source].append(low[kind] <= error <= high[kind])
    print("\n| source | 90 % intervals that hold |\n|---|---|")
    for source, values in sorted(inside.items()):
        print(f"| {source} | {format_percent(float(np.mean(values)))} of {len(values)} |")


def _regression(rows: Sequence[PublishedRow]) -> Array:
    """Predict each model by a linear regression of logarithms on the table's columns, without that model."""
    columns = np.array(
        [
            [
                1.0,
                log(row.shape.parameters),
                log(row.layout.gpus),
                *(log(degree) for degree in (row.layout.tensor, row.layout.pipeline, row.layout.micro_batch)),
                *(log(degree) ** 2 for degree in (row.layout.tensor, row.layout.pipeline, row.layout.micro_batch)),
                log(row.layout.tensor) * log(row.layout.micro_batch),
                float(row.layout.zero),
                float(row.layout.tensor > 8),
            ]
            for row in rows
        ]
    )
    target = np.log([row.step_time_s or 1.0 for row in rows])
    # One model of two has no spread in size: time per parameter is taken to be constant.
    target = target - columns[:, 1]
    columns = np.delete(columns, 1, axis=1)
    predicted = np.zeros(len(rows))
    for name in {row.shape.name for row in rows}:
        held = np.array([row.shape.name == name for row in rows])
        weights = np.linalg.lstsq(columns[~held], target[~held], rcond=None)[0]
        predicted[held] = columns[held] @ weights
    return np.asarray(np.exp(predicted + np.log([row.shape.parameters for row in rows])))


def _print_ablation(rows: Sequence[PublishedRow], held: Array) -> None:
    measured = np.array([row.step_time_s or 1.0 for row in rows])
    print("\n| prediction of held-out models | mean error | chosen over best |\n|---|---|---|")
    for name, predicted in (
        ("physics without fit", predicted_seconds(prior_fit(), rows)),
        ("fit without physics", _regression(rows)),
        ("both", held),
    ):
        loss = float(np.mean(list(choice_losses(rows, predicted).values())))
        error = float(abs(predicted / measured - 1).mean())
        print(f"| {name} | {format_percent(error, 1)} | {format_percent(loss, 1)} |")


def _print_memory(rows: Sequence[PublishedRow]) -> None:
    outcomes, (configurations, _) = read_outcomes(FITS_FIT), read_rows(FITS_FIT)
    print("\n| held-out model | reserved, mean error | balanced accuracy | predicted to fit and did not |")
    print("|---|---|---|---|")
    for name in sorted({row.shape.name for row in rows}):
        factors = fit_memory([row for row in rows if row.shape.name != name])
        threshold = fits_threshold(factors, frozenset(row.shape.name for row in rows if row.shape.name != name))
        own = [row for row in rows if row.shape.name == name]
        reserved = np.array([row.reserved_gib or 1.0 for row in own])
        error = abs(predicted_first_rank_gib(factors, own) / reserved - 1).mean()
        candidates = [row for row in configurations if row.shape.name == name]
        said = np.array([fullest_gib(row, factors) <= threshold for row in candidates])
        fits = np.array([outcomes[row.id] for row in candidates])
        balanced = (said[fits].mean() + (~said[~fits]).mean()) / 2
        wrong = format_percent((~fits[said]).mean(), 1)
        print(f"| {name} | {format_percent(error, 1)} | {format_percent(balanced, 1)} | {wrong} |")
