"""Fitted machines: vendor's figures of a node, and figures learned from published runs, as package data."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib import resources
from math import exp, hypot, prod
from typing import Any

import msgspec

from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import GpuNode, Layout
from hpcbench.predict.decoder.pricing import Figures
from hpcbench.strategies.decoder_shapes import DecoderShape

FOLDER = "machines"


class FittedMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a machine's file.

    ``figures`` hold for ``software`` nanotron; ``software_factors`` multiply figures for others, by figure name.
    ``log_error_low`` and ``log_error_high``: bounds of the 90 % interval of measured over predicted, as logarithms,
    by class of layout (``interval_class``).
    """

    name: str
    device: GpuNode
    figures: dict[str, float]
    software_factors: dict[str, dict[str, float]]
    log_error_low: dict[str, float]
    log_error_high: dict[str, float]
    provenance: list[str]

    def figures_of(self, software: str) -> Figures:
        """Return the figures of a training loop; an unknown one is a ConfigError."""
        if software not in self.software_factors:
            raise ConfigError(
                f"no figures of {software!r}",
                where=f"machine {self.name}",
                hint="valid: " + ", ".join(sorted(self.software_factors)),
            )
        factors = self.software_factors[software]
        figures = {name: value * factors.get(name, 1.0) for name, value in self.figures.items()}
        # Factors of other devices may lead beyond what this one can reach.
        figures["matmul"] = min(figures["matmul"], self.device.best_product)
        return Figures(**figures)


@cache
def fitted_machines() -> dict[str, FittedMachine]:
    """Return the shipped machines by name."""
    folder = resources.files("hpcbench.predict").joinpath(FOLDER)
    machines = {}
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".json"):
            machine = msgspec.json.decode(path.read_bytes(), type=FittedMachine)
            machines[machine.name] = machine
    return machines


def fitted_machine(name: str) -> FittedMachine:
    """Return a shipped machine; an unknown device is a ConfigError that names the valid ones."""
    machines = fitted_machines()
    if name not in machines:
        raise ConfigError(f"no fitted figures of device {name!r}", hint="valid: " + ", ".join(sorted(machines)))
    return machines[name]


LEARNED = ("h100-80gb-sxm", "a100-80gb-sxm")
"""Machines whose figures a device without runs has, in their geometric mean."""


DEVICE_LOG_ERROR = 0.3
"""Bound of 90 % of a new device's own factor, as a logarithm: blind predictions were 30 % too fast for the B200 and 2 %
too slow for the A100 PCIe (``benchmarks/oracle/gpu.md``)."""


def machine_without_runs(node: GpuNode) -> FittedMachine:
    """Return a machine of the vendor's figures of ``node``, with the mean figures of the devices that had runs."""
    first, *others = (fitted_machine(name) for name in LEARNED)
    figures = {
        name: prod(machine.figures[name] for machine in (first, *others)) ** (1 / len(LEARNED))
        for name in first.figures
    }  # fmt: skip
    return msgspec.structs.replace(
        first,
        name=node.name,
        device=node,
        figures=figures,
        log_error_low={kind: -hypot(error, DEVICE_LOG_ERROR) for kind, error in first.log_error_low.items()},
        log_error_high={kind: hypot(error, DEVICE_LOG_ERROR) for kind, error in first.log_error_high.items()},
        provenance=[
            f"no run of this device: its vendor's figures, with the mean efficiency of {' and '.join(LEARNED)}"
        ],
    )


EXPERTS_LOG_ERROR, PRECISION_LOG_ERROR = 0.45, 0.2
"""Bounds of 90 % of the errors of experts and of low precision, as logarithms. The fitted runs have neither;
the bounds are those of 27 published runs (``benchmarks/oracle/recipes.py``)."""


def unlearned_log_error(shape: DecoderShape, layout: Layout) -> float:
    """Return the bound of 90 % of the error of terms without learned figures, as a logarithm."""
    experts = EXPERTS_LOG_ERROR if shape.experts is not None else 0.0
    return hypot(experts, PRECISION_LOG_ERROR if layout.precision != "bf16" else 0.0)


def interval_class(layout: Layout, node: GpuNode) -> str:
    """Return the class of layouts whose errors were pooled: by software, tensor degree and size."""
    if layout.software != "nanotron":
        return layout.software
    if layout.tensor > node.gpus:
        return "wide_tensor"
    return "large" if layout.gpus >= 16 * node.gpus else "small"


def fit_interval_s(step_time_s: float, layout: Layout, machine: FittedMachine) -> tuple[float, float]:
    """Return the bounds of the 90 % interval of a step by software of published runs: the fit's error."""
    kind = interval_class(layout, machine.device)
    return step_time_s * exp(machine.log_error_low[kind]), step_time_s * exp(machine.log_error_high[kind])


LOOP_LOG_ERROR = 0.2
"""Bound of 90 % of a loop's own factor, as a logarithm. Four softwares on one GPU differ by 0.12 (standard deviation),
and hpcbench's loop is in no published run."""


def loop_interval_s(step_time_s: float, layout: Layout, machine: FittedMachine) -> tuple[float, float]:
    """Return the bounds of the 90 % interval of a step by hpcbench's own loop: the fit's error, and the loop's."""
    kind = interval_class(layout, machine.device)
    low, high = (
        hypot(min(0.0, machine.log_error_low[kind]), LOOP_LOG_ERROR),
        hypot(max(0.0, machine.log_error_high[kind]), LOOP_LOG_ERROR),
    )
    return step_time_s * exp(-low), step_time_s * exp(high)


def machine_file(machine: FittedMachine) -> bytes:
    """Return the text of a machine's file."""
    fields: dict[str, Any] = msgspec.to_builtins(machine)
    fields["device"] = asdict(machine.device)
    return msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n"
