"""Sweeps that ``recommend --as`` writes: their layouts, and the trainers' flags and log lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.command import Command, command_values, fill_words
from hpcbench.config.run_spec import RunSpec, config_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigError
from hpcbench.predict.command_layouts import anyones_layout, layout_of_command, layout_refusal, measured_layouts
from hpcbench.predict.decoder.layout import Layout
from hpcbench.predict.oracle_requests import LayoutRecommendation, RecommendRequest, recommend_layouts
from hpcbench.predict.trainers import LAYOUTS_PER_SCALE, TRAINERS, trainer_sweep_toml
from hpcbench.results.probe_records import CommandOutcome
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RankResult, RunMetrics, RunResult
from hpcbench.results.timing_statistics import step_time_statistics
from hpcbench.strategies.decoder_shapes import named_shape
from hpcbench.submit.plan import make_plan
from hpcbench.submit.submit import write_sweep_record
from hpcbench.worker.command.metrics import command_metrics
from hpcbench.worker.command.output import CommandOutput

WriteSweep = Callable[[str], Sweep]
H100 = "h100-80gb-ib"
MEGATRON_FLAGS: dict[str, type | tuple[str, ...] | None] = {
    "num-layers": int, "hidden-size": int, "ffn-hidden-size": int, "num-attention-heads": int,
    "group-query-attention": None, "num-query-groups": int, "swiglu": None, "normalization": ("LayerNorm", "RMSNorm"),
    "disable-bias-linear": None,
    "position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "attention-dropout": float, "hidden-dropout": float, "untie-embeddings-and-output-weights": None,
    "seq-length": int, "max-position-embeddings": int, "mock-data": None,
    "tokenizer-type": ("HuggingFaceTokenizer", "NullTokenizer", "TikTokenizer"), "vocab-size": int, "bf16": None,
    "train-iters": int, "lr": float, "log-interval": int, "eval-iters": int, "micro-batch-size": int,
    "global-batch-size": int, "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int,
    "context-parallel-size": int, "num-virtual-stages-per-pipeline-rank": int, "sequence-parallel": None,
    "use-distributed-optimizer": None, "overlap-grad-reduce": None, "overlap-param-gather": None,
    "recompute-granularity": ("full", "selective"), "recompute-method": ("uniform", "block"),
    "recompute-num-layers": int, "kv-channels": int, "qk-layernorm": None, "num-experts": int, "moe-router-topk": int,
    "moe-ffn-hidden-size": int, "moe-grouped-gemm": None,
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"), "moe-router-force-load-balancing": None,
    "expert-tensor-parallel-size": int, "expert-model-parallel-size": int, "moe-shared-expert-intermediate-size": int,
    "moe-layer-freq": str, "moe-router-score-function": ("softmax", "sigmoid"), "fp8-format": ("e4m3", "hybrid"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise"), "multi-latent-attention": None, "q-lora-rank": int,
    "decoder-first-pipeline-num-layers": int, "decoder-last-pipeline-num-layers": int, "kv-lora-rank": int, "qk-head-dim": int, "qk-pos-emb-head-dim": int, "v-head-dim": int,
}  # fmt: skip
"""Flags with their type or choices; ``None`` for those without a value. Read in ``megatron/training/arguments.py`` of
NVIDIA/Megatron-LM at commit 000c4ac24f61159c138b0975def722c65245983c: the package megatron-core 0.16.1 has no parser."""


def recommended(
    trainer: str, model: str = "llama_8b", nodes: tuple[int, ...] = (2,), precision: str = "bf16"
) -> LayoutRecommendation:
    wish = RecommendRequest(model=model, dataset="tokens", nodes=nodes, input_size=8192, precision=precision)
    found = recommend_layouts(wish, load_cluster(H100)[0], Path(), None, TRAINERS[trainer])
    assert isinstance(found, LayoutRecommendation)
    return found


def written(trainer: str, found: LayoutRecommendation) -> str:
    return trainer_sweep_toml(TRAINERS[trainer], found.shape, found.tasks_per_node, found.rankings)


def runs_of(sweep: Sweep, tmp_path: Path) -> tuple[Command, list[RunSpec]]:
    profile = load_cluster(H100)[0]
    plan = make_plan(sweep, profile, ResultsTree(tmp_path).cluster(profile.name), layout_refusal(sweep.command))
    assert sweep.command is not None
    assert not plan.dropped
    return sweep.command, [spec for spec in plan.runs.values() if spec.repeat == 0]


CASES = [
    ("torchtitan", "llama_8b", (1, 4), "bf16"), ("torchtitan", "llama_70b", (16,), "bf16"),
    ("megatron", "llama_8b", (1, 4), "fp8_current"), ("megatron", "llama_70b", (32,), "bf16"),
    ("megatron", "mixtral_8x7b", (8,), "bf16"), ("megatron", "qwen3_30b_a3b", (2, 4), "fp8_block"),
    ("megatron", "deepseek_v3", (256,), "fp8_delayed"), ("megatron", "deepseek_v3", (64, 128), "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "model", "nodes", "precision"), CASES)
def test_a_written_sweep_has_the_best_layouts(
    write_sweep: WriteSweep, tmp_path: Path, trainer: str, model: str, nodes: tuple[int, ...], precision: str
) -> None:
    found = recommended(trainer, model, nodes, precision)
    command, specs = runs_of(write_sweep(written(trainer, found)), tmp_path)
    assert command.layout is not None
    layouts = [anyones_layout(layout_of_command(spec, command.layout)[1]) for spec in specs]
    best = [row.layout for ranking in found.rankings.values() for row in ranking.layouts[:LAYOUTS_PER_SCALE]]
    assert layouts == [anyones_layout(layout) for layout in best]
    assert {layout.software for layout in best} == {trainer}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_shipped_sweep_is_the_written_one(trainer: str) -> None:
    shipped = Path(__file__).parents[2] / "sweeps" / "commands" / f"{trainer}.toml"
    assert written(trainer, recommended(trainer)) == shipped.read_text()


def is_divided(layers: int, stages: int, flags: dict[str, Any]) -> bool:
    """Whether the stages between those with layers of their own divide the rest, as ``TransformerConfig`` checks it."""
    for end in ("first", "last"):
        if (own := flags[f"decoder_{end}_pipeline_num_layers"]) is not None:
            layers, stages = layers - own, stages - 1
    return layers % stages == 0 if stages else layers == 0


@pytest.mark.parametrize(
    ("pipeline", "ends"),
    [
        (1, None),
        (2, (31, 30)),
        (4, (15, 14)),  # 15 16 16 14
        (8, (7, 6)),  # 7 8 8 8 8 8 8 6
        (16, (3, 2)),
        (31, (2, 1)),
        (61, None),
    ],
)
def test_stages_at_the_ends_have_fewer_layers_where_they_do_not_divide(
    pipeline: int, ends: tuple[int, int] | None
) -> None:
    values = TRAINERS["megatron"].values(named_shape("deepseek_v3"), pipelined(pipeline))
    assert TRAINERS["megatron"].can_run(named_shape("deepseek_v3"), pipelined(pipeline))
    flags = [f"--decoder-{end}-pipeline-num-layers=" for end in ("first", "last")]
    expected = [f"{flag}{count}" for flag, count in zip(flags, ends, strict=True)] if ends else ["", ""]
    assert [values["first_stage"], values["last_stage"]] == expected


def test_stages_without_a_layer_are_not_run() -> None:
    assert not TRAINERS["megatron"].can_run(named_shape("deepseek_v3"), pipelined(32)), "1 2 ... 2 0"


@pytest.mark.parametrize(
    ("trainer", "sequence", "degrees", "runs"),
    [
        ("megatron", 4095, {}, True),
        ("megatron", 4095, {"tensor": 2}, False),
        ("megatron", 4096, {"tensor": 2}, True),
        ("megatron", 4098, {"context": 2}, False),
        ("megatron", 4096, {"context": 2, "tensor": 2}, True),
        ("torchtitan", 4095, {}, True),
        ("torchtitan", 4095, {"tensor": 2}, False),
    ],
)
def test_ranks_have_equal_parts_of_a_sequence(trainer: str, sequence: int, degrees: dict[str, int], runs: bool) -> None:
    gpus = degrees.get("tensor", 1) * degrees.get("context", 1)
    shared = {"zero": 1} if degrees.get("context") else {}
    layout = Layout(gpus=gpus, sequence=sequence, micro_batch=1, global_batch=8, **degrees, **shared)  # type: ignore[arg-type]
    assert TRAINERS[trainer].can_run(named_shape("llama_8b"), layout) == runs


def pipelined(stages: int) -> Layout:
    return Layout(gpus=stages, sequence=4096, micro_batch=1, global_batch=64, pipeline=stages, software="megatron")


@pytest.mark.parametrize(("trainer", "model", "nodes", "precision"), CASES[2:])
def test_flags_of_megatron_are_those_of_its_parser(
    write_sweep: WriteSweep, tmp_path: Path, trainer: str, model: str, nodes: tuple[int, ...], precision: str
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in MEGATRON_FLAGS.items():
        if kind is None:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(f"--{name}", choices=kind)
        else:
            parser.add_argument(f"--{name}", type=kind)
    command, specs = runs_of(write_sweep(written(trainer, recommended(trainer, model, nodes, precision))), tmp_path)
    shape = named_shape(model)
    for spec in specs:
        words = fill_words(command.argv, {**command_values(spec, command), "NODE_RANK": 0, "MASTER_ADDR": "a",
                                          "MASTER_PORT": 1})  # fmt: skip
        flags = vars(parser.parse_args(words[words.index("/opt/megatron-lm/pretrain_gpt.py") + 1 :]))
        degrees = [flags[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context")]
        assert degrees == [spec.parameters["tp"], spec.parameters["pp"], spec.parameters["cp"]]
        tensor, pipeline, context = degrees
        replicas, rest = divmod(spec.devices, tensor * pipeline * context)
        assert (replicas, rest) == (spec.parameters["dp"], 0)
        # The checks of validate_args of the same file.
        assert flags["global_batch_size"] % (flags["micro_batch_size"] * replicas) == 0
        assert context == 1 or flags["seq_length"] % (2 * context) == 0
        chunks = flags["num_virtual_stages_per_pipeline_rank"]
        assert (chunks or 1) == spec.parameters["chunks"]
        assert pipeline > 1 or chunks is None
        assert is_divided(flags["num_layers"], pipeline * (chunks or 1), flags)
        assert flags["num_query_groups"] % tensor == 0
        experts, expert_degree = flags["num_experts"], flags["expert_model_parallel_size"] or 1
        assert expert_degree == spec.parameters["ep"]
        assert (experts or 0) % expert_degree == 0
        assert (spec.devices // pipeline) % expert_degree == 0, "the ranks of a stage"
        assert (experts is None) == (shape.experts is None)
        assert (flags["fp8_format"] is None) == (precision == "bf16")
        assert flags["multi_latent_attention"] == (shape.latent is not None)
        assert spec.env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


TORCHTITAN_LOG = (Path(__file__).parent / "data" / "torchtitan-0.3.0.log").read_bytes()
MEGATRON_LOG = b"""\
 [2026-11-27 10:00:01.000001] iteration        1/      30 | consumed samples:           64 | elapsed time per \
