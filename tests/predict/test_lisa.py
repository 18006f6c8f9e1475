"""The oracle with the profile of the cluster that DDLBench was measured on: the shapes of its figures 3.1 and 3.2.

Values differ: the thesis measured its frameworks' loaders and copies too (its own model of GPipe is 20 to 76 % off).
"""

from __future__ import annotations

from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.prediction import Prediction, predict
from hpcbench.strategies.data.buckets import simulate_fusion
from tests.layer_tables import table_of

MACHINE = nominal_machine(load_cluster("lisa")[0], None, 4)
MODELS = ("resnet18", "resnet50", "resnet152", "vgg11", "vgg16", "mobilenetv2")
BATCHES = {"mnist": (128, 128, 24), "cifar10": (64, 64, 32), "imagenet": (32, 24, 12), "highres": (32, 4, 12)}
"""DDLBench's: a replica's (and PipeDream's minibatch), GPipe's micro-batch and how many of them."""


def predicted(model: str, dataset: str, strategy: str, gpus: int) -> Prediction:
    batch, part, parts = BATCHES[dataset]
    options: dict[str, dict[str, Any]] = {
        "horovod": {"dp_degree": gpus, "options": {"fusion_threshold_mb": 64.0, "cycle_time_ms": 5.0}},
        "gpipe": {"pp_degree": gpus, "micro_batches": parts, "options": {"recompute": "except_last"}},
        "pipedream": {"pp_degree": gpus},
    }
    size = part * parts if strategy == "gpipe" else batch
    nodes = max(1, gpus // 4)
    spec = RunSpec(
        model=model, dataset=dataset, strategy=strategy, batch_size=size, nodes=nodes, tasks_per_node=gpus // nodes,
        **options.get(strategy, {}),
    )  # fmt: skip
    table = table_of(model, dataset)
    return predict(spec, table, MACHINE)


def speedup(model: str, dataset: str, strategy: str, gpus: int) -> float:
    alone = predicted(model, dataset, "single", 1).samples_per_s
    return predicted(model, dataset, strategy, gpus).samples_per_s / alone


@pytest.mark.parametrize("dataset", BATCHES)
@pytest.mark.parametrize("model", MODELS)
def test_replicas_are_fastest_wherever_they_fit(model: str, dataset: str) -> None:
    """So the thesis found. PipeDream comes close where VGG's weights are many for the images (CIFAR, MNIST)."""
    replicas, gpipe, pipedream = (predicted(model, dataset, name, 4) for name in ("horovod", "gpipe", "pipedream"))
    assert gpipe.fits
    if replicas.fits:
        assert replicas.samples_per_s > gpipe.samples_per_s
        assert replicas.samples_per_s > pipedream.samples_per_s * (1 if dataset in ("imagenet", "highres") else 0.95)


def test_only_one_network_needs_a_pipeline_for_its_memory() -> None:
    """ResNet-152 on images of 512 x 512: the one case for which the thesis recommends GPipe."""
    fits = {
        (model, dataset): (predicted(model, dataset, "horovod", 4).fits, predicted(model, dataset, "gpipe", 4).fits)
        for model in MODELS
        for dataset in BATCHES
    }
    assert [key for key, (replicas, _) in fits.items() if not replicas] == [("resnet152", "highres")]
    assert all(gpipe for _, gpipe in fits.values())


def test_a_large_model_gains_little_from_a_second_node() -> None:
    """VGG-16 gained 3 % from 4 to 8 GPUs (3.4 to 3.5) and doubled from 8 to 16 (6.6); ResNet-50 doubled both times."""
    vgg, resnet = (
        [speedup(model, "imagenet", "horovod", gpus) for gpus in (4, 8, 16)] for model in ("vgg16", "resnet50")
    )
    assert vgg[1] / vgg[0] < 1.2
    assert resnet[1] / resnet[0] > 1.5
    assert vgg[2] / vgg[1] == pytest.approx(6.6 / 3.5, rel=0.05)
    assert resnet[2] / resnet[1] == pytest.approx(14.5 / 7.3, rel=0.1)
    assert vgg[2] < resnet[2]


@pytest.mark.parametrize(
    ("ready_s", "passing_s", "threshold", "expected"),
    [
        # Looked for every second: what is ready by then goes together, up to the threshold.
        ([0.2, 0.9, 1.5, 1.6], 0.0, 100, [[3, 2], [1, 0]]),
        ([0.2, 0.9, 1.5, 1.6], 0.0, 10, [[3], [2], [1], [0]]),
        ([0.2, 0.3, 0.4, 0.5], 0.0, 25, [[3, 2], [1, 0]]),
        # What becomes ready while data is on its way goes together after it.
        ([0.2, 1.9, 2.5, 4.6], 5.0, 100, [[3], [2, 1, 0]]),
    ],
)
def test_tensor_fusion_follows_ready_times_and_threshold(
    ready_s: list[float], passing_s: float, threshold: int, expected: list[list[int]]
) -> None:
    assert simulate_fusion([3, 2, 1, 0], ready_s, [10] * 4, 1.0, threshold, lambda _: passing_s) == expected
