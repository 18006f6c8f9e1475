"""Results of a sweep with a declared layout beside the predictions: validate, report, and the winner by recommend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import config_id
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.prediction import NotPredicted
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunMetrics, RunResult
from hpcbench.results.timing_statistics import step_time_statistics
from hpcbench.submit.plan import make_plan
from hpcbench.submit.submit import write_sweep_record
from hpcbench.units import format_seconds
from tests.cli.test_cli import hpcbench

H100 = "h100-80gb-ib"
SHIPPED = Path(__file__).parents[2] / "sweeps" / "commands" / "megatron.toml"
FACTORS = (1.25, 1.3, 1.1)
"""Measured over predicted step time of the three layouts."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with three launches of each layout of the shipped sweep."""
    monkeypatch.delenv("HPCBENCH_RESULTS", raising=False)
    measure(tmp_path, H100)
    return tmp_path


def measure(folder: Path, cluster: str) -> None:
    profile, tree = load_cluster(cluster)[0], ResultsTree(folder / "results").cluster(cluster)
    plan = make_plan(load_sweep(SHIPPED), profile, tree)
    write_sweep_record(plan, tree)
    forecast = Forecast(profile, tree)
    for number, (key, spec) in enumerate(plan.runs.items()):
        predicted = forecast.predict(spec)
        assert not isinstance(predicted, NotPredicted)
        step_s = predicted.step_time_s * FACTORS[number // 3] * (1 + 0.001 * (number % 3))
        metrics = RunMetrics(step_time_s=step_time_statistics([step_s] * 20), samples_per_s=32 / step_s)
        result = RunResult(
            run_id=key, config_id=config_id(spec), attempt=1, sweep=plan.sweep.name, cluster=cluster, spec=spec,
            status="ok", metrics=metrics,
        )  # fmt: skip
        tree.write_result(result)


def output(project: Path, *words: str) -> Any:
    done = hpcbench(*words, "--json", cwd=project)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_validate_compares_commands_with_their_predictions(project: Path) -> None:
    found = output(project, "validate", "megatron-llama_8b")
    cases = found["cases"]
    assert [case["samples_per_step"] for case in cases] == pytest.approx([32.0] * 3)
    # Each is predicted by the two others: 1.25 and 1.3 for 1.1, shrunk towards 1.
    assert [round(case["error"], 2) for case in cases] == [-0.07, -0.12, 0.14]
    assert "held out" in " ".join(found["notes"])
    (choice,) = found["choices"]
    assert choice["devices"] == 16


def test_report_states_the_part_that_the_model_does_not_explain(project: Path) -> None:
    (finding,) = [one for one in output(project, "report", "megatron-llama_8b")["findings"] if one["kind"] == "model"]
    assert "of it is not explained: the model of megatron explains" in finding["text"]
    assert "of which computation of the layers is most" in finding["text"]
    assert finding["why"].startswith("inside the model's 90 % interval; terms: computation of the layers ")


@pytest.mark.parametrize("cluster", [H100, "b200-180gb-ib"])
def test_the_model_of_the_report_is_the_one_without_runs_here(tmp_path: Path, cluster: str) -> None:
    """The interval of a device without published runs is wider."""
    measure(tmp_path, cluster)
    report = json.loads(hpcbench("report", "megatron-llama_8b", "--json", cwd=tmp_path).stdout)
    (finding,) = [one for one in report["findings"] if one["kind"] == "model"]
    profile, unmeasured = load_cluster(cluster)[0], ResultsTree(tmp_path / "none").cluster(cluster)
    plan = make_plan(load_sweep(SHIPPED), profile, unmeasured)
    write_sweep_record(plan, unmeasured)
    forecast, texts = Forecast(profile, unmeasured), list[str]()
    for spec in plan.runs.values():
        predicted = forecast.predict(spec)
        assert not isinstance(predicted, NotPredicted)
        bounds = (predicted.interval.low, predicted.interval.high)
        texts.append(f"[{format_seconds(bounds[0])} {format_seconds(bounds[1])}]")
    assert any(text in finding["text"] for text in texts), (finding["text"], texts)


def test_recommend_shows_the_measured_winner(project: Path) -> None:
    words = ("recommend", "--model", "llama_8b", "--dataset", "tokens", "--input-size", "8192", "--cluster", H100,
             "--nodes", "2", "--as", "megatron")  # fmt: skip
    (entry,) = output(project, *words, "--measured", "megatron-llama_8b")["recommendations"]
    measured = [row for row in entry["layouts"] if row["measured_step_time_s"] is not None]
    assert len(measured) == 3 < len(entry["layouts"])
    # Predictions without these runs are lower by FACTORS; those here have learned from them.
    for row in measured:
        assert row["measured_step_time_s"] / row["predicted"]["step_time_s"] == pytest.approx(1.0, abs=0.13)
    text = hpcbench(*words, "--measured", "megatron-llama_8b", "--top", "3", cwd=project).stdout
    assert "measured the fastest of 3 layouts: dp=4 cp=4" in " ".join(text.split())
    failed = hpcbench(*words, "--measured", "megatron-llama_9b", cwd=project)
    assert failed.returncode == 2
    assert "is not a sweep with a [command.layout]" in failed.stderr


def test_a_prediction_is_explained_by_its_terms_and_the_measured_difference(project: Path) -> None:
    words = ("predict", str(SHIPPED), "--cluster", H100, "--explain", "--where", "tp == 2 or tp == 1")
    explanations = output(project, *words)["explanations"]
    assert len(explanations) == 3
    validated = output(project, "validate", "megatron-llama_8b")["cases"]
    for entry, case in zip(explanations, validated, strict=True):
        step_s = entry["predicted"]["step_time_s"]
        assert sum(term["seconds"] for term in entry["terms"]) == pytest.approx(step_s)
        assert entry["terms"][0]["name"] == "computation of the layers"
        assert "published runs" in entry["terms"][0]["rests_on"]
        assert "by runs here" in entry["terms"][0]["rests_on"]
        assert step_s / entry["measured_step_time_s"] - 1 == pytest.approx(case["error"])
    text = " ".join(hpcbench(*words, cwd=project).stdout.split())
    assert "of the prediction, that no term explains" in text
    assert "(3 launches): +" in text


def test_a_training_is_explained_too_and_many_are_refused(tmp_path: Path) -> None:
    words = ("predict", "ddlbench", "--cluster", "abci-v100", "--explain")
    refused = hpcbench(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "600 configurations, at most 6 are explained at once" in refused.stderr
    assert "no configuration satisfies --where" in hpcbench(*words, "--where", "nodes == 99", cwd=tmp_path).stderr
    chosen = (*words, "--where", "strategy == 'gpipe' and model == 'vgg16' and nodes == 1")
    for entry in output(tmp_path, *chosen)["explanations"]:
        assert sum(term["seconds"] for term in entry["terms"]) == pytest.approx(entry["predicted"]["step_time_s"])
        assert {term["rests_on"] for term in entry["terms"]} == {"from the profile"}
        assert entry["measured_step_time_s"] is None


def test_predictions_name_the_parts_that_no_run_taught(tmp_path: Path) -> None:
    sweep = tmp_path / "experts.toml"
    sweep.write_text(EXPERTS)
    text = " ".join(hpcbench("predict", str(sweep), "--cluster", H100, cwd=tmp_path).stdout.split())
    assert "published runs of megatron: h100-80gb-sxm; no run of experts was learned from" in text
    assert "no run of experts and products in fp8_current was learned from" in text
    entries = output(tmp_path, "predict", str(sweep), "--cluster", H100)["predictions"]
    assert ["predicted" in entry for entry in entries] == [True, True, False]
    assert "nvfp4: h100-80gb-sxm has no peak in fp4" in entries[2]["reason"]
    words = ("--explain", "--where", "recipe == 'fp8_current'")
    (entry,) = output(tmp_path, "predict", str(sweep), "--cluster", H100, *words)["explanations"]
    rests_on = {term["name"]: term["rests_on"] for term in entry["terms"]}
    assert "the device's peak in fp8_current" in rests_on["computation of the layers"]
    assert "balanced routing" in rests_on["tokens to experts and back"]


EXPERTS = """
name = "experts"
[fixed]
nodes = 8
tasks_per_node = 8
[command]
argv = ["train", "{recipe}"]
parameters.recipe = { type = "text", default = "bf16" }
[command.layout]
model = "mixtral_8x7b"
software = "megatron"
sequence = 4096
micro_batch = 1
global_batch = 256
dp = 16
zero = 1
tp = 2
pp = 2
ep = 8
precision = "recipe"
[grid]
recipe = ["bf16", "fp8_current", "nvfp4"]
"""
