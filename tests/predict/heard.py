"""A clock that notes what the steps pass that it prices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.cost_model import CostModel
from hpcbench.predict.machine import Machine
from hpcbench.predict.strategy_cost import resolve_cost
from hpcbench.predict.stream_simulator import CommCall, RepeatEvent, StreamEvent, StreamTimes
from hpcbench.strategies.layer_table import LayerTable
from hpcbench.strategies.traffic import Traffic, merge_calls


class Listener(CostModel):
    """``heard``: the calls of the steps so far."""

    def __init__(self, machine: Machine, spec: RunSpec) -> None:
        super().__init__(machine, spec)
        self.heard: list[Traffic] = []

    def run(self, events: Iterable[StreamEvent]) -> StreamTimes:
        """Run the simulator and record each call."""
        kept = list(events)
        self.heard += _calls(kept)
        return super().run(kept)


def heard(spec: RunSpec, table: LayerTable, machine: Machine) -> list[Traffic]:
    """Return the calls priced in a step, in the form of ``Cost.traffic``."""
    clock = Listener(machine, spec)
    resolve_cost(spec.strategy).step(spec, table, clock)
    return merge_calls(clock.heard)


def heard_in_order(spec: RunSpec, table: LayerTable, machine: Machine) -> list[Traffic]:
    """The same, call by call."""
    clock = Listener(machine, spec)
    resolve_cost(spec.strategy).step(spec, table, clock)
    return [replace(one, count=1) for one in clock.heard for _ in range(one.count)]


def _calls(events: Iterable[StreamEvent], times: int = 1) -> Iterator[Traffic]:
    for event in events:
        if isinstance(event, RepeatEvent):
            yield from _calls(event.events, times * event.times)
        elif isinstance(event, CommCall) and event.traffic is not None:
            yield replace(event.traffic, count=times)
