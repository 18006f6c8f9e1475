"""Every layer of a model by itself: its forward and its backward pass, whole and in parts, and the optimizer's update.

Layers are not repeated one by one, which would leave each in the caches: rounds go forward through all of them, back
again and through the optimizer, as a step does, with a clock around each. What autograd takes to begin and end a pass
is measured with a layer that does nothing, and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.results.schema import KernelProbe, UpdateProbe
from hpcbench.worker.probes.captured import Captured, callable_alone, capture, given
from hpcbench.worker.probes.sliced import SPLITS, sliced
from hpcbench.worker.probes.watches import Watch, median, spread
from hpcbench.worker.strategies.base import DataParallel, optimizer_kind

LEAST_ROUNDS, MOST_ROUNDS = 3, 60
_SHORTEST_S = 5e-7


@dataclass
class Piece:
    """One layer at one size."""

    row: str
    kind: str
    split: str
    parts: int
    samples: int
    call: Callable[[], Tensor]
    parameters: list[nn.Parameter] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    output: Tensor | None = None
    gradient: Tensor | None = None

    def forward(self) -> None:
        """Keeps what the backward pass needs."""
        self.output = self.call()

    def ready_to_go_back(self) -> bool:
        """Whether anything flows back; makes the gradient that comes in from behind, once."""
        if self.output is None or not self.output.requires_grad:
            return False
        if self.gradient is None:
            self.gradient = torch.randn_like(self.output.detach())
        return True

    def backward(self) -> None:
        """Leaves the parameters' gradients."""
        assert self.output is not None, "the forward pass comes first"
        torch.autograd.backward(self.output, self.gradient)

    def clear(self) -> None:
        """As the loop does before each step."""
        self.output = None
        for parameter in self.parameters:
            parameter.grad = None


