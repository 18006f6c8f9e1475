"""What a data-parallel run must compute, in one process: the judge of every data-parallel strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from hpcbench.config.spec import RunSpec
from hpcbench.worker.compare import Trained, on_host
from hpcbench.worker.data.feed import Feed
from hpcbench.worker.losses import sample_losses
from hpcbench.worker.precision import Arithmetic
from hpcbench.worker.strategies.base import make_optimizer


def _nothing() -> None:
    pass


def train_reference(
    model: nn.Module,
    spec: RunSpec,
    feed: Feed,
    steps: Iterable[int],
    tick: Callable[[], None] = _nothing,
    backwards: bool = False,
) -> Trained:
    """Train ``model`` in place on the steps numbered ``steps`` as ``spec.dp_degree`` replicas would.

    Each replica's share (and each micro-batch of it) is forwarded by itself, so that BatchNorm sees what it would see
    there; the losses' sum is divided by the true global sample count; one update follows. Running statistics are those
    of replica 0. ``tick`` is called after every replica. ``backwards`` sums the replicas from the last one on: what
    differs then is rounding alone.
    """
    model.to(feed.device).train()
    optimizer = make_optimizer(spec, model)
    arithmetic = Arithmetic(spec.precision, feed.device)
    trained = Trained()
    order = range(feed.replicas)[:: -1 if backwards else 1]
    for step in steps:
        loss = 0.0
        summed: dict[nn.Parameter, Tensor] = {}
        for replica in order:
            # Summed replica by replica, as an all_reduce does: of two replicas the sum is the same to the last bit.
            optimizer.zero_grad(set_to_none=True)
            loss += _accumulate_replica(model, feed, step, replica, arithmetic)
            for parameter in model.parameters():
                if parameter.grad is not None and parameter in summed:
                    summed[parameter].add_(parameter.grad)
                elif parameter.grad is not None:
                    summed[parameter] = parameter.grad
            feed.forget()
            tick()
        for parameter in model.parameters():
            parameter.grad = summed.get(parameter)
        arithmetic.update(optimizer)
        _note(trained, loss, model)
    return _finish(trained, model)


def train_full_batch(model: nn.Module, spec: RunSpec, feed: Feed, steps: Iterable[int]) -> Trained:
    """The plain single-device run on the global batch: equal to the above only for a model without BatchNorm."""
    model.to(feed.device).train()
    optimizer = make_optimizer(spec, model)
    arithmetic = Arithmetic(spec.precision, feed.device)
    trained = Trained()
    for step in steps:
        batches = [feed.batch(step, replica) for replica in range(feed.replicas)]
        inputs, labels = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        optimizer.zero_grad(set_to_none=True)
        with arithmetic.autocast():
            outputs = model(inputs)
        loss = sample_losses(outputs, labels) / len(labels)
        arithmetic.backward(loss)
        arithmetic.update(optimizer)
        _note(trained, loss.item(), model)
    return _finish(trained, model)


def _note(trained: Trained, loss: float, model: nn.Module) -> None:
    trained.losses.append(loss)
    if len(trained.losses) == 1:
        trained.first_gradients = _gradients(model)


def _finish(trained: Trained, model: nn.Module) -> Trained:
    trained.gradients = _gradients(model)
    trained.state = on_host(model.state_dict())
    return trained


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return on_host({name: parameter.grad for name, parameter in named if parameter.grad is not None})


def _accumulate_replica(model: nn.Module, feed: Feed, step: int, replica: int, arithmetic: Arithmetic) -> float:
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    inputs, labels = feed.batch(step, replica)
    total = 0.0
    for part in feed.micro_shares(step, replica):
        chosen = slice(part.start, part.stop)
        with arithmetic.autocast():
            outputs = model(inputs[chosen])
        loss = sample_losses(outputs, labels[chosen]) / feed.global_count(step)
        arithmetic.backward(loss)
        total += loss.item()
    if replica:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(kept[name])
    return total
