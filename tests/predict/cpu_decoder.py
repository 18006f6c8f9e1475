"""A decoder in plain torch that keeps the tensors of Megatron-LM's fused kernels, and the peak of torch's allocator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpcbench.strategies.decoder_shapes import DecoderShape


class _Norm(torch.autograd.Function):
    """RMS normalisation that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.rms_norm(x, x.shape[-1:], weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            y = functional.rms_norm(x, x.shape[-1:], weight)
        return torch.autograd.grad(y, (x, weight), gradients)


class _Gate(torch.autograd.Function):
    """The product of an MLP's gate, which keeps the result of the first products alone."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        result = torch.empty_like(both)
        of_gate, of_up = result.chunk(2, -1)
        torch.mul(gradient, functional.silu(gate), out=of_up)
        share = torch.sigmoid(gate)
        torch.mul(gradient, up, out=of_gate)
        of_gate.mul_(share).mul_(gate.mul(1 - share).add_(1))
        return result


class _Loss(torch.autograd.Function):
    """Cross entropy whose softmax in fp32 becomes the gradient in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        softmax = logits.float()
        softmax -= softmax.amax(-1, keepdim=True)
        softmax.exp_()
        softmax /= softmax.sum(-1, keepdim=True)
        ctx.save_for_backward(softmax, targets)
        return -softmax.gather(-1, targets[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        softmax.scatter_add_(-1, targets[:, None], -torch.ones_like(targets, dtype=softmax.dtype)[:, None])
        softmax *= gradient / len(targets)
        return softmax.bfloat16(), None


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return cast("Tensor", _Norm.apply(x, weight))  # type: ignore[no-untyped-call]


def _gate(both: Tensor) -> Tensor:
    return cast("Tensor", _Gate.apply(both))  # type: ignore[no-untyped-call]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cast("Tensor", _Loss.apply(logits, targets))  # type: ignore[no-untyped-call]


class _Layer(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.head_width
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(shape.hidden)) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, shape.attention_width + 2 * shape.kv_width, bias=False)
        self.out = nn.Linear(shape.value_width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(_norm(x, self.norms[0])).view(batch, length, -1, self.width).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
        # Rotated copies of queries and keys.
        attention = functional.scaled_dot_product_attention(q * 1.0, k * 1.0, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, -1))
        inner: Tensor = self.down(_gate(self.up(_norm(x, self.norms[1]))))
        return x + inner


class CpuDecoder(nn.Module):
    """A decoder in bf16 with master weights, moments and summed gradients in fp32."""

    def __init__(self, shape: DecoderShape, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.bfloat16()
        self.gradients = {one: torch.zeros_like(one, dtype=torch.float32) for one in self.parameters()}
        self.optimizer = [torch.zeros(3, *one.shape) for one in self.parameters()]
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._sum)  # type: ignore[no-untyped-call]

    def _sum(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook is called after it was computed"
        self.gradients[cast("nn.Parameter", parameter)] += parameter.grad
        parameter.grad = None

    def loss(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        logits = self.head(_norm(x, self.norm)).flatten(0, 1)
        return _loss(logits, tokens.flatten())


def allocated_peak_bytes(build: Callable[[], CpuDecoder], tokens: Tensor, micro_batches: int, folder: Path) -> int:
    """Return the peak of torch's allocator over a model, its states and a step, by the profiler's record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build()
        for _ in range(micro_batches):
            model.loss(tokens).backward()  # type: ignore[no-untyped-call]
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