def measure_kernels(
    strategy: DataParallel, batch: tuple[Tensor, Tensor], shares: list[int], budget_s: float, check: Callable[[], None]
) -> list[KernelProbe]:
    """All distinct layers of the strategy's model on ``batch``; rounds are repeated until ``budget_s`` has passed."""
    device = batch[0].device
    groups = [_whole(strategy, (batch[0][: len(batch[0]) // parts], batch[1][: len(batch[1]) // parts]), parts)
              for parts in _parts_of_samples(shares, len(batch[0]))]  # fmt: skip
    for parts in shares:
        if parts > 1:
            groups += [group for split in SPLITS if (group := _split(strategy, groups[0][1], split, parts))]
    pieces = [group for _, _, group in groups if group]
    nothing = Piece("", "", "", 1, 1, given(torch.zeros(1, device=device)))
    rounds: list[_Round] = [(group, _optimizer(strategy.spec, group)) for group in pieces]
    _rounds([*rounds, ([nothing], None)], device, budget_s, check)
    overhead_s = (median(nothing.forward_s), median(nothing.backward_s))
    return [_probe(piece, overhead_s) for group in pieces for piece in group]


_Group = tuple[int, list[Captured], list[Piece]]


def _parts_of_samples(shares: list[int], samples: int) -> list[int]:
    return [1, *(parts for parts in shares if 1 < parts <= samples // 2)]


def _whole(strategy: DataParallel, batch: tuple[Tensor, Tensor], parts: int) -> _Group:
    """All layers and the loss, on fewer samples where ``parts`` is more than one."""

    def run(inputs: Tensor) -> Tensor:
        with strategy.arithmetic.autocast():
            outputs: Tensor = strategy.module(inputs)
        return outputs

    found, outputs = capture(strategy.module, batch[0], run)
    split = "whole" if parts == 1 else "samples"
    samples = len(batch[0])
    pieces = [_piece(strategy, one, callable_alone(one), one.inputs, split, parts, samples) for one in found]
    source = given(outputs)
    loss = Piece("loss", "Loss", split, parts, samples, lambda: strategy.losses(source(), batch[1]) / samples)
    return parts, found, [*pieces, loss]


def _split(strategy: DataParallel, found: list[Captured], split: str, parts: int) -> _Group | None:
    pieces = []
    for one in found:
        x = one.inputs[0] if one.inputs else None
        made = sliced(one.module, x, split, parts) if isinstance(x, Tensor) else None
        if made is not None:
            pieces.append(_piece(strategy, one, made[0].train(), [made[1]], split, parts, len(made[1])))
    return (parts, found, pieces) if pieces else None


def _piece(
    strategy: DataParallel, one: Captured, module: nn.Module, inputs: list[object], split: str, parts: int, samples: int
) -> Piece:
    sources = [
        given(value) if isinstance(value, Tensor) and flows else _constant(value)
        for value, flows in zip(inputs, one.flows_back, strict=True)
    ]

    def call() -> Tensor:
        with strategy.arithmetic.autocast():
            output: Tensor = module(*(source() for source in sources))
        return output

    return Piece(one.name, one.kind, split, parts, samples, call, list(module.parameters()))


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _optimizer(spec: RunSpec, group: list[Piece]) -> torch.optim.Optimizer | None:
    """The run's, for the group's parameters, which it leaves as they are; ``None`` where there are none."""
    parameters = {id(parameter): parameter for piece in group for parameter in piece.parameters}
    kind, arguments = optimizer_kind(spec)
    make: Callable[..., torch.optim.Optimizer] = kind
    return make(list(parameters.values()), **{**arguments, "lr": 0.0}) if parameters else None


_Round = tuple[list[Piece], torch.optim.Optimizer | None]


def _rounds(groups: list[_Round], device: torch.device, budget_s: float, check: Callable[[], None]) -> None:
    """The first round is not kept: memory is taken, and libraries choose their algorithms."""
    ends, done = time.perf_counter() + budget_s, 0
    while done < LEAST_ROUNDS + 1 or (done < MOST_ROUNDS and time.perf_counter() < ends):
        check()
        watch = Watch(device)
        for group, optimizer in groups:
            _one_round(group, optimizer, watch)
        watch.settle()
        if done == 0:
            for group, _ in groups:
                for piece in group:
                    piece.forward_s.clear()
                    piece.backward_s.clear()
        done += 1


def _one_round(group: list[Piece], optimizer: torch.optim.Optimizer | None, watch: Watch) -> None:
    """Forward through all, then back, then the update: of large weights it leaves nothing in the caches."""
    for piece in group:
        piece.clear()
    watch.get_ahead()
    for piece in group:
        watch.time(piece.forward, piece.forward_s)
    back = [piece for piece in reversed(group) if piece.ready_to_go_back()]
    watch.get_ahead()
    for piece in back:
        watch.time(piece.backward, piece.backward_s)
        piece.output = None
    if optimizer is not None:
        optimizer.step()


def _probe(piece: Piece, overhead_s: tuple[float, float]) -> KernelProbe:
    readings = [piece.forward_s, piece.backward_s]
    forward_s, backward_s = (
        max(median(own) - extra, _SHORTEST_S) if own else None for own, extra in zip(readings, overhead_s, strict=True)
    )
    assert forward_s is not None, f"{piece.row} was never called"
    return KernelProbe(
        row=piece.row,
        kind=piece.kind,
        split=piece.split,
        parts=piece.parts,
        samples=piece.samples,
        forward_s=forward_s,
        backward_s=backward_s,
        spread=max(spread(own) for own in readings if own),
        repeats=len(piece.forward_s),
    )


def measure_updates(spec: RunSpec, module: nn.Module, repeats: int = 5) -> list[UpdateProbe]:
    """The run's optimizer on tensors of every size that the model has, all tensors of a size together.

    With what the next step begins with: giving back the gradients, which the allocator may return to the system.
    """
    by_size: dict[int, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        by_size.setdefault(parameter.numel() * parameter.element_size(), []).append(parameter)
    kind, arguments = optimizer_kind(spec)
    make: Callable[..., torch.optim.Optimizer] = kind
    optimizers = {size: make(parameters, **arguments) for size, parameters in by_size.items()}
    readings: dict[int, list[float]] = {size: [] for size in by_size}
    device = next(module.parameters()).device
    for number in range(repeats + 1):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        watch = Watch(device)
        for size, optimizer in optimizers.items():
            watch.time(partial(_update, optimizer), readings[size])
        watch.settle()
        if number == 0:
            # The state is made in the first step.
            readings = {size: [] for size in by_size}
    return [
        UpdateProbe(
            optimizer=spec.optimizer,
            parameter_bytes=size,
            seconds=median(found) / len(by_size[size]),
            spread=spread(found),
            repeats=repeats,
        )
        for size, found in readings.items()
    ]


def _update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
