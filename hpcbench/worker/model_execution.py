"""Loss, precision, compilation and activation checkpointing of a run's model.

``precision = "bf16_params"`` stores parameters in bf16, and fp32 master weights in the optimizer."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import unsupported
from hpcbench.strategies.gradient_buckets import MASTER_UPDATE_CAP_BYTES, fill_buckets


def summed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The sum of the samples' losses, in fp32 at least.

    * classes: outputs [n, classes], targets [n] (int64): cross-entropy;
    * tokens: outputs [n, length, vocabulary], targets [n, length] (int64): mean cross-entropy over the positions;
    * values: outputs and targets [n, values] (floating point): mean squared error over the values.
    """
    wide = outputs if outputs.dtype == torch.float64 else outputs.float()
    if targets.is_floating_point():
        return F.mse_loss(wide, targets.to(wide.dtype), reduction="sum") / targets[0].numel()
    if targets.dim() == 1:
        return F.cross_entropy(wide, targets, reduction="sum")
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]


def is_host(device: torch.device) -> bool:
    """Return whether ``device`` is the host itself. The ``cpu:0`` of dry runs is not: it stands for a GPU."""
    return device == torch.device("cpu")


class MixedPrecision:
    """Autocast and loss scaling of one run. fp64 and fp32 need neither; bf16 and fp16 keep fp32 weights.

    Raises ``WorkerError`` (``unsupported``) for tf32 and fp16 on a cpu.
    """

    def __init__(self, precision: str, device: torch.device) -> None:
        if precision in ("tf32", "fp16") and is_host(device):
            message = f"precision {precision} needs a cuda device; this run's is {device.type}"
            raise unsupported(message, "fp64, fp32 and bf16 run on a cpu")
        self.keeps_casts = True
        """Whether autocast keeps the cast of a weight until the forward pass ends, for a layer that uses it again."""
        allow_tf32(precision == "tf32")
        self._lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        self._device = device.type
        self._scaler = torch.amp.GradScaler("cuda", enabled=device.type == "cuda") if precision == "fp16" else None
        self._attempted = self._applied = 0
        self._counted: torch.optim.Optimizer | None = None

    def autocast(self) -> AbstractContextManager[None]:
        """The context of the forward pass."""
        if self._lower is None:
            return nullcontext()
        context: AbstractContextManager[None] = torch.autocast(
            self._device, dtype=self._lower, cache_enabled=self.keeps_casts
        )
        return context

    def backward(self, loss: Tensor) -> None:
        """Gradients of ``loss``, scaled for fp16 so that small ones do not vanish."""
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """One optimizer step; fp16 leaves it out where a gradient overflowed.

        Afterwards gradients are those that the step used: a scaler divides them in place. It reads from the device
        whether one overflowed, so fp16 waits once a step, within the step's time.
        """
        if self._scaler is None:
            optimizer.step()
            return
        if self._counted is not optimizer:
            self._counted = optimizer
            optimizer.register_step_post_hook(self._count)
        self._attempted += 1
        self._scaler.step(optimizer)
        self._scaler.update()

    def notes(self) -> list[str]:
        """Warnings about the updates so far."""
        if self._attempted == self._applied:
            return []
        left_out = f"{self._attempted - self._applied} of {self._attempted} updates (warm-up included) were left out"
        return [f"{left_out}: a gradient overflowed in fp16, and its scale was lowered"]

    def _count(self, *_step: object) -> None:
        self._applied += 1


def allow_tf32(allowed: bool) -> None:
    """Whether float32 products and convolutions may be computed in tf32 on cuda.

    cuDNN's convolutions are by default: fp32 must mean fp32. Set by torch's older switches: what they set is
    read equally through the newer ``fp32_precision``, while the older ones raise on what was set through that.
    """
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def choose_convolution_algorithms(by_trial: bool, device: torch.device) -> None:
    """Let cuDNN try its algorithms at the first convolution of each shape, as the reference scripts of CNNs do.

    Elsewhere the switch has no effect and stays as it is.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = by_trial


def compile_in_place(module: nn.Module, backend: Any = "inductor") -> None:
    """Compile ``module`` so that its names stay. Before DDP wraps it: torch advises so, and still cuts the backward
    graph at DDP's buckets. Compilation itself happens in the first step of each shape.
    """
    module.compile(backend=backend)


def count_compiled_graphs() -> int:
    """Return the number of graphs compiled by this process; 0 if this torch does not count them."""
    try:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
    except (ImportError, AttributeError, KeyError, TypeError, ValueError):
        return 0


def recompilation_warning(count: int) -> str | None:
    """Return the warning about ``count`` graphs compiled within the timed steps; ``None`` for 0."""
    if count == 0:
        return None
    return (
        f"{count} graph{'s' if count > 1 else ''} compiled within the timed steps: a shape was new there. "
        "drop_last = true leaves out partial batches; more warmup_steps let every shape come before"
    )


def force_eager() -> AbstractContextManager[Any]:
    """Within it compiled modules are called as they were written, and nothing is compiled."""
    # Importing the compiler takes seconds: who has not used it so far does not need this.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class SequentialBlocks(nn.Sequential):
    """A sequence of blocks that is compiled as one; the compiler skips the ``forward`` of ``nn.Sequential``."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks one after another: [n, *sample shape] -> outputs."""
        for block in self:
            x = block(x)
        return x


