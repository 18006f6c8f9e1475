"""`cluster init`, `check`, `doctor` and `submit` on one configuration, as two releases of SLURM print it.

tests/fakes/recorded/slurm-* are the answers of the SLURM box of that release to a site's partitions: closed, hidden and
restricted ones, memory limits, kinds of nodes, a drained node, a reservation that has begun and one to come.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tomli
from click.testing import CliRunner

from hpcbench.cli.load_plan import load_plan
from hpcbench.cli.main import cli
from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.toml_tables import TomlSource
from hpcbench.results.results_tree import ResultsTree
from hpcbench.site import slurm_facts
from hpcbench.site.cluster_doctor import _check_slurm
from hpcbench.site.profile_check import check_against_scheduler, closed_partitions, compare_profile
from hpcbench.site.profile_writer import profile_toml
from hpcbench.site.slurm_facts import SiteFacts, query_site
from tests.submit.test_submit import finish

RECORDED = Path(__file__).resolve().parents[1] / "fakes" / "recorded"
REFUSED = {
    "acct": "does not take any of your accounts (box): nobody",
    "deny": "does not take any of your accounts (box): it denies box",
    "wheel": "takes members of the groups adm only",
    "qosonly": "does not take QOS 'normal', your default; it takes limited",
}
OUT_OF_SERVICE = {
    "closed": "is DOWN: its jobs wait",
    "drained": "is DRAIN: sbatch refuses jobs for it",
    "inactive": "is INACTIVE: sbatch refuses jobs for it",
}


@pytest.fixture(params=["22.05", "24.11"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiteFacts:
    """The facts that SLURM's commands print to an ordinary user; the commands stay on PATH."""
    bin_folder, answers = tmp_path / "bin", RECORDED / f"slurm-{request.param}"
    bin_folder.mkdir()
    sacctmgr = f'case "$*" in *"assoc where user="*"cluster=slurmbox "*) cat {answers}/assoc.txt ;; esac'
    for name, script in {"scontrol": f'for what; do :; done; cat "{answers}/$3.txt" 2>/dev/null || cat "{answers}/$2.txt"',
                         "sacctmgr": sacctmgr, "sbatch": "exit 0", "squeue": "exit 0", "scancel": "exit 0"}.items():  # fmt: skip
        (bin_folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_facts, "_own_groups", lambda: frozenset({"users"}))
    return query_site(ClusterProfile.model_validate({"name": "site"}))


def profile_of(*partitions: str, **more: object) -> ClusterProfile:
    return ClusterProfile.model_validate({"name": "site", "partitions": {name: {} for name in partitions}, **more})


