"""Shapes of published decoder transformers: parameter counts and FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from typing import Any

import msgspec

from hpcbench.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixture of experts that replaces the MLP of most layers.

    Each token is multiplied by ``active`` of ``count`` experts of the inner width ``ffn``, which a router chooses, and
    by a shared MLP of width ``shared_ffn``. The first ``dense_layers`` layers have the decoder's own MLP instead.
    """

    count: int
    active: int
    ffn: int
    shared_ffn: int = 0
    dense_layers: int = 0
    router_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): ranks of the compressed queries and
    keys, and the widths of one head without and with rotary positions, and of its values."""

    query_rank: int
    key_rank: int
    plain_width: int
    rotary_width: int
    value_width: int


@dataclass(frozen=True)
class DecoderShape:
    """Dimensions of a decoder transformer; all sizes count elements.

    ``head_elements`` is the width of a head, where it is not ``hidden / heads``. ``gated`` stands for the three
    matrices of SwiGLU instead of two; ``norm_vectors`` for the vectors of one normalisation (1 RMSNorm, 2 LayerNorm).
    ``learned_positions`` is the length of a table of positions, 0 with rotary embeddings or ALiBi. ``head_norms``:
    queries and keys are normalised head by head, with a vector each.
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
    head_elements: int = 0
    head_norms: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}, at least 1 is required", where=f"model {self.name}")
        if (not self.head_elements and self.hidden % self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                f"hidden {self.hidden} must be a multiple of heads {self.heads}, and heads of kv_heads {self.kv_heads}",
                where=f"model {self.name}",
            )
        if self.experts is not None and self.experts.dense_layers > self.layers:
            raise ConfigError(
                f"{self.experts.dense_layers} layers without experts, but {self.layers} in all",
                where=f"model {self.name}",
            )

    @property
    def head_width(self) -> int:
        """Width of a query and of a key."""
        if self.latent is not None:
            return self.latent.plain_width + self.latent.rotary_width
        return self.head_elements or self.hidden // self.heads

    @property
    def attention_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_width

    @property
    def value_width(self) -> int:
        """Width of the attention's result."""
        return self.heads * (self.latent.value_width if self.latent is not None else self.head_width)

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def kv_state_width(self) -> int:
        """Width of all keys and values as attention reads them."""
        return 2 * self.kv_width if self.latent is None else self.attention_width + self.value_width

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """Layers with experts instead of an MLP."""
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def expert_share(self) -> float:
        """Share of the layers that have experts."""
        return self.expert_layers / self.layers

    @cached_property
    def attention_parameters(self) -> int:
        """Matrices of a layer's attention."""
        latent = self.latent
        if latent is None:
            return self.hidden * (self.attention_width + 2 * self.kv_width + self.value_width)
        queries = latent.query_rank * (self.hidden + self.attention_width)
        keys = self.hidden * (latent.key_rank + latent.rotary_width)
        keys += latent.key_rank * self.heads * (latent.plain_width + latent.value_width)
        return queries + keys + self.value_width * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Matrices of one expert."""
        return self.mlp_matrices * self.hidden * self.experts.ffn if self.experts is not None else 0

    @cached_property
    def layer_matmul_parameters(self) -> int:
        """Matrices of a layer that multiply every token: of a layer without experts."""
        return self.attention_parameters + self.mlp_matrices * self.hidden * self.ffn

    @property
    def layer_vectors(self) -> int:
        """Parameters of a layer's normalisations and biases."""
        vectors = 2 * self.norm_vectors * self.hidden
        if self.biases:
            ffn_biases = (self.mlp_matrices - 1) * self.ffn + self.hidden
            vectors += 2 * self.hidden + 2 * self.kv_width + ffn_biases
        if self.latent is not None:
            vectors += self.latent.query_rank + self.latent.key_rank
        return vectors + 2 * self.head_width * self.head_norms

    @cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer without experts."""
        return self.layer_matmul_parameters + self.layer_vectors

    @cached_property
    def routed_layer_parameters(self) -> int:
        """Parameters of a layer with experts that are not the experts': attention, router, shared MLP, norms."""
        if self.experts is None:
            return 0
        router = self.experts.count * (self.hidden + self.experts.router_bias)
        shared = self.mlp_matrices * self.hidden * self.experts.shared_ffn
        return self.attention_parameters + self.layer_vectors + router + shared

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, with tied embeddings counted once."""
        return self._parameters_with(self.experts.count if self.experts is not None else 0)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that multiply a token."""
        return self._parameters_with(self.experts.active if self.experts is not None else 0)

    def _parameters_with(self, experts: int) -> int:
        embeddings = self.embedding_parameters * (1 if self.tied else 2) + self.learned_positions * self.hidden
        dense = (self.layers - self.expert_layers) * self.layer_parameters
        routed = self.expert_layers * (self.routed_layer_parameters + experts * self.expert_parameters)
        return dense + routed + embeddings + self.norm_vectors * self.hidden

    def flops_per_token(self, sequence: int) -> int:
        """Forward and backward FLOPs by the convention of PaLM and torchtitan.

        6 for each parameter that multiplies a token, and 12 * layers * heads * head width * sequence for attention
        (no saving by the causal mask).
        """
        multiplied = self.active_parameters - self.learned_positions * self.hidden
        if not self.tied:
            multiplied -= self.embedding_parameters
        return 6 * multiplied + 6 * self.layers * (self.attention_width + self.value_width) * sequence


@cache
def named_shapes() -> dict[str, DecoderShape]:
    """Return the published shapes by key, from ``decoder_shapes.json``."""
    text = resources.files(__package__).joinpath("decoder_shapes.json").read_bytes()
    rows: dict[str, dict[str, Any]] = msgspec.json.decode(text)
    return {key: msgspec.convert({"name": key, **row}, DecoderShape) for key, row in rows.items()}


def named_shape(key: str, *, layers: int | None = None) -> DecoderShape:
    """Return a published shape, on request with another number of layers; an unknown key is a ConfigError."""
    shapes = named_shapes()
    if key not in shapes:
        raise ConfigError(f"unknown model {key!r}", hint="valid: " + ", ".join(sorted(shapes)))
    return shapes[key] if layers is None else replace(shapes[key], layers=layers)
