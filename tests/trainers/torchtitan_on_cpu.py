"""torchtitan 0.3.0 on CPU ranks, with torch 2.13: its own training loop, with stand-ins for that which CPUs lack.

``python torchtitan_on_cpu.py --make FOLDER`` writes a tokenizer and texts; other arguments are those of torchtitan.
Only torchtitan's environment runs this file.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.tensor._random
import torch.nn.attention.flex_attention as flex
from torch.distributed.fsdp import FSDPModule


def make_assets(folder: Path) -> None:
    """Write a tokenizer of single characters, and texts, as torchtitan's own tests have them."""
    from tokenizers import Tokenizer, models  # type: ignore[import-not-found]

    words = {chr(code) if 32 <= code < 127 else f"<{code}>": code for code in range(256)}
    words |= {"<|begin_of_text|>": 256, "<|end_of_text|>": 257}
    (folder / "tokenizer").mkdir(parents=True)
    Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<0>")).save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    source = random.Random(0)
    texts = (" ".join(source.choices(["the", "model", "trains", "on", "words"], k=300)) for _ in range(300))
    (folder / "texts").mkdir()
    (folder / "texts" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def stand_in() -> None:
    """Replace the parts that torchtitan takes from an accelerator, or from a newer torch."""
    # torchtitan asks for the accelerator, and takes CUDA where there is none.
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = SimpleNamespace(total_memory=2**34, name="cpu")
    for name, function in {
        "get_device_name": lambda *_: "cpu", "get_device_properties": lambda *_: properties,
        "reset_peak_memory_stats": lambda *_: None, "empty_cache": lambda *_: None, "memory_stats": lambda *_: {},
    }.items():  # fmt: skip
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    torch.distributed.tensor._random.manual_seed = lambda seed, mesh: torch.manual_seed(seed)  # type: ignore[assignment]
    # FlexAttention has no backward pass on CPUs where it is compiled, and torchtitan has no other attention for Llama.
    from torchtitan.models.common.attention import FlexAttention  # type: ignore[import-not-found]

    flex._validate_device = lambda *_: None
    FlexAttention._compiled_flex_attn = staticmethod(flex.flex_attention)
    # gloo has no ReduceOp.PREMUL_SUM.
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sums(self: Any, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_of_sums  # type: ignore[method-assign]
    barrier = torch.distributed.barrier
    # Devices of a barrier are CUDA's.
    torch.distributed.barrier = lambda *args, device_ids=None, **named: barrier(*args, **named)  # noqa: PLW0108
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1] == "--make":
        make_assets(Path(sys.argv[2]))
    else:
        stand_in()
        from torchtitan.train import main  # type: ignore[import-not-found]

        main()
