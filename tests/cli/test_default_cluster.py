"""The cluster of commands without ``--cluster``, and profiles that are named by their path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import default_cluster, matching_profiles
from hpcbench.errors import ConfigError
from tests.cli.test_cli import GOOD, hpcbench

PROFILE = 'name = "{name}"\n[scheduler]\nkind = "local"\n[match]\nvariables = {{ HERE = "{here}" }}\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two profiles, in which no other setting chooses a cluster."""
    for name in ("HPCBENCH_CLUSTER", "HERE", "SLURM_JOB_ID", "HPCBENCH_RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "hpcbench").mkdir(parents=True)
    folder = tmp_path / "project"
    (folder / "clusters").mkdir(parents=True)
    for name in ("one", "two"):
        (folder / "clusters" / f"{name}.toml").write_text(PROFILE.format(name=name, here=name))
    (folder / "tiny.toml").write_text(GOOD)
    monkeypatch.chdir(folder)
    return folder


def test_the_source_nearest_to_the_command_decides(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_cluster().name == "local"
    stderr = hpcbench("plan", "tiny.toml").stderr
    reason = "--cluster is not given, and this machine is no login node of a known cluster"
    assert stderr.splitlines()[0] == f"using cluster local, because {reason}"
    monkeypatch.setenv("HERE", "two")
    assert (default_cluster().name, "login node" in default_cluster().reason) == ("two", True)
    user = tmp_path / "config" / "hpcbench" / "config.toml"
    user.write_text('cluster = "of-the-user"\n[accounts]\none = "mine"\n')
    assert (default_cluster().name, default_cluster().reason) == ("of-the-user", f"{user} sets it")
    (project / "hpcbench.toml").write_text('cluster = "of-the-project"\n')
    assert (default_cluster().name, default_cluster().reason) == ("of-the-project", f"{project}/hpcbench.toml sets it")
    monkeypatch.setenv("HPCBENCH_CLUSTER", "of-the-variable")
    assert default_cluster().name == "of-the-variable"


def test_a_path_in_the_projects_file_is_beside_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "hpcbench.toml").write_text('cluster = "far/mine.toml"\n')
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert default_cluster().name == str(project / "far" / "mine.toml")


def test_two_profiles_of_one_login_node_are_not_guessed_between(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "one")
    (project / "clusters" / "extended.toml").write_text('name = "extended"\nextends = "one"\n')
    assert matching_profiles() == ["extended"], "a profile counts before the one that it extends"
    (project / "clusters" / "third.toml").write_text(PROFILE.format(name="third", here="one"))
    with pytest.raises(ConfigError, match=r"login node of 2 clusters: extended, third\n  name one: --cluster"):
        default_cluster()


def test_a_job_is_no_login_node(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "one")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert default_cluster().name == "local"


def test_a_wrong_key_in_the_projects_file_has_its_line(project: Path) -> None:
    (project / "hpcbench.toml").write_text('\nclustr = "x"\n')
    done = hpcbench("plan", "tiny.toml", cwd=project)
    assert (done.returncode, "hpcbench.toml:2: unknown key 'clustr'" in done.stderr) == (2, True), done.stderr
    assert "did you mean 'cluster'?" in done.stderr


def test_run_on_a_login_node_does_not_train_there(project: Path) -> None:
    text = PROFILE.format(name="site", here="site").replace('"local"', '"slurm"')
    (project / "clusters" / "site.toml").write_text(text)
    done = hpcbench("run", "tiny.toml", cwd=project, env={"HERE": "site", "PATH": "/nowhere"})
    assert "using cluster site, because this machine" in done.stderr
    assert (done.returncode, "sbatch" in done.stderr) == (3, True), done.stderr
    assert not list(project.glob("results/*/runs/*"))


def test_the_default_is_printed_and_filters_nothing(project: Path) -> None:
    environment = {"HPCBENCH_CLUSTER": "two"}
    done = hpcbench("plan", "tiny.toml", "--json", cwd=project, env=environment)
    assert (done.returncode, '"cluster": "two"' in done.stdout) == (0, True), done.stderr
    assert done.stderr == "using cluster two, because $HPCBENCH_CLUSTER is set\n"
    table = hpcbench("table", cwd=project, env=environment)
    assert (table.returncode, table.stderr) == (0, f"no results yet in {project}/results\n")


def test_a_profile_may_be_a_path(project: Path) -> None:
    """``status`` and ``cancel`` accept the path afterwards, too."""
    (project / "far").mkdir()
    (project / "far" / "mine.toml").write_text('name = "mine"\n[scheduler]\nkind = "local"\n')
    (project / "tiny.toml").write_text(GOOD.replace("4", "5").replace('"single", "ddp"', '"single"'))
    done = hpcbench("submit", "tiny.toml", "--cluster", "far/mine.toml", "--wait", cwd=project)
    assert "sweep tiny on mine: 1 run," in done.stderr, done.stderr
    for command in (["status"], ["cancel", "tiny"], ["table", "--cluster", "far/mine.toml"]):
        after = hpcbench(*command, cwd=project)
        assert (after.returncode in (0, 1), "unknown cluster" in after.stderr) == (True, False), after.stderr
    wrong = hpcbench("plan", "tiny.toml", "--cluster", "far/mime.toml", cwd=project)
    assert (wrong.returncode, "did you mean 'far/mine.toml'?" in wrong.stderr) == (2, True)
