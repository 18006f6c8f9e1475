"""Every command ends with a message: output streams of any kind, closed folders, accounts without a name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import absent
from tests.submit.conftest import fake_slurm

__all__ = ["fake_slurm"]

pytestmark = pytest.mark.slow

SWEEP = """name = "one"
description = "µ → ü 漢字"
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "single"
batch_size = 16
steps = 1
warmup_steps = 1
profile_steps = 0
"""
OF_RESULTS = ["table one", "table one --csv", "status one", "report one", "logs one", "collect one --json"]
OTHERS = ["--help", "check sweeps/µ.toml", "plan one --cluster local", "cluster list", "data list", "nonsense"]
UNPRIVILEGED = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
NAMELESS = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups",
            # The interpreter may lie in root's home.
            "--inh-caps", "+dac_override,+dac_read_search", "--ambient-caps", "+dac_override,+dac_read_search"]  # fmt: skip
needs_root = pytest.mark.usefixtures("root")


@pytest.fixture
def root() -> None:
    if os.getuid() != 0:
        absent("root", "only root changes its user, and gives folders away")


def run(
    command: str, project: Path, *, prefix: Sequence[str] = (), without: Sequence[str] = (), **env: str
) -> subprocess.CompletedProcess[bytes]:
    """The command in ``project``; it must end, and without a traceback."""
    environment = {name: value for name, value in os.environ.items() if name not in without} | env
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "hpcbench", *command.split()],
        cwd=project, env=environment, capture_output=True, check=False, timeout=200,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr + done.stdout, (command, done.stderr.decode(errors="replace"))
    return done


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with one measured run."""
    project = tmp_path_factory.mktemp("project")
    (project / "sweeps").mkdir()
    (project / "clusters").mkdir()
    (project / "sweeps" / "one.toml").write_text(SWEEP, encoding="utf-8")
    assert run("run one --cluster local", project).returncode == 0
    return project


@pytest.fixture
def project(measured: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(measured, tmp_path / "project", symlinks=True))


@pytest.fixture(scope="module")
def codes(measured: Path) -> dict[str, int]:
    """The exit code of each command in this process's encoding."""
    return {command: run(command, measured).returncode for command in [*OF_RESULTS, *OTHERS]}


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp437:strict", "utf-16"])
def test_commands_print_in_any_encoding(project: Path, codes: dict[str, int], encoding: str) -> None:
    for command, code in codes.items():
        done = run(command, project, PYTHONIOENCODING=encoding)
        assert done.returncode == code, command
        (done.stdout if "--json" not in command else b"").decode(encoding.partition(":")[0])


def test_a_table_in_ascii_has_ascii_lines(project: Path) -> None:
    done = run("table one", project, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert b"------" in done.stdout
    assert b"single" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "< /dev/null | head -1", "| true"])
def test_a_stream_that_is_closed_is_no_error(project: Path, redirection: str) -> None:
    for command in [
        "table one",
        "status one",
        "plan one --cluster local",
        "--help",
        "collect one --json",
        "cluster list",
    ]:
        line = f"set -o pipefail; {sys.executable} -m hpcbench {command} {redirection}"
        done = subprocess.run(["bash", "-c", line], cwd=project, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (0, False, False), command


def test_output_to_a_full_device_is_an_error_with_the_reason(project: Path) -> None:
    for command in ["table one", "plan one --cluster local", "--help", "collect one --json", "cluster show local"]:
        line = f"{sys.executable} -m hpcbench {command} > /dev/full"
        done = subprocess.run(["bash", "-c", line], cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 3, command
        assert done.stderr.endswith("error: cannot write the output: No space left on device\n")


@needs_root
@pytest.mark.parametrize("closed", ["results", "results/local/runs", "sweeps", "clusters", "."])
def test_a_folder_that_may_not_be_entered_is_named(project: Path, closed: str) -> None:
    folder = project / closed
    os.chown(folder, 65534, 65534)
    folder.chmod(0o700)
    for command in [
        *OF_RESULTS,
        *OTHERS,
        "submit one --cluster local",
        "cancel one",
        "retry one",
        "bundle one --out b",
    ]:
        done = run(command, project, prefix=UNPRIVILEGED)
        if command == "table one" and closed.startswith("results"):
            assert done.returncode == 3
            assert f"{folder} belongs to uid 65534, gid 65534, mode 0700" in done.stderr.decode()


@needs_root
def test_a_home_that_may_not_be_entered_is_passed_over(project: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, 65534, 65534)
    for command in ["plan one --cluster local", "table one", "predict one --cluster local", "cluster list"]:
        assert run(command, project, prefix=UNPRIVILEGED, HOME=str(home)).returncode == 0, command


@needs_root
@pytest.mark.usefixtures("fake_slurm")
@pytest.mark.parametrize("key", ["venv", "python"])
def test_an_interpreter_that_may_not_be_seen_is_left_to_the_job(project: Path, tmp_path: Path, key: str) -> None:
    venv = tmp_path / "closed"
    (venv / "bin").mkdir(parents=True)
    path = venv if key == "venv" else venv / "bin" / "python"
    text = f'name = "c"\ndefault_environment = "e"\n[environments.e]\n{key} = "{path}"\n'
    (project / "clusters" / "c.toml").write_text(text)
    os.chown(venv, 65534, 65534)
    venv.chmod(0o700)
    done = run("submit one --cluster c", project, prefix=UNPRIVILEGED)
    assert (done.returncode, b"1 submitted" in done.stdout + done.stderr) == (0, True), done.stderr
    assert b"Permission denied" in run("doctor --cluster c --no-job", project, prefix=UNPRIVILEGED).stdout


def test_a_current_folder_that_was_removed_is_named(tmp_path: Path) -> None:
    line = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m hpcbench"
    for command in ["status", "table one", "plan one", "cluster list", "check one.toml"]:
        done = subprocess.run(
            ["bash", "-c", f"{line} {command}"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (3, "error: the current folder was removed: cd to another one\n"), (
            command
        )


@needs_root
@pytest.mark.usefixtures("fake_slurm")
def test_an_account_without_a_name_and_a_home_runs_every_command(project: Path) -> None:
    (project / "clusters" / "c.toml").write_text('name = "c"\n[partitions.p]\n')
    without = ["USER", "LOGNAME", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"]
    others = [
        "check clusters/c.toml",
        "submit one --cluster c",
        "submit one --cluster c --wait",
        "bundle one --out b",
    ]
    for command in [
        *OF_RESULTS,
        *OTHERS,
        *others,
        "run one --cluster local --set steps=2",
        "cluster show ~nobody1/c.toml",
    ]:
        run(command, project, prefix=NAMELESS, without=without, TORCHINDUCTOR_CACHE_DIR="")
