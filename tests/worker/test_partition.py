"""The partitioner by hand: what it prints of a model whose blocks' times are known, and what it refuses."""

from __future__ import annotations

from unittest import mock

import msgspec
import pytest

from hpcbench.parallel.pipeline.stage_balance import BlockProfile, BlockProfileRequest, MeasuredBlock
from hpcbench.worker import partition as module
from hpcbench.worker.partition import main

BLOCKS = [(1.0, 1_000, 10), (1.0, 1_000, 10), (1.0, 1_000, 10), (1.0, 1, 10_000_000)]
"""Seconds of the forward pass (backward twice as many), bytes handed on, bytes of parameters."""


def planned(request: BlockProfileRequest, _refresh: bool = False) -> BlockProfile:
    blocks = [
        MeasuredBlock(
            name=str(place), forward_s=seconds, forward_iqr_s=0.0, backward_s=2 * seconds, backward_iqr_s=0.0,
            output_bytes=handed_on, parameter_bytes=weights, kept_bytes=50,
        )
        for place, (seconds, handed_on, weights) in enumerate(BLOCKS)
    ]  # fmt: skip
    return BlockProfile(request=request, device_name="a device", torch="t", threads=1, blocks=blocks)


def run(*arguments: str) -> int:
    words = ["--model", "vgg11", "--dataset", "digits", "--micro-batch-size", "8", *arguments]
    with mock.patch.object(module, "profile_blocks", planned):
        return main(words)


def test_plans_are_printed_with_stages_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Three replicas of the convolutions and one of the large layer behind them, as in the paper's 15-1."""
    assert run("--workers", "4 x 1 MB/s") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("fp32 on a device: 4 blocks, 12.0 s per micro-batch on one worker")
    assert lines[2:4] == ["stages may be replicated", "  3.00 s per micro-batch, 4.00 times one worker"]
    assert lines[5].split() == ["0", "0-2", "3", "2", "9.00", "s", "30", "B", "1000", "B", "420", "B"]
    assert lines[7].strip() == 'strategy = "1f1b", pp_degree = 4, options.cuts = "3", options.stage_replicas = "3-1"'
    assert lines[-1].strip() == 'strategy = "pipedream", pp_degree = 4, options.cuts = "1,2,3"'


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        ("2 x 1 TB/s", 'strategy = "ddp", dp_degree = 2'),
        ("2 x 1 TB/s, 2 x 1 MB/s", 'strategy = "pipedream", pp_degree = 2, dp_degree = 2, options.cuts = "2"'),
    ],
)
def test_the_best_plan_is_printed_as_run_options(
    capsys: pytest.CaptureFixture[str], workers: str, options: str
) -> None:
    """Inside a node weights pass at once, between nodes 10 MB take longer than two blocks."""
    assert run("--workers", workers) == 0
    assert options in capsys.readouterr().out


def test_master_weights_and_their_states_are_twice_as_large_as_bf16_parameters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = []
    for precision in ("bf16", "bf16_params"):
        assert run("--workers", "2 x 1 TB/s", "--precision", precision, "--json") == 0
        (stage,) = msgspec.json.decode(capsys.readouterr().out)["plans"][0]["stages"]
        held.append(stage["held_bytes"])
    parameter_bytes = sum(parameters for _, _, parameters in BLOCKS)
    # A momentum, and four times the parameters: a master and its momentum.
    assert held[1] - held[0] == (4 - 1) * parameter_bytes


def test_partition_json_lists_the_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "2 x 1 TB/s", "--memory", "40 MB", "--json") == 0
    plans = msgspec.json.decode(capsys.readouterr().out)["plans"]
    assert [(plan["replicated"], plan["cuts"], plan["stage_replicas"]) for plan in plans] == [
        (True, "", "2"), (False, "2", "1-1"),
    ]  # fmt: skip
    assert plans[0]["stages"][0]["held_bytes"] == 3 * 10_000_030 + 200


def test_plans_that_exceed_the_memory_fail_with_both_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "2 x 1 TB/s", "--memory", "20 MB") == 2
    assert "needs 30000050 bytes, and the limit is 20000000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "four"], "--workers: 'four' is no level: '4 x 25 GB/s' is"),
        (["--workers", "4 x fast"], "'fast' is no rate"),
        (["--workers", "4 x 0 GB/s"], "'0 GB/s' is nothing"),
        (["--workers", "2 x 1 GB/s", "--memory", "much"], "--memory: 'much' is no size"),
        (["--workers", "2 x 1 GB/s", "--model-options", "{"], "--model-options '{': no JSON"),
        (["--workers", "2 x 1 GB/s", "--optimizer-states", "-1"], "--optimizer-states 0 or more"),
    ],
)
def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
