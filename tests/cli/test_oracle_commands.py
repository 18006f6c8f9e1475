"""``predict``, ``recommend``, ``validate`` and what ``plan`` foretells, as they are called."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec, config_id, run_id
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
from hpcbench.predict.calibration.calibration_store import Calibration, write_calibration
from hpcbench.predict.forecast import Forecast
from hpcbench.predict.machine import nominal_machine
from hpcbench.predict.prediction import Prediction
from hpcbench.results.results_tree import ResultsTree
from hpcbench.results.schema import RunMetrics, RunResult, StepTimeStatistics, result_document
from hpcbench.strategies.check_sweep import check_names
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

SWEEP = """name = "tiny"
[fixed]
model = "resnet18"
dataset = "digits"
batch_size = 8
[grid]
strategy = ["single", "ddp", "fsdp"]
nodes = [1, 2]
"""
LARGE = """name = "large"
[fixed]
model = "gpt_13b"
dataset = "tokens"
batch_size = 8
nodes = 2
tasks_per_node = 8
[grid]
strategy = ["ddp", "fsdp"]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SWEEP)
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.toml"
    path.write_text(LARGE)
    return path


def call(tmp_path: Path, *arguments: str | Path) -> Result:
    command = [*map(str, arguments), "--results", str(tmp_path / "results")]
    done = CliRunner(env={"COLUMNS": "80"}).invoke(cli, command)
    if done.exception is not None:
        raise done.exception
    return done


def said(tmp_path: Path, *arguments: str | Path) -> Any:
    return json.loads(call(tmp_path, *arguments, "--json").stdout)


def test_predictions_are_of_every_run(tiny: Path, tmp_path: Path) -> None:
    document = said(tmp_path, "predict", tiny, "--cluster", "slurmbox")
    entries = document["predictions"]
    assert [(one["spec"]["strategy"], one["spec"].get("nodes", 1)) for one in entries] == [
        ("single", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2),
    ]  # fmt: skip
    assert {
        "step_time_s", "compute_s", "comm_s", "exposed_comm_s", "bubble_fraction", "peak_memory_bytes", "interval",
        "bound_by", "samples_per_s", "depth", "source",
    } <= entries[0]["predicted"].keys()  # fmt: skip
    assert entries[0]["run_id"] == run_id(msgspec.convert(entries[0]["spec"], RunSpec))
    assert document["machines"][0]["depth"] == "nominal"
    assert any("usual values are assumed" in note for note in document["machines"][0]["notes"])
    fast = said(tmp_path, "predict", tiny, "--cluster", "slurmbox", "--where", "nodes == 2 and exposed_comm_s > 0")
    assert [one["spec"]["strategy"] for one in fast["predictions"]] == ["ddp", "fsdp"]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("cluster", ["slurmbox", "selene", "abci-v100", "lumi-g"])
def test_the_table_of_predictions_fits_80_columns(tiny: Path, tmp_path: Path, cluster: str) -> None:
    lines = call(tmp_path, "predict", tiny, "--cluster", cluster).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"nominal: nominal numbers of the profile {cluster}"
    assert any(line.startswith("fsdp") for line in lines)


