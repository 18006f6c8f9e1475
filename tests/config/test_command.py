"""The table [command] of a sweep: its words, parameters and metrics, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.config.command import (
    Command,
    CommandMetric,
    command_values,
    command_warnings,
    fill_word,
    fill_words,
)
from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.config.sweep_file import apply_overrides
from hpcbench.config.sweep_loader import Sweep, expand_sweep
from hpcbench.config.toml_tables import parse_toml
from hpcbench.errors import ConfigErrors, HpcbenchError
from hpcbench.strategies.check_sweep import check_names
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

SWEEP = """\
name = "mine"
[command]
argv = ["python", "train.py", "--lr={lr}", "--dp", "{dp}", "{{x}}", "$(id) `id`"]
parameters.lr = { type = "float", unit = "1", default = 1e-3 }
parameters.dp = { type = "int", default = 1 }
parameters.width = { type = "int", default = 2 }
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
per = "step"
pattern = 'elapsed ([0-9.]+)'
[grid]
lr = [1e-3, 1e-2]
nodes = [1, 2]
[derive]
dp = "nodes * width"
[[exclude]]
when = "width > 2"
"""

WriteSweep = Callable[[str], Sweep]


def specs(sweep: Sweep) -> list[RunSpec]:
    resolved = [
        resolve_point(point, PartitionLimits("any")) for point in expand_sweep(sweep) if isinstance(point, dict)
    ]
    return [spec for spec in resolved if isinstance(spec, RunSpec)]


def test_parameters_are_swept_and_derived_by_their_own_names(write_sweep: WriteSweep) -> None:
    sweep = write_sweep(SWEEP)
    check_names(sweep)
    found = specs(sweep)
    assert [(spec.nodes, spec.parameters) for spec in found] == [
        (1, {"lr": 1e-3, "dp": 2, "width": 2}), (2, {"lr": 1e-3, "dp": 4, "width": 2}), (1, {"lr": 1e-2, "dp": 2, "width": 2}), (2, {"lr": 1e-2, "dp": 4, "width": 2}),
    ]  # fmt: skip
    assert {(spec.workload, spec.strategy, spec.model) for spec in found} == {("command", "command", "")}
    assert len({run_id(spec) for spec in found}) == 4


def test_the_words_of_a_run_are_passed_as_they_are(write_sweep: WriteSweep) -> None:
    sweep = write_sweep(SWEEP)
    assert sweep.command is not None
    values = command_values(specs(sweep)[3], sweep.command)
    assert [fill_word(word, values) for word in sweep.command.argv] == [
        "python", "train.py", "--lr=0.01", "--dp", "4", "{x}", "$(id) `id`",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "filled"),
    [
        (["p", "{flag}", "x"], ["p", "x"]), (["p", "{on}"], ["p", "--on"]), (["p", "--f={flag}"], ["p", "--f="]),
        (["p", "", "{{"], ["p", "", "{"]), (["p", "{flag}{flag}"], ["p", ""]),
    ],
)  # fmt: skip
def test_a_placeholder_alone_whose_value_is_empty_leaves_its_word_out(argv: list[str], filled: list[str]) -> None:
    assert fill_words(argv, {"flag": "", "on": "--on"}) == filled


def test_another_command_makes_other_runs(write_sweep: WriteSweep) -> None:
    first, other = (specs(write_sweep(text))[0] for text in (SWEEP, SWEEP.replace("train.py", "other.py")))
    assert (first.parameters, run_id(first) == run_id(other)) == (other.parameters, False)


def test_one_process_a_node_drives_the_devices_of_all_its_tasks(write_sweep: WriteSweep) -> None:
    sweep = write_sweep(
        SWEEP.replace("[command]", '[command]\nlaunch = "node"').replace("nodes = [1, 2]", "tasks_per_node = [4]")
    )
    spec = specs(sweep)[0]
    assert (spec.tasks_per_node, spec.devices_per_task, spec.devices, spec.options) == (1, 4, 4, {"launch": "node"})
    assert command_values(spec, sweep.command or Command(argv=[]))["devices_per_node"] == 4


def test_a_parameter_without_a_placeholder_is_found(write_sweep: WriteSweep) -> None:
    command = write_sweep(SWEEP.replace("--lr={lr}", "--lr=1")).command
    assert command is not None
    assert [key for key, _ in command_warnings(command)] == [
        ("command", "parameters", name) for name in ("lr", "width")
    ]


@pytest.mark.parametrize(
    ("name", "unit", "better", "warns"),
    [
        ("step_time", "ms", "lower", False), ("step_time", "J", "lower", True), ("step_time", "", "lower", True),
        ("step_time", "s", "higher", True), ("energy", "J", "higher", False),
    ],
)  # fmt: skip
def test_check_warns_of_a_step_time_that_is_no_time(name: str, unit: str, better: str, warns: bool) -> None:
    metric = CommandMetric(name=name, unit=unit, better=better, per="step", pattern="(x)")  # type: ignore[arg-type]
    warnings = list(command_warnings(Command(argv=["x"], metrics=[metric])))
    text = f"step_time in {unit!r}, {better} is better: only a time, lower is better, gives rates, MFU and plots of step times"
    assert warnings == ([(("command", "metrics", 0, "unit"), text)] if warns else [])


@pytest.mark.parametrize(
    ("word", "folder", "warns"),
    [
        ("train.py", "run", True), ("sub/train.py", "run", True), ("./train.py", "run", True),
        ("train.py", "/shared", False), ("{HPCBENCH_SWEEP_FOLDER}/train.py", "run", False), ("other.py", "run", False),
        ("sub", "run", False), ("", "run", False),
    ],
)  # fmt: skip
def test_a_script_beside_the_sweep_is_named_by_its_folder(tmp_path: Path, word: str, folder: str, warns: bool) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "sub/train.py"):
        (tmp_path / name).write_text("")
    command = Command(argv=["python3", word], folder=folder, sweep_folder=str(tmp_path))
    texts = [text for _, text in command_warnings(command)]
    expected = f"{word!r} lies beside the sweep, and each run begins in a folder of its own: write {{HPCBENCH_SWEEP_FOLDER}}/{word}"
    assert texts == ([expected] if warns else [])


METRIC = "pattern = 'elapsed ([0-9.]+)'"
WRONG: dict[str, tuple[str, str, str]] = {
    "placeholder": ("{lr}", "{lrr}", "sweep.toml:3: argv: no parameter 'lrr' for the placeholder in '--lr={lrr}'\n  did you mean 'lr'?"),
    "brace": ("{{x}}", "{x", "sweep.toml:3: argv: '{x' has a single '{'\n  write {{ for a brace"),
    "no group": (METRIC, "pattern = 'elapsed'", "sweep.toml:12: command.metrics.0.pattern: 'elapsed' has no group: put the number in brackets"),
    "no expression": (METRIC, "pattern = '(elapsed'", "sweep.toml:12: command.metrics.0.pattern: '(elapsed' is not a regular expression: missing )"),
    "two sources": (METRIC, METRIC + '\njson = "t"', "either pattern or json is needed, and both are given"),
    "no source": (METRIC, "", "either pattern or json is needed, and neither is given"),
    "name": ("[[command", 'parameters.steps = { type = "int", default = 1 }\n[[command', "sweep.toml:7: command.parameters.steps: 'steps' is a name that every run has"),
    "default": ("default = 1 }", 'default = "a" }', "default: a whole number expected, not \"a\""),
    "type": ("lr = [1e-3, 1e-2]", "lr = [true]", "sweep.toml:14: parameters.lr: a number expected, not true"),
    "unknown": ("lr = [1e-3, 1e-2]", "parameters.lrr = [1.0]", "[command] has no parameter 'lrr'\n  did you mean 'lr'?"),
    "unit": ('unit = "s"', 'unit = "secs"', "sweep.toml:9: command.metrics.0.unit: 'secs' is not a unit: write 's'"),
    "part of a unit": ('unit = "s"', 'unit = "GB/tick"', "'tick' is not a unit: for instance s, ms, bytes, GB/s, J, %"),
    "workload": ("[grid]", '[fixed]\nworkload = "collectives"\n[grid]', "sweep.toml:14: workload belongs to trainings of hpcbench"),
    "strategy": ("[grid]", '[fixed]\nstrategy = "ddp"\n[grid]', "sweep.toml:14: strategy belongs to trainings of hpcbench"),
    "launch's option": ("nodes = [1, 2]", 'options.launch = ["job"]', "options.launch belongs to trainings of hpcbench"),
    "training": ("nodes = [1, 2]", "batch_size = [8]", "sweep.toml:15: batch_size belongs to trainings of hpcbench"),
    "empty": ('argv = ["python", "train.py", "--lr={lr}", "--dp", "{dp}", "{{x}}", "$(id) `id`"]', "argv = []", "command.argv is empty: at least one value is needed"),
    "folder": ("[[command", 'folder = "here"\n[[command', "sweep.toml:7: command.folder: an absolute path or \"run\" is needed, not 'here'"),
    "folder in itself": ("[[command", 'folder = "/a/{HPCBENCH_RUN_FOLDER}"\n[[command', "sweep.toml:7: folder: no parameter 'HPCBENCH_RUN_FOLDER'"),
    "metrics": ("[grid]", '[[command.metrics]]\nname = "step_time"\nbetter = "lower"\njson = "t"\n[grid]', "sweep.toml:13: two metrics have the name 'step_time'"),
    "folder's word": ("[[command", 'folder = "/a/{b}"\n[[command', "folder: no parameter 'b' for the placeholder"),
    "outputs": ("[[command", 'outputs = ["../*"]\n[[command', "sweep.toml:7: command.outputs.0: '../*' leads out of the run's folder"),
    "per step": ("[[command", 'samples_per_step = "lr * batch"\n[[command', "unknown name 'batch'"),
    "derive": ('dp = "nodes * width"', 'dps = "nodes"', "derive: unknown parameter 'dps'\n  did you mean 'dp'? choices: dp, lr, width; or declare it: [command.parameters.dps]"),
    "other tool's name": ("lr = [1e-3, 1e-2]", "learning_rate = [0.1, 0.2]", "sweep.toml:14: learning_rate belongs to trainings of hpcbench, and these runs have workload = 'command'\n  did you mean 'lr'? choices: dp, lr, width; or declare one of another name: [command.parameters.my_learning_rate]"),
    "undeclared": ("lr = [1e-3, 1e-2]", "lrs = [0.1]", "sweep.toml:14: unknown key 'lrs' in [grid]\n  did you mean 'lr'? choices: dp, lr, width; or declare it: [command.parameters.lrs]"),
    "declared nowhere": ("lr = [1e-3, 1e-2]", "gamma = [0.1]", "unknown key 'gamma' in [grid]\n  choices: devices_per_task, dp, env, environment, lr, node, nodes, partition, precision, seed, tasks_per_node, time_limit_min, warmup_steps, width; or declare it: [command.parameters.gamma]"),
    "excluded": ('when = "width > 2"', "widht = 2", "unknown key 'widht' in [exclude.0]\n  did you mean 'width'?"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "other", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_refused_with_its_line(write_sweep: WriteSweep, text: str, other: str, message: str) -> None:
    assert text in SWEEP
    with pytest.raises((ConfigErrors, HpcbenchError)) as caught:
        check_names(write_sweep(SWEEP.replace(text, other, 1)))
    assert message in str(caught.value)


def test_the_other_name_of_a_parameter_is_suggested_only_where_it_is_declared(write_sweep: WriteSweep) -> None:
    text = 'name = "a"\n[command]\nargv = ["a", "{lr}"]\n[grid]\nlr = [1.0, 2.0]\n'
    with pytest.raises(ConfigErrors) as caught:
        write_sweep(text)
    assert "learning_rate" not in str(caught.value)
    assert str(caught.value).count("; or declare it: [command.parameters.lr]") == 1
    declared = text.replace("[grid]", "[command.parameters.learnrate]\ntype = 'float'\ndefault = 1.0\n[grid]")
    with pytest.raises(ConfigErrors, match=r"unknown key 'learn_rate' in \[grid\]\n  did you mean 'learnrate'\?"):
        write_sweep(declared.replace("lr = [", "learn_rate = ["))


def test_an_undeclared_parameter_that_is_set_for_one_command_is_refused_with_the_declared_ones(
    write_sweep: WriteSweep,
) -> None:
    data, _ = parse_toml(SWEEP, Path("sweep.toml"))
    for text in ("widht=1", "grid.widht=1,2"):
        with pytest.raises(
            ConfigErrors, match=f"--set {text}: unknown .* 'widht'\n  did you mean 'width'. .*; or declare"
        ):
            apply_overrides(data, [text])


def test_all_mistakes_in_all_metrics_are_listed_at_once(write_sweep: WriteSweep) -> None:
    wrong = """\
