"""Every command and every TOML on every page works, or the page says, with a reason, that the tests do not run it.

Commands run in a project with synthetic results and in front of stand-ins for SLURM's commands; those that train
find their runs done. What a page does on a real scheduler is followed by tests of its own.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli
from click.testing import CliRunner

from benchmarks.results_tree import result
from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import load_cluster, load_cluster_file, load_user_config
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import HpcbenchError
from hpcbench.report.comparison import load_bands
from hpcbench.results.results_tree import ResultsTree
from hpcbench.strategies.check_sweep import check_names
from hpcbench.submit.plan import make_plan
from hpcbench.submit.submission_record import read_sweep_record
from hpcbench.submit.submit import write_sweep_record
from tests.docs.blocks import Block, blocks, make_targets, pages

ROOT = Path(__file__).resolve().parents[2]
ALL = [block for page in pages() for block in blocks(page)]
FOLLOWED = {
    "docs/add-a-cluster.md": "tests/slurm/test_add_a_cluster.py",
    "docs/add-a-strategy.md": "tests/docs/test_add_a_strategy.py",
    "docs/calibration.md": "tests/cli/test_calibrate_commands.py",
    "benchmarks/oracle/README.md": "tests/predict/test_abci_predictions.py",
    "benchmarks/oracle/gpu.md": "tests/predict/test_gpu_predictions.py",
    "docs/collectives.md": "tests/cli/test_collectives_sweep.py",
    "docs/tutorial.md": "tests/slurm/test_tutorial.py",
    "docs/your-own-command.md": "tests/cli/test_command_examples.py",
}
"""Pages that a test of their own follows from top to bottom."""
PLACEHOLDERS = {"SWEEP": "quickstart", "C": "my-cluster", "FILE": "bands.toml"}
SMALLER = {
    "run --model": ["--dataset", "digits", "--batch-size", "2", "--set", "steps=1", "--set", "warmup_steps=0"],
    "data make": ["--samples", "2", "--workers", "1"],
    "doctor": ["--no-job"],
    "compare": ["--allow-empty"],
}
"""Options added to commands that would write gigabytes, wait for a node, or compare results of today with older ones."""
DONE = (("quickstart", "local"), ("quickstart", "my-cluster"), ("spread", "local"), ("nccl", "my-cluster"))
"""Sweeps and clusters whose runs have all ended."""
ALSO_CALLED = ("scaling", "pipelines", "collectives")
"""Other names that pages have for a sweep whose runs have ended."""


def block_id(block: Block) -> str:
    return f"{block.page}:{block.line}"


def of_kind(kind: str) -> list[Block]:
    return [block for block in ALL if block.kind == kind and not block.excuse]


def has_own_test(block: Block) -> bool:
    """Whether another test runs the block: those of its page, or test_ci, which runs the fenced console blocks."""
    return block.page in FOLLOWED or block.fence == "console"


def is_run(command: str) -> bool:
    return command.startswith(("hpcbench ", "cd ", "cp "))


def is_accounted_for(block: Block, command: str) -> bool:
    """Whether a command is run here, by a test of its page's own, by CI itself, or is excused."""
    targets = make_targets()
    made = re.fullmatch(r"make ([a-z-]+)(?: [A-Z]+=[\w.]+)*(?: +#.*)?", command)
    extras = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = re.fullmatch(r"pip install '(?:\.|hpcbench-dl)\[(\w+)\]'(?: +#.*)?", command)
    hooks = command == ".venv/bin/pre-commit install" and (ROOT / ".pre-commit-config.yaml").exists()
    return bool(
        block.excuse
        or is_run(command)
        or has_own_test(block)
        or (made and made[1] in targets)
        or (installed and installed[1] in extras)
        or hooks
    )


def test_no_block_is_unaccounted_for() -> None:
    left = [
        f"{block_id(block)}: {command}"
        for block in ALL
        if block.kind == "console"
        for command in block.commands()
        if not is_accounted_for(block, command)
    ]
    assert left == []
    assert {block.kind for block in ALL} == {"console", "toml", "python", "text"}
    assert all((ROOT / test).exists() for test in FOLLOWED.values())
    excused = [block for block in ALL if block.excuse]
    assert [block_id(block) for block in excused if len(block.excuse) < 20 or block.kind == "text"] == []
    # One in ten at most: a page is there to be tried.
    assert len(excused) <= len([block for block in ALL if block.kind in ("console", "toml")]) / 10


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which everything has run, with what the pages name beside it."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("sweeps", "clusters"):
        (folder / name).mkdir()
    for name in ("quickstart", "ddlbench", "paradl"):
        shutil.copy(ROOT / "sweeps" / f"{name}.toml", folder / "sweeps")
    shutil.copy(ROOT / "clusters" / "generic-slurm.toml", folder / "clusters")
    (folder / "clusters" / "my-cluster.toml").write_text(renamed(ROOT / "clusters" / "generic-slurm.toml"))
    for block in of_kind("toml"):
        if block.page == "docs/measurement.md":
            (folder / "spread.toml").write_text(block.text)
        if block.text.startswith('name = "nccl"'):
            (folder / "nccl.toml").write_text(block.text)
        if "[[band]]" in block.text:
            (folder / "bands.toml").write_text(block.text)
    (wide,) = (block for block in ALL if block.page == "docs/add-a-model.md" and "width=256" in block.text)
    for module in ("nets/wide.py", "my-models/nets.py"):
        (folder / module).parent.mkdir()
        (folder / module).write_text(wide.text + ("\n\nsmall = build\n" if module.endswith("nets.py") else ""))
    for name in ALSO_CALLED:
        text = (ROOT / "sweeps" / "quickstart.toml").read_text().replace('"quickstart"', f'"{name}"')
        (folder / "sweeps" / f"{name}.toml").write_text(text)
    for sweep, cluster in (*DONE, *((name, "local") for name in ALSO_CALLED)):
        plant(folder, sweep, cluster)
    for copy in ("results-of-october", "results-of-2025", "old", "new", "other-tree"):
        shutil.copytree(folder / "results", folder / copy)
    return folder


