"""Sweeps that train layouts of a decoder with torchtitan or Megatron-LM, by these trainers' own flags.

The sweeps are templates in ``trainer_sweeps``: ``$name`` is a value of the best layout, or of the decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

from hpcbench.config.command import LayerPrecision, Software
from hpcbench.config.sweep_file import settings_lines
from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.decoder.layout_search import LayoutRanking
from hpcbench.strategies.decoder_shapes import DecoderShape

LAYOUTS_PER_SCALE = 3
"""A sweep has so many of the best layouts for each number of nodes."""
_TORCHTITAN_CONFIGS = {"llama_8b": "llama3_8b", "llama_70b": "llama3_70b"}
"""Decoders of torchtitan 0.3.0 in bf16; its ``llama3_405b`` computes in fp8."""


@dataclass(frozen=True)
class Trainer:
    """A program that trains layouts."""

    software: Software
    can_run: Callable[[DecoderShape, Layout], bool]
    values: Callable[[DecoderShape, Layout], dict[str, Any]]
    """Values of the template; ``ConfigError`` where the trainer has no flags for the decoder."""


def _torchtitan_can_run(shape: DecoderShape, layout: Layout) -> bool:
    # Its interleaved schedule has two stages a rank where nothing else is set.
    fits = layout.tensor <= shape.kv_heads and layout.context == 1 and layout.sequence % layout.tensor == 0
    return fits and layout.zero == 0 and layout.chunks <= 2


def _torchtitan_values(shape: DecoderShape, layout: Layout) -> dict[str, Any]:
    if shape.name not in _TORCHTITAN_CONFIGS:
        hint = f"models: {', '.join(_TORCHTITAN_CONFIGS)}"
        raise ConfigError(f"torchtitan has no {shape.name} in bf16", where="--as torchtitan", hint=hint)
    if layout.precision != "bf16":
        hint = "--as megatron, or --precision bf16"
        raise ConfigError(f"sweeps of torchtitan have no {layout.precision}", where="--as torchtitan", hint=hint)
    # Without stages the trainer accumulates gradients over calls; with stages one call has all micro-batches.
    local_batch = layout.micro_batch * (layout.accumulation if layout.pipeline > 1 else 1)
    schedule = "Interleaved1F1B" if layout.chunks > 1 else "1F1B"
    return {
        **_shared_values(layout), "shards": layout.shards, "local_batch": local_batch, "schedule": schedule,
        "recompute": layout.recompute, "config": _TORCHTITAN_CONFIGS[shape.name],
    }  # fmt: skip


def _megatron_can_run(shape: DecoderShape, layout: Layout) -> bool:
    has_layers = min(_end_layers(shape.layers, layout.pipeline)) > 0
    # Each context rank has two equal parts of a sequence, and each tensor rank an equal part of those.
    parts = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
    is_divisible = layout.tensor <= shape.kv_heads and layout.sequence % parts == 0
    shares_optimizer = layout.zero == 1 or layout.data_degree * layout.context == 1
    return layout.shards == 1 and has_layers and is_divisible and shares_optimizer


def _megatron_values(shape: DecoderShape, layout: Layout) -> dict[str, Any]:
    if not shape.gated or shape.biases or shape.learned_positions or shape.norm_vectors != 1:
        raise ConfigError(f"{shape.name} is not a Llama: its flags are not known", where="--as megatron")
    first, last = _end_layers(shape.layers, layout.pipeline)
    is_even = shape.layers % layout.pipeline == 0
    return {
        "interleaving": f"--num-virtual-stages-per-pipeline-rank={layout.chunks}" if layout.chunks > 1 else "",
        "first_stage": "" if is_even else f"--decoder-first-pipeline-num-layers={first}",
        "last_stage": "" if is_even else f"--decoder-last-pipeline-num-layers={last}",
        **{name: getattr(shape, name) for name in ("layers", "hidden", "ffn", "heads", "kv_heads")},
        **_shared_values(layout), "cp": layout.context, "chunks": layout.chunks,
        "recomputed_layers": shape.layers if layout.recompute == "full" else 0,
        "untied": "" if shape.tied else '"--untie-embeddings-and-output-weights",',
        # NullTokenizer adds a token.
        "vocabulary": shape.vocabulary - 1, "ep": layout.expert, "layer_precision": layout.precision,
        "more": "".join(f'    "{flag}",\n' for flag in [*_attention_flags(shape), *_expert_flags(shape),
                                                       *_PRECISION_FLAGS[layout.precision]]),
    }  # fmt: skip


def _end_layers(layers: int, stages: int) -> tuple[int, int]:
    """Return the layers of the first and the last stage, so that all stages between them have as many.

    The ends have fewer than the others: the embedding and the head are there. The last may come out without any.
    """
    most = -(-layers // stages)
    missing = most * stages - layers
    return most - missing // 2, most - (missing + 1) // 2


_PRECISION_FLAGS: dict[LayerPrecision, tuple[str, ...]] = {
    "bf16": (),
    "fp8_delayed": ("--fp8-format=hybrid", "--fp8-recipe=delayed"),
    "fp8_current": ("--fp8-format=hybrid", "--fp8-recipe=tensorwise"),
    "fp8_block": ("--fp8-format=e4m3", "--fp8-recipe=blockwise"),
    "mxfp8": ("--fp8-format=e4m3", "--fp8-recipe=mxfp8"),
    "nvfp4": ("--fp4-format=e2m1", "--fp4-recipe=nvfp4"),
}


def _attention_flags(shape: DecoderShape) -> list[str]:
    """Flags of attention that is not that of a Llama."""
    if shape.latent is not None:
        latent = shape.latent
        return [
            "--multi-latent-attention", "--qk-layernorm", f"--q-lora-rank={latent.query_rank}",
            f"--kv-lora-rank={latent.key_rank}", f"--qk-head-dim={latent.plain_width}",
            f"--qk-pos-emb-head-dim={latent.rotary_width}", f"--v-head-dim={latent.value_width}",
        ]  # fmt: skip
    width = [f"--kv-channels={shape.head_elements}"] if shape.head_elements else []
    return [*width, *(["--qk-layernorm"] if shape.head_norms else [])]


def _expert_flags(shape: DecoderShape) -> list[str]:
    """Flags of a mixture of experts, whose routing is balanced by force, as the price takes it."""
    experts = shape.experts
    if experts is None:
        return []
    flags = [
        f"--num-experts={experts.count}", f"--moe-router-topk={experts.active}",
        f"--moe-ffn-hidden-size={experts.ffn}", "--moe-grouped-gemm", "--moe-token-dispatcher-type=alltoall",
        "--moe-router-force-load-balancing", "--expert-tensor-parallel-size=1", "--expert-model-parallel-size={ep}",
    ]  # fmt: skip
    flags += [f"--moe-shared-expert-intermediate-size={experts.shared_ffn}"] if experts.shared_ffn else []
    dense = experts.dense_layers
    flags += [f"--moe-layer-freq=([0]*{dense}+[1]*{shape.expert_layers})"] if dense else []
    return [*flags, *(["--moe-router-score-function=sigmoid"] if experts.router_bias else [])]


def _shared_values(layout: Layout) -> dict[str, Any]:
    return {
        "sequence": layout.sequence, "micro_batch": layout.micro_batch, "global_batch": layout.global_batch,
        "dp": layout.replicas, "tp": layout.tensor, "pp": layout.pipeline,
    }  # fmt: skip


TRAINERS = {
    "torchtitan": Trainer("torchtitan", _torchtitan_can_run, _torchtitan_values),
    "megatron": Trainer("megatron", _megatron_can_run, _megatron_values),
}


def trainer_sweep_toml(
    trainer: Trainer, shape: DecoderShape, per_node: int, rankings: Mapping[int, LayoutRanking]
) -> str:
    """Return a sweep of the best layouts of each number of nodes, as ``trainer`` runs them; empty without layouts.

    ``ConfigError`` where the trainer has no flags for the decoder.
    """
    points = [
        {"nodes": nodes, **trainer.values(shape, row.layout)}
        for nodes, ranking in rankings.items()
        for row in ranking.layouts[:LAYOUTS_PER_SCALE]
    ]
    if not points:
        return ""
    template = resources.files(__package__) / "trainer_sweeps" / f"{trainer.software}.toml"
    flops = shape.flops_per_token(points[0]["sequence"])
    values = {**points[0], "model": shape.name, "flops": flops, "tasks_per_node": per_node}
    columns = {name: [point[name] for point in points] for name in points[0]}
    varying = {name: column for name, column in columns.items() if name == "nodes" or len({*column}) > 1}
    return "\n".join([Template(template.read_text()).substitute(values), "[[zip]]", *settings_lines(varying)]) + "\n"
