"""Hostile values in whole job scripts: bash reads them, and what it starts gets the bytes that were written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.errors import RenderError
from hpcbench.paths import shared_folder
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine

TEXT = st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)
LINE = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=30)
PATH = st.text(alphabet=st.characters(exclude_characters="\x00/", exclude_categories=["Cs"]), min_size=1, max_size=30)
HOSTILE = "'\"$(touch owned)`id`\\\n#SBATCH --x; * ~ {{ 7 }} \u202e\x85\u2028 !! -n\t"
ENGINE = TemplateEngine([shared_folder("templates")])

# Stands in for the worker's interpreter: writes down how it was called and with which environment, then says that
# there is nothing to do.
INTERPRETER = """#!/bin/bash
printf '%s\\0' "$0" "$@" > "$DUMP/arguments"
env -0 > "$DUMP/environment"
exit 10
"""


def profile(kind: str, **values: object) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "c", "scheduler": {"kind": kind}, "launcher": "torchrun", **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quoting")
    (path / "bin").mkdir()
    (path / "dump").mkdir()
    return path


def checked(script: str) -> str:
    done = subprocess.run(["bash", "-n"], input=script.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return script


def run(script: str, folder: Path) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Return the arguments and the environment of the interpreter."""
    (folder / "job.sh").write_bytes(script.encode())
    env = {"PATH": "/usr/bin:/bin", "DUMP": str(folder / "dump")}
    done = subprocess.run(["bash", str(folder / "job.sh")], cwd=folder, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    arguments = (folder / "dump" / "arguments").read_bytes().split(b"\0")[:-1]
    pairs = (entry.partition(b"=") for entry in (folder / "dump" / "environment").read_bytes().split(b"\0")[:-1])
    return arguments, {name: value for name, _, value in pairs}


@given(st.lists(TEXT, min_size=2, max_size=4), PATH, LINE.filter(lambda text: "/" not in text))
@example([HOSTILE, ""], HOSTILE.replace("/", ""), "it's $HOME `id` \\ \"")
@example(["-n", "a\r\nb"], "-rf", " ")
def test_values_reach_what_the_script_starts_byte_by_byte(
    folder: Path, values: list[str], task_folder: str, interpreter: str
) -> None:
    python = folder / "bin" / f"python{interpreter}"
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    env = {f"V{number}": value for number, value in enumerate(values)}
    made = profile(
        "local", env={"V0": values[0]}, environments={"e": {"python": str(python), "env": {**env, "V0": values[0]}}}
    )
    place = folder / f"tasks{task_folder}"
    arguments, environment = run(
        checked(render_script(ENGINE, make_job_shape(made, 1, 1, environment="e"), "sweep", place, 3)), folder
    )
    python.unlink()
    assert arguments[0] == str(python).encode()
    assert str(place / "3.jsonl").encode() in arguments
    assert {name: environment[name.encode()].decode() for name in env} == env
    assert not (folder / "owned").exists()


@given(LINE, TEXT, st.one_of(TEXT, st.just("-fine")), st.one_of(PATH, st.just("plain")))
@example("project 42", HOSTILE, "fine", "plain")
@example("it's", "fine", "fine", "a b%A")
def test_directives_stay_on_their_line_or_are_refused(account: str, comment: str, name: str, place: str) -> None:
    where = Path("/shared") / place
    try:
        made = profile("slurm", account=account, directives={"comment": comment, f"own{name}": True})
        script = render_script(ENGINE, make_job_shape(made, 1, 1), "sweep", where, 0)
    except (ValidationError, RenderError):
        is_word = re.fullmatch(r"[\w.-]*", name, re.ASCII)
        assert not is_word or any(ord(letter) < 32 or ord(letter) == 127 for letter in comment + place)
        return
    lines = [line for line in checked(script).split("\n") if line.startswith("#SBATCH")]
    words = [shlex.split(line) for line in lines]
    assert all(len(line) == 2 for line in words), lines
    assert ["#SBATCH", f"--account={account}"] in words
    assert ["#SBATCH", f"--comment={comment}"] in words
    assert ["#SBATCH", f"--own{name}"] in words
    assert ["#SBATCH", f"--chdir={where}"] in words
    assert sys.executable in script
