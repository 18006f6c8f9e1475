"""The count of tensors against torch's own allocator, on real steps of small decoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcbench.config.command import Recompute
from hpcbench.predict.decoder.allocated import allocated_memory
from hpcbench.predict.decoder.layout import Layout
from hpcbench.strategies.decoder_shapes import DecoderShape
from tests.predict.cpu_decoder import CpuDecoder, allocated_peak_bytes

SMALL = DecoderShape("small", layers=4, hidden=128, ffn=352, heads=2, kv_heads=2, vocabulary=512)
CASES: dict[str, tuple[DecoderShape, int, Recompute]] = {
    "activations of the layers": (SMALL, 4, "none"),
    "activations are computed again": (SMALL, 4, "full"),
    "logits of a large vocabulary": (replace(SMALL, vocabulary=8192), 4, "none"),
    "states of many layers": (replace(SMALL, layers=12), 1, "none"),
    "a wide MLP": (replace(SMALL, ffn=1024), 2, "none"),
}


@pytest.mark.parametrize(("shape", "samples", "recompute"), CASES.values(), ids=CASES)
def test_the_count_is_the_peak_of_the_allocator(
    shape: DecoderShape, samples: int, recompute: Recompute, tmp_path: Path
) -> None:
    layout = Layout(
        gpus=1, sequence=128, micro_batch=samples, global_batch=samples, recompute=recompute, software="megatron"
    )
    (counted,) = allocated_memory(shape, layout)
    tokens = torch.randint(shape.vocabulary, (samples, layout.sequence))
    measured = allocated_peak_bytes(
        lambda: CpuDecoder(shape, recomputes=recompute == "full"), tokens, layout.accumulation, tmp_path
    )
    assert counted.total == pytest.approx(measured, rel=0.02)
