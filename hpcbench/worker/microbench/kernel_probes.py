"""Times of every layer, whole and split, and of the optimizer's update.

Layers are not repeated one by one, which would keep each in the caches: a round runs forward through all layers, back,
and through the optimizer, as a step does. The overhead of an empty pass is subtracted. Modules are captured with their
inputs and outputs, so that each can be called by itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpcbench.config.run_spec import RunSpec
from hpcbench.results.probe_records import KernelProbe, UpdateProbe
from hpcbench.worker.measure.clocks import CallTimer, reading_statistics, relative_spread
from hpcbench.worker.measure.layer_trace import module_hooks
from hpcbench.worker.strategies.base import DataParallelStrategy, optimizer_class_and_arguments


@dataclass
class CapturedModule:
    """The first call of one of several equal modules."""

    name: str
    kind: str
    """Kind as in the layer table: the module's class, with ``.other`` appended for its operations around its
    children."""
    module: nn.Module
    inputs: list[Any]
    flows_back: list[bool]
    """Whether each input requires a gradient."""
    children: dict[str, list[Tensor]] = field(default_factory=dict)
    """Outputs of the direct children, call by call."""


def capture_modules(
    model: nn.Module, inputs: Tensor, forward: Callable[[Tensor], Tensor]
) -> tuple[list[CapturedModule], Tensor]:
    """One forward pass: modules that differ in their class, settings or shapes, and the model's output."""
    capture = _ModuleCapture()
    with module_hooks(model, capture.enter, capture.leave):
        outputs = forward(inputs)
    return capture.captured, outputs.detach().clone()


