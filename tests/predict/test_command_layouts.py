"""Layouts that a sweep declares for its command: what is refused, and predictions by published runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.command import CommandLayout
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.config.sweep_loader import Sweep, expand_sweep
from hpcbench.errors import ConfigError, ConfigErrors
from hpcbench.predict.command_layouts import layout_of_command, layout_refusal, recorded_layouts
from hpcbench.predict.decoder.layout import Layout, nominal_rates
from hpcbench.predict.decoder.pricing import step_time
from hpcbench.predict.decoder.site import PRIOR_LOGS, site_terms
from hpcbench.predict.decoder.work import step_work
from hpcbench.predict.fitted_decoders import machine_of_profile
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunMetrics, RunResult
from hpcbench.results.timing_statistics import step_time_statistics
from hpcbench.strategies.check_sweep import check_names
from hpcbench.strategies.decoder_shapes import named_shape
from hpcbench.strategies.resolve import PartitionLimits, resolve_point
from hpcbench.submit.plan import make_plan
from hpcbench.submit.submit import write_sweep_record

LAYOUT = """\
[command.layout]
model = "llama_8b"
software = "torchtitan"
sequence = 4096
micro_batch = "mb"
global_batch = "4 * nodes * 4"
shards = "dp"
tp = 2
recompute = "'full' if mb > 1 else 'none'"
"""
SWEEP = f"""\
name = "mine"
[command]
argv = ["torchrun", "--dp={{dp}}", "--mb={{mb}}"]
launch = "node"
parameters.dp = {{ type = "int", default = 4 }}
parameters.mb = {{ type = "int", default = 1 }}
{LAYOUT}
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'elapsed ([0-9.]+)'
[fixed]
tasks_per_node = 8
"""
WriteSweep = Callable[[str], Sweep]
H100 = "h100-80gb-ib"


def spec_of(sweep: Sweep) -> RunSpec:
    (point,) = expand_sweep(sweep)
    spec = resolve_point(point, PartitionLimits("any")) if isinstance(point, dict) else None
    assert isinstance(spec, RunSpec)
    return spec


def profile_of(name: str) -> ClusterProfile:
    return load_cluster(name)[0]


def test_a_run_has_the_declared_layout_by_its_own_parameters(write_sweep: WriteSweep) -> None:
    sweep = write_sweep(f"{SWEEP}nodes = 2\nmb = 2\ndp = 8\n")
    assert sweep.command is not None
    assert sweep.command.layout is not None
    shape, layout = layout_of_command(spec_of(sweep), sweep.command.layout)
    assert shape == named_shape("llama_8b")
    assert layout == Layout(
        gpus=16, sequence=4096, micro_batch=2, global_batch=32, shards=8, tensor=2, recompute="full",
        software="torchtitan",
    )  # fmt: skip


def test_to_declare_a_layout_changes_no_run(write_sweep: WriteSweep) -> None:
    declared, corrected, bare = (
        spec_of(write_sweep(text)) for text in (SWEEP, SWEEP.replace("tp = 2", "tp = 1"), SWEEP.replace(LAYOUT, ""))
    )
    assert run_id(declared) == run_id(corrected) == run_id(bare)


WRONG = {
    "an unknown name": ('tp = "tensor"', "tp", "unknown name 'tensor'"),
    "a wrong type": ("tp = 1.5", "tp", "int"),
    "no software": (
        'software = "deepspeed"',
        "software",
        "'nanotron', 'megatron', 'fsdp', 'torchtitan', 'megatron_deepspeed' or 'other'",
    ),
    "a typo": ("tensor = 2", "tensor", "tensor"),
    "an unknown model": ('model = "llama_9b"', "model", "unknown model 'llama_9b'"),
}


@pytest.mark.parametrize(("line", "name", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_layout_is_an_error_with_its_line(write_sweep: WriteSweep, line: str, name: str, message: str) -> None:
    old = next((one for one in LAYOUT.splitlines() if one.startswith(f"{name} =")), "tp = 2")
    with pytest.raises(ConfigErrors) as caught:
        check_names(write_sweep(SWEEP.replace(old, line)))
    (problem,) = caught.value.problems
    number = SWEEP.replace(old, line).splitlines().index(line) + 1
    assert message in str(problem)
    assert (problem.where or "").endswith(f".toml:{number}")


REFUSED = {
    "degrees": ("dp = 2", "the degrees multiply to 4 (shards 2 x tp 2), but the run has 8 devices"),
    "the batch": ("mb = 3", "global batch 16 is not a multiple of 4 replicas times micro-batch 3"),
    "no sample": ("mb = 0", "micro_batch is 0, 1 to 2147483647 can be priced"),
}


@pytest.mark.parametrize(("line", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_impossible_layout_is_an_infeasible_point(write_sweep: WriteSweep, line: str, reason: str) -> None:
    sweep = write_sweep(f"{SWEEP}{line}\n")
    refuse = layout_refusal(sweep.command)
    assert refuse is not None
    assert refuse(spec_of(sweep)) == f"layout: {reason} ({sweep.source.where(('command', 'layout'))})"
    assert refuse(spec_of(write_sweep(SWEEP))) is None


@pytest.mark.parametrize(("nodes", "reason"), [(32, None), (33, "layout: 33 stages for 32 layers")])
def test_every_stage_has_a_layer(write_sweep: WriteSweep, nodes: int, reason: str | None) -> None:
    text = SWEEP.replace("tp = 2", 'tp = 2\npp = "nodes"').replace("torchtitan", "nanotron")
    sweep = write_sweep(f"{text}nodes = {nodes}\n")
    refuse = layout_refusal(sweep.command)
    assert refuse is not None
    refused = refuse(spec_of(sweep))
    assert (refused and refused.partition(" (")[0]) == reason


def test_a_layout_is_priced_like_a_published_run_and_its_terms_are_the_step(write_sweep: WriteSweep) -> None:
    sweep, profile = write_sweep(SWEEP), profile_of(H100)
    spec, forecast = spec_of(sweep), Forecast(profile, command=sweep.command)
    predicted, priced = forecast.predict(spec), forecast.price_command(spec)
    assert not isinstance(predicted, NotPredicted)
    assert not isinstance(priced, NotPredicted)
    layout = Layout(gpus=8, sequence=4096, micro_batch=1, global_batch=16, shards=4, tensor=2, software="torchtitan")
    machine = machine_of_profile(profile, None, 8)
    work = step_work(named_shape("llama_8b"), layout, machine.device, nominal_rates(machine.device, 8))
    step_s = step_time(work, machine.figures_of("torchtitan")).total_s
    assert predicted.step_time_s == pytest.approx(step_s)
    assert predicted.samples_per_s * predicted.step_time_s == pytest.approx(16)
    assert predicted.peak_memory_bytes == pytest.approx(predicted.memory.total_bytes)
    terms = site_terms(priced.work, priced.figures, PRIOR_LOGS)
    assert terms.own_s + terms.traffic_s + terms.bubble + terms.straggling == pytest.approx(step_s)
    assert terms.tensor_traffic > 0
    assert terms.stage_traffic == 0.0
    assert terms.bubble == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("terms", [{"sequence": 8, "micro_batch": 1}, {"sequence": 8, "micro_batch": 1,
                                   "global_batch": 8, "dp": 8, "depth": 2}])  # fmt: skip
def test_a_record_of_another_version_is_an_error_and_no_traceback(
    write_sweep: WriteSweep, terms: dict[str, int | float | bool | str]
) -> None:
    declared = CommandLayout(model="llama_8b", software="fsdp", terms=terms | {"dp": 8})
    with pytest.raises(ConfigError, match="layout: "):
        layout_of_command(spec_of(write_sweep(SWEEP)), declared)


UNPRICED = {
    "no layout": (SWEEP.replace(LAYOUT, ""), H100, "declare it in [command.layout]"),
    "no fitted device": (SWEEP, "abci-v100", "devices.v100 has neither fitted nor peak_flops_per_s.bf16"),
}


@pytest.mark.parametrize(("text", "cluster", "reason"), UNPRICED.values(), ids=UNPRICED)
def test_a_run_without_a_price_has_the_reason(write_sweep: WriteSweep, text: str, cluster: str, reason: str) -> None:
    sweep = write_sweep(text)
    predicted = Forecast(profile_of(cluster), command=sweep.command).predict(spec_of(sweep))
    assert isinstance(predicted, NotPredicted)
    assert reason in predicted.reason


def test_the_record_of_a_sweep_keeps_its_layout_and_results_adjust_predictions(
    write_sweep: WriteSweep, tmp_path: Path
) -> None:
    sweep, profile = write_sweep(SWEEP), profile_of(H100)
    tree = ResultsTree(tmp_path / "results").cluster(profile.name)
    plan = make_plan(sweep, profile, tree, layout_refusal(sweep.command))
    write_sweep_record(plan, tree)
    (spec,) = plan.runs.values()
    assert recorded_layouts(tree)[spec.command_digest].terms["tp"] == 2
    known = Forecast(profile, tree)
    predicted = known.predict(spec)
    assert not isinstance(predicted, NotPredicted)
    metrics = RunMetrics(step_time_s=step_time_statistics([1.5 * predicted.step_time_s] * 9))
    result = RunResult(
        run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="mine", cluster=profile.name, spec=spec, status="ok",
        metrics=metrics,
    )  # fmt: skip
    other = msgspec.structs.replace(spec, parameters={"dp": 4, "mb": 2})
    before = known.predict(other)
    tree.write_result(result)
    after = Forecast(profile, tree).predict(other)
    assert not isinstance(before, NotPredicted)
    assert not isinstance(after, NotPredicted)
    assert 1.2 < after.step_time_s / before.step_time_s < 1.5
    training = resolve_point(
        {"model": "llama_8b", "dataset": "tokens", "strategy": "fsdp", "batch_size": 1, "tasks_per_node": 8},
        PartitionLimits("any"),
    )
    assert isinstance(training, RunSpec)
    for run, is_moved in ((other, True), (training, False)):
        predicted = Forecast(profile, tree).predict(run)
        assert not isinstance(predicted, NotPredicted)
        assert bool(predicted.rests_on.counts) == is_moved


def test_a_measured_command_that_contradicts_the_others_is_named(write_sweep: WriteSweep, tmp_path: Path) -> None:
    sweep, profile = write_sweep(SWEEP), profile_of(H100)
    tree = ResultsTree(tmp_path / "results").cluster(profile.name)
    plan = make_plan(sweep, profile, tree, layout_refusal(sweep.command))
    write_sweep_record(plan, tree)
    (one,) = plan.runs.values()
    alone = Forecast(profile, command=sweep.command)
    for nodes, factor in ((1, 1.0), (2, 1.02), (4, 0.98), (8, 2.0)):
        spec = msgspec.structs.replace(one, nodes=nodes, parameters={"dp": 4 * nodes, "mb": 1})
        predicted = alone.predict(spec)
        assert not isinstance(predicted, NotPredicted)
        metrics = RunMetrics(step_time_s=step_time_statistics([factor * predicted.step_time_s] * 9))
        result = RunResult(
            run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="mine", cluster=profile.name, spec=spec,
            status="ok", metrics=metrics,
        )  # fmt: skip
        tree.write_result(result)
    forecast = Forecast(profile, tree)
    assert forecast.site_notes() == []
    forecast.predict(one)
    (note,) = forecast.site_notes()
    assert note.startswith("command on 64 devices, dp 32, mb 1 took 1.")
    assert "times as long as the cluster's other runs predict" in note


def test_dimensions_of_a_layout_replace_those_of_the_decoder(write_sweep: WriteSweep) -> None:
    text = SWEEP.replace("tp = 2", "tp = 2\nlayers = 'mb + 3'\nhidden = 8192\nheads = 64\nsequence_parallel = 'mb > 1'")
    sweep = write_sweep(text)
    assert sweep.command is not None
    assert sweep.command.layout is not None
    shape, layout = layout_of_command(spec_of(sweep), sweep.command.layout)
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (4, 8192, 64, named_shape("llama_8b").ffn)
    assert not layout.sequence_parallel


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("layers = 10001", "layers is 10001, 1 to 10000 can be priced"),
        ("layers = 'mb - 1'", "layers is 0, 1 to 10000 can be priced"),
        ("heads = 7", "hidden 4096 must be a multiple of heads 7, and heads of kv_heads 8"),
        ("fused_attention = '3'", "fused_attention is 3, true or false is needed"),
        ("optimizer_shards = 3", "groups of 3 replicas that share the optimizer do not divide 1 replicas"),
        ("optimizer_shards = 'mb / 2'", "optimizer_shards is 0.5, a whole number is needed"),
    ],
)
def test_wrong_dimensions_are_refused(write_sweep: WriteSweep, lines: str, message: str) -> None:
    sweep = write_sweep(SWEEP.replace("tp = 2", f"tp = 2\n{lines}"))
    assert sweep.command is not None
    assert sweep.command.layout is not None
    with pytest.raises(ConfigError) as refused:
        layout_of_command(spec_of(sweep), sweep.command.layout)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('precision = "fp9"', "layout: unknown precision 'fp9'"),
        ('recompute = "ful"', "layout: unknown recompute 'ful'\n  did you mean 'full'?"),
        ("expert_imbalance = 0.5", "expert_imbalance: input should be greater than or equal to 1"),
        ("ep = 0", "ep"),
    ],
)
def test_a_word_or_number_that_a_layout_cannot_have_is_refused(
    write_sweep: WriteSweep, line: str, message: str
) -> None:
    key = line.partition(" =")[0]
    kept = [own for own in SWEEP.splitlines() if own.partition(" =")[0] != key]
    with pytest.raises(ConfigErrors) as caught:
        write_sweep("\n".join(kept).replace("[command.layout]\n", f"[command.layout]\n{line}\n", 1))
    assert message in str(caught.value)
