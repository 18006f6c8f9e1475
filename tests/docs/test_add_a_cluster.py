"""The steps of the page "add a cluster" without a scheduler; tests/slurm follows all of it."""

from __future__ import annotations

from pathlib import Path

from hpcbench.config.cluster_profile import load_cluster_file
from tests.docs.following import follow, steps

PAGE = "add-a-cluster.md"
NEEDS_A_SCHEDULER = ("cluster init", "hpcbench check clusters/my-cluster", "--cluster my-cluster")


def test_the_page_works_without_a_scheduler(tmp_path: Path) -> None:
    done = follow(tmp_path, PAGE, lambda step: not any(words in step for words in NEEDS_A_SCHEDULER))
    assert done.returncode == 0, done.stderr
    mine, _ = load_cluster_file(tmp_path / "my-project" / "clusters" / "my-lumi.toml")
    assert mine.node.scratch_folder == "/scratch/project_1/me"
    assert '"account": "project_1"' in done.stdout
    assert "next: qsub jobs/0.sh" in done.stderr
    assert (tmp_path / "my-project" / "jobs" / "0.sh").exists()


def test_the_page_goes_all_the_way_to_a_run() -> None:
    lines = [step for step in steps(PAGE) if step.startswith("hpcbench")]
    wanted = ["hpcbench init", "hpcbench cluster list", "hpcbench cluster init", "hpcbench check", "hpcbench doctor"]
    for words in [*wanted, "hpcbench render", "hpcbench run quickstart"]:
        assert [line for line in lines if line.startswith(words)], words
