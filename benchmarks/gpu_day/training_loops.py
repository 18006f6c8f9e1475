"""The tool's training step on one device, timed in turns with those of a hand-written loop and of timm's script.

    block of hpcbench | block of plain | block of timm | block of plain | block of timm | block of hpcbench | ...

A disturbance of the machine hits one block; the order of the loops rotates, so that none always follows the same one.
The other loops share nothing with the tool but the samples, the data set's classes and, in ``plain``, the model.

python -m benchmarks.gpu_day.training_loops --device cuda --size full --out loops.json
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hpcbench
from benchmarks.gpu_day.device_cases import measure_cases
from benchmarks.gpu_day.loops import LoopFigures, LoopTime, loop_budget_s, loop_specs
from benchmarks.gpu_day.parts import Size
from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feed import DataFeed
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext
from hpcbench.worker.measure.clocks import reading_statistics, synchronize
from hpcbench.worker.model_execution import choose_convolution_algorithms
from hpcbench.worker.models.build import build_model
from hpcbench.worker.models.torchvision_models import SMALL_IMAGE_EDGE, build_torchvision_model
from hpcbench.worker.strategy import DataParallelStrategy
from hpcbench.workloads.datasets import DATASETS, sample_shape

STEPS_PER_BLOCK = 5
MIN_ROUNDS, MAX_ROUNDS = 3, 60
_TIMM_WEIGHT_DECAY = 2e-5
_LOW_PRECISIONS = {"bf16": torch.bfloat16}

TrainingStep = Callable[[int], object]
"""Trains the step of that number; does not wait for the device."""


class _Loop(NamedTuple):
    name: str
    model: str
    step: TrainingStep
    readings_s: list[float]


def time_loops(spec: RunSpec, device: torch.device, budget_s: float) -> list[LoopTime]:
    """Build the model of ``spec``, which has one device, and time the loops on it; see ``measure_loops``."""
    choose_convolution_algorithms(spec.cudnn_benchmark, device)
    strategy, feed = DataParallelStrategy(), make_feed(spec, device)
    strategy.setup(build_model(spec), spec, RankContext(0, 1, device))
    feed.prepare(strategy.replica)
    return measure_loops(strategy, feed, budget_s)


def measure_loops(strategy: DataParallelStrategy, feed: DataFeed, budget_s: float) -> list[LoopTime]:
    """Time blocks of each loop in turns until ``budget_s`` has passed.

    Args:
        strategy: Set up on one device; its own step is the first loop.
        feed: Samples; the other loops train on its first batches.
        budget_s: Seconds for all loops, about; at least ``MIN_ROUNDS`` blocks of each are timed.
    """
    spec, device = strategy.spec, strategy.context.device
    batches = [feed.batch(step, strategy.replica) for step in range(STEPS_PER_BLOCK)]
    version = f"hpcbench {hpcbench.__version__}"
    loops = [
        _Loop("hpcbench", version, lambda step: strategy.step(feed, step), []),
        _Loop("plain", version, plain_step(copy.deepcopy(strategy.module), spec, device, batches), []),
    ]
    if (library_model := make_library_model(spec, device)) is not None:
        model, library = library_model
        loops.append(_Loop("timm", library, timm_step(model, spec, device, batches), []))
    for loop in loops:
        # cuDNN tries its algorithms, and the allocator grows, before anything is timed.
        _time_block(loop.step, device)
    began = time.perf_counter()
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - began > budget_s:
            break
        first = number % len(loops)
        for loop in (*loops[first:], *loops[:first]):
            loop.readings_s.append(_time_block(loop.step, device) / STEPS_PER_BLOCK)
    return [LoopTime(loop=loop.name, model=loop.model, **reading_statistics(loop.readings_s)) for loop in loops]


def _time_block(step: TrainingStep, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for number in range(STEPS_PER_BLOCK):
        step(number)
    synchronize(device)
    return time.perf_counter() - began


def plain_step(
    model: nn.Module, spec: RunSpec, device: torch.device, batches: list[tuple[Tensor, Tensor]]
) -> TrainingStep:
    """Return the step of a hand-written loop with sgd.

    Args:
        model: On ``device``, for training.
        spec: Its precision and its arguments of sgd are used.
        device: The device that computes.
        batches: Inputs and targets on ``device``, taken in turns.
    """
    # One kernel for all weights, as torch's manual recommends for cuda.
    optimizer = torch.optim.SGD(
        model.parameters(), spec.learning_rate, spec.momentum, weight_decay=spec.weight_decay,
        fused=device.type == "cuda",
    )  # fmt: skip

    def step(number: int) -> None:
        inputs, targets = batches[number % len(batches)]
        optimizer.zero_grad(set_to_none=True)
        with _autocast(spec, device):
            loss = _mean_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def timm_step(
    model: nn.Module, spec: RunSpec, device: torch.device, batches: list[tuple[Tensor, Tensor]]
) -> TrainingStep:
    """Return the step of timm's training script with its defaults, on samples that lie on the device.

    That is: SGD with Nesterov's momentum, no weight decay for biases and norms, the loss as a module within autocast,
    and a mean that the host reads only when it logs (left out here). The update is fused, as in the other loops.
    """
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": _TIMM_WEIGHT_DECAY}]
    optimizer = torch.optim.SGD(groups, lr=spec.learning_rate, momentum=0.9, nesterov=True, fused=device.type == "cuda")
    loss_function = nn.CrossEntropyLoss().to(device)

    def step(number: int) -> None:
        inputs, targets = batches[number % len(batches)]
        with _autocast(spec, device):
            loss = loss_function(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_library_model(spec: RunSpec, device: torch.device) -> tuple[nn.Module, str] | None:
    """Build timm's ResNet of the run's name, or torchvision's where timm is not installed; with the library's name.

    ``None`` for other models, and for images for which the run's ResNet has another form than theirs.
    """
    channels, *_, edge = sample_shape(spec.dataset, spec.input_size)
    if not spec.model.startswith("resnet") or channels != 3 or edge < SMALL_IMAGE_EDGE:
        return None
    outputs = DATASETS[spec.dataset].outputs
    try:
        library: Any = importlib.import_module("timm")
        model = library.create_model(spec.model, num_classes=outputs)
    except ImportError:
        model = build_torchvision_model(spec.model, outputs)
        library = importlib.import_module("torchvision")
    if spec.precision == "fp64":
        model = model.double()
    layout = torch.channels_last if spec.channels_last else torch.contiguous_format
    return model.to(device, memory_format=layout).train(), f"{library.__name__} {library.__version__}"


def _autocast(spec: RunSpec, device: torch.device) -> Any:
    lower = _LOW_PRECISIONS.get(spec.precision)
    return nullcontext() if lower is None else torch.autocast(device.type, dtype=lower)


def _mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of classes [n], tokens [n, length] or values [n, values]."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def main(arguments: list[str] | None = None) -> int:
    """Time the loops of each configuration and write the file after each."""

    def measure(figures: LoopFigures, device: torch.device, size: Size) -> None:
        figures.loops = time_loops(figures.spec, device, loop_budget_s(size))

    return measure_cases(
        "training_loops", arguments, lambda size: (LoopFigures(spec=spec) for spec in loop_specs(size)), measure
    )


if __name__ == "__main__":
    raise SystemExit(main())
