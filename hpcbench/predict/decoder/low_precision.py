"""Matrix products in 8 or 4 bit: their rates, and the casts that precede them.

NVIDIA's Transformer Engine describes the recipes (user guide, "Using FP8 and FP4"). The layers' linear products have
low precision; attention, router, output head, messages and sums keep bf16 and fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcbench.config.command import LayerPrecision
from hpcbench.errors import ConfigError
from hpcbench.predict.decoder.layout import GpuNode

_BF16, _FP8, _FP4 = 2.0, 1.0, 0.5


@dataclass(frozen=True, kw_only=True)
class PrecisionRecipe:
    """Rate and bytes of a recipe.

    ``rate`` is the key of the device's peak. ``value_bytes`` are those of an operand with its scales. ``amax_reads``
    counts passes over a tensor for the largest value before its cast.
    """

    rate: str
    value_bytes: float
    amax_reads: int = 0

    @property
    def cast_bytes(self) -> float:
        """Bytes moved for each operand: read in bf16, written by rows and by columns, for both products that use it."""
        return _BF16 * (1 + self.amax_reads) + 2 * self.value_bytes


RECIPES: dict[LayerPrecision, PrecisionRecipe] = {
    # The scale is that of earlier steps' largest values.
    "fp8_delayed": PrecisionRecipe(rate="fp8", value_bytes=_FP8),
    "fp8_current": PrecisionRecipe(rate="fp8", value_bytes=_FP8, amax_reads=1),
    # A scale in fp32 for each 128 values.
    "fp8_block": PrecisionRecipe(rate="fp8", value_bytes=_FP8 + 4 / 128),
    # A scale of 8 bit for each 32 values.
    "mxfp8": PrecisionRecipe(rate="fp8", value_bytes=_FP8 + 1 / 32),
    # A scale of 8 bit for each 16 values, and one in fp32 for the tensor.
    "nvfp4": PrecisionRecipe(rate="fp4", value_bytes=_FP4 + 1 / 16, amax_reads=1),
}


def node_of_products(node: GpuNode, precision: LayerPrecision) -> GpuNode:
    """Return ``node`` with the peak of the layers' products. ConfigError where the device has none in ``precision``."""
    if precision == "bf16":
        return node
    rate = RECIPES[precision].rate
    peak = {"fp8": node.fp8_flops, "fp4": node.fp4_flops}[rate]
    if not peak:
        raise ConfigError(
            f"{precision}: {node.name} has no peak in {rate}",
            where="layout",
            hint=f"a device that computes in it states it in the profile: peak_flops_per_s.{rate}",
        )
    return replace(node, peak_flops=peak)


def operand_bytes(precision: LayerPrecision) -> float:
    """Bytes of a value that a product keeps for its backward pass."""
    return _BF16 if precision == "bf16" else RECIPES[precision].value_bytes


def copied_weight_bytes(precision: LayerPrecision) -> float:
    """Bytes of the low-precision copies of a weight, by rows and by columns, that stay over a step's micro-batches."""
    return 0.0 if precision == "bf16" else 2 * RECIPES[precision].value_bytes


def cast_bytes(precision: LayerPrecision) -> float:
    """Bytes moved to cast one operand."""
    return 0.0 if precision == "bf16" else RECIPES[precision].cast_bytes
