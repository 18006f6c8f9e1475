"""``python -m benchmarks.oracle.gpu``: training steps on H100 and A100 predicted from published runs, blind.

Without an option: fits all machines to ``data/gpu_published_fit.csv.gz`` and ``data/gpu_fits_fit.csv.gz``, writes their
files in ``hpcbench/predict/machines`` and both files of predictions beside this one. ``--check`` repeats the
predictions from the shipped files and compares. ``--tables`` prints the held-out errors as Markdown: see gpu.md.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.oracle import exam2
from benchmarks.oracle.gpu_fit import (
    FIRST,
    HOST_OF_FUSED,
    NODES,
    Array,
    Fit,
    fit_figures,
    fit_memory,
    megatron_2021_factors,
    predicted_seconds,
    unseen_factors,
)
from benchmarks.oracle.gpu_tables import (
    EXAM,
    FIT,
    FITS_EXAM,
    FITS_FIT,
    PublishedRow,
    megatron_rows,
    read_outcomes,
    read_rows,
)
from benchmarks.oracle.reserved_memory import (
    FACTORS,
    MemoryTerms,
    ReservedMemory,
    reserved_gib,
    reserved_memory,
    stage_memory_terms,
)
from hpcbench.predict import decoder as transformer
from hpcbench.predict.decoder.layout import nominal_rates
from hpcbench.predict.decoder.machines import (
    FittedMachine,
    fit_interval_s,
    fitted_machine,
    fitted_machines,
    interval_class,
    machine_file,
)
from hpcbench.predict.decoder.pricing import step_time
from hpcbench.predict.decoder.work import step_work
from hpcbench.units import pluralize

FOLDER = Path(__file__).parent
STEP_PREDICTIONS = FOLDER / "gpu_predictions.csv"
FITS_PREDICTIONS = FOLDER / "gpu_fits_predictions.csv"
MACHINES = Path(transformer.__file__).parent.parent / "machines"
STEP_COLUMNS = ("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_gib")
FITS_COLUMNS = ("id", "fits", "peak_memory_gib")
SOFTWARE = ("nanotron", "megatron", "fsdp", "torchtitan")
TOLERANCE = 0.002
EXTRAPOLATION = 1.25
"""Held-out intervals widen by this for models and sizes beyond those of the fit."""


def held_out_seconds(rows: Sequence[PublishedRow]) -> Array:
    """Predict every row by a fit without its model."""
    predicted = np.zeros(len(rows))
    everything = fit_figures(rows)
    for name in sorted({row.shape.name for row in rows}):
        held = np.array([row.shape.name == name for row in rows])
        fit = fit_figures([row for row, out in zip(rows, held, strict=True) if not out], everything)
        predicted[held] = predicted_seconds(fit, [row for row, out in zip(rows, held, strict=True) if out])
    return predicted


def error_bounds(rows: Sequence[PublishedRow], predicted: Array) -> tuple[dict[str, float], dict[str, float]]:
    """Return the 5th and 95th percentile of ln(measured / predicted) of held-out rows by class of layout."""
    errors: dict[str, list[float]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        kind = interval_class(row.layout, NODES[row.device])
        errors.setdefault(kind, []).append(float(np.log((row.step_time_s or 1.0) / seconds)))
    low, high = {}, {}
    for kind, values in errors.items():
        # Few rows say little about a tail: a floor of 6 % on both sides.
        low[kind] = min(EXTRAPOLATION * float(np.quantile(values, 0.05)), -0.06)
        high[kind] = max(EXTRAPOLATION * float(np.quantile(values, 0.95)), 0.06)
    return low, high


def fits_threshold(factors: MemoryTerms, models: frozenset[str] | None = None) -> float:
    """Return the reserved memory that best separates the runs that fit from those that did not."""
    rows = [row for row in read_rows(FITS_FIT)[0] if models is None or row.shape.name in models]
    outcome = read_outcomes(FITS_FIT)
    peaks = np.array([fullest_gib(row, factors) for row in rows])
    fits = np.array([outcome[row.id] for row in rows])
    names = np.array([row.shape.name for row in rows])

    def balanced(threshold: float) -> float:
        said = peaks <= threshold
        return float(
            np.mean(
                [
                    (
                        said[names == name][fits[names == name]].mean()
                        + (~said[names == name])[~fits[names == name]].mean()
                    )
                    / 2
                    for name in set(names.tolist())
                ]
            )
        )

    return float(max(np.arange(60.0, 90.0, 0.5), key=balanced))


def fullest_gib(row: PublishedRow, factors: MemoryTerms) -> float:
    """Return the reserved memory of the fullest rank."""
    return max(reserved_gib(terms, factors) for terms in stage_memory_terms(row.shape, row.layout))


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def fitted(rows: Sequence[PublishedRow]) -> list[FittedMachine]:
    """Fit the figures and return the machines."""
    fit = fit_figures(rows)
    bounds = error_bounds(rows, held_out_seconds(rows))
    return [_machine(name, rows, fit, bounds) for name in NODES]


def _software_factors(fit: Fit) -> dict[str, dict[str, float]]:
    factors = {software: fit.factors(software) for software in SOFTWARE}
    factors["megatron"] |= {"host_layer_s": HOST_OF_FUSED, "host_head_s": HOST_OF_FUSED}
    factors["megatron_deepspeed"] = megatron_2021_factors(fit, megatron_rows())
    factors["other"] = unseen_factors(fit)
    return {software: rounded(values) for software, values in factors.items()}


def _machine(
    name: str,
    rows: Sequence[PublishedRow],
    fit: Fit,
    bounds: tuple[dict[str, float], dict[str, float]],
) -> FittedMachine:
    own = [row for row in rows if row.device == name]
    counts = {source: sum(row.source == source for row in own) for source in sorted({row.source for row in own})}
    learned = ", ".join(f"{pluralize(count, 'run')} of {source}" for source, count in counts.items())
    return FittedMachine(
        name=name,
        device=NODES[name],
        figures=rounded(fit.figures(name, "nanotron")),
        software_factors=_software_factors(fit),
        log_error_low=rounded(bounds[0]),
        log_error_high=rounded(bounds[1]),
        provenance=[
            f"learned from {learned}" if learned else f"no run of this device: the figures of {FIRST} on its peaks",
            "Figures that these runs do not determine are those of other devices (benchmarks/oracle/gpu_fit.py).",
            "Runs: benchmarks/oracle/data/gpu_published_fit.csv.gz; peaks: vendors' data sheets.",
        ],
    )


def step_predictions(rows: Sequence[PublishedRow]) -> str:
    """Return the text of the file of step times."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(STEP_COLUMNS)
    factors = reserved_memory().factors
    for row in rows:
        machine = fitted_machine(row.device)
        work = step_work(
            row.shape, row.layout, machine.device, row.rates or nominal_rates(machine.device, row.layout.gpus)
        )
        step_s = step_time(work, machine.figures_of(row.layout.software)).total_s
        # These runs ended well: none reserved more than its device holds.
        first = reserved_gib(stage_memory_terms(row.shape, row.layout)[0], factors)
        memory = min(first, NODES[row.device].memory_gib)
        values = (step_s, *fit_interval_s(step_s, row.layout, machine), memory)
        writer.writerow([row.id, *(f"{value:.5g}" for value in values)])
    return text.getvalue()


