"""Predictions for the runs of a sweep: their tables of layers, their cluster's machine, each configuration once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from hpcbench.config.cluster import ClusterProfile
from hpcbench.config.spec import RunSpec
from hpcbench.errors import HpcbenchError
from hpcbench.oracle.answers import Room, Unpriced
from hpcbench.oracle.calibration.choose import machine_for
from hpcbench.oracle.machine import Machine
from hpcbench.oracle.memory import Memory
from hpcbench.oracle.predict import Prediction, fullest, predict
from hpcbench.oracle.rehearsing import rehearsing
from hpcbench.parallel.catalog import STRATEGIES, models
from hpcbench.parallel.datasets import DATASETS
from hpcbench.parallel.layers import LayerRequest, LayerTable
from hpcbench.parallel.own_model import is_own
from hpcbench.parallel.table_limits import excluded_by_table
from hpcbench.results.store import ClusterTree
from hpcbench.submit.layers import layer_table_of
from hpcbench.submit.plan import local_cores
from hpcbench.submit.rehearsal import rehearsed_machine

_Said = TypeVar("_Said", Prediction, Memory)

STARTUP_S = {"cpu": 15.0, "cuda": 45.0}
"""From a launch to its first step, and from its last step to the next launch: interpreters, libraries, the model, the
first call of every kernel. A usual time; nothing is measured for it."""

MOST_DEVICES, MOST_MICRO_BATCHES = 10_000_000, 20_000
"""What is priced at most: results that somebody else has written may say anything."""

_HOLES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError,
)  # fmt: skip

_PRICED = attrgetter(
    "model", "dataset", "input_size", "strategy", "batch_size", "nodes", "tasks_per_node", "devices_per_task",
    "micro_batches", "dp_degree", "tp_degree", "sp_degree", "pp_degree", "precision", "compile",
    "activation_checkpointing", "channels_last", "optimizer", "momentum", "data", "partition", "rehearse",
)  # fmt: skip
"""What a step's time and memory depend on, beside the options: runs that differ in nothing else are alike."""