def test_predicting_takes_no_torch(tiny: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\nfrom hpcbench.cli.main import cli\n"
        f"cli(['predict', {str(tiny)!r}, '--cluster', 'selene', '--results', {str(tmp_path / 'r')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fsdp" in done.stdout


def test_plan_reports_runs_that_do_not_fit_into_memory(large: Path, tmp_path: Path) -> None:
    text = call(tmp_path, "plan", large, "--cluster", "selene").stdout
    assert "predicted" in text.partition("all runs")[0]
    assert "1 of 2 will probably not fit into memory, by the oracle: ddp on 16 ranks" in " ".join(text.split())
    assert "there is 73.9 GiB" in text
    document = said(tmp_path, "plan", large, "--cluster", "selene")
    ddp, fsdp = document["runs"]
    assert (ddp["predicted"]["fits"], fsdp["predicted"]["fits"]) == (False, True)
    assert document["predicted"]["does_not_fit"] == [ddp["run_id"]]
    hours = sum(2 * one["predicted"]["run_time_s"] for one in document["runs"]) / 3600
    assert document["predicted"]["node_hours"] == pytest.approx(hours)
    assert 0 < hours < document["node_hours"]


def test_plan_works_without_predictions(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def net():\n    raise SystemExit('not to be called')\n")
    path = tmp_path / "own.toml"
    path.write_text(SWEEP.replace('"resnet18"', '"mine:net"').replace('"tiny"', '"own"\nmodel_folder = "."'))
    text = " ".join(call(tmp_path, "plan", path, "--cluster", "slurmbox").stdout.split())
    assert "nothing is predicted for 5 runs: mine:net on digits is neither shipped nor measured yet" in text
    document = said(tmp_path, "plan", path, "--cluster", "slurmbox")
    assert document["predicted"]["node_hours"] is None
    assert all("predicted" not in one for one in document["runs"])


WISH = ("recommend", "--model", "resnet18", "--dataset", "cifar10", "--cluster", "selene", "--global-batch-size", "256")


def test_a_recommendation_ranks_candidates_and_gives_reasons_for_the_rest(tmp_path: Path) -> None:
    document = said(tmp_path, *WISH, "--nodes", "2", "--nodes", "1")
    assert [one["nodes"] for one in document["recommendations"]] == [1, 2]
    found = document["recommendations"][0]
    rates = [one["predicted"]["samples_per_s"] for one in found["candidates"]]
    assert rates == sorted(rates, reverse=True)
    best = found["candidates"][0]
    assert (best["ratio"], best["significant"]) == ({"value": 1.0, "low": 1.0, "high": 1.0}, False)
    assert best["largest_batch_size"] > best["spec"]["batch_size"]
    assert {one["kind"] for one in found["refused"]} == {"limit"}
    (tensor,) = [one for one in found["refused"] if one["strategy"] == "tensor"]
    assert tensor["reason"].startswith("tensor splits transformer blocks, and resnet18 has none")
    assert found["priced"] == len(found["candidates"])


def test_recommend_prints_a_table_and_writes_a_valid_sweep(tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    done = call(tmp_path, *WISH, "--nodes", "1", "--nodes", "2", "--top", "3", "--out", out)
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("1 node x 8 = 8 devices:", "to best [90 %]", "the best at every scale", "reason, for instance"):
        assert words in done.stdout
    assert f"written: {out}; next: hpcbench plan {out} --cluster selene" in done.stderr
    sweep = load_sweep(out)
    check_names(sweep)
    document = said(tmp_path, *WISH, "--nodes", "1", "--nodes", "2")
    best = {config_id(msgspec.convert(one["candidates"][place]["spec"], RunSpec))
            for one in document["recommendations"] for place in range(3)}  # fmt: skip
    planned = said(tmp_path, "plan", out, "--cluster", "selene")["runs"]
    # The sweep makes the very runs that were ranked, in several launches.
    assert {config_id(msgspec.convert(one["spec"], RunSpec)) for one in planned} == best
    assert len(planned) == 3 * len(best)


LAYOUTS = ("recommend", "--model", "llama_8b", "--dataset", "tokens", "--cluster", "h100-80gb-ib")


def test_layouts_of_a_decoder_are_ranked_with_what_they_rest_on(tmp_path: Path) -> None:
    document = said(tmp_path, *LAYOUTS, "--nodes", "8")
    assert document["machine"] == "h100-80gb-sxm"
    (entry,) = document["recommendations"]
    assert (entry["nodes"], entry["tasks_per_node"], entry["candidates"]) == (8, 8, [])
    best = entry["layouts"][0]
    interval = best["predicted"]["interval"]
    assert interval["low"] < best["predicted"]["step_time_s"] < interval["high"]
    assert 0.2 < best["predicted"]["mfu"] < 0.8
    assert best["layout"]["sequence"] == 8192
    assert best["layout"]["global_batch"] == 2 * 64, "16,384 tokens a GPU where no batch is given"
    for words in (
        "learned from",
        "all layouts: bf16, fused Adam, 8192 tokens a sample",
        "rates between nodes are the profile's",
        "--global-batch-size",
    ):
        assert any(words in note for note in document["notes"]), words
    split = [one for one in entry["layouts"] if one["layout"]["context"] > 1]
    assert {one["priced_only"] for one in split} == {"context parallelism"}
    assert all((one["run"] is None) == (one["priced_only"] is not None) for one in entry["layouts"])


def test_layouts_that_can_be_run_resolve_to_runs_of_their_size(tmp_path: Path) -> None:
    document = said(tmp_path, *LAYOUTS, "--nodes", "2", "--global-batch-size", "32")
    runnable = [one for one in document["recommendations"][0]["layouts"] if one["run"] is not None]
    assert {one["run"]["strategy"] for one in runnable} >= {"fsdp", "tensor", "1f1b"}
    for one in runnable:
        shared = {"model": "llama_8b", "dataset": "tokens", "precision": "bf16", "nodes": 2, "tasks_per_node": 8}
        spec = resolve_point({**shared, **one["run"]}, PartitionLimits("any"))
        assert isinstance(spec, RunSpec), spec
        layout = one["layout"]
        assert spec.global_batch_size == layout["global_batch"]
        assert (spec.tp_degree, spec.pp_degree) == (layout["tensor"], layout["pipeline"])
        assert spec.batch_size // spec.micro_batches == layout["micro_batch"]


def test_recommend_for_decoders_prints_layouts_and_writes_a_sweep(tmp_path: Path) -> None:
    out = tmp_path / "best.toml"
    done = call(tmp_path, *LAYOUTS, "--nodes", "1", "--nodes", "2", "--top", "3", "--out", out)
    for words in ("1 node x 8 = 8 GPUs:", "2 nodes x 8 = 16 GPUs:", "to best [90 %]", "layouts examined", "left out"):
        assert words in done.stdout, words
    assert f"written: {out}" in done.stderr
    sweep = load_sweep(out)
    check_names(sweep)
    planned = said(tmp_path, "plan", out, "--cluster", "h100-80gb-ib")["runs"]
    assert len(planned) == 3 * 2 * 3
    assert {one["spec"]["precision"] for one in planned} == {"bf16"}


def test_a_device_without_package_data_is_named(tmp_path: Path) -> None:
    asked = ("recommend", "--model", "llama_8b", "--dataset", "tokens", "--cluster", "selene", "--nodes", "2")
    done = call(tmp_path, *asked, "--batch-size", "1")
    assert "no run of this device: its vendor's figures, with the mean" in " ".join(done.stdout.split())
    assert "2 nodes x 8 = 16 GPUs" in done.stdout
    (tmp_path / "clusters").mkdir()
    text = 'name = "new"\nextends = "h100-80gb-ib"\n[devices.h100]\nfitted = "b300"\n'
    (tmp_path / "clusters" / "new.toml").write_text(text)
    with pytest.raises(HpcbenchError, match="no fitted figures of device 'b300'") as wrong:
        call(tmp_path, *LAYOUTS[:-1], tmp_path / "clusters" / "new.toml")
    assert "h100-80gb-sxm" in str(wrong.value.hint)
    assert wrong.value.where == "new: devices.h100.fitted"


def test_recommend_without_a_feasible_strategy_prints_the_reasons(tmp_path: Path) -> None:
    asked = ("recommend", "--model", "resnet18", "--dataset", "cifar10", "--cluster", "snellius", "--nodes", "3000")
    text = " ".join(call(tmp_path, *asked, "--global-batch-size", "48").stdout.split())
    assert "3,000 nodes x 4 = 12,000 devices: nothing can run" in text
    assert "ddp 1 excluded: global_batch_size 48 cannot be shared evenly by 12000 replicas" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nothing", "--cluster", "selene"], "no sweep 'nothing'"),
        (["predict", "{}", "--cluster", "selen"], "did you mean 'selene'?"),
        (["predict", "{}", "--cluster", "selene", "--where", "strateg == 'ddp'"], "did you mean 'strategy'?"),
        ([*WISH[:-2]], "--batch-size or --global-batch-size: neither is given"),
        ([*WISH, "--batch-size", "4"], "--batch-size or --global-batch-size: both are given"),
        ([*WISH, "--objective", "speed"], "unknown objective 'speed'\n  choices: node_hours, samples_per_s"),
        ([*WISH, "--precision", "fp8"], "unknown precision 'fp8'"),
        ([*WISH, "--dataset", "tokens"], "resnet18 takes images; tokens holds tokens"),
        ([*WISH, "--model", "resnet19"], "did you mean 'resnet18'?"),
        (["validate", "nothing"], "there is no folder"),
    ],
)
def test_wrong_oracle_arguments_exit_with_code_2_and_write_nothing(
    tiny: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(HpcbenchError) as caught:
        call(tmp_path, *(one.replace("{}", str(tiny)) for one in arguments))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "results").exists()


def test_validate_names_a_wrong_sweep_and_a_wrong_parameter(tmp_path: Path) -> None:
    planted(tmp_path / "results", "ddp", 1.0)
    for arguments, message in (
        (["nothing"], "sweep 'nothing' has nothing in"),
        (["--where", "nods == 2"], "mean 'nodes'?"),
    ):
        with pytest.raises(HpcbenchError, match=re.escape(message)):
            call(tmp_path, "validate", *arguments)


def planted(tree: Path, strategy: str, factor: float, launches: int = 3, status: str = "ok", **more: Any) -> None:
    """Results that take ``factor`` times what is predicted, the launches 1 % apart."""
    profile, _ = load_cluster("slurmbox")
    placed: dict[str, Any] = {} if strategy == "single" else {"nodes": 2, "dp_degree": 2}
    for repeat in range(launches):
        spec = RunSpec(
            model="resnet18", dataset="digits", strategy=strategy, batch_size=8, repeat=repeat, seed=repeat,
            **placed,
            **more,
        )  # fmt: skip
        found = Forecast(profile).predict(spec)
        assert isinstance(found, Prediction)
        time_s = found.step_time_s * factor * (0.99, 1.0, 1.01)[repeat]
        spread = StepTimeStatistics(**{**dict.fromkeys(StepTimeStatistics.__struct_fields__, time_s), "std": 0.0})
        metrics = RunMetrics(
            step_time_s=spread, compute_s=found.compute_s, peak_memory_bytes=2 * found.peak_memory_bytes
        )  # fmt: skip
        made = RunResult(
            run_id=run_id(spec), config_id=config_id(spec), attempt=1, sweep="tiny", cluster="slurmbox", status=status,
            spec=spec, metrics=metrics if status == "ok" else RunMetrics(), environment_digest="e",
        )  # fmt: skip
        folder = tree / "slurmbox" / "runs" / made.run_id[:2] / made.run_id
        folder.mkdir(parents=True)
        (folder / "result.json").write_bytes(msgspec.json.encode(result_document(made)))


def test_validation_of_planted_results_gives_errors_ranks_and_regrets(tmp_path: Path) -> None:
    tree = tmp_path / "results"
    planted(tree, "single", 1.0)
    planted(tree, "ddp", 1.25)
    planted(tree, "fsdp", 0.5)
    planted(tree, "zero1", 1.0, launches=1, status="oom")
    planted(tree, "horovod", 1.0, launches=1, status="skipped")
    document = said(tmp_path, "validate")
    cases = {one["spec"]["strategy"]: one for one in document["cases"]}
    assert cases.keys() == {"single", "ddp", "fsdp", "zero1"}
    assert [len(one.get("launches_s", [])) for one in document["cases"]].count(3) == 3
    profile, _ = load_cluster("slurmbox")
    by_profile = Forecast(profile).predict(msgspec.convert(cases["ddp"]["spec"], RunSpec))
    assert isinstance(by_profile, Prediction)
    # ddp's own results are held out: of the same model single, as predicted, and fsdp, twice as fast.
    assert cases["ddp"]["measured_s"] == pytest.approx(1.25 * by_profile.step_time_s)
    assert cases["ddp"]["predicted_s"] < by_profile.step_time_s
    assert cases["ddp"]["error"] == pytest.approx(cases["ddp"]["predicted_s"] / cases["ddp"]["measured_s"] - 1)
    assert cases["ddp"]["rests_on"] == "2 of model"
    ranks = {name: (one["rank"], one["predicted_rank"]) for name, one in cases.items()}
    assert ranks == {"single": (1, 1), "ddp": (2, 1), "fsdp": (1, 2), "zero1": (None, None)}
    assert (cases["zero1"]["status"], cases["zero1"]["error"]) == ("oom", None)
    assert {row["strategy"]: row["count"] for row in document["errors"]} == {"single": 1, "ddp": 1, "fsdp": 1, "all": 3}
    (choice,) = document["choices"]
    assert (choice["best"], choice["predicted_best"]) == ("fsdp", "ddp")
    regret = cases["ddp"]["measured_s"] / cases["fsdp"]["measured_s"] - 1
    assert choice["regret"] == choice["constant_regret"] == pytest.approx(regret)
    assert document["notes"] == [
        "not compared: 1 configurations that were skipped, cancelled, preempted or unsupported",
        "predictions: 4 from the profile; 4 of them adjusted by measured neighbours; each leaves the results of its own "
        "configuration out (held out)",
    ]


def test_validation_counts_disturbed_runs_and_refuses_if_all_are(tmp_path: Path) -> None:
    tree = tmp_path / "results"
    planted(tree, "single", 1.0)
    planted(tree, "ddp", 1.25)
    paths = sorted(tree.rglob("result.json"))
    for number, path in enumerate(paths, 1):
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"warnings": ["other processes used the cores: 9 % of the 2 cores"]}))
        if number == 1:
            notes = said(tmp_path, "validate")["notes"]
            assert f"1 of {len(paths)} runs are marked as disturbed" in notes
    with pytest.raises(HpcbenchError, match=f"all {len(paths)} runs are marked as disturbed"):
        said(tmp_path, "validate")
    assert said(tmp_path, "validate", "--busy")["cases"]


