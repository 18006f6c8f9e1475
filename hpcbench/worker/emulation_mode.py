"""Emulation of another machine: operators return zeros and cost timed sleeps, collectives are real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

from hpcbench.config.run_spec import RunSpec, TaskFileHeader
from hpcbench.errors import WorkerError, unsupported
from hpcbench.parallel.roofline import BACKWARD, FORWARD, UPDATE, DeviceCompute, EmulatedDevice, Kernel, RooflineModel
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES, tensor_bytes, tensor_leaves
from hpcbench.worker.strategies.base import Strategy

_LAYER_KINDS = {
    "batch_norm": "BatchNorm2d", "layer_norm": "LayerNorm", "rms_norm": "RMSNorm", "threshold": "ReLU",
    "relu": "ReLU", "gelu": "GELU", "silu": "SiLU", "max_pool2d": "MaxPool2d", "max_pool3d": "MaxPool3d",
    "adaptive_avg_pool": "AdaptiveAvgPool2d", "avg_pool": "AvgPool2d", "embedding": "Embedding", "dropout": "Dropout",
}  # fmt: skip
"""Parts of operators' names and the layer whose computation they are."""

_FREE_OPERATORS = frozenset({"new_empty", "new_empty_strided", "empty_like", "_unsafe_view", "_reshape_alias", "alias"})
"""Operators that touch no numbers."""

_MATMUL_OPERATORS = ("mm", "addmm", "bmm", "baddbmm")


_NO_KERNEL = Kernel("none", FORWARD, "fp32", 0.0, 0.0, 0.0, 0.0, 0.0)


