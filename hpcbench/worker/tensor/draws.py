"""Random numbers of ranks that share a model: alike where all compute the same, their own where each has a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn


@contextmanager
def own_draws(place: int, device: torch.device) -> Iterator[None]:
    """Within it, the device's generator draws what the rank at ``place`` alone draws.

    Outside the ranks' generators stay alike, which is what makes masks of replicated activations alike. The seed is
    itself drawn, so a recomputation (which begins with the generators as they were) draws the same again.
    """
    seed = int(torch.randint(2**62, ()).item())
    generator = torch.cuda.default_generators[_index(device)] if device.type == "cuda" else torch.default_generator
    kept = generator.get_state()
    generator.manual_seed(seed + place)
    try:
        yield
    finally:
        generator.set_state(kept)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class OwnDropout(nn.Dropout):
    """Of activations of which every rank holds its own tokens."""

    def __init__(self, whole: nn.Dropout, place: int) -> None:
        super().__init__(whole.p)
        self.place = place

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """Any shape."""
        if not self.training or self.p == 0:
            return input
        with own_draws(self.place, input.device):
            return F.dropout(input, self.p)
