"""Messages about mistakes in sweeps and options: the name that was meant, and the place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcbench.config import toml_tables
from hpcbench.config.cluster_profile import load_cluster_file
from hpcbench.config.expression import Expression
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import ConfigError, ConfigErrors, HpcbenchError, did_you_mean
from hpcbench.strategies.catalog import selectable_strategies
from hpcbench.strategies.check_sweep import check_names
from hpcbench.workloads.models import CUSTOM_MODEL_PATTERN
from tests.cli.test_cli import GOOD, ROOT, hpcbench


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("zero3", "fsdp"),
        ("zero2", "fsdp"),
        ("deepspeed", "fsdp"),
        ("pipeline", "1f1b"),
        ("tp", "tensor"),
        ("dp", "ddp"),
    ],
)
def test_strategy_names_of_other_tools_get_a_suggestion(wrong: str, meant: str) -> None:
    assert did_you_mean(wrong, selectable_strategies()).startswith(f"did you mean {meant!r}?")


def test_every_pattern_of_a_file_has_words() -> None:
    """A person need not read a regular expression. Names of models get a list of choices instead."""
    schemas = [(ROOT / "docs" / "schemas" / f"{name}.json").read_text() for name in ("sweep", "cluster")]
    patterns = {
        json.loads(found) for text in schemas for found in re.findall(r'"pattern":\s*("(?:[^"\\]|\\.)*")', text)
    }
    assert len(patterns) > 7
    assert patterns - {CUSTOM_MODEL_PATTERN} <= toml_tables._PATTERN_WORDS.keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("steps = 2", "pipeline_stages = 2"), "s.toml:7: unknown key 'pipeline_stages' in [fixed]\n  did you mean 'pp_degree'?"),
        (GOOD.replace("warmup_steps", "warmup_step"), "s.toml:6: unknown key 'warmup_step' in [fixed]\n  did you mean 'warmup_steps'?"),
        (GOOD.replace("steps = 2", 'steps = 2\nsteps = 3'), "s.toml:8: not valid TOML: steps is set twice"),
        (GOOD.replace('"resnet18"', '"resnet18'), "s.toml:3: not valid TOML: a string is not closed: model = \"resnet18"),
        (GOOD.replace('"tiny"', '"a/b"'), "s.toml:1: name: letters, digits, '.', '_' and '-' are allowed, 64 at most"),
        (GOOD + "[gird.options]\nx = [1]\n", "s.toml:11: unknown key 'gird'"),
        (GOOD + '[[exclude]]\nwhen = "nodes =! 2"\n', "not a valid expression: invalid syntax at character 7, '=! 2'\n  did you mean '!='?"),
        (GOOD + '[[exclude]]\nwhen = "batch_size = 8"\n', "'= 8'\n  did you mean '=='?"),
        (GOOD + "[zip]\nseed = [1, 2]\n", "\n  two pairs of brackets: [[zip]]"),
        (GOOD + "[command]\nargv = 'python3 x.py'\n", "\n  a list has brackets: argv = [\"a\", \"b\"]"),
        (GOOD + "[command.metrics]\nname = 'x'\n", "\n  two pairs of brackets: [[command.metrics]]"),
        (GOOD + "[[submit]]\npack = 1\n", "s.toml:11: submit: a table is needed, not [{'pack': 1}]\n  one pair of brackets: [submit]"),
        (GOOD + "[command]\nparameters.lr = 0.1\n", "parameters.lr: a table is needed, not 0.1\n  its keys: type, unit, default, description"),
        (GOOD + "[fixed.env]\nX = 1\n", "fixed.env.X: input should be a valid string, not 1\n  a text has quotes: \"1\""),
        (GOOD + "[fixed.env]\n'A B' = '1'\n", "fixed.env.A B: letters, digits and '_' are allowed, no digit first, not 'A B'"),
        (GOOD.replace("steps = 2", "steps = [2, 3]"), "steps: input should be a valid integer, not [2, 3]\n  several values of steps belong in [grid]"),
        (GOOD.replace("[1, 2]", "[1, 2, 1]"), "s.toml:10: tasks_per_node = 1 is listed twice\n  for several launches of every run set repeats = 2"),
        (GOOD + "[scaling]\nkind = 'weak'\nnodes = [2, 2]\n", "nodes = 2 is listed twice"),
    ],
)  # fmt: skip
def test_mistakes_are_reported_with_line_and_suggestion(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(HpcbenchError) as caught:
        check_names(load_sweep(tmp_path / "s.toml"))
    assert message in str(caught.value)
    assert len(max(str(caught.value).splitlines(), key=len)) < 300


def test_an_incomplete_expression_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match="not a valid expression: invalid syntax at "):
        Expression("nodes >")


def test_every_missing_option_is_named_with_its_choices() -> None:
    done = hpcbench("recommend", "--cluster", "local")
    assert done.returncode == 2
    for option in ("--model", "--dataset"):
        assert f"error: option {option} is missing\n  choices: " in done.stderr
    assert "error: --batch-size or --global-batch-size: neither is given\n" in done.stderr
    assert "error: " in hpcbench("recommend", "--nope").stderr


def test_check_takes_names_of_profiles() -> None:
    done = hpcbench("check", "generic-slurm")
    assert (done.returncode, "generic-slurm: a cluster profile, valid" in done.stderr) == (0, True), done.stderr


def test_check_calls_a_file_by_its_folder_and_its_keys(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "early.toml").write_text('name = "early"\n')
    (tmp_path / "mine.toml").write_text('name = "mine"\n[node]\ndata_folder = "/x"\n')
    early = hpcbench("check", "early", cwd=tmp_path)
    assert (early.returncode, "early.toml: model is missing" in early.stderr) == (2, True)
    profile = hpcbench("check", "mine.toml", cwd=tmp_path)
    assert "mine.toml:3: unknown key 'data_folder' in [node]\n  it belongs at the top of the file" in profile.stderr
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.toml").write_text('name = "mine"\n[partition.x]\n')
    misspelt = hpcbench("check", "clusters/mine.toml", cwd=tmp_path)
    assert "mine.toml:2: unknown key 'partition'\n  did you mean 'partitions'?" in misspelt.stderr
    planned = hpcbench("plan", "mine.toml", "--cluster", "local", cwd=tmp_path)
    assert (planned.returncode, "error: mine.toml: a cluster profile, no sweep" in planned.stderr) == (2, True)


def test_a_rule_about_keys_of_a_nested_table_names_the_line_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'name = "x"\n[environments.e]\nmodules = ["a"]\nvenv = "/a"\npython = "/b"\n[directives]\narray = "0-3"\n'
    )
    with pytest.raises(ConfigErrors, match=r"x.toml:4: environments.e: venv = '/a' has a python"):
        load_cluster_file(path)
    path.write_text(path.read_text().replace('python = "/b"\n', ""))
    with pytest.raises(ConfigErrors, match=r"x.toml:6: directives.array = '0-3': hpcbench writes this one"):
        load_cluster_file(path)
    path.write_text('name = "x"\n[partitions."a.b"]\n[partitions."a.b".directives]\n"#SBATCH --hold" = true\n')
    with pytest.raises(
        ConfigErrors, match=r"""x.toml:4: partitions."a.b".directives."#SBATCH --hold" = True: write hold"""
    ):
        load_cluster_file(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("node = { devices = 8, device_type = 'MI250X' }", "node.device_type = 'MI250X'"),
        ("node = { memory_bytes = 512 }", "node.memory_bytes: no machine has 512 B"),
        ("request = { cpus_per_device = 64 }", "request.cpus_per_device = 64"),
        ("request = { gpus_on = 'step' }", "request.gpus_on = 'step'"),
        ("request = { drop = ['none'] }", r"request.drop = \['none'\]"),
    ],
)
def test_a_wrong_value_of_a_partition_is_named_with_its_own_line(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        'name = "x"\nlauncher = "mpirun"\n[node]\ncores = 64\ndevices = 4\ndevice_type = "a100"\n[request]\n'
        f'gpus_on = "job"\n[devices.a100]\n[partitions.gpu]\n[partitions.amd]\n{table}\n'
    )
    with pytest.raises(ConfigErrors, match=rf"x.toml:12: partitions.amd.{message}"):
        load_cluster_file(path)


@pytest.mark.parametrize(("table", "near"), [("sbatch", "directives"), ("queues", "partitions")])
def test_a_table_by_its_name_in_other_tools_is_named_by_hpcbenchs(tmp_path: Path, table: str, near: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(f'name = "x"\n[{table}]\n')
    with pytest.raises(ConfigErrors, match=rf"x.toml:2: unknown key '{table}'\n  did you mean '{near}'\?"):
        load_cluster_file(path)