class OperatorCosts:
    """Seconds of operators on one device, in one precision."""

    def __init__(self, compute: DeviceCompute, precision: str, model: str) -> None:
        self._roofline, self._precision = RooflineModel.of(compute), precision
        self._factor = compute.factors.get(model, compute.factors.get("", 1.0))

    def seconds(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        """Return the seconds of one call that returns ``out``."""
        kernel, share = self._work(func, args, kwargs, out)
        return self._factor * share * self._roofline.seconds(kernel)

    def _work(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Kernel, float]:
        """Return the kernel that the call belongs to, and its share of it."""
        name = func.__name__.partition(".")[0]
        if name == "convolution_backward":
            # Its parts may be computed one without the other: the input's or the weight's gradient alone.
            gradient, x, weight, wanted = args[0], args[1], args[2], args[-1]
            parts = int(wanted[0]) + int(wanted[1])
            forward = float(conv_flop_count(x.shape, weight.shape, gradient.shape))
            # The first layer's whole backward pass is one part.
            return self._convolution(x, weight, gradient, BACKWARD, 2 * forward), max(parts, 1) / 2
        if name.startswith(("_foreach", "_fused")):
            return Kernel("sgd", UPDATE, self._precision, 0.0, _float_bytes((args, kwargs)), 0.0, 0.0, 0.0), 1.0
        if name in _FREE_OPERATORS:
            return _NO_KERNEL, 1.0
        flops = _operator_flops(func, args, kwargs, out)
        if name == "convolution":
            return self._convolution(args[0], args[1], out, FORWARD, flops), 1.0
        if name in _MATMUL_OPERATORS:
            return self._product(args, out, flops)
        kind = next((kind for part, kind in _LAYER_KINDS.items() if part in name), "elementwise")
        inputs, outputs = _float_bytes((args, kwargs)), _float_bytes(out)
        direction = BACKWARD if _in_backward_pass() else FORWARD
        return Kernel(kind, direction, self._precision, flops, inputs + outputs, 0.0, inputs, outputs), 1.0

    def _convolution(self, x: Tensor, weight: Tensor, out: Tensor, direction: str, flops: float) -> Kernel:
        inputs, weights, outputs = tensor_bytes(x), tensor_bytes(weight), tensor_bytes(out)
        kind, moved = f"Conv{x.dim() - 2}d", (2 if direction == BACKWARD else 1) * (inputs + outputs)
        return Kernel(kind, direction, self._precision, flops, moved, weights, inputs, outputs)

    def _product(self, args: Any, out: Any, flops: float) -> tuple[Kernel, float]:
        """Count a product in the backward pass as one of a layer's two: the gradient of its input, or of its weight."""
        left, right = tensor_leaves(args)[-2:]
        sizes = [tensor_bytes(left), tensor_bytes(right), tensor_bytes(out)]
        if not _in_backward_pass():
            inputs, weight, outputs = sizes
            return Kernel("Linear", FORWARD, self._precision, flops, inputs + outputs, weight, inputs, outputs), 1.0
        inputs, outputs, weight = sorted(sizes)
        moved = 2 * (inputs + outputs)
        return Kernel("Linear", BACKWARD, self._precision, 2 * flops, moved, weight, inputs, outputs), 0.5


def _operator_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if "dot_product" in func.__name__:
        query, key, value = [tensor.shape for tensor in tensor_leaves(args) if tensor.dim() == 4][-3:]
        products = 2.5 if _in_backward_pass() else 1.0
        return products * float(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
    return 0.0


def _float_bytes(values: Any) -> float:
    return sum(tensor_bytes(tensor) for tensor in tensor_leaves(values) if tensor.is_floating_point())


def _in_backward_pass() -> bool:
    return torch._C._current_autograd_node() is not None


def broadcast_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class OutputShapes:
    """Results of operators by the shapes of their arguments, which are kept as tensors without memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[Any, Any] = {}

    def result(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``func`` returns, all zeros; tensors that it writes are returned as they are."""
        schema = func._schema  # type: ignore[attr-defined]
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written and len(schema.returns) == 0:
            return None
        if written and all(returned.alias_info is not None for returned in schema.returns):
            return written[0] if len(schema.returns) == 1 else tuple(written)
        flat, tree = tree_flatten((args, kwargs))
        key = (func, tree, tuple(_argument_key(value) for value in flat))
        if key not in self._known:
            meta_args, meta_kwargs = tree_map(_to_meta, (args, kwargs))
            self._known[key] = func(*meta_args, **meta_kwargs)
        return tree_map(self._zeros, self._known[key])

    def _zeros(self, value: Any) -> Any:
        return broadcast_zeros(value.shape, value.dtype, self._device) if isinstance(value, Tensor) else value


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _argument_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


_MIN_SLEEP_S = 0.5e-3
"""Sleeping has a cost of its own: shorter computations wait until they are as long together."""
_EXECUTED_OPERATORS = ("_local_scalar_dense", "item", "detach", "set_", "resize_", "lift_fresh", "_pin_memory")


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
        """Seconds that the emulated device has computed so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COMM_NAMESPACES:
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
        """Sleep for the accumulated time if it exceeds ``at_least_s``."""
        if self._sleep_debt_s > at_least_s:
            began = time.perf_counter()
            time.sleep(self._sleep_debt_s)
            self._sleep_debt_s -= time.perf_counter() - began


def _is_computation(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether it would read or make floating-point numbers; tensors of subclasses have their own rules."""
    if func.namespace != "aten" or func.is_view or func.__name__.partition(".")[0] in _EXECUTED_OPERATORS:
        return False
    if any(not issubclass(kind, Tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
        return False
    return any(tensor.is_floating_point() for tensor in tensor_leaves((args, kwargs)))


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
        raise unsupported(f"a rehearsal sleeps on the host: it needs cpu ranks, not {device}")
    if spec.rehearse not in header.rehearsed:
        raise WorkerError(f"the task file lacks {spec.rehearse}, which the run emulates")
    emulated = msgspec.convert(header.rehearsed[spec.rehearse], EmulatedDevice)
    mode, whole_step = EmulationMode(emulated.compute, spec.compute_precision, spec.model, device), strategy.step

    def emulated_step(feed: DataFeed, step: int) -> Tensor:
        with mode:
            return whole_step(feed, step)

    strategy.step = emulated_step  # type: ignore[method-assign]
    return emulated