[[command.metrics]]
name = "1st"
better = "low"
pattern = "elapsed"
[[command.metrics]]
name = "step_time"
better = "lower"
json = "t"
pattern = "(t)"
value = "value / speed"
unit = "secs"
[grid]
lrs = [1]
"""
    with pytest.raises(ConfigErrors) as caught:
        write_sweep(SWEEP.replace("[grid]", wrong, 1).replace("{lr}", "{rl}", 1))
    text = str(caught.value)
    mistakes = (
        "14: command.metrics.1.name: letters, digits", "15: command.metrics.1.better: input",
        "16: command.metrics.1.pattern: 'elapsed' has no", "23: command.metrics.2.unit: 'secs' is not a unit",
        "25: unknown key 'lrs' in [grid]",
    )  # fmt: skip
    assert [mistake for mistake in mistakes if f"sweep.toml:{mistake}" not in text] == []
    assert len(caught.value.problems) == len(mistakes)


def test_parameters_need_a_command(write_sweep: WriteSweep) -> None:
    text = 'name = "a"\n[fixed]\nmodel = "vgg11"\ndataset = "cifar10"\nstrategy = "ddp"\nbatch_size = 8\nparameters.lr = 1.0\n'
    with pytest.raises(ConfigErrors, match=r"sweep.toml:7: parameters.lr is set without a \[command\]"):
        check_names(write_sweep(text))
