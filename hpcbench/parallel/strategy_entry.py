"""The registry entry of a strategy, and the declaration of one option of a strategy or a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpcbench.config.run_spec import OptionValue, RunSpec
from hpcbench.parallel.layer_table import LayerTable

if TYPE_CHECKING:
    from hpcbench.parallel.pipeline.weight_versions import Staleness

_EMPTY: Mapping[str, OptionValue] = MappingProxyType({})


class Option(NamedTuple):
    """The declaration of one key of a strategy's ``options`` or a model's ``model_options``.

    The type of the default is the type of all values: bool, int, float or str.

    Example:
        >>> form = Option("gathered", "layout of activations", choices=("gathered", "sharded"))
        >>> form.accepts("sharded"), form.accepts(1), form.expected()
        (True, False, '"gathered" or "sharded"')
    """

    default: OptionValue
    description: str
    choices: tuple[OptionValue, ...] = ()
    lossy: Mapping[OptionValue, float] = MappingProxyType({})
    """Values with which gradients are inexact, each with the largest difference that ``verify`` accepts."""

    @property
    def kind(self) -> type:
        """Type of the default, which is that of all values."""
        return type(self.default)

    def accepts(self, value: Any) -> bool:
        """Whether a sweep may set the option to ``value``; an integer is valid where a number is expected."""
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        return type(value) is self.kind and (not self.choices or value in self.choices)

    def expected(self) -> str:
        """Describe the valid values."""
        if self.choices:
            return " or ".join(toml_literal(choice) for choice in self.choices)
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]


def toml_literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


class HybridAlias(NamedTuple):
    """Another name of a strategy: under it, nodes are replicas unless a sweep sets the degrees."""

    strategy: str
    needs_tp_degree: bool = False
    """Whether ``tp_degree`` must be 2 or more."""


class ParityCase(NamedTuple):
    """A small training that must give the reference's losses, gradients and weights on real ranks.

    ``degrees`` replaces the default, which gives all ranks to the strategy's own degree.
    """

    model: str
    dataset: str
    model_options: Mapping[str, OptionValue] = _EMPTY
    options: Mapping[str, OptionValue] = _EMPTY
    ranks: int = 2
    micro_batches: int = 1
    degrees: Mapping[str, int] = MappingProxyType({})
    devices_per_task: int = 1
    """Devices that one process drives; above 1 for strategies that drive several."""


class CalibrationRuns(NamedTuple):
    """The runs with which ``hpcbench calibrate`` measures the overhead of a strategy's library."""

    batch_factor: int = 1
    """Batch size as a multiple of the workload's."""
    micro_batches: int = 1
    one_process: bool = False
    """Whether one process drives two devices; otherwise 2 and 4 ranks run."""
    cpu_options: Mapping[str, OptionValue] = _EMPTY
    """Options of the runs on CPUs."""


Parallelism = Literal[
    "single_device", "replicas", "sharded_optimizer", "sharded_parameters", "split_layers", "stages",
    "interleaved_stages", "asynchronous_stages",
]  # fmt: skip
"""Ways to divide a training. Where hpcbench itself chooses a strategy for one, it takes the one that represents it."""


class PlotStyle(NamedTuple):
    """Names of a colour, shape and dash of ``hpcbench.report.plots.theme``."""

    colour: str
    shape: str
    dash: str


class StrategyEntry(NamedTuple):
    """Everything that the rest of hpcbench reads about a strategy.

    Runtime and cost are strings ``"module:Class"``, so that a login node reads the registry without torch. All other
    behaviour that differs between strategies is a field here, a member of the runtime or a member of the cost. A test
    searches the package for names of strategies outside these three (``tests/test_seams.py``).
    """

    own_degree: str | None
    """The degree that takes the devices left by the other degrees of a sweep; ``None``: one device."""
    runtime: str
    """``"module:Class"`` of a ``hpcbench.worker.strategies.base.Strategy``."""
    description: str
    cost: str | None = None
    """``"module:Class"`` of a ``hpcbench.oracle.strategies.base.Cost``; ``None``: runs are not predicted."""
    other_names: tuple[str, ...] = ()
    """Names of the strategy in other tools, which a hint about an unknown name understands."""
    represents: Parallelism | None = None
    """The way to divide a training for which hpcbench itself chooses this strategy; each has one strategy."""
    options: Mapping[str, Option] = MappingProxyType({})
    exclusion: Callable[[RunSpec], str | None] | None = None
    """The reason why a run is infeasible by its integers and names alone, or ``None``."""
    table_exclusion: Callable[[RunSpec, LayerTable], str | None] | None = None
    """The reason why the strategy cannot split the model of a layer table, or ``None``."""
    eager_steps_before_graph: int | None = None
    """Steps that must run before one is captured as a CUDA graph; ``None``: the step is not static."""
    without_bf16_params: str | None = None
    """The reason why the strategy cannot train with ``precision = "bf16_params"``; ``None``: it can."""
    hybrid: tuple[str, ...] = ()
    """Further degrees that may be above 1: the strategy is then a hybrid with those."""
    drives_several_devices: bool = False
    """Whether one rank computes on ``devices_per_task`` devices; else every rank has one."""

    # Verification
    reference: str = "data_parallel"
    """Key of ``REFERENCE_TRAINERS``: the training in one process that a verified run is compared with."""
    widest: str = "fp64"
    """The most exact precision in which the strategy can be verified."""
    lossy: float | None = None
    """The largest difference that ``verify`` accepts, for a strategy that is inexact with any options."""
    parity_cases: tuple[ParityCase, ...] = ()
    """Cases of the parity, traffic and memory tests; by default those of ``own_degree``."""
    exact_traffic: bool = True
    """Whether the cost predicts each call; ``False``: timing decides about the calls, only total bytes are exact."""

    # Data parallelism
    alike_replicas: bool = False
    """Whether a rank's step does not depend on the number of replicas: nothing is sharded among them."""
    owners_largest_first: bool = False
    """Whether parameters are assigned to replicas in descending order of size (ZeRO-1) instead of model order."""

    # Pipelines
    schedule: str | None = None
    """Key of ``hpcbench.parallel.pipeline.schedules.SCHEDULES``; ``None``: no pipeline."""
    splits_backward: bool = False
    """Whether a backward pass is two actions: gradients of the inputs, and later those of the weights."""
    records_timeline: bool = False
    """Whether ranks execute the actions of ``schedule`` themselves, step by step, and record their times."""
    staleness: Callable[[RunSpec], Staleness] | None = None
    """Weight versions of an asynchronous pipeline; ``None``: every step uses the newest weights."""

    # Calibration, reports, provenance
    calibration: CalibrationRuns | None = None
    """Runs in a calibration sweep; ``None``: none."""
    plot_style: PlotStyle | None = None
    """Style in plots; ``None``: the first free one."""
    library: str | None = None
    """The library whose code executes the strategy; ``None``: code of this project, for which no overhead is fitted."""
    library_facts: str | None = None
    """``"module:function"`` of the worker: facts about the strategy's library for the provenance of a result."""
