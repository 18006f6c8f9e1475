"""Emulation of another machine: operators return zeros and cost timed sleeps, collectives are real."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.errors import WorkerError
from hpcbench.parallel.roofline import BACKWARD, FORWARD, UPDATE, DeviceCompute, EmulatedDevice, Kernel, RooflineModel
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.layer_trace import tensor_bytes, tensor_leaves
from hpcbench.worker.strategies.base import Strategy

_LAYER_KINDS = (
    ("batch_norm", "BatchNorm2d"),
    ("layer_norm", "LayerNorm"),
    ("threshold", "ReLU"),
    ("relu", "ReLU"),
    ("gelu", "GELU"),
    ("silu", "SiLU"),
    ("max_pool2d", "MaxPool2d"),
    ("max_pool3d", "MaxPool3d"),
    ("adaptive_avg_pool", "AdaptiveAvgPool2d"),
    ("avg_pool", "AvgPool2d"),
    ("embedding", "Embedding"),
    ("dropout", "Dropout"),
)
"""Parts of operators' names and the layer whose computation they are."""

_FREE_OPERATORS = frozenset({"new_empty", "new_empty_strided", "empty_like", "_unsafe_view", "_reshape_alias", "alias"})
"""Operators that touch no numbers."""

_MATMUL_OPERATORS = ("mm", "addmm", "bmm", "baddbmm")


_NO_KERNEL = Kernel("none", FORWARD, "fp32", 0.0, 0.0, 0.0, 0.0, 0.0)


class OperatorWork(NamedTuple):
    """A kernel of which an operator is a part."""

    kernel: Kernel
    share: float = 1.0


class OperatorCosts:
    """Of operators, on one device, in one precision."""

    def __init__(self, compute: DeviceCompute, precision: str, model: str) -> None:
        self._roofline, self._precision = RooflineModel.of(compute), precision
        self._factor = compute.factors.get(model, compute.factors.get("", 1.0))

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Of one call that returns ``out``."""
        work = self._work(func, args, kwargs, out)
        return self._factor * work.share * self._roofline.seconds(work.kernel)

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any) -> OperatorWork:
        name = func.__name__.partition(".")[0]
        if name == "convolution":
            return OperatorWork(self._convolution(args, out, FORWARD, _operator_flops(func, args, kwargs, out)))
        if name == "convolution_backward":
            # Its parts may be computed one without the other: the input's or the weight's gradient alone.
            gradient, x, weight, wanted = args[0], args[1], args[2], args[-1]
            parts = int(wanted[0]) + int(wanted[1])
            forward = float(conv_flop_count(x.shape, weight.shape, gradient.shape))
            kernel = self._convolution((x, weight), gradient, BACKWARD, 2 * forward)
            # The first layer's whole backward pass is one part.
            return OperatorWork(kernel, max(parts, 1) / 2)
        if name in _MATMUL_OPERATORS:
            return self._product(args, out, _operator_flops(func, args, kwargs, out))
        if name.startswith(("_foreach", "_fused")):
            return OperatorWork(self._kernel("sgd", UPDATE, 0.0, _float_bytes((args, kwargs)), 0.0, 0.0, 0.0))
        if name in _FREE_OPERATORS:
            return OperatorWork(_NO_KERNEL)
        kind = next((kind for part, kind in _LAYER_KINDS if part in name), "elementwise")
        input_bytes, output_bytes = _float_bytes((args, kwargs)), _float_bytes(out)
        direction = BACKWARD if _in_backward_pass() else FORWARD
        flops = _operator_flops(func, args, kwargs, out)
        moved = input_bytes + output_bytes
        return OperatorWork(self._kernel(kind, direction, flops, moved, 0.0, input_bytes, output_bytes))

    def _convolution(self, args: Any, out: Any, direction: str, flops: float) -> Kernel:
        x, weight = args[0], args[1]
        input_bytes, output_bytes = tensor_bytes(x), tensor_bytes(out)
        moved = (2 if direction == BACKWARD else 1) * (input_bytes + output_bytes)
        kind = f"Conv{x.dim() - 2}d"
        return self._kernel(kind, direction, flops, moved, tensor_bytes(weight), input_bytes, output_bytes)

    def _product(self, args: Any, out: Any, flops: float) -> OperatorWork:
        """In the backward pass one of two that are a layer's: the gradient of its input, or of its weight."""
        left, right = [one for one in args if isinstance(one, Tensor)][-2:]
        if not _in_backward_pass():
            input_bytes, weight_bytes, output_bytes = tensor_bytes(left), tensor_bytes(right), tensor_bytes(out)
            moved = input_bytes + output_bytes
            return OperatorWork(self._kernel("Linear", FORWARD, flops, moved, weight_bytes, input_bytes, output_bytes))
        sizes = sorted(tensor_bytes(tensor) for tensor in (left, right, out))
        kernel = self._kernel("Linear", BACKWARD, 2 * flops, 2 * sum(sizes[:2]), sizes[2], sizes[0], sizes[1])
        return OperatorWork(kernel, 0.5)

    def _kernel(
        self, kind: str, direction: str, flops: float, moved: float, weight: float, inputs: float, outputs: float
    ) -> Kernel:
        return Kernel(kind, direction, self._precision, flops, moved, weight, inputs, outputs)


