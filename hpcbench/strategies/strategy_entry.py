"""The registry entry of a strategy, and the declaration of one option of a strategy or a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from hpcbench.config.option import Option
from hpcbench.config.run_spec import OptionValue, RunSpec
from hpcbench.strategies.layer_table import LayerTable

if TYPE_CHECKING:
    from hpcbench.strategies.pipeline.weight_versions import Staleness

_EMPTY: Mapping[str, OptionValue] = MappingProxyType({})


def refuse_bf16_params(
    reason: str, otherwise: Callable[[RunSpec], str | None] | None = None
) -> Callable[[RunSpec], str | None]:
    """Return an exclusion of ``precision = "bf16_params"`` for ``reason``, and of what ``otherwise`` excludes."""

    def exclusion(spec: RunSpec) -> str | None:
        if spec.precision == "bf16_params":
            return f"{spec.strategy} with bf16_params: {reason}; use bf16, ddp or fsdp"
        return None if otherwise is None else otherwise(spec)

    return exclusion


class HybridAlias(NamedTuple):
    """Another name of a strategy: under it, nodes are replicas unless a sweep sets the degrees."""

    strategy: str
    needs_tp_degree: bool = False
    """Whether ``tp_degree`` must be 2 or more."""


class PipelineForm(NamedTuple):
    """The order in which a pipeline's ranks compute."""

    schedule: str | None = None
    """Key of ``hpcbench.strategies.pipeline.schedules.SCHEDULES``; ``None``: no pipeline."""
    splits_backward: bool = False
    """Whether a backward pass is two actions: gradients of the inputs, and later those of the weights."""
    records_timeline: bool = False
    """Whether ranks execute the actions of ``schedule`` themselves, step by step, and record their times."""
    staleness: Callable[[RunSpec], Staleness] | None = None
    """Weight versions of an asynchronous pipeline; ``None``: every step uses the newest weights."""


class Library(NamedTuple):
    """A library that executes strategies, and the runs with which a calibration measures its overhead."""

    name: str
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


class StrategyEntry(NamedTuple):
    """Everything that the rest of hpcbench reads about a strategy.

    All other behaviour that differs between strategies is a member of the class that trains or of the cost.
    """

    own_degree: str | None
    """The degree that takes the devices left by the other degrees of a sweep; ``None``: one device."""
    description: str
    other_names: tuple[str, ...] = ()
    """Names of the strategy in other tools, which a hint about an unknown name understands."""
    represents: Parallelism | None = None
    """The way to divide a training for which hpcbench itself chooses this strategy; each has one strategy."""
    options: Mapping[str, Option] = MappingProxyType({})
    exclusion: Callable[[RunSpec], str | None] | None = None
    """The reason why a run is infeasible by its integers and names alone, or ``None``."""
    table_exclusion: Callable[[RunSpec, LayerTable], str | None] | None = None
    """The reason why the strategy cannot split the model of a layer table, or ``None``."""
    hybrid: tuple[str, ...] = ()
    """Further degrees that may be above 1: the strategy is then a hybrid with those."""
    drives_several_devices: bool = False
    """Whether one rank computes on ``devices_per_task`` devices; else every rank has one."""
    pipeline: PipelineForm = PipelineForm()
    """The order of a pipeline's actions."""
    library: Library | None = None
    """The library whose code executes the strategy; ``None``: code of this project, for which no overhead is fitted."""

    @property
    def library_name(self) -> str | None:
        """Name of the library, if there is one."""
        return self.library and self.library.name