def fits_predictions(rows: Sequence[PublishedRow]) -> str:
    """Return the text of the file of outcomes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(FITS_COLUMNS)
    reserved = reserved_memory()
    for row in rows:
        peak = fullest_gib(row, reserved.factors)
        below = reserved.fits_below_gib * NODES[row.device].memory_gib / NODES[FIRST].memory_gib
        writer.writerow([row.id, int(peak <= below), f"{peak:.5g}"])
    return text.getvalue()


def differences(path: Path, text: str) -> list[str]:
    """Return the rows of a committed file that differ by more than the rounding of other processors."""
    committed, repeated = (list(csv.DictReader(io.StringIO(content))) for content in (path.read_text(), text))
    if [row["id"] for row in committed] != [row["id"] for row in repeated]:
        return [f"{path.name}: the rows are not those of the table"]
    return [
        f"{path.name}: id {before['id']}, {column}: {before[column]} committed, {after[column]} now"
        for before, after in zip(committed, repeated, strict=True)
        for column in before
        if column != "id" and abs(float(before[column]) - float(after[column])) > TOLERANCE * abs(float(before[column]))
    ]


def check(every: int = 1) -> list[str]:
    """Repeat both files of predictions, all rows or every n-th, and return the differences."""
    problems = []
    for table, path, predict in (
        (EXAM, STEP_PREDICTIONS, step_predictions),
        (FITS_EXAM, FITS_PREDICTIONS, fits_predictions),
    ):
        rows, left_out = read_rows(table)
        problems += [f"{table.name}: id {row.id}: {row.reason}" for row in left_out]
        if every > 1:
            lines = path.read_text().splitlines(keepends=True)
            problems += _compare_some(lines, predict(rows[::every]), path.name)
        else:
            problems += differences(path, predict(rows))
    return problems


def _compare_some(committed: Sequence[str], some: str, name: str) -> list[str]:
    by_id = {line.split(",")[0]: line for line in committed}
    return [
        f"{name}: id {line.split(',')[0]} differs"
        for line in some.splitlines()
        if not _is_close(by_id[line.split(",")[0]].strip(), line)
    ]


def _is_close(before: str, after: str) -> bool:
    pairs = zip(before.split(",")[1:], after.split(",")[1:], strict=True)
    return before == after or all(abs(float(old) - float(new)) <= TOLERANCE * abs(float(old)) for old, new in pairs)


def write() -> None:
    """Fit, and write the machines and the predictions."""
    rows, left_out = read_rows(FIT)
    for row in left_out:
        print(f"left out: id {row.id}: {row.reason}")
    memory = fit_memory(rows)
    factors = MemoryTerms(**rounded(asdict(memory)))
    FACTORS.write_bytes(
        msgspec.json.format(msgspec.json.encode(ReservedMemory(factors, fits_threshold(memory)))) + b"\n"
    )
    for machine in fitted(rows):
        (MACHINES / f"{machine.name}.json").write_bytes(machine_file(machine))
    fitted_machines.cache_clear()
    STEP_PREDICTIONS.write_text(step_predictions(read_rows(EXAM)[0]))
    FITS_PREDICTIONS.write_text(fits_predictions(read_rows(FITS_EXAM)[0]))


def main(arguments: Sequence[str]) -> int:
    if "--check" in arguments:
        problems = [*check(), *exam2.check()]
        print("\n".join(problems) or "All files of predictions are repeated.")
        return 1 if problems else 0
    if "--tables" in arguments:
        from benchmarks.oracle.gpu_report import print_tables

        print_tables()
        return 0
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
