"""The output of a command's process: values, patterns, what is kept, and what makes a run fail."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from hpcbench.config.command import Command, CommandMetric
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.results.device_records import DevicePower
from hpcbench.results.probe_records import CommandOutcome
from hpcbench.results.schema import RankResult, RunMetrics, StepTimeStatistics
from hpcbench.worker.command import output as output_module
from hpcbench.worker.command.metrics import command_metrics
from hpcbench.worker.command.output import CommandOutput, read_metrics_file, to_number
from hpcbench.worker.energy import command_energy

STEP = CommandMetric(name="step_time", unit="s", better="lower", per="step", pattern=r"elapsed +([^ ]+)")
LOSS = CommandMetric(name="loss", better="lower", json="loss")
COMMAND = Command(argv=["x"], metrics=[STEP, LOSS], must_match=["completed"], must_not_match=["nan"])


def read(tmp_path: Path, text: bytes, command: Command = COMMAND) -> CommandOutput:
    output = CommandOutput(command, tmp_path / "rank-0.log")
    output.read(io.BufferedReader(io.BytesIO(text)))
    return output


def test_values_are_read_from_lines_and_from_progress_bars(tmp_path: Path) -> None:
    output = read(tmp_path, b"step 1 elapsed 0.5\rstep 2 elapsed  0.25\r\nbytes \xff\ntraining completed")
    assert output.values == {"step_time": [0.5, 0.25]}
    assert (output.matched, output.forbidden) == ({"completed"}, None)
    assert (tmp_path / "rank-0.log").read_bytes().startswith(b"step 1 elapsed 0.5\r")


@pytest.mark.parametrize(("warmup_steps", "timed"), [(0, (1.0, 4.0)), (1, (1.0, 4.0)), (2, (3.0, 4.0)), (4, None)])
def test_timed_steps_run_from_the_end_of_the_warm_up_to_the_last_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup_steps: int, timed: tuple[float, float] | None
) -> None:
    pieces = [b"begins\n", b"elapsed 9\n", b"loss 1\n", b"elapsed 1\n", b"elapsed 1\n", b"saved\n", b""]
    seconds = [0]

    def read_piece(_: int) -> bytes:
        seconds.append(seconds[-1] + 1)
        return pieces[seconds[-2]]

    clock = SimpleNamespace(time=lambda: float(seconds[-2]), monotonic=time.monotonic)
    monkeypatch.setattr(output_module, "time", clock)
    output = CommandOutput(COMMAND, tmp_path / "rank-0.log", warmup_steps)
    output.read(cast(io.BufferedReader, SimpleNamespace(read1=read_piece)))
    assert output.timed_unix_s == timed


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "1.2.3"])
def test_a_value_that_is_no_finite_number_ends_the_run(tmp_path: Path, value: str) -> None:
    with pytest.raises(WorkerError, match=f"the metric step_time is '{value}', no finite number, in: elapsed {value}"):
        read(tmp_path, f"elapsed {value}\n".encode())


def test_a_negative_time_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"the metric step_time is -0.5, and a time is at least 0, in: elapsed -0.5"):
        read(tmp_path, b"elapsed -0.5\n", Command(argv=["x"], metrics=[STEP]))


def test_a_forbidden_line_is_named(tmp_path: Path) -> None:
    assert read(tmp_path, b"loss nan\x1b[31m\n").forbidden == "'nan' matches the line 'loss nan\ufffd[31m'"


def test_the_most_similar_lines_come_first(tmp_path: Path) -> None:
    output = read(tmp_path, b"hello\nstep 3 took 5 s\nstep 3 elapse 0.1\nworld\n")
    assert output.similar_lines(STEP.pattern or "")[0] == "step 3 elapse 0.1"


def test_a_log_has_a_bounded_size_and_ends_with_the_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(output_module, "MAX_VALUES", 10)
    output = read(tmp_path, b"elapsed 1\n" * 5000 + b"training completed\n")
    log = (tmp_path / "rank-0.log").read_text()
    assert len(log) < 5000
    assert "bytes are left out; the last lines:" in log
    assert log.endswith("training completed\n")
    assert output.matched == {"completed"}


def test_values_are_read_while_the_disk_is_full(tmp_path: Path) -> None:
    output = CommandOutput(COMMAND, tmp_path / "rank-0.log")
    output._file.close()
    output._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    output.read(io.BufferedReader(io.BytesIO(b"elapsed 1\ntraining completed\n")))
    assert (output.values, output.matched) == ({"step_time": [1.0]}, {"completed"})
    assert output.log_error == "No space left on device"


def test_a_line_without_an_end_is_read_in_pieces(tmp_path: Path) -> None:
    output = read(tmp_path, b"x" * 5 * output_module.MAX_LINE_BYTES + b"\nelapsed 1\n")
    assert output.values == {"step_time": [1.0]}
    assert max(map(len, output.last)) == 1000


def test_json_lines_hold_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metrics_file(COMMAND, file) == {}
    file.write_text('{"loss": 2, "other": "x"}\n{"loss": 1.5}\n')
    assert read_metrics_file(COMMAND, file) == {"loss": [2.0, 1.5]}
    for line, message in (
        ("{", "is not a JSON object"),
        ('{"loss": null}', "no finite number"),
        ('{"loss": true}', "no finite"),
    ):
        file.write_text(line)
        with pytest.raises(WorkerError, match=message):
            read_metrics_file(COMMAND, file)


@pytest.mark.parametrize(("text", "value"), [("1,234", 1234.0), ("12,345,678.5", 12345678.5), ("0.5", 0.5)])
def test_thousands_may_be_grouped(text: str, value: float) -> None:
    assert to_number("tps", text, "") == value
    with pytest.raises(WorkerError):
        to_number("tps", f"{text},1", "")


def test_a_value_is_an_expression_of_the_number_that_was_read() -> None:
    step = msgspec.structs.replace(STEP, value="batch * ranks / value")
    spec = RunSpec(strategy="command", workload="command", tasks_per_node=2, parameters={"batch": 8}, warmup_steps=0)
    warnings: list[str] = []
    for rate, steps in ((32.0, [0.5]), (0.0, [])):
        ranks = {0: rank(0, step_time=[rate])}
        _, steps_s = command_metrics(spec, Command(argv=["x"], metrics=[step]), {}, ranks, warnings)
        assert steps_s == steps
    assert warnings == ["step_time: expression 'batch * ranks / value': cannot be computed: a division by zero"]


def rank(number: int, **values: list[float]) -> RankResult:
    outcome = CommandOutcome(argv=["x"], exit_code=0, wall_s=10.0 + number, values=values)
    return RankResult(rank=number, local_rank=number, node_rank=0, host="h", pid=1, device="cpu", command=outcome)


def test_steps_of_the_warm_up_do_not_count_and_rates_follow_from_counts_per_step() -> None:
    command = Command(
        argv=["x"], metrics=[STEP, LOSS], defaults={"batch": 8},
        per_step={"samples_per_step": "batch * ranks", "flops_per_step": "1e9 * devices"},
    )  # fmt: skip
    spec = RunSpec(strategy="command", workload="command", tasks_per_node=2, warmup_steps=2)
    warnings: list[str] = []
    ranks = {0: rank(0), 1: rank(1, step_time=[9.0, 9.0, 0.5, 0.5, 0.5], loss=[3.0, 1.0])}
    metrics, steps_s = command_metrics(spec, command, {"fp32": 4e9}, ranks, warnings)
    assert (steps_s, warnings) == ([0.5] * 3, [])
    assert metrics.step_time_s is not None
    assert isinstance(metrics.own["step_time"], StepTimeStatistics)
    assert (metrics.own["step_time"].median, metrics.own["loss"]) == (0.5, 1.0)
    assert (metrics.samples_per_s, metrics.flops_per_s, metrics.mfu) == (32.0, 4e9, 0.5)
    assert metrics.wall_time_s == 11.0


@pytest.mark.parametrize(("unit", "step_s"), [("s", 4.0), ("ms", 0.004), ("min", 240.0), ("", None), ("steps/s", None)])
def test_step_times_of_any_unit_of_time_become_seconds(unit: str, step_s: float | None) -> None:
    spec = RunSpec(strategy="command", workload="command", warmup_steps=1)
    command = Command(argv=["x"], metrics=[msgspec.structs.replace(STEP, unit=unit)])
    metrics, steps_s = command_metrics(spec, command, {}, {0: rank(0, step_time=[9.0, 4.0, 4.0])}, [])
    own = metrics.own["step_time"]
    assert isinstance(own, StepTimeStatistics)
    assert own.median == 4.0
    assert (metrics.step_time_s and metrics.step_time_s.median, steps_s) == (step_s, [step_s, step_s] if step_s else [])


def test_steps_that_take_no_time_have_no_rate() -> None:
    command = Command(argv=["x"], metrics=[STEP], per_step={"samples_per_step": "8"})
    spec = RunSpec(strategy="command", workload="command", warmup_steps=0)
    metrics, steps_s = command_metrics(spec, command, {}, {0: rank(0, step_time=[0.0, 0.0])}, [])
    assert (steps_s, metrics.samples_per_s) == ([0.0, 0.0], None)


def test_energy_of_a_sample_is_the_power_of_the_timed_steps_over_their_rate() -> None:
    """Two ranks with a GPU each; start-up and the end of the program are in ``energy_j`` alone."""
    ranks = {0: rank(0, step_time=[9.0, 0.5]), 1: rank(1)}
    for name, one in zip("ab", ranks.values(), strict=True):
        one.device_power = {name: DevicePower(energy_j=4000.0, steps_power_w=300.0)}
    metrics = RunMetrics(energy_j=8000.0, samples_per_s=32.0, tokens_per_s=4096.0)
    command_energy(metrics, ranks)
    assert (metrics.energy_per_sample_j, metrics.energy_per_token_j) == (600 / 32, 600 / 4096)
    for changed in (RunMetrics(samples_per_s=32.0), RunMetrics(energy_j=8000.0)):
        command_energy(changed, ranks)
        assert (changed.energy_per_sample_j, changed.energy_per_token_j) == (None, None)
    ranks[1].device_power["b"].steps_power_w = None
    absent = RunMetrics(energy_j=8000.0, samples_per_s=32.0)
    command_energy(absent, ranks)
    assert absent.energy_per_sample_j is None, "a part of the devices would look like all"