class CheckpointedBlocks(SequentialBlocks):
    """Keeps the input of every block and computes the block again in the backward pass (Chen et al. 2016)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks one after another: [n, *sample shape] -> outputs.

        In the recomputation dropout draws the same numbers again.
        """
        if not torch.is_grad_enabled():
            return super().forward(x)
        for block in self:
            x = checkpoint_block(block, x)
        return x


def wrap_blocks(model: nn.Sequential, spec: RunSpec) -> nn.Sequential:
    """``model`` as the run asks for it: the same modules under the same names, and so is any slice of it.

    Raises ``WorkerError`` (``unsupported``) for a model that does more than to call its blocks in order.
    """
    if not (spec.compile or spec.activation_checkpointing):
        return model
    if type(model).forward is not nn.Sequential.forward:
        called = f"compile and activation_checkpointing call the blocks of {spec.model} in order"
        message = f"{called}, but {type(model).__name__} has a forward of its own"
        raise unsupported(message, "put what it does into a block")
    kind = CheckpointedBlocks if spec.activation_checkpointing else SequentialBlocks
    for block in model if spec.activation_checkpointing else ():
        disable_inplace_first_op(block)
    return kind(OrderedDict(model.named_children())).train(model.training)


def disable_inplace_first_op(block: nn.Module) -> None:
    """Let ``block`` not begin by writing over its input, which is a leaf of autograd's graph where the block is a cut
    piece of a model: VGG's in-place ReLUs are blocks of their own."""
    for module in block.modules():
        if next(module.children(), None) is None and not isinstance(module, nn.Flatten | nn.Identity):
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
            return


def checkpoint_block(block: nn.Module, x: Tensor) -> Tensor:
    """``block(x)``, of which only ``x`` is kept for the backward pass."""
    # A compiled graph writes statistics once, in its forward part.
    is_compiling = torch.compiler.is_compiling()
    contexts: Any = {} if is_compiling else {"context_fn": lambda: (nullcontext(), frozen_running_statistics(block))}
    output: Tensor = checkpoint(block, x, use_reentrant=False, **contexts)
    return output


@contextlib.contextmanager
def frozen_running_statistics(block: nn.Module) -> Iterator[None]:
    """BatchNorm computes as in training, but its running statistics stay: the first pass has counted the batch."""
    norms = [
        module
        for module in block.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats
    ]
    states = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # Not track_running_stats = False: the operator would save other tensors than in the first pass.
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, states, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def avoid_cumulative_averages(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Let BatchNorm with ``momentum=None`` not read its count of batches, whose value fake tensors do not have.

    Returns the layers whose momentum it has set.
    """
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    cumulative = [norm for norm in norms if norm.momentum is None]
    for norm in cumulative:
        norm.momentum = 0.1
    return cumulative


_DTYPES = {"fp64": torch.float64, "bf16_params": torch.bfloat16}


def storage_dtype(precision: str) -> torch.dtype:
    """Return the dtype of parameters and inputs: autocast computes lower precisions from fp32."""
    return _DTYPES.get(precision, torch.float32)


class _Fp32StatisticsMixin(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of bf16 activations with bf16 weights and fp32 running statistics, whose kernel takes fp32 weights."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Normalise as torch's BatchNorm does, with the weights cast."""
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        is_counted = self.training and self.track_running_stats
        if is_counted and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum: Any = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked) if is_counted and self.num_batches_tracked else 0.0
        uses_batch = self.training or self.running_mean is None
        kept = (self.running_mean, self.running_var) if is_counted or not uses_batch else (None, None)
        weight, bias = (None if tensor is None else tensor.float() for tensor in (self.weight, self.bias))
        return F.batch_norm(input, *kept, weight, bias, uses_batch, momentum, self.eps)


_BATCH_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"_Fp32Statistics{kind.__name__}", (_Fp32StatisticsMixin, kind), {})
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


def use_bf16_parameters(model: nn.Module) -> None:
    """Round the fp32 parameters of ``model`` to bf16, in place. Buffers keep their dtype."""
    for module in model.modules():
        module.__class__ = _BATCH_NORMS.get(type(module), type(module))
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)


class MasterWeights(torch.optim.Optimizer):
    """An optimizer of bf16 parameters that updates fp32 copies of them (Micikevicius et al. 2018, section 3.1)::

        bf16 gradient --> fp32 gradient --> update of the fp32 master --> bf16 parameter

    A bf16 number would lose every update below 1/256 of its size. Parameters are updated in parts of
    ``MASTER_UPDATE_CAP_BYTES``, so that fp32 gradients of one part exist at a time.

    Args:
        parameters: The model's parameters.
        make: Creates the optimizer of a list of fp32 tensors; called once for every part.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], make: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        super().__init__(parameters, {})
        sizes = [parameter.numel() * 4 for parameter in parameters]
        self._parts: list[tuple[list[nn.Parameter], list[Tensor], torch.optim.Optimizer]] = []
        for places in fill_buckets(sizes, MASTER_UPDATE_CAP_BYTES, MASTER_UPDATE_CAP_BYTES):
            part = [parameters[place] for place in places]
            masters = [parameter.detach().to(torch.float32) for parameter in part]
            self._parts.append((part, masters, make(masters)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the masters by the parameters' gradients, and round them into the parameters."""
        for parameters, masters, optimizer in self._parts:
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                master.grad = None
                parameter.copy_(master)