def renamed(profile: Path) -> str:
    return re.sub(r'^name = ".*"', 'name = "my-cluster"', profile.read_text(), flags=re.MULTILINE)


def plant(folder: Path, sweep: str, cluster: str) -> None:
    """Give every run of a sweep a result, half of them before a day that pages ask about."""
    source = random.Random(0)
    path = folder / f"{sweep}.toml"
    tree = ResultsTree(folder / "results").cluster(cluster)
    profile = folder / "clusters" / f"{cluster}.toml"
    loaded = load_cluster_file(profile)[0] if profile.exists() else load_cluster(cluster)[0]
    plan = make_plan(load_sweep(path if path.exists() else folder / "sweeps" / path.name), loaded, tree)
    write_sweep_record(plan, tree)
    for number, (run_id, spec) in enumerate(plan.runs.items()):
        made = result(spec, source)
        made.sweep, made.cluster, made.status, made.error = sweep, cluster, "ok", None
        tree.write_result(made)
        if number % 2:
            at = time.mktime((2026, 11, 1, 0, 0, 0, 0, 0, -1))
            os.utime(tree.result_path(run_id), (at, at))


@pytest.fixture
def call(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return the output of a command on a page, called in the folder of the last ``cd``."""
    project = tmp_path / "project"
    shutil.copytree(template, project)
    (tmp_path / "fake").mkdir()
    for name in [name for name in os.environ if name.startswith(("SLURM_", "HPCBENCH_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FAKE_STATE", str(tmp_path / "fake"))
    monkeypatch.setenv("PATH", f"{ROOT / 'tests' / 'fakes' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(project)
    bundled = CliRunner().invoke(cli, ["bundle", "quickstart", "--cluster", "local"])
    assert bundled.exit_code == 0, bundled.output
    Path("quickstart.hpcbench.tar.gz").rename("theirs.hpcbench.tar.gz")
    spread = read_sweep_record(ResultsTree(project / "results").cluster("local"), "spread")
    assert spread is not None

    def said(command: str) -> str:
        words = shlex.split(command, comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            shutil.copytree(template / "results", "results", dirs_exist_ok=True)
            return ""
        if words[0] == "cp":
            Path(words[2]).write_text(renamed(Path(words[1])))
            return ""
        known = {**PLACEHOLDERS, "RUN_ID": spread.run_ids[0]}
        # Nobody is there to leave a screen, no node to look at.
        arguments = [known.get(word, word) for word in words[1:] if word != "--watch"]
        arguments += next((more for first, more in SMALLER.items() if command.startswith(f"hpcbench {first}")), [])
        done = CliRunner().invoke(cli, arguments, prog_name="hpcbench")
        if isinstance(done.exception, HpcbenchError):
            raise AssertionError(f"{command}: {done.exception}")
        assert done.exit_code in (0, 1), f"{command}: {done.output}"
        assert done.exception is None or isinstance(done.exception, SystemExit), command
        return done.output

    return said


CONSOLES = [block for block in of_kind("console") if not has_own_test(block)]


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in CONSOLES}))
def test_commands_of_every_page_succeed(page: str, call: Callable[[str], str]) -> None:
    for block in CONSOLES:
        if block.page == page:
            for line in block.commands():
                for command in line.split(" && "):
                    if is_run(command):
                        call(command)


@pytest.mark.parametrize("block", of_kind("toml"), ids=block_id)
def test_toml_blocks_are_valid(block: Block, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, bands, a person's accounts, or keys of a profile."""
    project = tmp_path / "project"
    shutil.copytree(template, project)
    path = project / "block.toml"
    path.write_text(block.text)
    data = tomli.loads(block.text)
    if {"fixed", "grid", "include"} & set(data):
        check_names(load_sweep(path))
    elif "band" in data:
        assert load_bands(path)[0]
    elif {"accounts", "cluster"} & set(data):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        (tmp_path / "hpcbench").mkdir()
        shutil.copy(path, tmp_path / "hpcbench" / "config.toml")
        assert load_user_config().model_dump(exclude_unset=True) == data
    else:
        path = project / f"{data.get('name', 'block')}.toml"
        path.write_text(block.text if "name" in data else f'name = "block"\n{block.text}')
        load_cluster_file(path)


@pytest.mark.parametrize("block", of_kind("python"), ids=block_id)
def test_python_blocks_of_the_pages_compile(block: Block) -> None:
    text = textwrap.dedent(block.text)
    # What is to be put into a table is no statement by itself.
    compile(f"{{\n{text}}}" if text.startswith('"late_ddp"') else text, block_id(block), "exec")
