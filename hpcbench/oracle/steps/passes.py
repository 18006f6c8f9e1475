"""Forward and backward passes through a table's rows as events, with whatever happens around a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.clock import Clock
from hpcbench.oracle.kernels import Pass, update_kernels
from hpcbench.oracle.streams import Compute, Event
from hpcbench.parallel.layers import LayerTable

Around = Callable[[int], Sequence[Event]]
"""What happens at the row of that number."""


def nothing(_: int) -> Sequence[Event]:
    """At no row anything."""
    return ()


def forward(clock: Clock, passes: Sequence[Pass], before: Around = nothing, after: Around = nothing) -> Iterator[Event]:
    """Row by row."""
    for number, one in enumerate(passes):
        yield from before(number)
        yield Compute(clock.kernel_s(one.forward))
        yield from after(number)


def backward(
    clock: Clock,
    spec: RunSpec,
    table: LayerTable,
    passes: Sequence[Pass],
    before: Around = nothing,
    after: Around = nothing,
    again: Around = nothing,
) -> Iterator[Event]:
    """Row by row from the last; a block whose activations were dropped is computed again before its last row.

    ``again`` is what happens after each row that is computed again.
    """
    block = -1
    for number in range(len(passes) - 1, -1, -1):
        layer = table.layers[number]
        if spec.activation_checkpointing and layer.block != block and layer.block < table.blocks:
            for one in [row for row, other in enumerate(table.layers) if other.block == layer.block]:
                yield Compute(clock.kernel_s(passes[one].forward))
                yield from again(one)
        block = layer.block
        yield from before(number)
        yield Compute(clock.kernel_s(passes[number].backward))
        yield from after(number)


def update(clock: Clock, spec: RunSpec, parameter_bytes: Sequence[float]) -> Iterator[Event]:
    """The optimizer's pass over what the rank updates."""
    counts = Counter(size for size in parameter_bytes if size)
    each = (clock.kernel_s(kernel) for kernel in update_kernels(spec, counts))
    yield Compute(sum(seconds * count for seconds, count in zip(each, counts.values(), strict=True)))