def test_a_calibration_is_taken_and_its_own_runs_are_not_compared(tmp_path: Path) -> None:
    tree = tmp_path / "results"
    planted(tree, "ddp", 1.25)
    planted(tree, "fsdp", 1.0)
    profile, _ = load_cluster("slurmbox")
    nominal = nominal_machine(profile)
    slower = msgspec.structs.replace(nominal.compute, crowding={1: 2.0})
    seen = [
        json.loads(path.read_text())["run_id"] for path in tree.rglob("result.json") if '"fsdp"' in path.read_text()
    ]
    made = Calibration(
        cluster="slurmbox", made_at="2026-11-21T20:00:00Z", partition="normal", run_ids=seen,
        machine=msgspec.structs.replace(nominal, compute=slower, depth="calibrated"),
    )  # fmt: skip
    write_calibration(made, ResultsTree(tree).cluster("slurmbox"))
    document = said(tmp_path, "validate")
    (case,) = document["cases"]
    assert case["spec"]["strategy"] == "ddp"
    assert document["notes"] == [
        "not compared: 1 configurations that the cluster's calibration was fitted to",
        "predictions: 1 from the calibration",
    ]
    (tmp_path / "tiny.toml").write_text(SWEEP)
    found = said(tmp_path, "predict", tmp_path / "tiny.toml", "--cluster", "slurmbox")
    assert found["machines"][0]["depth"] == "calibrated"
    assert found["machines"][0]["source"].startswith("calibration of 2026-11-21")
    single = next(one for one in found["predictions"] if one["spec"]["strategy"] == "single")
    alone = Forecast(profile).predict(msgspec.convert(single["spec"], RunSpec))
    assert isinstance(alone, Prediction)
    # The calibration's own runs of fsdp are in its numbers already: only those of ddp are learned from.
    basis = single["predicted"]["rests_on"]
    assert basis["counts"] == {"model": 1}
    assert single["predicted"]["compute_s"] == pytest.approx(2 * basis["factor"] * alone.compute_s)


