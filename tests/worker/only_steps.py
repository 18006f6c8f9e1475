"""A strategy for tests of what goes on around its steps."""

from __future__ import annotations

from typing import Any

import torch

from hpcbench.worker.strategy import Strategy


class OnlySteps(Strategy):
    """A strategy of which a loop may ask for steps alone; a subclass makes them."""

    replica = 0
    module: torch.nn.Module = torch.nn.Identity()

    def setup(self, model: Any, spec: Any, place: Any) -> None:
        raise AssertionError("the loop does not set up")

    def announce(self, steps: Any) -> None:
        raise AssertionError("the loop's steps follow one another")

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {}

    @staticmethod
    def close() -> None:
        raise AssertionError("the loop does not close")
