"""Versions of one stage's weights (Narayanan et al. 2019, section 3.3): a minibatch meets the same ones both ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hpcbench.parallel.versions import Delay


class WeightStash:
    """Weights of ``module``, stage number ``stage``, for minibatches that are under way together.

    The parameters themselves are the newest version, which the optimizer changes in place; before it does, their
    memory is kept where an older minibatch still needs it and the parameters move to a copy. So there are never more
    than ``Delay.held`` versions. Buffers have no versions: statistics run on in the order of the forward passes.
    """

    def __init__(self, module: nn.Module, delay: Delay, stage: int) -> None:
        self._delay, self._stage = delay, stage
        self._parameters = list(module.parameters())
        place = {id(one): number for number, one in enumerate(self._parameters)}
        self._slots = [
            (owner, name, place[id(one)])
            for owner in module.modules()
            for name, one in owner._parameters.items()
            if one is not None
        ]
        self._older: dict[int, list[Tensor]] = {}
        self._in_use: dict[int, list[Tensor]] = {}
        self.updates = 0
        """That were made."""

    @property
    def versions(self) -> int:
        """How many there are now, the parameters among them."""
        return len(self._older) + 1

    @contextmanager
    def installed(self, number: int, update: int) -> Iterator[None]:
        """In here ``module`` computes micro-batch ``number`` with the weights that are right for it.

        ``update`` is that which its gradient goes into. The same tensors are there whenever a micro-batch is asked for
        again: a block that is computed anew in the backward pass finds what it found before.
        """
        if number not in self._in_use:
            self._in_use[number] = self._leaves(update)
        for owner, name, place in self._slots:
            owner._parameters[name] = self._in_use[number][place]  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, place in self._slots:
                owner._parameters[name] = self._parameters[place]

    def collect(self, number: int) -> None:
        """Add the gradients of micro-batch ``number``, whose backward pass is done, to the parameters' own."""
        for parameter, leaf in zip(self._parameters, self._in_use.pop(number), strict=True):
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)

    def before_update(self) -> None:
        """Let go of what no minibatch needs any more, and keep what the optimizer is about to overwrite."""
        oldest = self._delay.version(self._stage, self.updates + 1)
        self._older = {version: held for version, held in self._older.items() if version >= oldest}
        if oldest <= self.updates:
            self._older[self.updates] = [one.data for one in self._parameters]
            for one in self._parameters:
                one.data = one.data.clone()
        self.updates += 1

    def _leaves(self, update: int) -> list[Tensor]:
        version = self._delay.version(self._stage, update)
        held = self._parameters if version == self.updates else self._older[version]
        # Not detach(): its result counts changes together with the parameter, and autograd would refuse the old memory
        # as soon as the optimizer writes into the new one.
        return [one.data.requires_grad_(own.requires_grad) for one, own in zip(held, self._parameters, strict=True)]
