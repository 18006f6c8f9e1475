"""Links, shipped files and commands of the documentation exist; test_blocks runs its blocks."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from benchmarks.planted_results import write_planted
from hpcbench.cli.main import COMMANDS
from hpcbench.config.cluster_profile import load_cluster_file
from hpcbench.config.sweep_loader import load_sweep
from hpcbench.errors import INSTALL_REPORT, INSTALL_WORKER
from hpcbench.results.timing_statistics import OPERATOR_S
from hpcbench.strategies.check_sweep import check_names
from tests.docs.blocks import make_targets

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for path in ROOT.glob("**/*.md")
    if ".venv" not in path.parts and not any(path.is_relative_to(ROOT / made) for made in ("build", "results/local"))
]


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_to_existing_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_on_pages_exist(page: Path) -> None:
    lines = re.findall(r"^(?:    |`)hpcbench ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in lines if name not in COMMANDS] == []
    targets = make_targets()
    made = re.findall(r"`?\bmake ([a-z-]+)\b(?=`|\s*(?:#|$|\())", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name in made if name not in targets] == []


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").glob("*.toml")), ids=page_id)
def test_shipped_sweeps_are_valid_under_their_file_name(path: Path) -> None:
    sweep = load_sweep(path)
    check_names(sweep)
    assert sweep.name == path.stem


@pytest.mark.parametrize("path", sorted((ROOT / "clusters").rglob("*.toml")), ids=page_id)
def test_every_shipped_profile_is_valid(path: Path) -> None:
    load_cluster_file(path)


def test_shipped_toml_fits_its_schema_in_an_editor() -> None:
    command = [str(Path(sys.executable).with_name("taplo")), "check"]
    files = [str(path) for folder in ("sweeps", "clusters") for path in sorted((ROOT / folder).rglob("*.toml"))]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "first", "skipped"),
    [("report planted", "Fastest", 2), (None, "nominal: ", 0)],
    ids=["report", "recommend"],
)
def test_samples_in_the_readme_are_the_beginning_of_the_output(
    tmp_path: Path, command: str | None, first: str, skipped: int
) -> None:
    """The sample of report is printed for planted results; that of recommend by the command above it."""
    write_planted(tmp_path / "planted")
    sample = re.search(
        rf"(?:    hpcbench ([^\n]+)\n\n)?```text\n({first}.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert sample
    columns = "80" if command else "110"
    words = [sys.executable, "-m", "hpcbench", *shlex.split(command or sample[1])]
    env = {**os.environ, "COLUMNS": columns}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert sample[2].splitlines() == printed[skipped : skipped + sample[2].count("\n")]


def test_pages_state_the_host_time_of_an_operator_that_the_oracle_uses() -> None:
    for page, words in (
        ("oracle.md", "operators of a step ({:.0f} us each"),
        ("formulas.md", "or {:.0f} us an operator"),
    ):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert words.format(OPERATOR_S * 1e6) in text, page


def test_the_commands_of_the_readme_work_in_a_new_project(tmp_path: Path) -> None:
    """Those before anything is submitted, as they stand, with the profile's name set as the README says."""
    block = next(
        block for block in (ROOT / "README.md").read_text().split("\n\n") if "hpcbench init my-project && cd" in block
    )
    commands = [line.split("#")[0].strip() for line in block.splitlines()]
    commands = [
        line
        for line in commands
        if not line.startswith("pip") and not re.search(r"hpcbench (submit|status|table|report|plot|bundle)", line)
    ]
    script = "\n".join(commands).replace(
        "hpcbench check", "sed -i 's/^name = .*/name = \"my-cluster\"/' clusters/my-cluster.toml\nhpcbench check", 1
    )
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=1" in done.stdout
    assert "quickstart on my-cluster: 6 runs" in done.stdout


@pytest.mark.slow
def test_the_wheel_carries_templates_clusters_and_sweeps(tmp_path: Path) -> None:
    """Installed without a clone, without torch: plan and render work, and profiles are found."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    (information,) = (tmp_path / "site").glob("hpcbench_dl-*.dist-info")
    metadata = (information / "METADATA").read_text()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nProject-URL: " in metadata
    assert (information / "licenses" / "LICENSE").is_file()
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import hpcbench.cli.main as m; print(m.__file__); m.entry_point()"
    done = subprocess.run(
        [sys.executable, "-c", code, *shlex.split("render quickstart --cluster generic-slurm")],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "#SBATCH --job-name=hpcbench-quickstart-0001-0" in done.stdout
    assert (tmp_path / "site" / "hpcbench" / "report" / "html" / "template" / "page.html.j2").is_file()
    listed = subprocess.run(
        [sys.executable, "-c", code, "models", "--model", "resnet18", "--dataset", "imagenet"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "3.63 G" in listed.stdout, listed.stderr


def test_messages_install_packages_and_never_the_name_of_another_project() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "hpcbench-dl"
    extras = {
        name: {re.split(r"[<>=]", entry)[0] for entry in entries}
        for name, entries in project["optional-dependencies"].items()
    }
    assert set(INSTALL_REPORT.split()[2:]) == extras["report"]
    assert set(INSTALL_WORKER.split()[2:]) == extras["worker"] | {"msgspec", "psutil"}
    for path in (ROOT / "hpcbench").rglob("*.py"):
        assert not re.search(r"pip install '?hpcbench", path.read_text(encoding="utf-8")), path


def test_pyproject_names_every_package_that_the_login_node_imports() -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["report"]
    named = {re.split(r"[<>=\[ ]", entry)[0] for entry in [*project["dependencies"], *extra]}
    imported = set()
    for path in (ROOT / "hpcbench").rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
        is_training = "strategies" in path.parts and "torch" in names
        if "worker" not in path.parts and not is_training:
            imported |= names
    foreign = imported - set(sys.stdlib_module_names) - {"hpcbench", "markupsafe"}
    assert foreign <= named, foreign - named