class _ModuleCapture:
    def __init__(self) -> None:
        self.captured: list[CapturedModule] = []
        self._known: set[tuple[Any, ...]] = set()
        self._running: list[CapturedModule | None] = []

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._running.append(self._new(name, module, inputs[0]))

    def leave(self, name: str, output: Any) -> None:
        self._running.pop()
        caller = self._running[-1] if self._running else None
        if caller is not None and isinstance(output, Tensor):
            caller.children.setdefault(name.rpartition(".")[2], []).append(output.detach().clone())

    def _new(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> CapturedModule | None:
        if isinstance(module, nn.Sequential | nn.Identity | nn.ModuleList):
            return None
        is_leaf = next(module.children(), None) is None
        kind = type(module).__name__ + ("" if is_leaf else ".other")
        key = (kind, repr(module), *(tuple(arg.shape) for arg in args if isinstance(arg, Tensor)))
        if key in self._known:
            return None
        self._known.add(key)
        flows_back = [isinstance(arg, Tensor) and arg.requires_grad for arg in args]
        # What runs next may write over it.
        kept = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
        captured = CapturedModule(name, kind, module, kept, flows_back)
        self.captured.append(captured)
        return captured


class _ReplayedTensor(torch.autograd.Function):
    """A tensor that is there already, as if it had just been computed from ``inputs``.

    What flows back to them is there already, too.
    """

    @staticmethod
    def forward(ctx: Any, _trigger: Tensor, holder: list[Tensor], flowing: list[Tensor], *inputs: Tensor) -> Tensor:
        # The gradients belong to the call, not to the graph.
        ctx.flowing = flowing
        if len(flowing) < len(inputs):
            flowing += [
                torch.randn_like(value) if value.is_floating_point() else value for value in inputs[len(flowing) :]
            ]
        return holder[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        return (None, None, None, *(grad if needs else None for grad, needs in zip(ctx.flowing, wanted, strict=True)))


def replay_tensor(tensor: Tensor) -> Callable[..., Tensor]:
    """A function that hands ``tensor`` over, with a gradient wanted, as if it were made of its arguments."""
    trigger, holder, flowing = torch.zeros((), requires_grad=True), [tensor], list[Tensor]()
    return lambda *inputs: _ReplayedTensor.apply(trigger, holder, flowing, *inputs)  # type: ignore[no-untyped-call]


def isolate_module(captured: CapturedModule) -> nn.Module:
    """The module itself where it has no children; else a copy whose children give back what they gave back before."""
    module = captured.module
    if next(module.children(), None) is None:
        return module
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    for name, outputs in captured.children.items():
        child = module._modules.get(name)
        if child is not None:
            clone._modules[name] = _replay_child(child, outputs)
    return clone


def _replay_child(child: nn.Module, outputs: list[Tensor]) -> nn.Module:
    """``child`` with all that it has, but for what it computes."""
    sources = [replay_tensor(output) for output in outputs]
    calls = 0

    def forward(*args: Any, **_kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sources[(calls - 1) % len(sources)](*(arg for arg in args if isinstance(arg, Tensor)))

    clone = copy.copy(child)
    clone.forward = forward
    return clone


LAYER_SPLITS = ("outputs", "inputs", "positions")
CHANNELS = "channels"
"""A normalization over a part of its channels."""
_CONVOLUTION_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORM_TYPES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def slice_layer(module: Any, x: Tensor, split: str, parts: int) -> tuple[nn.Module, Tensor] | None:
    """Return a layer and the input for one of ``parts``; ``None`` where the layer cannot be split so.

    Its weights are the first numbers of the whole layer's, in their memory where that is contiguous: they give the time
    of a part, not its result.
    """
    if split == CHANNELS:
        return _slice_norm(module, x, parts)
    is_linear = isinstance(module, nn.Linear)
    if not is_linear and not isinstance(module, _CONVOLUTION_TYPES):
        return None
    if split == "positions" and is_linear:
        return (module, _first_part(x, 1, parts)) if x.dim() >= 3 and x.shape[1] >= parts else None
    if split == "positions":
        extent, kernel = x.shape[2] // parts, module.dilation[0] * (module.kernel_size[0] - 1) + 1
        padding = 0 if isinstance(module.padding, str) else int(module.padding[0])
        fits = x.shape[2] % parts == 0 and extent + 2 * padding >= kernel
        return (module, _first_part(x, 2, parts)) if fits else None
    widths = [module.in_features, module.out_features] if is_linear else [module.in_channels, module.out_channels]
    side = int(split == "outputs")
    if widths[side] % parts or (not is_linear and module.groups != 1):
        return None
    widths[side] //= parts
    settings = () if is_linear else (module.kernel_size, module.stride, module.padding, module.dilation)
    make: Callable[..., nn.Module] = nn.Linear if is_linear else type(module)
    layer = make(*widths, *settings, bias=module.bias is not None, device="meta")
    # Parts of a large model's layers, by every split and number of parts, have no room beside it.
    for name, part in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(getattr(module, name).detach().flatten()[: part.numel()].view(part.shape)))
    return layer, x if split == "outputs" else _first_part(x, x.dim() - 1 if is_linear else 1, parts)


def _slice_norm(module: Any, x: Tensor, parts: int) -> tuple[nn.Module, Tensor] | None:
    if not isinstance(module, _NORM_TYPES) or module.num_features % parts:
        return None
    layer = type(module)(
        module.num_features // parts, module.eps, module.momentum, module.affine, module.track_running_stats,
        device=x.device, dtype=None if module.weight is None else module.weight.dtype,
    )  # fmt: skip
    return layer, _first_part(x, 1, parts)


def _first_part(x: Tensor, dim: int, parts: int) -> Tensor:
    """The first part, in memory of its own and in the same order."""
    return x.narrow(dim, 0, x.shape[dim] // parts).clone()


MIN_ROUNDS, MAX_ROUNDS = 3, 60
_MIN_KERNEL_S = 5e-7


@dataclass
class LayerCall:
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

    def prepare_backward(self) -> bool:
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
        """Clear gradients as the training loop does before each step."""
        self.output = None
        for parameter in self.parameters:
            parameter.grad = None


def measure_kernels(
    strategy: DataParallelStrategy, batch: tuple[Tensor, Tensor], shares: list[int], budget_s: float,
    check: Callable[[], None], *, splits: Sequence[str] = ("samples", *LAYER_SPLITS),
    agree: Callable[[bool], bool] = bool,
) -> list[KernelProbe]:  # fmt: skip
    """All distinct layers of the strategy's model on ``batch``; rounds are repeated until ``budget_s`` has passed.

    Args:
        shares: numbers of parts that layers are also cut into, by each of ``splits``.
        agree: whether the time is up on any rank, where several measure side by side.
    """
    device, samples = batch[0].device, len(batch[0])
    captured, whole = _capture_whole_layers(strategy, batch, 1)
    groups, divisors = [whole], [parts for parts in shares if parts > 1]
    for parts in divisors:
        if parts <= samples // 2 and "samples" in splits:
            fewer = (batch[0][: samples // parts], batch[1][: samples // parts])
            groups.append(_capture_whole_layers(strategy, fewer, parts)[1])
    cuts = [split for split in splits if split != "samples"]
    groups += [_split_layers(strategy, captured, split, parts) for parts in divisors for split in cuts]
    groups = [group for group in groups if group]
    nothing = LayerCall("", "", "", 1, 1, replay_tensor(torch.zeros(1, device=device)))
    rounds: list[_RoundGroup] = []
    for group in groups:
        # The run's optimizer, which leaves the parameters as they are.
        parameters = {id(parameter): parameter for piece in group for parameter in piece.parameters}
        rounds.append((group, _optimizer(strategy.spec, list(parameters.values()), lr=0.0) if parameters else None))
    _run_rounds([*rounds, ([nothing], None)], device, budget_s, check, agree)
    overhead_s = (median(nothing.forward_s[1:]), median(nothing.backward_s[1:]))
    return [_kernel_probe(piece, overhead_s) for group in groups for piece in group]


def _optimizer(spec: RunSpec, parameters: list[nn.Parameter], **changes: float) -> torch.optim.Optimizer:
    kind, arguments = optimizer_class_and_arguments(spec, parameters[0].device)
    make: Callable[..., torch.optim.Optimizer] = kind
    return make(parameters, **(arguments | changes))


def _capture_whole_layers(
    strategy: DataParallelStrategy, batch: tuple[Tensor, Tensor], parts: int
) -> tuple[list[CapturedModule], list[LayerCall]]:
    """Capture all layers and the loss on ``batch``, which is one of ``parts`` of the whole."""

    def run(inputs: Tensor) -> Tensor:
        with strategy.arithmetic.autocast():
            outputs: Tensor = strategy.module(inputs)
        return outputs

    captured, outputs = capture_modules(strategy.module, batch[0], run)
    split, samples = "whole" if parts == 1 else "samples", len(batch[0])
    calls = [
        make_layer_call(strategy, module, isolate_module(module), module.inputs, split, parts, samples)
        for module in captured
    ]
    source = replay_tensor(outputs)
    loss = LayerCall("loss", "Loss", split, parts, samples, lambda: strategy.loss_sum(source(), batch[1]) / samples)
    return captured, [*calls, loss]


def _split_layers(
    strategy: DataParallelStrategy, captured: list[CapturedModule], split: str, parts: int
) -> list[LayerCall]:
    calls = []
    for module in captured:
        x = module.inputs[0] if module.inputs else None
        sliced = slice_layer(module.module, x, split, parts) if isinstance(x, Tensor) else None
        if sliced is not None:
            layer, part = sliced
            calls.append(make_layer_call(strategy, module, layer.train(), [part], split, parts, len(part)))
    return calls


def make_layer_call(
    strategy: DataParallelStrategy, captured: CapturedModule, module: nn.Module, inputs: list[object], split: str,
    parts: int, samples: int,
) -> LayerCall:  # fmt: skip
    """Return ``module`` on ``inputs`` as a call of its own; nothing flows back to what ``captured`` wants none for."""
    sources = [
        replay_tensor(value) if isinstance(value, Tensor) and flows else partial(next, repeat(value))
        for value, flows in zip(inputs, captured.flows_back, strict=True)
    ]

    def call() -> Tensor:
        with strategy.arithmetic.autocast():
            output: Tensor = module(*(source() for source in sources))
        return output

    return LayerCall(captured.name, captured.kind, split, parts, samples, call, list(module.parameters()))


_RoundGroup = tuple[list[LayerCall], torch.optim.Optimizer | None]


def _run_rounds(
    groups: list[_RoundGroup], device: torch.device, budget_s: float, check: Callable[[], None],
    agree: Callable[[bool], bool],
) -> None:  # fmt: skip
    """Append the times of all rounds. The first is not used: memory is taken, and libraries choose their algorithms."""
    ends, done, timer = time.perf_counter() + budget_s, 0, CallTimer(device)
    while done < MIN_ROUNDS + 1 or (done < MAX_ROUNDS and not agree(time.perf_counter() >= ends)):
        check()
        for group, optimizer in groups:
            time_passes(group, timer)
            # Of large weights the update leaves nothing in the caches.
            if optimizer is not None:
                optimizer.step()
            # Gradients of all groups are several times the model's.
            for piece in group:
                piece.clear()
        timer.flush()
        done += 1


def time_passes(calls: Sequence[LayerCall], timer: CallTimer) -> None:
    """Time each of ``calls`` forward, then each of them backward, in reverse order."""
    timer.time_all([(call.forward, call.forward_s) for call in calls], len(calls), (id(calls), "forward"))
    back = [call for call in reversed(calls) if call.prepare_backward()]
    timer.time_all(_backward_calls(back), len(back), (id(calls), "backward"))


def _backward_calls(calls: Sequence[LayerCall]) -> Iterator[tuple[Callable[[], object], list[float]]]:
    for call in calls:
        yield call.backward, call.backward_s
        # Its memory is free for the next one.
        call.output = None


def _kernel_probe(piece: LayerCall, overhead_s: tuple[float, float]) -> KernelProbe:
    readings = [piece.forward_s[1:], piece.backward_s[1:]]
    forward_s, backward_s = (
        max(median(seconds) - extra, _MIN_KERNEL_S) if seconds else None
        for seconds, extra in zip(readings, overhead_s, strict=True)
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
        spread=max(relative_spread(seconds) for seconds in readings if seconds),
        repeats=len(readings[0]),
    )


def measure_optimizer_updates(spec: RunSpec, module: nn.Module, repeats: int = 5) -> list[UpdateProbe]:
    """The run's optimizer on tensors of every size that the model has, all tensors of a size together.

    With what the next step begins with: giving back the gradients, which the allocator may return to the system.
    """
    by_size: dict[int, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        by_size.setdefault(parameter.numel() * parameter.element_size(), []).append(parameter)
    optimizers = {size: _optimizer(spec, parameters) for size, parameters in by_size.items()}
    readings: dict[int, list[float]] = {size: [] for size in by_size}
    timer = CallTimer(next(module.parameters()).device)
    for _ in range(repeats + 1):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        updates = [(partial(_optimizer_step, optimizer), readings[size]) for size, optimizer in optimizers.items()]
        timer.time_all(updates, len(updates), "updates")
        timer.flush()
    # The optimizer's state is made in its first step. Tensors of a size share their reading.
    shares = {size: [seconds / len(by_size[size]) for seconds in readings[size][1:]] for size in by_size}
    return [
        UpdateProbe(optimizer=spec.optimizer, parameter_bytes=size, **reading_statistics(seconds))
        for size, seconds in shares.items()
    ]


def _optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