class Forecast:
    """What the oracle says of runs on one cluster. Remembers what it was asked."""

    def __init__(
        self,
        profile: ClusterProfile,
        tree: ClusterTree | None = None,
        model_folder: Path | None = None,
        python: str | None = sys.executable,
        *,
        forgiving: bool = False,
    ) -> None:
        """``tree`` is the cluster's, for its calibrations.

        ``forgiving`` makes a hole in a formula a reason, for who looks at more than predictions; else it is raised.
        ``python`` makes tables of layers that are neither shipped nor cached; ``None`` leaves their runs unpriced.
        """
        self.profile, self._tree, self._python = _with_this_machine(profile), tree, python
        self._forgiving = forgiving
        self._model_folder = str(model_folder.resolve()) if model_folder else None
        self._tables: dict[Any, LayerTable | Unpriced] = {}
        self._machines: dict[tuple[str | None, int, str | None], Machine] = {}
        self._plain: dict[int, Machine] = {}
        self._held: dict[Any, Memory | Unpriced] = {}
        self._found: dict[Any, Prediction | Unpriced] = {}

    def of(self, spec: RunSpec, *, quick: bool = False, most: int | None = None) -> Prediction | Unpriced:
        """The prediction for ``spec``, or why there is none; beyond ``most`` different ones none is made.

        ``quick``: where the machine was fitted its interval is not worked out anew for every number that is uncertain.
        """
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return Unpriced(error.message)
        if quick and machine.posterior is not None:
            machine = self._without_posterior(machine)
        key = (*_key(spec), machine.posterior is None)
        found = self._found.get(key)
        if found is None:
            if most is not None and len(self._found) >= most:
                return Unpriced(f"more than {most} different ones")
            found = self._found[key] = self._priced(spec, machine)
        return found

    def run_time_s(self, spec: RunSpec) -> float | None:
        """How long a launch takes, its start included; evaluation, checks and the queue are not. ``None``: unknown."""
        found = self.of(spec, quick=True)
        return None if isinstance(found, Unpriced) else self.launch_s(spec, found)

    def launch_s(self, spec: RunSpec, found: Prediction) -> float:
        """As ``run_time_s``, by the run's prediction."""
        steps = spec.warmup_steps + spec.steps + spec.profile_steps
        return STARTUP_S[self.profile.device] + steps * found.step_time_s

    def machine(self, spec: RunSpec) -> Machine:
        """What times on the run's nodes are made of."""
        key = (spec.partition, spec.tasks_per_node, spec.rehearse)
        if key not in self._machines:
            here = machine_for(self.profile, self._tree, *key[:2])
            self._machines[key] = here if spec.rehearse is None else self._rehearsing(here, spec.rehearse)
        return self._machines[key]

    def _rehearsing(self, here: Machine, cluster: str) -> Machine:
        """``ConfigError`` where nobody knows that cluster."""
        return rehearsing(here, rehearsed_machine(cluster, self._tree))

    def _without_posterior(self, machine: Machine) -> Machine:
        # Clocks know machines by their parts: one copy of each is enough.
        if id(machine) not in self._plain:
            self._plain[id(machine)] = msgspec.structs.replace(machine, posterior=None)
        return self._plain[id(machine)]

    def machines(self) -> list[Machine]:
        """Those that have been asked for."""
        return list(self._machines.values())

    def table(self, spec: RunSpec) -> LayerTable | Unpriced:
        """The table of the run's layers."""
        key = (spec.model, spec.dataset, spec.input_size, _frozen(spec.model_options))
        if key not in self._tables:
            request = LayerRequest(
                model=spec.model,
                dataset=spec.dataset,
                input_size=spec.input_size,
                # Dropout's probability changes no shape.
                model_options={name: value for name, value in spec.model_options.items() if name != "dropout"},
                model_folder=self._model_folder if is_own(spec.model) else None,
            )
            self._tables[key] = self._table(request)
        return self._tables[key]

    def _table(self, request: LayerRequest) -> LayerTable | Unpriced:
        """What somebody else's result names is looked up; a module of theirs is never run."""
        own = is_own(request.model)
        if (not own and request.model not in models()) or request.dataset not in DATASETS:
            return Unpriced(f"there is no model {request.model!r:.60} here that takes {request.dataset!r:.60}")
        try:
            return layer_table_of(request, None if own and self._model_folder is None else self._python)
        except HpcbenchError as error:
            return Unpriced(error.message)

    def room(self, spec: RunSpec) -> Room | Unpriced:
        """What the fullest rank holds, and how much there is."""
        held = self._fullest(spec)
        if isinstance(held, Unpriced):
            return held
        try:
            machine = self.machine(spec)
        except HpcbenchError as error:
            return Unpriced(error.message)
        limit = None if machine.memory_bytes is None else round(machine.memory_bytes)
        return Room(held.total_bytes + round(machine.base_bytes), limit)

    def _fullest(self, spec: RunSpec) -> Memory | Unpriced:
        key = _key(spec)
        if key not in self._held:
            self._held[key] = self._told(spec, lambda table: fullest(spec, table, self.profile.device))
        return self._held[key]

    def _priced(self, spec: RunSpec, machine: Machine) -> Prediction | Unpriced:
        held = self._fullest(spec)
        if isinstance(held, Unpriced):
            return held
        return self._told(spec, lambda table: predict(spec, table, machine, memory=held))

    def _told(self, spec: RunSpec, tell: Callable[[LayerTable], _Said]) -> _Said | Unpriced:
        if spec.strategy not in STRATEGIES or STRATEGIES[spec.strategy].cost is None:
            return Unpriced(f"the oracle has no formulas for {spec.strategy!r:.60}")
        if spec.devices > MOST_DEVICES or spec.micro_batches > MOST_MICRO_BATCHES:
            return Unpriced(f"more than {MOST_DEVICES:,} devices or {MOST_MICRO_BATCHES:,} micro_batches")
        table = self.table(spec)
        if isinstance(table, Unpriced):
            return table
        if is_own(spec.model) and (reason := excluded_by_table(spec, table)):
            return Unpriced(reason)
        try:
            return tell(table)
        except HpcbenchError as error:
            return Unpriced(error.message)
        except _HOLES as error:
            if not self._forgiving:
                raise
            # A hole in a formula must not keep anybody from planning or looking at the other runs.
            return Unpriced(f"the oracle's formulas fail: {type(error).__name__}: {error}")


def _with_this_machine(profile: ClusterProfile) -> ClusterProfile:
    """``profile`` with what there is here, where jobs run here and it does not say."""
    if profile.scheduler.kind != "local":
        return profile
    node = profile.node
    here = {"cores": node.cores or local_cores(), "memory_bytes": node.memory_bytes or psutil.virtual_memory().total}
    return profile.model_copy(update={"node": node.model_copy(update=here)})


def _key(spec: RunSpec) -> Any:
    return _PRICED(spec), _frozen(spec.options), _frozen(spec.model_options)


def _frozen(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items())) if options else ()