def test_init_writes_what_the_scheduler_has(site: SiteFacts, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", site))
    profile, source = load_cluster_file(path)
    assert list(profile.partitions) == ["normal", "high", "low", "small", "long-q", "qosonly", "maxcpu", "memspec"]
    assert profile.partitions["qosonly"].qos == "limited"
    for name, reason in {**REFUSED, **OUT_OF_SERVICE}.items():
        if name != "qosonly":
            assert f"# {name} {reason.partition(':')[0] if name in OUT_OF_SERVICE else reason}.\n" in source.text
    assert "# secret is hidden: the site lists it only for `scontrol --all`.\n# [partitions.secret]\n" in source.text
    assert "# 1 of its 2 nodes takes no jobs now: n3 (IDLE+DRAIN, bad disk). It counts in max_nodes.\n" in source.text
    assert "# reservation maint holds n[1-2] from 2026-11-28T" in source.text
    problems, warnings = compare_profile(profile, site, source)
    assert problems == []
    assert any("partition long-q: 1 of its 2 nodes takes no jobs now: n3" in str(warning) for warning in warnings)


def test_memory_is_what_jobs_may_have(site: SiteFacts, tmp_path: Path) -> None:
    """RealMemory is 3072 MiB; n2 keeps MemSpecLimit 1024; small has MaxMemPerNode 1024; long-q DefMemPerNode 512."""
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", site))
    profile, _ = load_cluster_file(path)
    found = {
        key: ((profile.partition(key).node.memory_bytes or 0) / 2**20, profile.partition(key).request.memory)
        for key in ("normal", "small", "long-q", "maxcpu", "memspec")
    }
    assert found == {
        "normal": (3072, "none"), "small": (1024, "node"), "long-q": (2048, "node"), "maxcpu": (1024, "node"),
        "memspec": (2048, "node"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("partition", "request_table", "expected"),
    [
        ("small", {"memory": "all"}, "jobs ask for 2.0 GiB a node, those of small give at most 1.0 GiB"),
        ("small", {"memory_bytes": "2 GiB"}, "jobs ask for 2.0 GiB a node, those of small give at most 1.0 GiB"),
        ("memspec", {"memory_bytes": "3 GiB"}, "jobs ask for 3.0 GiB a node, those of memspec give at most 2.0 GiB"),
        ("memspec", {"memory": "all"}, None),
    ],
)
def test_check_finds_memory_that_no_job_may_have(
    site: SiteFacts, partition: str, request_table: dict[str, object], expected: str | None
) -> None:
    profile = profile_of(partition, request=request_table)
    problems = compare_profile(profile, site, TomlSource(Path("c.toml"), "")).problems
    assert [problem.message for problem in problems] == ([expected] if expected else [])


def test_partitions_that_exclude_a_user_are_named_by_check_doctor_and_submit(site: SiteFacts) -> None:
    profile, source = profile_of("normal", "secret", *REFUSED), TomlSource(Path("c.toml"), "")
    expected = {f"partition {name} {reason}" for name, reason in REFUSED.items()}
    assert {problem.message for problem in compare_profile(profile, site, source).problems} == expected
    checks = _check_slurm(profile, source)
    assert {check.detail for check in checks if check.what == "profile" and check.needed} == {
        f"c.toml: {text}" for text in expected
    }
    assert closed_partitions(profile, list(profile.partitions)) == REFUSED


def test_submit_and_retry_name_a_partition_in_which_its_jobs_wait(
    site: SiteFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho 4711\n")
    profile, sweep = tmp_path / "site.toml", tmp_path / "s.toml"
    profile.write_text('name = "site"\ndefault_partition = "acct"\n[partitions.acct]\n[partitions.normal]\n')
    sweep.write_text('name = "s"\n[fixed]\nmodel = "vit"\ndataset = "digits"\nstrategy = "single"\nbatch_size = 8\n')
    monkeypatch.setenv("HPCBENCH_RESULTS", str(tmp_path / "results"))
    reason = f"warning: partition acct {REFUSED['acct']}: its jobs wait until that changes\n"
    for partition, expected in (("acct", reason), ("normal", "")):
        words = ["submit", str(sweep), "--cluster", str(profile), "--set", f"partition={partition}"]
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert (done.exit_code, "1 submitted" in done.stderr) == (0, True), done.stderr
        assert "".join(line for line in done.stderr.splitlines(keepends=True) if "partition" in line) == expected
        failed = ResultsTree(tmp_path / "failed")
        plan = load_plan(str(sweep), str(profile), failed, [f"partition={partition}"])
        finish(plan.tree, plan, next(iter(plan.runs)), "failed")
        words = ["retry", *words[1:], "--results", str(failed.root)]
        again = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert "1 run submitted again" in again.stderr
        assert "".join(line for line in again.stderr.splitlines(keepends=True) if "warning" in line) == expected


def test_what_is_out_of_service_today_is_no_error_of_the_profile(site: SiteFacts) -> None:
    text = 'name = "site"\n' + "".join(f"[partitions.{name}]\n" for name in OUT_OF_SERVICE)
    profile, source = ClusterProfile.model_validate(tomli.loads(text)), TomlSource(Path("c.toml"), text)
    warnings = [str(warning) for warning in check_against_scheduler(profile, source) or ()]
    for line, (name, reason) in enumerate(OUT_OF_SERVICE.items(), start=2):
        assert f"c.toml:{line}: partition {name} {reason}" in warnings
        assert (
            f"c.toml:{line}: partition {name}: 2 of its 4 nodes take no jobs now: n3 (IDLE+DRAIN, bad disk), n4"
            in str(warnings)
        )
    checks = [check for check in _check_slurm(profile, source) if check.what == "profile"]
    assert {check.detail for check in checks} == set(warnings)
    assert not any(check.needed for check in checks)


def test_a_refusal_for_lack_of_nodes_passes_while_a_reservation_is_to_come(
    site: SiteFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "allocation failure: Requested node configuration is not available"
    (tmp_path / "bin" / "sbatch").write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
    profile, source = profile_of("memspec"), TomlSource(Path("c.toml"), "")
    warnings = check_against_scheduler(profile, source)
    assert warnings is not None
    assert [str(warning).partition(" from ")[0] for warning in warnings] == ["c.toml: reservation maint holds n[1-2]"]
    assert replace(site, reservations=()).partitions["memspec"].absent_nodes == ()