iteration (ms): 9876.5 | learning rate: 1.000000E-04 | global batch size:    64 |
 [2026-11-27 10:00:02.000001] iteration        2/      30 | consumed samples:          128 | elapsed time per \
iteration (ms): 1234.5 | learning rate: 1.000000E-04 | global batch size:    64 |
"""
LOGS = {
    # 2 ranks, 256 tokens each: the differences of the times in the log are 1.468, 1.445, 1.364 s ...
    "torchtitan": (
        TORCHTITAN_LOG,
        {"sequence": 256, "global_batch": 2},
        [9.143, 1.471, 1.446, 1.362, 1.488, 1.399, 1.455, 1.471],
    ),
    "megatron": (MEGATRON_LOG, {}, [9.8765, 1.2345]),
}


@pytest.mark.parametrize("trainer", LOGS)
def test_step_times_are_read_from_a_log(write_sweep: WriteSweep, tmp_path: Path, trainer: str) -> None:
    text, changes, steps_s = LOGS[trainer]
    command = write_sweep(written(trainer, recommended(trainer))).command
    assert command is not None
    log = tmp_path / "log"
    log.write_bytes(text)
    output = CommandOutput(command, tmp_path / "rank-0.log")
    with log.open("rb") as stream:
        output.read(stream)
    outcome = CommandOutcome(argv=["x"], exit_code=0, wall_s=1.0, values=output.values)
    rank = RankResult(rank=0, local_rank=0, node_rank=0, host="h", pid=1, device="cpu", command=outcome)
    spec = RunSpec(
        strategy="command", workload="command", devices_per_task=2, warmup_steps=0,
        parameters={**command.defaults, **changes},
    )  # fmt: skip
    warnings: list[str] = []
    _, found_s = command_metrics(spec, command, {}, {0: rank}, warnings)
    assert found_s == pytest.approx(steps_s, abs=6e-4)


def test_a_trainer_without_flags_for_the_model_is_an_error() -> None:
    layout = Layout(gpus=1, software="other", sequence=2048, micro_batch=1, global_batch=1)
    for trainer, model in (("torchtitan", "llama2_13b"), ("megatron", "mpt_7b")):
        with pytest.raises(ConfigError, match=model):
            TRAINERS[trainer].values(named_shape(model), layout)


def test_torchtitan_has_no_sweep_in_8_bit() -> None:
    layout = Layout(gpus=1, software="torchtitan", sequence=2048, micro_batch=1, global_batch=1, precision="mxfp8")
    with pytest.raises(ConfigError, match="sweeps of torchtitan have no mxfp8"):
        TRAINERS["torchtitan"].values(named_shape("llama_8b"), layout)


def ok_result(key: str, spec: RunSpec, step_s: float) -> RunResult:
    metrics = RunMetrics(step_time_s=step_time_statistics([step_s] * 5))
    return RunResult(
        run_id=key, config_id=config_id(spec), attempt=1, sweep="best", cluster=H100, spec=spec, status="ok",
        metrics=metrics,
    )  # fmt: skip


def test_layouts_that_were_measured_are_found_again(write_sweep: WriteSweep, tmp_path: Path) -> None:
    found = recommended("megatron")
    sweep = write_sweep(written("megatron", found))
    tree = ResultsTree(tmp_path / "results").cluster(H100)
    plan = make_plan(sweep, load_cluster(H100)[0], tree, layout_refusal(sweep.command))
    with pytest.raises(ConfigError, match="is not a sweep"):
        measured_layouts(tree, sweep.name)
    write_sweep_record(plan, tree)
    with pytest.raises(ConfigError, match="no run of sweep"):
        measured_layouts(tree, sweep.name)
    for number, (key, spec) in enumerate(plan.runs.items()):
        tree.write_result(ok_result(key, spec, 1.0 + number))
    times: dict[Layout, list[float]] = measured_layouts(tree, sweep.name)
    best = [anyones_layout(row.layout) for row in found.rankings[2].layouts[:LAYOUTS_PER_SCALE]]
    assert times == {layout: [1.0 + 3 * place, 2.0 + 3 * place, 3.0 + 3 * place] for place, layout in enumerate(best)}
