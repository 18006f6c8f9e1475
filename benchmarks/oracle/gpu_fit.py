"""Fitting of the figures of GPU machines to published runs: one set a machine, factors a software, nothing a model.

Logarithms of figures are fitted to logarithms of step times with a robust loss; each has a prior that the data must
outweigh. Other machines and other software differ from the first by factors whose prior is 1 (shrinkage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import log
from typing import Any, cast

import numpy as np
from scipy.optimize import least_squares

from benchmarks.oracle.gpu_tables import PublishedRow
from benchmarks.oracle.reserved_memory import TERM_NAMES, MemoryTerms, stage_memory_terms
from hpcbench.predict.decoder.layout import GpuNode, nominal_rates
from hpcbench.predict.decoder.pricing import FIGURE_NAMES, Figures, step_time
from hpcbench.predict.decoder.work import Work, step_work

Array = np.ndarray[Any, np.dtype[np.float64]]

PRIORS: dict[str, tuple[float, float]] = {
    "matmul": (0.70, 0.08),
    "tile_passes": (2.0, 0.4),
    "attention": (0.33, 0.15),
    "attention_head_power": (0.25, 0.4),
    "memory": (0.80, 0.12),
    "host_layer_s": (4.3e-3, 0.5),
    "host_tensor_s": (0.5e-3, 1.0),
    "host_contended_s": (1.9e-3, 1.0),
    "host_contended_power": (1.0, 0.3),
    "host_contended_hidden_power": (0.2, 1.0),
    "host_head_s": (5e-3, 0.5),
    "tensor_rate": (0.7, 0.3),
    "tensor_wide_rate": (0.5, 0.5),
    "tensor_network_power": (0.4, 0.5),
    "tensor_message_s": (20e-6, 0.7),
    "tensor_wide_message_s": (500e-6, 1.0),
    "tensor_exposed": (0.6, 0.4),
    "send_rate": (0.6, 0.5),
    "send_s": (0.2e-3, 1.0),
    "reduce_rate": (0.7, 0.4),
    "reduce_wide_rate": (1.0, 0.5),
    "network_power": (0.7, 0.4),
    "wide_share_power": (0.3, 0.7),
    "ring_hop_s": (10e-6, 1.0),
    "overlap": (0.6, 0.4),
    "gather_rate": (0.7, 0.5),
    "gather_wide_rate": (0.7, 0.5),
    "gather_message_s": (0.3e-3, 1.0),
    "gather_hop_s": (5e-6, 1.0),
    "optimizer": (0.6, 0.4),
    "optimizer_tensor_s": (0.1e-3, 1.0),
    "step_s": (10e-3, 1.0),
    "straggling": (0.01, 1.0),
    "shard_rate": (0.7, 0.4),
    "shard_wide_rate": (0.5, 0.4),
    "shard_message_s": (50e-6, 1.0),
}
"""Median and standard deviation of the logarithm, for the first machine with nanotron."""
BY_MACHINE = {"matmul": 0.1, "attention": 0.15, "memory": 0.1, "shard_rate": 0.2, "shard_wide_rate": 0.2}
BY_SOFTWARE = {
    "matmul": 0.1,
    "attention": 0.3,
    "memory": 0.2,
    "host_layer_s": 0.5,
    "host_head_s": 0.5,
    "tensor_exposed": 0.4,
    "step_s": 0.5,
    "straggling": 0.5,
    "optimizer": 0.3,
    "gather_wide_rate": 0.5,
    "reduce_wide_rate": 0.5,
}
UNSEEN_GATHER = 1 / 7.5
"""Factor on the rate at which replicas gather parameters over nodes: nanotron's runs hide most of that time, and no
other program is known to."""
HOST_OF_FUSED = 0.5
"""Factor on the host's time a layer where kernels are fused: about half as many are launched. No run determines it."""
MEGATRON_2021: dict[str, tuple[float, float]] = {
    "matmul": (1.0, 0.1),
    "memory": (1.0, 0.2),
    "tensor_rate": (1.0, 0.3),
    "send_rate": (1.0, 0.5),
    "reduce_wide_rate": (1.0, 0.5),
    "optimizer": (1.0, 0.4),
}
"""Median and standard deviation of the logarithm of the factors of Megatron-LM with stored scores."""
NOISE = {"nanotron": 0.08, "megatron": 0.04, "fsdp": 0.05, "torchtitan": 0.05}
FIRST = "h100-80gb-sxm"
NODES = {
    FIRST: GpuNode(
        name=FIRST,
        gpus=8,
        peak_flops=989.4e12,
        memory_bytes_s=3.35e12,
        memory_gib=79.1,
        multiprocessors=132,
        nvlink_bytes_s=450e9,
        nic_bytes_s=50e9,
    ),
    "a100-80gb-sxm": GpuNode(
        name="a100-80gb-sxm",
        gpus=8,
        peak_flops=312e12,
        memory_bytes_s=2.039e12,
        memory_gib=79.1,
        multiprocessors=108,
        nvlink_bytes_s=300e9,
        nic_bytes_s=25e9,
    ),
    "a100-40gb-sxm": GpuNode(
        name="a100-40gb-sxm",
        gpus=8,
        peak_flops=312e12,
        memory_bytes_s=1.555e12,
        memory_gib=39.4,
        multiprocessors=108,
        nvlink_bytes_s=300e9,
        nic_bytes_s=25e9,
    ),
    # The limit of 500 W instead of 700 W lowers the clock of long multiplications to about 0.8.
    "h100-96gb-500w": GpuNode(
        name="h100-96gb-500w",
        gpus=8,
        peak_flops=0.8 * 989.4e12,
        memory_bytes_s=2.4e12,
        memory_gib=94.0,
        multiprocessors=132,
        nvlink_bytes_s=450e9,
        nic_bytes_s=50e9,
    ),
    "h200-141gb-sxm": GpuNode(
        name="h200-141gb-sxm",
        gpus=8,
        peak_flops=989.4e12,
        memory_bytes_s=4.8e12,
        memory_gib=139.8,
        multiprocessors=132,
        nvlink_bytes_s=450e9,
        nic_bytes_s=50e9,
    ),
}
FITTED_MACHINES = (FIRST, "a100-80gb-sxm", "a100-40gb-sxm")


