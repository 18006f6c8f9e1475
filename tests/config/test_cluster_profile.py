"""Profiles over profiles, accounts from the user's own configuration, and what the larger schema refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hpcbench.config.cluster_profile import (
    ClusterProfile,
    find_cluster_profiles,
    load_cluster,
    load_cluster_file,
    merge_tables,
)
from hpcbench.config.run_spec import max_job_minutes
from hpcbench.errors import HpcbenchError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project" / "clusters" / "historic").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project" / "clusters"


def test_tables_are_laid_over_key_by_key(project: Path) -> None:
    (project / "base.toml").write_text(
        'name = "base"\ndescription = "all"\n[partitions.a]\nqos = "x"\n[partitions.b]\n[node]\ncores = 64\ndevices = 4\n'
        '[scheduler]\nconfig_file = "/etc/x.conf"\n[env]\nA = "1"\nB = "2"\n'
    )
    path = project / "mine.toml"
    path.write_text('name = "mine"\nextends = "base"\n[partitions.a]\nqos = "y"\n[node]\ncores = 56\n[env]\nB = "3"\n')
    profile, source = load_cluster("mine")
    assert source.path == path
    assert (profile.partitions["a"].qos, list(profile.partitions)) == ("y", ["a", "b"])
    assert (profile.node.cores, profile.node.devices) == (56, 4)
    assert profile.env == {"A": "1", "B": "3"}
    assert (profile.description, profile.scheduler.config_file) == ("all", "/etc/x.conf")


def test_a_profile_extends_the_shipped_one_of_its_name(project: Path) -> None:
    (project / "generic-slurm.toml").write_text('name = "generic-slurm"\nextends = "generic-slurm"\naccount = "mine"\n')
    profile, _ = load_cluster("generic-slurm")
    assert (profile.account, profile.request.gpus) == ("mine", "gpus-per-node")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": 'name = "a"\nextends = "bb"\n', "b": 'name = "b"\n'}, r"a.toml:2: extends = 'bb': there is no such"),
        (
            {"a": 'name = "a"\nextends = "a"\n'},
            r"a.toml:2: extends = 'a': profiles extend each other in a circle: a -> a",
        ),
        (
            {"a": 'name = "a"\nextends = "b"\n', "b": 'name = "b"\nextends = "a"\n'},
            r"b.toml:2: extends = 'a': profiles extend each other in a circle: a -> b -> a",
        ),
        ({"a": 'name = "a"\nextends = "b"\n[node]\ncore = 3\n', "b": 'name = "b"\n'}, r"a.toml:4: unknown key 'core'"),
    ],
)
def test_mistakes_in_what_is_extended_have_file_and_line(project: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (project / f"{name}.toml").write_text(text)
    with pytest.raises(HpcbenchError, match=message):
        load_cluster("a")


def test_profiles_one_folder_below_are_named_without_it(project: Path) -> None:
    (project / "historic" / "old.toml").write_text('name = "old"\n')
    assert find_cluster_profiles()["old"] == project / "historic" / "old.toml"
    assert load_cluster("old")[0].name == "old"


def test_accounts_are_the_users_own(project: Path, tmp_path: Path) -> None:
    (project / "base.toml").write_text('name = "base"\naccount_required = true\n')
    (project / "mine.toml").write_text('name = "mine"\nextends = "base"\n')
    (project / "other.toml").write_text('name = "other"\naccount = "its-own"\n')
    config = tmp_path / "xdg" / "hpcbench" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[accounts]\nbase = "project_1"\nother = "project_2"\n')
    found = {name: load_cluster(name)[0].account for name in ("base", "mine", "other")}
    assert found == {"base": "project_1", "mine": "project_1", "other": "its-own"}
    config.write_text('[account]\nbase = "project_1"\n')
    with pytest.raises(HpcbenchError, match=r"config.toml:1: unknown key 'account'\n  did you mean 'accounts'"):
        load_cluster("base")


def test_merging_replaces_lists_and_values() -> None:
    assert merge_tables({"a": [1], "b": {"c": 1, "d": 2}}, {"a": [2], "b": {"c": 3}}) == {
        "a": [2],
        "b": {"c": 3, "d": 2},
    }


STEPS = ((91, 120.0), (183, 360.0))


@pytest.mark.parametrize(
    ("nodes", "most", "steps", "node_hours", "expected"),
    [
        (1, None, (), None, None), (4, 60.0, (), None, 60.0),
        (91, 720.0, STEPS, None, 120.0), (92, 720.0, STEPS, None, 360.0), (184, 720.0, STEPS, None, 720.0),
        (1, None, (), 1.5, 90.0), (4, None, (), 1.5, 22.5), (4, 20.0, (), 1.5, 20.0),
    ],
)  # fmt: skip
def test_the_longest_job_time_follows_nodes_steps_and_node_hours(
    nodes: int, most: float | None, steps: tuple[tuple[int, float], ...], node_hours: float | None, expected: float
) -> None:
    assert max_job_minutes(nodes, most, steps, node_hours) == expected


WRONG_DIRECTIVES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"directives": {name: "1"}}, f" = '1': write {right} ")
        for name, right in (
            ("#SBATCH --exclusive", "exclusive"), ("--reservation", "reservation"), ("#SBATCH reservation=x", "reservation"),
            ("s", "oversubscribe"), ("mail_user", "mail-user"), ("memory", "mem"), ("memm", "mem"), ("Hint", "hint"),
            ("cluster", "clusters"), ("reservaton", "reservation"),
        )
    ),
    *(({"directives": {name: "1"}}, "'1': no directive of slurm") for name in ("z", "--", "a b", "3", "", "x\n#SBATCH")),
    *(({"scheduler": {"kind": "pbs"}, "directives": {name: "1"}}, "'1': no directive of pbs") for name in ("queue", "")),
    ({"scheduler": {"kind": "pbs"}, "directives": {"-W": "1"}}, 'directives.-W = \'1\': write W '),
    *(
        ({"directives": {name: "1"}}, f"hpcbench writes {ours} for each job: remove it; {way}.* sets it, or add '")
        for name, ours, way in (
            ("-A", "account", "account at the top of the file"), ("A", "account", "account at the top"),
            ("account", "this one", "account at the top"), ("partition", "this one", "partitions.NAME.name"),
            ("ntasks_per_node", "ntasks-per-node", "tasks_per_node of a sweep"),
            ("ntasks-per-node", "this one", "tasks_per_node of a sweep"), ("n", "ntasks-per-node", "tasks_per_node"),
            ("ntasks", "ntasks-per-node", "tasks_per_node"), ("cpus-per-task", "this one", "request.cpus_per_task"),
            ("gpus-per-node", "this one", "request.gpus"), ("gpus-per-task", "this one", "request.gpus"),
            ("gpus-per-socket", "gpus", "request.gpus"), ("signal", "this one", "scheduler.warning_s"),
        )
    ),
    *(({"directives": {name: "1"}}, " for each job: remove it ") for name in ("--time", "t", "D", "open-mode", "walltime")),
    ({"directives": {"gres": ["nvme:1", "gpu:4"]}}, "this one for each job: remove it; request.gpus sets it"),
    ({"directives": {"gres": "nvme:1"}, "request": {"gpus": "gres"}}, "this one for each job: remove it; request.gpus"),
    ({"directives": {"mem-per-cpu": "2G"}, "request": {"memory": "all"}}, "writes mem for each job.*; request.memory sets"),
    ({"directives": {"exclusive": True}, "request": {"exclusive": True}}, "this one for each job.*; request.exclusive"),
    (
        {"directives": {"constraint": "x"}, "partitions": {"a": {"constraint": "y"}}},
        "^(?s:.*)directives.constraint = 'x': hpcbench writes this one .*; partitions.NAME.constraint sets it",
    ),
    *(({"scheduler": {"kind": "pbs"}, "directives": {name: "x"}}, f"{name} = 'x': hpcbench writes this") for name in "oPql"),
]  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"directives": {"constraint": "scratch", "qos": "q", "mem": "2G", "gres": "nvme:1", "exclusive": "user"}},
        {"directives": {"disable-dcgm": True, "container-image": "a", "uenv": "b", "x_y": 1, "job-name": "n"}},
        {"directives": {"ntasks": 8, "gpus-per-node": 4}, "request": {"drop": ["ntasks-per-node", "gpus-per-node"]}},
        {"partitions": {"a": {"directives": {"account": "x"}, "request": {"drop": ["account"]}}}},
        {"scheduler": {"kind": "pbs"}, "directives": {"v": "A=1", "l": "select=1"}, "request": {"drop": ["l"]}},
        {"scheduler": {"kind": "local"}, "directives": {"anything": 1}},
    ],
)
def test_directives_that_contradict_nothing_are_accepted(values: dict[str, Any]) -> None:
    made = ClusterProfile.model_validate({"name": "c", **values})
    assert made.directives == values.get("directives", {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"request": {"gpus": "gres-typed"}}, "needs node.gres_type"),
        ({"request": {"gpus_on": "step"}, "launcher": "mpirun"}, "speaks to srun"),
        ({"launcher": "fork"}, "this profile's kind is 'slurm'"),
        (
            {"launcher": "fork", "scheduler": {"kind": "local"}, "launcher_args": ["--tee=3"]},
            "this profile's kind is 'local', its launcher_args are ..--tee=3",
        ),
        ({"binding": {"device_order": [1, 1]}, "node": {"devices": 2}}, "does not name each of the 2 devices once"),
        (
            {"node": {"ranks_per_device": 2}},
            "node.ranks_per_device = 2 is for scheduler.kind = 'local', this profile's is 'slurm'",
        ),
        ({"node": {"memory_bytes": 512}}, r"no machine has 512 B \(.* to .*\): write the unit, such as '80 GB'"),
        ({"request": {"memory": "node"}}, "request.memory = 'node' needs node.memory_bytes"),
        (
            {"request": {"memory": "node"}, "partitions": {"a": {"node": {"memory_bytes": 2**40}}, "b": {}}},
            "request.memory = 'node' of partition b needs node.memory_bytes",
        ),
        ({"request": {"memory_bytes": 64}}, r"no machine has 64 B \(.* to .*\): write the unit, such as '80 GB'"),
        (
            {"devices": {"a100": {"memory_bytes": 80}}},
            r"no machine has 80 B \(.* to .*\): write the unit, such as '80 GB'",
        ),
        (
            {"devices": {"a100": {"memory_bandwidth_bytes_per_s": "2039 TB/s"}}},
            r"no machine has 2.039e.15 B/s \(.* to .*\): write the unit, such as '2 TB/s'",
        ),
        (
            {"devices": {"a100": {"memory_bandwidth_bytes_per_s": 3350}}},
            r"no machine has 3350 B/s \(.* to .*\): write the unit, such as '2 TB/s'",
        ),
        (
            {"links": {"inter_node": {"latency_s": 1e-6, "bandwidth_bytes_per_s": 400}}},
            r"no machine has 400 B/s \(.* to .*\): write the unit, such as '200 Gbit/s'",
        ),
        (
            {"devices": {"a100": {"peak_flops_per_s": {"bf16": 312}}}},
            r"no machine has 312 FLOP/s \(.* to .*\): write the unit, such as '312 TFLOP/s'",
        ),
        (
            {"node": {"cores": 128, "devices": 4}, "request": {"cpus_per_device": 64}},
            "request.cpus_per_device = 64 takes 256 cores for 4 devices, and node.cores is 128",
        ),
        (
            {"node": {"device_type": "a1000"}, "devices": {"a100": {}}},
            "node.device_type = 'a1000' is not among the devices: a100",
        ),
        (
            {"partitions": {"a": {"max_time_min": 60, "time_limit_min": 4320}}},
            "partitions.a.time_limit_min = 4320 is longer than its max_time_min, 60",
        ),
        (
            {"partitions": {"a": {"min_nodes": 4, "max_nodes": 2}}},
            "partitions.a.min_nodes = 4 is above its max_nodes, 2",
        ),
        (
            {"partitions": {"a": {"max_time_min": 60}, "b": {"max_time_min": 90}}, "time_limit_min": 100},
            "time_limit_min = 100 is longer than any partition allows: the largest max_time_min is 90",
        ),
        (
            {"scheduler": {"warning_s": 7200}, "time_limit_min": 30},
            r"scheduler.warning_s = 7200 s is not below the time limit, 1800 s: .*; lower it, or raise time_limit_min",
        ),
        (
            {"scheduler": {"warning_s": 600}, "partitions": {"a": {"max_time_min": 10}}},
            "warning_s = 600 s is not below the time limit of partition a, 600 s",
        ),
        (
            {"directives": {"array": "0-3"}},
            "directives.array = '0-3': hpcbench writes this one for each job: remove it",
        ),
        ({"partitions": {"a": {"directives": {"time": 5}}}}, "partitions.a.directives.time = 5: hpcbench writes this"),
        ({"scheduler": {"kind": "pbs"}, "directives": {"J": "0-3"}}, "directives.J = '0-3': hpcbench writes this one"),
        (
            {"node": {"cores": 64}, "request": {"cpus_per_task": 128}},
            "request.cpus_per_task = 128 is above node.cores, 64",
        ),
        (
            {"node": {"cores": 64}, "request": {"cpus_per_task": 64}, "partitions": {"a": {"node": {"cores": 8}}}},
            "request.cpus_per_task = 64 of partition a is above node.cores, 8",
        ),
        *WRONG_DIRECTIVES,
        (
            {"request": {"drop": ["signal", "gpu-per-nod"]}},
            r"request.drop = \['signal', 'gpu-per-nod'\]: hpcbench writes no directive 'gpu-per-nod': did you mean "
            "'gpus-per-node'[?] choices: account, chdir, comment,",
        ),
        (
            {"partitions": {"a": {"request": {"drop": [""]}}}},
            r"partitions.a.request.drop = \[''\]: .* choices: account",
        ),
        ({"request": {"drop": ["array"]}}, "hpcbench writes no directive 'array'"),
        ({"scheduler": {"kind": "pbs"}, "request": {"drop": ["signal"]}}, "'signal': choices: J, N, P, S, j, l, o, q "),
        (
            {"environments": {"e": {"venv": "/a", "python": "/b"}}},
            "venv = '/a' has a python, and python = '/b' is another: keep one",
        ),
        ({"match": {"hosts": ["("]}}, "not a regular expression"),
        ({"environments": {"e": {"container": {}}}}, "either `command` or `kind`"),
        ({"environments": {"e": {"container": {"kind": "pyxis"}}}}, "needs an `image`"),
        (
            {"environments": {"e": {"container": {"kind": "uenv", "image": "x", "mounts": ["a:b"]}}}},
            "takes no `mounts`",
        ),
        ({"environments": {"e": {"container": {"kind": "pyxis", "image": "x", "modules": ["a"]}}}}, "shifter's"),
        ({"environments": {"e": {"container": {"command": ["x"], "image": "x"}}}}, "is the whole command"),
    ],
)
def test_contradictory_keys_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterProfile.model_validate({"name": "c", **values})


def test_a_file_beside_is_found_outside_of_the_folders_of_profiles(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('name = "base"\n[node]\ncores = 3\n')
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = "base"\n')
    assert load_cluster_file(tmp_path / "mine.toml")[0].node.cores == 3