def _operator_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "dot_product" in func.__name__:
        query, key, value = [one for one in args if isinstance(one, Tensor) and one.dim() == 4][-3:]
        products = 2.5 if _in_backward_pass() else 1.0
        found = sdpa_flop_count(query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
        return products * float(found)
    return 0.0


def _float_bytes(values: Any) -> float:
    return sum(tensor_bytes(tensor) for tensor in tensor_leaves(values) if tensor.is_floating_point())


def _in_backward_pass() -> bool:
    return torch._C._current_autograd_node() is not None


class OutputMeta(NamedTuple):
    """A tensor that an operator returns, or something else."""

    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    other: Any = None


def broadcast_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class OutputShapes:
    """Results of operators by the shapes of their arguments; remembers what it was asked."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, tuple[list[OutputMeta], Any]] = {}

    def result(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``func`` returns, all zeros; tensors that it writes are returned as they are."""
        written = _written_arguments(func, args, kwargs)
        returns = func._schema.returns  # type: ignore[attr-defined]
        if written and len(returns) == 0:
            return None
        if written and all(one.alias_info is not None for one in returns):
            return written[0] if len(returns) == 1 else tuple(written)
        flat, tree = tree_flatten((args, kwargs))
        key = (func, tree, tuple(_argument_key(one) for one in flat))
        if key not in self._known:
            found, result_tree = tree_flatten(self._on_meta(func, args, kwargs))
            self._known[key] = ([_output_meta(one) for one in found], result_tree)
        entries, result_tree = self._known[key]
        outputs = [
            entry.other
            if entry.shape is None or entry.dtype is None
            else broadcast_zeros(entry.shape, entry.dtype, self._device)
            for entry in entries
        ]
        return tree_unflatten(outputs, result_tree)

    def _on_meta(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def to_meta(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty(value.shape, dtype=value.dtype, device="meta")
            return torch.device("meta") if isinstance(value, torch.device) else value

        return func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that ``func`` writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _argument_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def _output_meta(value: Any) -> OutputMeta:
    return OutputMeta(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else OutputMeta(None, None, value)


_COMM_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_MIN_SLEEP_S = 0.5e-3
"""Sleeping has a cost of its own: shorter computations wait until they are as long together."""
_EXECUTED_OPERATORS = frozenset(
    {"_local_scalar_dense", "item", "detach", "set_", "resize_", "lift_fresh", "_pin_memory"}
)


class EmulationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context around the steps of one run.

    Operators on floating-point tensors are not computed: their results are zeros that take no memory, and the thread
    sleeps for as long as the rehearsed device would have computed, less what it took here to find that out. Payloads
    get their memory when they are handed to a collective, so messages are as long as they are in truth.
    """

    def __init__(self, compute: DeviceCompute, precision: str, model: str, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._costs, self._shapes = OperatorCosts(compute, precision, model), OutputShapes(device)
        self._sleep_debt_s = 0.0
        self._returned_s = time.perf_counter()
        self.computed_s = 0.0
        """Of the rehearsed device, so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COMM_NAMESPACES:
            self._sleep(0.0)
            return func(*tree_map(_materialize, args), **kwargs)
        if func.__name__.startswith("as_strided") and _is_broadcast_zero(args[0]):
            # It would look beyond the one number that there is.
            return broadcast_zeros(tuple(args[1]), args[0].dtype, args[0].device)
        if not _is_computation(func, types, args, kwargs):
            return func(*args, **kwargs)
        began = time.perf_counter()
        out = self._shapes.result(func, args, kwargs)
        cost_s = self._costs.seconds(func, args, kwargs, out)
        self.computed_s += cost_s
        # What lies between two operators is this machine's overhead as far as the operator covers it; beyond that the
        # thread has waited for somebody.
        between_s = min(began - self._returned_s, cost_s)
        self._sleep_debt_s += cost_s - between_s - (time.perf_counter() - began)
        self._sleep(_MIN_SLEEP_S)
        self._returned_s = time.perf_counter()
        return out

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self._sleep(0.0)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _sleep(self, at_least_s: float) -> None:
        """What is owed, if that is more than ``at_least_s``."""
        if self._sleep_debt_s > at_least_s:
            began = time.perf_counter()
            time.sleep(self._sleep_debt_s)
            self._sleep_debt_s -= time.perf_counter() - began


def _is_computation(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether it would read or make floating-point numbers; tensors of subclasses know better what to do."""
    if func.namespace != "aten" or func.is_view or func.__name__.partition(".")[0] in _EXECUTED_OPERATORS:
        return False
    if any(not issubclass(one, Tensor) or one.__torch_dispatch__ is not Tensor.__torch_dispatch__ for one in types):
        return False
    return any(isinstance(one, Tensor) and one.is_floating_point() for one in tree_leaves((args, kwargs)))


def _materialize(value: Any) -> Any:
    """A tensor whose numbers share their memory gets some of its own."""
    if isinstance(value, Tensor) and _is_broadcast_zero(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value


def _is_broadcast_zero(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and 0 in tensor.stride()


def apply_emulation(
    spec: RunSpec, header: TaskFileHeader, strategy: Strategy, device: torch.device
) -> EmulatedDevice | None:
    """Replace the computation of ``strategy``'s steps by sleeps, and return the emulated device; ``None`` if the run
    emulates none.

    Raises:
        WorkerError: ``unsupported`` on an accelerator; the task file lacks the emulated cluster.
    """
    if spec.rehearse is None:
        return None
    if device.type != "cpu":
        raise WorkerError(f"a rehearsal sleeps on the host: it needs cpu ranks, not {device}", status="unsupported")
    if spec.rehearse not in header.rehearsed:
        raise WorkerError(f"the task file says nothing of {spec.rehearse}, which the run rehearses")
    emulated = msgspec.convert(header.rehearsed[spec.rehearse], EmulatedDevice)
    mode, whole_step = EmulationMode(emulated.compute, spec.precision, spec.model, device), strategy.step

    def emulated_step(feed: DataFeed, step: int) -> Tensor:
        with mode:
            return whole_step(feed, step)

    strategy.step = emulated_step  # type: ignore[method-assign]
    return emulated