def row_work(row: PublishedRow) -> Work:
    """Return the work of a row's step."""
    node = NODES[row.device]
    return step_work(row.shape, row.layout, node, row.rates or nominal_rates(node, row.layout.gpus))


def stacked(works: Sequence[Work]) -> Work:
    """Return one Work whose fields are arrays."""
    columns = {field.name: np.array([getattr(work, field.name) for work in works], float) for field in fields(Work)}
    return Work(**cast("dict[str, Any]", columns))


@dataclass(frozen=True)
class Fit:
    """Logarithms of the figures: of the first machine, and the factors of machines and software."""

    names: tuple[tuple[str, str, str], ...]
    """(kind, name of the machine or software, figure)."""
    values: Array

    def figures(self, device: str, software: str) -> dict[str, float]:
        result = dict.fromkeys(FIGURE_NAMES, 0.0)
        for (kind, whose, figure), value in zip(self.names, self.values, strict=True):
            if kind == "base" or (kind == "machine" and whose == device) or (kind == "software" and whose == software):
                result[figure] += float(value)
        return {name: float(np.exp(value)) for name, value in result.items()}

    def factors(self, software: str) -> dict[str, float]:
        return {
            figure: float(np.exp(value))
            for (kind, whose, figure), value in zip(self.names, self.values, strict=True)
            if kind == "software" and whose == software
        }


def _layout_of_parameters() -> tuple[tuple[tuple[str, str, str], ...], Array, Array]:
    names = [("base", "", figure) for figure in FIGURE_NAMES]
    means = [log(PRIORS[figure][0]) for figure in FIGURE_NAMES]
    spreads = [PRIORS[figure][1] for figure in FIGURE_NAMES]
    groups: list[tuple[str, Sequence[str], Mapping[str, float]]] = [
        ("machine", FITTED_MACHINES[1:], BY_MACHINE),
        ("software", ("megatron", "fsdp", "torchtitan"), BY_SOFTWARE),
    ]
    for kind, owners, spread in groups:
        for whose in owners:
            for figure, deviation in spread.items():
                names.append((kind, whose, figure))
                means.append(0.0)
                spreads.append(deviation)
    return tuple(names), np.array(means), np.array(spreads)


def fit_figures(rows: Sequence[PublishedRow], start: Fit | None = None) -> Fit:
    """Fit the figures to rows with their step times, from the values of another fit where there is one."""
    names, means, spreads = _layout_of_parameters()
    groups: dict[tuple[str, str], list[PublishedRow]] = {}
    for row in rows:
        groups.setdefault((row.device, row.layout.software), []).append(row)
    data = [
        (key, stacked([row_work(row) for row in members]), np.log([row.step_time_s or 1.0 for row in members]))
        for key, members in groups.items()
    ]

    def residuals(values: Array) -> Array:
        fit = Fit(names, values)
        parts = [(values - means) / spreads]
        for (device, software), work, target in data:
            figures = Figures(**fit.figures(device, software))
            parts.append((np.log(step_time(work, figures).total_s) - target) / NOISE[software])
        return np.concatenate(parts)

    first = means if start is None else start.values
    solution = least_squares(residuals, first, loss="soft_l1", max_nfev=60, ftol=1e-5)
    return Fit(names, solution.x)


