"""Completion in shells: names of sweeps, clusters, runs, columns and parameters, as a shell asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpcbench.cli.main import cli
from tests.cli.test_cli import ROOT
from tests.conftest import absent


def completed(words: str, cwd: Path, results: Path) -> list[str]:
    count = len(words.split(" ")) - 1
    environment = {
        "COMP_WORDS": words, "COMP_CWORD": str(count), "_HPCBENCH_COMPLETE": "bash_complete",
        "HPCBENCH_RESULTS": str(results),
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'hpcbench'; from hpcbench.cli.main import entry_point; entry_point()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line.startswith("plain,")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.toml").write_text('name = "mine"\n')
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "scaling.toml").write_text('name = "scaling"\n')
    (tmp_path / "r" / "mine" / "runs" / "ab" / "ab00000000000000").mkdir(parents=True)
    (tmp_path / "r" / "mine" / "sweeps").mkdir()
    (tmp_path / "r" / "mine" / "sweeps" / "scaled-before.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("hpcbench stat", ["status"]),
        ("hpcbench cluster sh", ["show"]),
        ("hpcbench plan scal", ["scaled-before", "scaling"]),
        ("hpcbench plan scaling --cluster min", ["mine"]),
        ("hpcbench table --cluster min", ["mine"]),
        ("hpcbench logs ab", ["ab00000000000000"]),
        ("hpcbench table --by strategy,batch", ["strategy,batch_size"]),
        ("hpcbench run scaling --set batch", ["batch_size="]),
        ("hpcbench run scaling --set grid.batch", ["grid.batch_size="]),
        ("hpcbench dry-run scal", ["scaled-before", "scaling"]),
        ("hpcbench check min", ["mine"]),
        ("hpcbench cluster show min", ["mine"]),
        ("hpcbench plot throu", ["throughput"]),
        ("hpcbench status --state pend", ["pending"]),
        ("hpcbench run --model resnet15", ["resnet152"]),
        ("hpcbench run --strategy zero1", ["zero1"]),
        ("hpcbench data make cosmoflow_2", ["cosmoflow_256"]),
    ],
)
def test_completion_lists_commands_names_and_values_with_the_prefix(
    project: Path, words: str, expected: list[str]
) -> None:
    assert completed(words, project, project / "r") == expected


def all_parameters() -> Iterator[tuple[str, click.Parameter]]:
    context = click.Context(cli, info_name="hpcbench")
    pending: list[tuple[str, click.Command]] = [("hpcbench", cli)]
    for name, command in pending:
        if isinstance(command, click.Group):
            commands = [(name, command.get_command(context, child)) for child in command.list_commands(context)]
            pending += [(f"{name} {entry.name}", entry) for _, entry in commands if entry is not None]
        yield from ((name, parameter) for parameter in command.params)


COMPLETED = {
    "sweep", "sweeps", "sources", "files", "cluster_name", "run_id", "prefix", "by", "pivot", "metric", "metrics", "sort",
    "kind", "model", "names", "strategy", "dataset", "datasets", "wanted", "statuses", "overrides",
}  # fmt: skip
"""Parameters that take a name which hpcbench has."""


def test_no_command_leaves_a_name_to_be_typed() -> None:
    named = [(command, parameter) for command, parameter in all_parameters() if parameter.name in COMPLETED]
    missing = [
        (command, parameter.name)
        for command, parameter in named
        if parameter._custom_shell_complete is None and not isinstance(parameter.type, click.Choice)
    ]
    assert {parameter.name for _, parameter in named} == COMPLETED
    assert missing == []


SCRIPTS = {
    "bash": """
compopt() {{ :; }}
COMP_WORDS=({words}); COMP_CWORD={count}
_hpcbench_completion hpcbench
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "zsh": """
compadd() {{ print -l -- $completions; }}
_describe() {{ print -l -- ${{(P)3}} | cut -d: -f1; }}
_path_files() {{ :; }}
words=({words}); CURRENT=$(( {count} + 1 ))
_hpcbench_completion
""",
    "fish": "\ncomplete -C '{line}' | cut -f1\n",
}
"""What a shell does when the user presses the key: in bash and zsh with the shell's own functions replaced."""


def script_of(shell: str, folder: Path) -> str:
    """The script that click prints."""
    command = folder / "bin" / "hpcbench"
    environment = {**os.environ, "_HPCBENCH_COMPLETE": f"{shell}_source", "PYTHONPATH": str(ROOT)}
    return subprocess.run([str(command)], env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hpcbench plan scal", {"scaled-before", "scaling"}),
        ("hpcbench plan scaling --cluster min", {"mine"}),
        ("hpcbench logs ab", {"ab00000000000000"}),
        ("hpcbench plot throu", {"throughput"}),
        ("hpcbench clea", {"clean"}),
    ],
)
def test_bash_zsh_and_fish_complete_sweeps_and_clusters(
    project: Path, shell: str, line: str, expected: set[str]
) -> None:
    if shutil.which(shell) is None:
        absent(shell, "it is not installed")
    words = line.split(" ")
    typed = SCRIPTS[shell].format(words=" ".join(words), count=len(words) - 1, line=line)
    folder = project / "bin"
    folder.mkdir()
    command = folder / "hpcbench"
    command.write_text(f"#!{sys.executable}\nfrom hpcbench.cli.main import entry_point\nentry_point()\n")
    command.chmod(0o755)
    script = "compdef() { :; }\n" * (shell == "zsh") + script_of(shell, project) + typed
    environment = {
        "HPCBENCH_RESULTS": str(project / "r"), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT), "HOME": str(project),
    }  # fmt: skip
    done = subprocess.run(
        [shell, *{"zsh": ["-f"], "fish": ["--no-config"]}.get(shell, []), "-c", script], cwd=project,
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected, done.stderr


def test_names_of_commands_import_none(project: Path) -> None:
    code = "import sys; sys.argv = ['hpcbench']\nfrom hpcbench.cli.main import entry_point\ntry: entry_point()\nexcept SystemExit: pass\nsys.exit(len({'polars', 'pydantic'} & set(sys.modules)))"
    environment = {"COMP_WORDS": "hpcbench st", "COMP_CWORD": "1", "_HPCBENCH_COMPLETE": "bash_complete"}
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, check=False).returncode == 0
