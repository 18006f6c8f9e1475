"""Shapes of published decoder transformers: parameter counts and FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from hpcbench.errors import ConfigError


@dataclass(frozen=True)
class DecoderShape:
    """Dimensions of a decoder transformer; all sizes count elements.

    ``heads_width`` is heads times the width of one (``hidden`` in all published shapes). ``gated`` stands for the three
    matrices of SwiGLU instead of two; ``norm_vectors`` for the vectors of one normalisation (1 RMSNorm, 2 LayerNorm).
    ``learned_positions`` is the length of a table of positions, 0 with rotary embeddings or ALiBi.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    biases: bool = False
    norm_vectors: int = 1
    learned_positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}, at least 1 is required", where=f"model {self.name}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads of kv_heads {self.kv_heads}",
                where=f"model {self.name}",
            )

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def layer_matmul_parameters(self) -> int:
        """Weights of one layer that multiply every token."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width
        return attention + self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        vectors = 2 * self.norm_vectors * self.hidden
        if self.biases:
            ffn_biases = (self.mlp_matrices - 1) * self.ffn + self.hidden
            vectors += 2 * self.hidden + 2 * self.kv_width + ffn_biases
        return self.layer_matmul_parameters + vectors

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, with tied embeddings counted once."""
        embeddings = self.embedding_parameters * (1 if self.tied else 2) + self.learned_positions * self.hidden
        return self.layers * self.layer_parameters + embeddings + self.norm_vectors * self.hidden

    def flops_per_token(self, sequence: int) -> int:
        """Forward and backward FLOPs by the convention of PaLM and torchtitan.

        6 for each parameter but the input embedding, and 12 * layers * heads * head width * sequence for attention
        (no saving by the causal mask).
        """
        multiplied = self.parameters - self.learned_positions * self.hidden
        if not self.tied:
            multiplied -= self.embedding_parameters
        return 6 * multiplied + 12 * self.layers * self.hidden * sequence


@cache
def named_shapes() -> dict[str, DecoderShape]:
    """Return the published shapes by key, from ``decoder_shapes.json``."""
    text = resources.files(__package__).joinpath("decoder_shapes.json").read_bytes()
    rows: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return {key: DecoderShape(name=key, **row) for key, row in rows.items()}


def named_shape(key: str, *, layers: int | None = None) -> DecoderShape:
    """Return a published shape, on request with another number of layers; an unknown key is a ConfigError."""
    shapes = named_shapes()
    if key not in shapes:
        raise ConfigError(f"unknown model {key!r}", hint="valid: " + ", ".join(sorted(shapes)))
    return shapes[key] if layers is None else replace(shapes[key], layers=layers)
