"""What single strategies cannot do: each function gives the reason that excludes a run, or ``None``."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec


def ddp(spec: RunSpec) -> str | None:
    """torch's reducer fails in the first backward pass without synchronisation."""
    if spec.options.get("static_graph") and spec.micro_batches > 1:
        return f"ddp with static_graph cannot accumulate gradients: micro_batches {spec.micro_batches}, 1 is right"
    return None


def fsdp(spec: RunSpec) -> str | None:
    """A mesh needs whole rows."""
    degree = spec.options.get("shard_degree", 0)
    if not isinstance(degree, int) or degree < 0 or (degree and spec.dp_degree % degree):
        return (
            f"fsdp with shard_degree {degree}: {spec.dp_degree} replicas cannot be shared evenly by groups of as many"
        )
    return _no_fp16(spec)


def fairscale_sddp(spec: RunSpec) -> str | None:
    """Its buckets ignore reduce_fp16 without a word."""
    buffer_mb = spec.options.get("reduce_buffer_mb", 32.0)
    if spec.options.get("reduce_fp16") and buffer_mb:
        return f"fairscale_sddp reduces in fp16 without buckets only: reduce_buffer_mb {buffer_mb:g}, 0 is right"
    return _no_fp16(spec)


def fairscale_fsdp(spec: RunSpec) -> str | None:
    """It takes fp32 parameters only, and expects each of its blocks to run forward once per backward pass."""
    if spec.precision == "fp64":
        return "fairscale_fsdp takes fp32 parameters: precision fp64 is beyond it"
    if spec.activation_checkpointing:
        return "fairscale_fsdp cannot compute a sharded block again in the backward pass: use fsdp"
    if spec.compile:
        return "fairscale_fsdp opens CUDA streams that torch.compile cannot trace: use fsdp"
    return _no_fp16(spec)


def _no_fp16(spec: RunSpec) -> str | None:
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all shards agree on: use bf16"
    return None