def megatron_2021_factors(fit: Fit, rows: Sequence[PublishedRow]) -> dict[str, float]:
    """Fit the factors of Megatron-LM with stored scores; figures of the device and of other programs stay."""
    base = fit.figures(rows[0].device, "nanotron")
    fixed = {"gather_wide_rate": UNSEEN_GATHER, "host_layer_s": HOST_OF_FUSED, "host_head_s": HOST_OF_FUSED}
    works, target = stacked([row_work(row) for row in rows]), np.log([row.step_time_s or 1.0 for row in rows])
    means = np.log([median for median, _ in MEGATRON_2021.values()])
    spreads = np.array([spread for _, spread in MEGATRON_2021.values()])

    def factors(values: Array) -> dict[str, float]:
        return {**fixed, **dict(zip(MEGATRON_2021, (float(value) for value in np.exp(values)), strict=True))}

    def residuals(values: Array) -> Array:
        chosen = factors(values)
        figures = Figures(**{name: value * chosen.get(name, 1.0) for name, value in base.items()})
        errors = (np.log(step_time(works, figures).total_s) - target) / NOISE["fsdp"]
        return np.concatenate([(values - means) / spreads, errors])

    return factors(least_squares(residuals, means, loss="soft_l1").x)


def unseen_factors(fit: Fit) -> dict[str, float]:
    """Return the factors of a program without runs: the geometric mean of the known ones', nanotron's 1 among them."""
    known = [fit.factors(software) for software in ("megatron", "fsdp", "torchtitan")]
    means = {name: float(np.exp(np.mean([0.0, *(np.log(one[name]) for one in known)]))) for name in BY_SOFTWARE}
    return {**means, "gather_wide_rate": UNSEEN_GATHER, "host_layer_s": HOST_OF_FUSED, "host_head_s": HOST_OF_FUSED}


def prior_fit() -> Fit:
    """Return the figures before any run was seen."""
    names, means, _ = _layout_of_parameters()
    return Fit(names, means)


def predicted_seconds(fit: Fit, rows: Sequence[PublishedRow]) -> Array:
    """Return the predicted step times of rows."""
    return np.array(
        [step_time(row_work(row), Figures(**fit.figures(row.device, row.layout.software))).total_s for row in rows]
    )


MEMORY_PRIORS: dict[str, tuple[float, float]] = {
    "weights": (1.0, 0.02),
    "optimizer": (1.0, 0.03),
    "gradients": (1.0, 0.1),
    "buckets": (0.3, 0.7),
    "sharding": (0.1, 1.0),
    "accumulation": (0.1, 1.0),
    "held_hidden": (12.0, 0.4),
    "held_ffn": (4.0, 0.4),
    "held_gathered": (1.5, 0.5),
    "held_gathered_recomputed": (0.05, 1.0),
    "held_stage": (1.0, 1.0),
    "held_stage_local": (3.0, 1.0),
    "pass_gathered": (2.0, 0.7),
    "pass_hidden": (3.0, 0.7),
    "pass_ffn": (3.0, 0.7),
    "logits": (5.0, 0.5),
    "embedding": (0.3, 1.0),
    "layer": (0.3, 1.0),
    "constant": (0.5, 0.7),
}
MEMORY_NOISE = 0.06


def _term_rows(rows: Sequence[PublishedRow]) -> Array:
    """Terms of the rank that the tables report: the first."""
    first = [stage_memory_terms(row.shape, row.layout)[0] for row in rows]
    return np.array([[getattr(terms, name) for name in TERM_NAMES] for terms in first])


def fit_memory(rows: Sequence[PublishedRow]) -> MemoryTerms:
    """Fit the factors of memory terms to the reserved memory of rows that state it."""
    rows = [row for row in rows if row.reserved_gib is not None]
    terms = _term_rows(rows)
    target = np.log([row.reserved_gib or 1.0 for row in rows])
    means = np.log([MEMORY_PRIORS[name][0] for name in TERM_NAMES])
    spreads = np.array([MEMORY_PRIORS[name][1] for name in TERM_NAMES])

    def residuals(values: Array) -> Array:
        return np.concatenate([(np.log(terms @ np.exp(values)) - target) / MEMORY_NOISE, (values - means) / spreads])

    solution = least_squares(residuals, means, loss="soft_l1", max_nfev=200)
    return MemoryTerms(**dict(zip(TERM_NAMES, (float(value) for value in np.exp(solution.x)), strict=True)))


def predicted_first_rank_gib(factors: MemoryTerms, rows: Sequence[PublishedRow]) -> Array:
    """Return the predicted reserved memory of the first rank."""
    return np.asarray(_term_rows(rows) @ np.array([getattr(factors, name) for name in TERM_NAMES]))
