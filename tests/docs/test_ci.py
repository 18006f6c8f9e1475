"""The examples for CI servers: their commands, as a pull request and its baseline execute them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "ci"


def lines_of(script: str) -> list[str]:
    return [line for line in script.splitlines() if line.strip()]


def github_commands(event: str) -> tuple[list[str], dict[str, str]]:
    """The commands of the job after ``event`` (push or pull_request), and its environment."""
    job: dict[str, Any] = yaml.safe_load((EXAMPLES / "github.yml").read_text())["jobs"]["performance"]
    steps = [step for step in job["steps"] if "run" in step]
    wanted = [step for step in steps if "event_name" not in step.get("if", "") or f"'{event}'" in step["if"]]
    return [line for step in wanted for line in lines_of(step["run"])], job["env"]


def gitlab_commands(name: str) -> tuple[list[str], dict[str, str]]:
    jobs: dict[str, Any] = yaml.safe_load((EXAMPLES / "gitlab-ci.yml").read_text())
    job = {**jobs[jobs[name]["extends"]], **jobs[name]}
    return [*job["before_script"], *job["script"], *job.get("after_script", [])], jobs["variables"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the sweep, made small enough for a test."""
    (tmp_path / "ci").mkdir()
    text = (EXAMPLES / "performance.toml").read_text()
    for key, value in {"repeats": 1, "warmup_steps": 1, "steps": 2, "batch_size": 2}.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    text = re.sub(r"^strategy = .*$", 'strategy = ["single"]', text, flags=re.MULTILINE)
    (tmp_path / "ci" / "performance.toml").write_text(text)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "hpcbench"
    command.write_text(f"#!{sys.executable}\nfrom hpcbench.cli.main import entry_point\nentry_point()\n")
    command.chmod(0o755)
    return tmp_path


def execute(commands: list[str], environment: dict[str, str], folder: Path) -> list[int]:
    """The exit code of each command, in a checkout without results."""
    shutil.rmtree(folder / "results", ignore_errors=True)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, **environment, "PATH": path, "PYTHONPATH": str(ROOT)}
    codes = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=170
        )
        print(command, done.returncode, done.stdout, done.stderr, sep="\n")
        codes.append(done.returncode)
    return codes


@pytest.mark.slow
# The commands of both are compared with each other by a test below.
@pytest.mark.parametrize("server", ["github", pytest.param("gitlab", marks=pytest.mark.soak)])
def test_a_request_is_compared_with_the_baseline(repository: Path, server: str) -> None:
    baseline = github_commands("push") if server == "github" else gitlab_commands("baseline")
    request = github_commands("pull_request") if server == "github" else gitlab_commands("compare")
    # Without a baseline the comparison is an error, not a success.
    without = execute([line for line in request[0] if " compare " in line], request[1], repository)
    assert without == [2]
    assert execute(*baseline, repository) == [0] * len(baseline[0])
    assert (repository / "baselines" / "main.hpcbench.tar.gz").is_file()
    assert execute(*request, repository) == [0] * len(request[0])
    suite = xml.etree.ElementTree.parse(repository / "comparison.xml").getroot()
    assert len(list(suite.iter("testcase"))) == 1
    assert (repository / "comparison.md").is_file()
    assert "<html" in (repository / "report.html").read_text()


def test_both_servers_and_the_page_have_the_same_commands() -> None:
    """Without options that only a server needs."""

    def measuring(commands: list[str]) -> list[str]:
        kept = [line for line in commands if re.search(r"hpcbench (run|bundle|compare) |^mkdir", line)]
        names = [line.replace('"$BASELINE"', "baselines/main.hpcbench.tar.gz") for line in kept]
        return [line.replace(" --cluster local", "").replace(" --out comparison.md", "") for line in names]

    on_page = [block.commands() for block in blocks(ROOT / "docs" / "results.md") if block.fence == "console"]
    assert measuring(github_commands("push")[0]) == measuring(gitlab_commands("baseline")[0]) == measuring(on_page[0])
    assert (
        measuring(github_commands("pull_request")[0])
        == measuring(gitlab_commands("compare")[0])
        == measuring(on_page[1])
    )
