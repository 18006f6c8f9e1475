"""A sweep whose values look like commands: they are data in the plan, the script, the job and the table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcbench.results.results_tree import ClusterTree

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
VALUES = {
    "quotes": "'\"'\"' \\' \"",
    "lines": "one\ntwo\r\n\n",
    "command": "$(touch X) `touch X`; touch X & touch X | touch X > X",
    "directive": "\n#SBATCH --wrap='touch X'\n",
    "template": "{{ 7*7 }}{% include 'x' %}{# #}",
    "unicode": "\u202edlrow\u2066 \u00e4 \U0001f600",
    "escapes": "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "globs": "* ~ $HOME ${PATH} !! %n %A [a-z] ../../x",
    "long": "0123456789" * 1024,
    "empty": "",
    "dashes": "--tree=/ -rf",
}


def toml(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's, which also wants DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    variables = "".join(f"OMP_HOSTILE_{name} = {toml(value)}\n" for name, value in VALUES.items())
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.toml").write_text(
        f'name = "mine"\ndescription = {toml(VALUES["escapes"])}\nlauncher = "torchrun"\n[scheduler]\nkind = "local"\n'
        f"[request]\ncpus_per_task = 1\n[env]\n{variables.replace('OMP_HOSTILE', 'OMP_PROFILE')}"
    )
    (tmp_path / "hostile.toml").write_text(
        f'name = "hostile"\ndescription = {toml("".join(VALUES.values()))}\n[fixed]\nmodel = "resnet18"\n'
        'dataset = "digits"\nstrategy = "ddp"\nbatch_size = 4\nwarmup_steps = 1\nsteps = 1\ntasks_per_node = 2\n'
        f"[fixed.env]\n{variables}"
    )
    return tmp_path


def hpcbench(project: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "hpcbench", *arguments], cwd=project, capture_output=True, check=False, timeout=250,
        env={**os.environ, "HPCBENCH_RESULTS": str(project / "results")},
    )  # fmt: skip


@pytest.mark.slow
def test_hostile_values_reach_the_ranks_unchanged_and_no_shell(project: Path) -> None:
    done = [
        hpcbench(project, *arguments)
        for arguments in (
            ["check", "hostile.toml", "clusters/mine.toml"],
            ["plan", "hostile.toml", "--cluster", "mine"],
            ["plan", "hostile.toml", "--cluster", "mine", "--json"],
            ["predict", "hostile.toml", "--cluster", "mine"],
            ["run", "hostile.toml", "--cluster", "mine"],
            ["status", "hostile"],
            ["table", "hostile"],
            ["table", "hostile", "--json"],
            ["collect", "hostile"],
            ["bundle", "hostile"],
            ["table", "hostile.hpcbench.tar.gz"],
        )
    ]
    tree = ClusterTree(project / "results" / "mine")
    (run_id,) = tree.run_ids()
    done.append(hpcbench(project, "logs", run_id))
    for one in done:
        assert one.returncode == 0, (one.args, one.stderr.decode())
        assert CONTROL.findall(one.stdout.decode() + one.stderr.decode()) == []
    assert list(project.rglob("X")) == []
    result = tree.read_result(run_id)
    assert result is not None
    assert len(result.ranks) == 2
    seen = {name: value for name, value in result.provenance["env"].items() if "HOSTILE" in name or "PROFILE" in name}
    assert seen == {
        f"OMP_{source}_{name}": value for source in ("HOSTILE", "PROFILE") for name, value in VALUES.items()
    }


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('name = "../../x"\n[fixed]\n', ["check", "{}"]),
        ('name = "a\\nb"\n[fixed]\n', ["check", "{}"]),
        ('name = "a\\u001b[2J"\n[fixed]\n', ["run", "{}"]),
        ('name = "x"\n[fixed]\nmodel = "\\u001b[2J\\u202e"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 1\n', ["run", "{}"]),
        ('name = "x"\n[fixed]\n"\\u001b[2J\\u009b" = 1\n', ["check", "{}"]),
        ('name = "x"\n[fixed.env]\n"A B" = "1"\n', ["check", "{}"]),
        ('name = "x"\n[fixed.env]\n"A=$(touch X)" = "1"\n', ["check", "{}"]),
        ('name = "x"\n[fixed]\n', ["plan", "{}", "--cluster", "../../x"]),
        ('name = "x"\n[fixed]\n', ["plan", "{}", "--cluster", "x\x1b[2J\u202e"]),
        ('name = "x"\n[fixed]\n', ["status", "../../x"]),
        ('name = "x"\n[fixed]\n', ["status", "--cluster", "../.."]),
        ('name = "x"\n[fixed]\n', ["table", "--cluster", "../.."]),
        ('name = "x"\n[fixed]\n', ["bundle", "../../x"]),
        ('name = "x"\n[fixed]\n', ["logs", "../../x\x9b"]),
    ],
)  # fmt: skip
def test_an_invalid_name_is_refused_and_leaves_no_file(tmp_path: Path, text: str, arguments: list[str]) -> None:
    (tmp_path / "given.toml").write_text(text)
    done = hpcbench(tmp_path, *(argument.replace("{}", "given.toml") for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert CONTROL.findall(done.stdout.decode() + done.stderr.decode()) == []
    assert [path.name for path in tmp_path.rglob("*")] == ["given.toml"]