def test_measured_configurations_move_predictions(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(SWEEP)
    ask = (tmp_path / "tiny.toml", "--cluster", "slurmbox")
    before = {one["run_id"]: one["predicted"] for one in said(tmp_path, "predict", *ask)["predictions"]}
    assert {one["rests_on"]["kind"] for one in before.values()} == {"profile"}
    assert "rests on" not in call(tmp_path, "predict", *ask).stdout
    planted(tmp_path / "results", "ddp", 1.5)
    after = {one["run_id"]: one for one in said(tmp_path, "predict", *ask)["predictions"]}
    for key, entry in after.items():
        basis, interval = entry["predicted"]["rests_on"], entry["predicted"]["interval"]
        factor = entry["predicted"]["step_time_s"] / before[key]["step_time_s"]
        assert factor == pytest.approx(basis["factor"])
        assert 1.1 < factor < 1.5
        widths = [one["high"] / one["low"] for one in (interval, before[key]["interval"])]
        assert widths[0] < widths[1]
        assert len(basis["neighbours"]) == 1
    text = " ".join(call(tmp_path, "predict", *ask).stdout.split())
    assert "rests on" in text
    assert "measured configurations (the nearest kind; --json names them)" in text
    planned = said(tmp_path, "plan", *ask)
    assert all(one["predicted"]["rests_on"]["kind"] == "measured neighbours" for one in planned["runs"])
    text = " ".join(call(tmp_path, "plan", *ask).stdout.split())
    assert "(5 from the profile; 5 of them adjusted by measured neighbours)" in text
    wish = ("recommend", "--model", "resnet18", "--dataset", "digits", "--cluster", "slurmbox", "--batch-size", "8")
    best = said(tmp_path, *wish, "--nodes", "2")["recommendations"][0]["candidates"][0]
    assert best["predicted"]["rests_on"]["kind"] == "measured neighbours"
    assert "rests on" in call(tmp_path, *wish, "--nodes", "2").stdout


def test_the_tables_of_a_validation_fit_80_columns(tmp_path: Path) -> None:
    tree = tmp_path / "results"
    planted(tree, "ddp", 1.25)
    planted(tree, "fsdp", 0.8)
    text = call(tmp_path, "validate", "--cases").stdout
    assert max(map(len, text.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line and line[0] != " "}
    # Each of the two moves the other one's prediction, in the wrong direction.
    assert rows["all"][:3] == ["2", "36.5", "%"]
    assert "always ddp in 1 group:" in text
    done = call(tmp_path, "validate", "--out", tmp_path / "cases.csv")
    assert (done.stdout, done.stderr) == ("", f"2 configurations written to {tmp_path / 'cases.csv'}\n")
    assert (tmp_path / "cases.csv").read_text().startswith("strategy,model,devices,batch_size,measured_s,")
    call(tmp_path, "validate", "--out", tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text()) == said(tmp_path, "validate")
    assert len(said(tmp_path, "validate", "--where", "strategy == 'ddp'")["cases"]) == 1
    assert "no results to validate" in call(tmp_path, "validate", "--cluster", "local").stderr
