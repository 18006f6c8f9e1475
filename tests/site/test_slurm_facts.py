"""Facts of the scheduler: parsing, writing a profile, comparing a profile."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.toml_tables import TomlSource, validate_table
from hpcbench.site.partition_facts import GpuCount, NodeFacts
from hpcbench.site.profile_check import compare_profile
from hpcbench.site.profile_writer import profile_toml
from hpcbench.site.slurm_facts import (  # fmt: skip
    SiteFacts,
    parse_associations,
    parse_gres,
    parse_minutes,
    parse_nodes,
    parse_oneliner,
    parse_partitions,
    parse_qos,
    parse_slurm_config,
    query_site,
)

RECORDED = Path(__file__).resolve().parents[1] / "fakes" / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:4", [(None, 4)]), ("gpu:4(S:0)", [(None, 4)]), ("gpu:4(S:0-1)", [(None, 4)]), ("gpu", [(None, 1)]),
        ("gpu:8(S:0,2-3)", [(None, 8)]), ("gpu:a100:4(S:0-1)", [("a100", 4)]), ("gpu:volta:8(S:0-1)", [("volta", 8)]),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", [("nvidia_h100_80gb_hbm3", 8)]),
        ("gpu:A100_sxm4_40gb:4", [("A100_sxm4_40gb", 4)]),
        ("gpu:nvidia_a100-pcie-40gb:2", [("nvidia_a100-pcie-40gb", 2)]), ("gpu:geforce_rtx_2060:1", [("geforce_rtx_2060", 1)]),
        ("gpu:a100:1,gpu:a100_3g.20gb:2", [("a100", 1), ("a100_3g.20gb", 2)]),
        ("gpu:tesla:2,gpu:kepler:2,mps:400,bandwidth:lustre:no_consume:4G", [("tesla", 2), ("kepler", 2)]),
        ("gpu:2,shard:64", [(None, 2)]), ("gpu:fake1:1(S:0),gpu:fake2:1(S:0)", [("fake1", 1), ("fake2", 1)]),
        ("gres/gpu=8,gres/gpu:h100=8", [("h100", 8)]), ("gres/gpu:h100=2", [("h100", 2)]), ("gres/gpu=8", [(None, 8)]),
        ("cpu=8,mem=3G,billing=8,gres/gpu=4", [(None, 4)]), ("gpu:h100:8(IDX:0-7)", [("h100", 8)]),
        ("gpu:1080ti:8(S:0-1)", [("1080ti", 8)]), ("gpu:1080ti:1(IDX:0),gpu:980gtx:1(IDX:1)", [("1080ti", 1), ("980gtx", 1)]),
        ("gpu:2080ti:4(S:0),gpu:a100:4(S:1)", [("2080ti", 4), ("a100", 4)]), ("gpu:2080:4", [("2080", 4)]),
        ("gpu:a100:2(S:0-1),gpu:3g.20gb:4(S:0-1)", [("a100", 2), ("3g.20gb", 4)]), ("gpu:3g.20gb", [("3g.20gb", 1)]),
        ("gpu:a100:4(S:0,2-3)(IDX:0,1)", [("a100", 4)]), ("gpu:a100:4(CPU:0-63),gpu:l4:2", [("a100", 4), ("l4", 2)]),
        ("gpu:tesla:no_consume:4", [("tesla", 4)]), ("gpu:no_consume:4", [(None, 4)]), ("gpu:2k", [(None, 2048)]),
        ("gres/gpu=6,gres/gpu:3g.20gb=4", [(None, 2), ("3g.20gb", 4)]), ("gres/gpu=4,gres/shard=40", [(None, 4)]),
        ("shard:a100:40,mps:gpu:4", []), ("gpu::4", []), ("gpu:a:b:4", []),
        ("craynetwork:4,gpu:2", [(None, 2)]), ("gpu:0", []), ("N/A", []), ("(null)", []), ("", []), ("shard:gpu:4", []),
    ],
)  # fmt: skip
def test_every_form_of_gres_is_parsed(text: str, expected: list[tuple[str | None, int]]) -> None:
    assert parse_gres(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1-00:00:00", 1440.0), ("00:30:00", 30.0), ("30:30", 30.5), ("45", 45.0), ("2-12", 3600.0), ("UNLIMITED", None),
     ("", None), ("NONE", None), ("5-00:00:00", 7200.0)],
)  # fmt: skip
def test_slurm_time_limits_are_parsed_to_minutes(text: str, expected: float | None) -> None:
    assert parse_minutes(text) == expected


def box() -> SiteFacts:
    nodes = parse_nodes(recorded("box-node"))
    settings = parse_slurm_config(recorded("box-config"))
    return SiteFacts(
        cluster=settings["ClusterName"],
        version=settings["SLURM_VERSION"],
        partitions=parse_partitions(recorded("box-partition"), nodes),
        qos=parse_qos("normal|||||\nlimited|02:00:00|2|5|cpu=64,node=2,gres/gpu=8|\nlarge|||||node=2\n"),
        associations=parse_associations("box|limited,normal|normal|\nroot|normal||\n"),
        max_array_size=int(settings["MaxArraySize"]),
        settings=settings,
        groups=frozenset({"users"}),
    )


def test_the_output_of_a_real_scheduler_is_parsed() -> None:
    facts = box()
    assert (facts.cluster, facts.max_array_size, facts.default_qos) == ("slurmbox", 1001, "normal")
    assert list(facts.partitions) == ["normal", "high", "low"]
    normal = facts.partitions["normal"]
    assert (normal.is_default, normal.max_time_min, normal.default_time_min, normal.nodes) == (True, 1440.0, 10.0, 2)
    assert (normal.max_nodes, normal.allowed_qos, normal.qos, normal.whole_nodes) == (None, None, None, False)
    assert normal.kinds == (NodeFacts(8, 3072 * 2**20, (GpuCount(None, 4),), frozenset(), "x86_64", 1),)
    assert facts.qos["limited"].max_submitted_jobs == 5
    assert facts.qos["limited"].max_time_min == 120.0


def test_values_with_spaces_end_at_the_next_key() -> None:
    record = parse_oneliner(
        "NodeName=n1 OS=Linux 6.1 #1 SMP (2024-07-15) RealMemory=5 Gres= Reason=out of order [root@now]\n"
    )[0]
    assert record["OS"] == "Linux 6.1 #1 SMP (2024-07-15)"
    assert (record["RealMemory"], record["Gres"], record["Reason"]) == ("5", "", "out of order [root@now]")


def test_devices_missing_in_gres_are_read_from_the_totals() -> None:
    text = (
        "NodeName=a CPUTot=64 RealMemory=1000 Gres=(null) Partitions=p CfgTRES=cpu=64,mem=1000M,gres/gpu=4 AllocTRES=\n"
    )
    assert parse_nodes(text)["p"][0].gpus == (GpuCount(None, 4),)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "\x1b[2J\n=\nPartitionName=a\x1b[31mb TotalNodes=1\n",
        "PartitionName=a MaxNodes=x MaxTime=soon TotalNodes=-1\nNodeName=n Partitions=a CPUTot=many Gres=gpu:a:b\n",
    ],
)
def test_invalid_scheduler_output_gives_a_valid_profile(fake_slurm: Path, tmp_path: Path, said: str) -> None:
    (fake_slurm / "scontrol").write_text(said)
    (fake_slurm / "sinfo").write_text("{")
    (fake_slurm / "sacctmgr.error").write_text("no")
    made = ClusterProfile.model_validate({"name": "site"})
    facts = query_site(made)
    compare_profile(made, facts, TomlSource(Path("c.toml"), ""))
    (tmp_path / "site.toml").write_text(profile_toml("site", facts))
    assert load_cluster_file(tmp_path / "site.toml")[0].name == "site"


PLANTED = """name = "planted"
device = "cuda"
account = "box2"
time_limit_min = "30 min"
[scheduler]
max_array_size = 5000
max_submitted_jobs = 9
[node]
cores = 16
memory_bytes = "4 GiB"
devices = 8
device_type = "a100"
[request]
gpus = "gres-typed"
memory = "node"
[partitions.normal]
max_nodes = 3
max_time_min = "3 days"
qos = "limited"
[partitions.hgih]
[partitions.low]
qos = "limitde"
constraint = "nvme"
"""


def test_ten_planted_mistakes_and_more_are_found(tmp_path: Path) -> None:
    import tomli

    path = tmp_path / "planted.toml"
    source = TomlSource(path, PLANTED)
    profile = validate_table(ClusterProfile, tomli.loads(PLANTED), source)
    found = {
        str(problem).split("planted.toml:", 1)[1].splitlines()[0]
        for problem in compare_profile(profile, box(), source).problems
    }
    assert found == {
        "3: you have no account 'box2' here",
        "6: max_array_size = 5000, the scheduler's is 1001",
        "7: max_submitted_jobs = 9, the QOS allows 5",
        "9: cores = 16, nodes of normal have 8",
        "10: jobs ask for 4.0 GiB a node, those of normal give at most 3.0 GiB",
        "11: devices = 8, nodes of normal have 4",
        "12: nodes of normal have no gpu of type 'a100'",
        "17: max_nodes = 3, normal gives 2",
        "18: max_time_min = 4320 min, QOS limited allows 120",
        "20: the scheduler has no partition 'hgih'",
        "22: the scheduler has no QOS 'limitde'",
        "23: no node of low has the feature nvme",
    }


def with_partition(facts: SiteFacts, name: str, **changes: object) -> SiteFacts:
    changed = replace(facts.partitions[name], **changes)  # type: ignore[arg-type]
    return replace(facts, partitions={**facts.partitions, name: changed})


@pytest.mark.parametrize(
    ("changes", "profile", "expected"),
    [
        ({"allowed_qos": frozenset({"fast"})}, {"partitions": {"normal": {"qos": "limited"}}}, "does not take QOS 'limited'"),
        ({"allowed_accounts": frozenset({"a"})}, {"account": "box", "partitions": {"normal": {}}}, "does not take account 'box': a"),
        ({"max_time_min": 20.0}, {"partitions": {"normal": {}}}, "time_limit_min = 30 min, partition normal allows 20"),
        ({}, {"request": {"gpus": "gres"}, "node": {"devices": 8}}, "devices = 8, nodes of normal have 4"),
        ({"nodes": 9}, {"partitions": {"normal": {"qos": "limited", "max_nodes": 3}}}, "max_nodes = 3, QOS limited allows 2"),
        ({"min_nodes": 2}, {"partitions": {"normal": {}}}, "normal takes no job of fewer than 2 nodes\n  min_nodes = 2"),
        ({"qos": "large"}, {"partitions": {"normal": {}}}, "QOS large takes no job of fewer"),
        ({"allowed_qos": frozenset({"large"})}, {"partitions": {"normal": {}}}, "does not take any of your QOS (limited, normal): large"),
        ({"allowed_qos": frozenset({"limited"})}, {"partitions": {"normal": {}}}, "does not take QOS 'normal', your default; it takes limited"),
        ({"denied_qos": frozenset({"normal"})}, {"partitions": {"normal": {}}}, "does not take QOS 'normal', your default"),
        ({"denied_qos": frozenset({"limited"})}, {"partitions": {"normal": {"qos": "limited"}}}, "does not take QOS 'limited'; it takes normal"),
        ({"allowed_accounts": frozenset({"a"})}, {"partitions": {"normal": {}}}, "does not take any of your accounts (box, root): a"),
        ({"denied_accounts": frozenset({"box"})}, {"account": "box", "partitions": {"normal": {}}}, "account 'box': it denies box"),
        ({"allowed_groups": frozenset({"wheel"})}, {"partitions": {"normal": {}}}, "takes members of the groups wheel only"),
        ({}, {"request": {"gpus": "gres-typed"}, "node": {"devices": 4, "device_type": "t4"}, "partitions": {"mixed": {}}},
         "devices = 4, nodes of mixed have 2 of type t4"),
        ({}, {"account_required": True, "partitions": {"normal": {}}}, "cluster c needs an account, and none is set"),
    ],
)  # fmt: skip
def test_a_profile_beyond_a_partitions_limits_is_reported(
    changes: dict[str, object], profile: dict[str, object], expected: str
) -> None:
    made = ClusterProfile.model_validate({"name": "c", **profile})
    mixed = NodeFacts(8, 2**32, (GpuCount("t4", 2), GpuCount("l4", 2)), frozenset(), "x86_64", 1)
    facts = with_partition(box(), "normal", **changes)
    facts.partitions["mixed"] = replace(box().partitions["normal"], name="mixed", is_default=False, kinds=(mixed,))
    problems = compare_profile(made, facts, TomlSource(Path("c.toml"), "")).problems
    assert len(problems) == 1
    assert expected in str(problems[0])


def test_a_correct_profile_has_no_problems() -> None:
    made = ClusterProfile.model_validate({
        "name": "c", "account": "box", "request": {"gpus": "gres", "memory": "node"},
        "node": {"cores": 8, "memory_bytes": "3 GiB", "devices": 4},
        "partitions": {"normal": {"max_nodes": 2, "max_time_min": "1 day"}, "fast": {"name": "high", "qos": "limited", "max_time_min": "2 h"}},
    })  # fmt: skip
    assert compare_profile(made, box(), TomlSource(Path("c.toml"), "")) == ([], [])


def test_a_profile_is_written_that_its_own_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", box(), config_file="/etc/slurm.conf"))
    profile, source = load_cluster_file(path)
    assert compare_profile(profile, box(), source) == ([], [])
    assert (profile.device, profile.request.gpus, profile.node.devices, profile.node.cores) == (
        "cuda",
        "gpus-per-node",
        4,
        8,
    )
    assert (profile.default_partition, profile.partitions["low"].max_time_min) == ("normal", 1440.0)
    assert profile.scheduler.config_file == "/etc/slurm.conf"
    assert "Your accounts: box, root" in source.text


def test_a_profile_of_several_node_kinds_is_written(tmp_path: Path) -> None:
    nodes = (
        "NodeName=c1 Arch=x86_64 CPUTot=256 RealMemory=250000 Gres=(null) AvailableFeatures=amd Partitions=cpu ThreadsPerCore=2\n"
        "NodeName=g1 Arch=aarch64 CPUTot=72 RealMemory=480000 Gres=gpu:h100:4(S:0-1) AvailableFeatures=nvme,h100 Partitions=gpu\n"
        "NodeName=g2 Arch=aarch64 CPUTot=72 RealMemory=480000 Gres=gpu:h100:4(S:0-1) AvailableFeatures=h100 Partitions=gpu\n"
    )
    partitions = (
        "PartitionName=cpu AllowQos=ALL Default=NO QoS=N/A MaxNodes=8 MaxTime=2-00:00:00 MinNodes=1 TotalNodes=1 State=UP\n"
        "PartitionName=gpu AllowQos=long,debug Default=YES QoS=gpuq MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=2 State=UP "
        "OverSubscribe=EXCLUSIVE DefMemPerCPU=1000\n"
    )
    facts = SiteFacts(
        "site", "23.11.4", parse_partitions(partitions, parse_nodes(nodes)),
        qos=parse_qos("gpuq|00:20:00|1|4|node=1|\nlong|||||\n"), settings={"SelectType": "select/linear"},
    )  # fmt: skip
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", facts))
    profile, source = load_cluster_file(path)
    assert compare_profile(profile, facts, source).problems == []
    gpu, cpu = profile.partitions["gpu"], profile.partitions["cpu"]
    assert (gpu.max_time_min, gpu.max_nodes, gpu.whole_nodes, cpu.max_nodes) == (20.0, 1, True, 1)
    assert (profile.request.gpus, profile.request.memory, profile.node.gres_type) == ("gres", "node", "h100")
    assert (profile.node.arch, profile.partition("cpu").node.devices, profile.partition("cpu").request.gpus) == (
        "aarch64",
        0,
        "none",
    )
    assert profile.time_limit_min == 20.0
    assert "# Its nodes are of 2 kinds" in source.text


def written(facts: SiteFacts, tmp_path: Path) -> tuple[ClusterProfile, str]:
    """The profile of ``facts`` and its text; it must have no problems."""
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", facts))
    profile, source = load_cluster_file(path)
    assert [str(problem) for problem in compare_profile(profile, facts, source).problems] == []
    return profile, source.text


GPU_NODE = (
    "NodeName=g1 Arch=x86_64 CPUTot=64 RealMemory=256000 Gres=gpu:a100:4(S:0-1) AvailableFeatures=a100 Partitions="
)
CPU_NODE = "NodeName=c1 Arch=x86_64 CPUTot=64 RealMemory=256000 Gres=(null) AvailableFeatures=amd Partitions="


def facts_of(partitions: str, nodes: str, **changes: object) -> SiteFacts:
    facts = SiteFacts("site", "24.05", parse_partitions(partitions, parse_nodes(nodes)))
    return replace(facts, settings={"SelectType": "select/cons_tres"}, **changes)  # type: ignore[arg-type]


def test_gpus_are_requested_although_the_default_partition_has_none(tmp_path: Path) -> None:
    partitions = "PartitionName=cpu Default=YES TotalNodes=1 State=UP\nPartitionName=gpu TotalNodes=1 State=UP\n"
    profile, text = written(facts_of(partitions, f"{CPU_NODE}cpu\n{GPU_NODE}gpu\n"), tmp_path)
    assert (profile.device, profile.default_partition) == ("cuda", "gpu")
    assert (profile.partition("gpu").request.gpus, profile.partition("gpu").node.devices) == ("gpus-per-node", 4)
    assert (profile.partition("cpu").request.gpus, profile.partition("cpu").node.devices) == ("none", 0)
    assert "# The scheduler's default partition, cpu, has no devices, and `device` holds for all partitions." in text


def test_gpus_are_requested_in_a_partition_that_has_more_nodes_without(tmp_path: Path) -> None:
    nodes = f"{CPU_NODE}all\n{CPU_NODE}all\n{GPU_NODE}all\n"
    profile, _ = written(facts_of("PartitionName=all Default=YES TotalNodes=3 State=UP\n", nodes), tmp_path)
    assert (profile.device, profile.request.gpus, profile.node.devices) == ("cuda", "gpus-per-node", 4)


def test_a_cluster_without_gpus_keeps_the_schedulers_default(tmp_path: Path) -> None:
    partitions = "PartitionName=a TotalNodes=1 State=UP\nPartitionName=b Default=YES TotalNodes=1 State=UP\n"
    profile, text = written(facts_of(partitions, f"{CPU_NODE}a,b\n"), tmp_path)
    assert (profile.device, profile.default_partition, profile.request.gpus) == ("cpu", "b", "none")
    assert "The scheduler's default partition" not in text


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("State=DOWN", "is DOWN"), ("State=INACTIVE", "is INACTIVE"),
        ("AllowAccounts=nobody,other", "does not take any of your accounts (box): nobody, other"),
        ("DenyAccounts=box", "does not take any of your accounts (box): it denies box"),
        ("AllowQos=gold", "does not take any of your QOS (long, normal): gold"),
        ("DenyQos=long,normal", "does not take any of your QOS (long, normal)"),
        ("AllowGroups=wheel,admin", "takes members of the groups admin, wheel only"),
    ],
)  # fmt: skip
def test_a_partition_in_which_no_job_starts_is_a_comment(tmp_path: Path, keys: str, reason: str) -> None:
    partitions = f"PartitionName=closed Default=YES TotalNodes=1 {keys}\nPartitionName=open TotalNodes=1 State=UP\n"
    facts = facts_of(
        partitions, f"{GPU_NODE}closed\n{CPU_NODE}open\n", groups=frozenset({"users"}),
        associations=parse_associations("box|long,normal|normal|\n"),
    )  # fmt: skip
    profile, text = written(facts, tmp_path)
    assert (list(profile.partitions), profile.default_partition, profile.device) == (["open"], "open", "cpu")
    assert f"# closed {reason}.\n# [partitions.closed]\n" in text


def test_a_cluster_whose_partitions_are_all_closed_has_no_default(tmp_path: Path) -> None:
    facts = facts_of("PartitionName=p Default=YES TotalNodes=1 State=DOWN\n", f"{GPU_NODE}p\n")
    profile, _ = written(facts, tmp_path)
    assert (profile.partitions, profile.default_partition, profile.node.devices) == ({}, None, 4)


def test_a_qos_is_named_where_the_default_is_refused(tmp_path: Path) -> None:
    partitions = "PartitionName=p Default=YES TotalNodes=1 AllowQos=long,gold\nPartitionName=q TotalNodes=1 State=UP\n"
    associations = parse_associations("box|debug,long,normal|normal|\n")
    profile, text = written(facts_of(partitions, f"{GPU_NODE}p,q\n", associations=associations), tmp_path)
    assert (profile.partitions["p"].qos, profile.partitions["q"].qos) == ("long", None)
    assert "# QOS: long. Your default, normal, is not taken here." in text
    assert '# QOS: debug, long, normal; the scheduler takes normal where none is named.\n# qos = "debug"\n' in text


def test_kinds_of_nodes_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    nodes = "".join(
        f"NodeName=n Arch=x86_64 CPUTot=8 RealMemory={mib} Gres=gpu:4 AvailableFeatures={features} Partitions=p\n"
        for mib, features in ((3072, "ib,nvme"), (3072, "ib"), (6144, "ib"))
    )
    _, text = written(facts_of("PartitionName=p Default=YES TotalNodes=3 State=UP\n", nodes), tmp_path)
    kind = "8 CPUs and 4x gpu a node"
    expected = f"# Its nodes are of 3 kinds: {kind} (3072 MiB, nvme); {kind} (3072 MiB); {kind} (6144 MiB)."
    assert expected in text


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["gpu+long", "gpu-long", "gpu=long"], ["gpu-long", "gpu-long-2", "gpu-long-3"]),
        (["a" * 64 + "x", "a" * 64 + "y"], ["a" * 64, "a" * 60 + "-2"]),
        (["+a", "pa"], ["pa", "pa-2"]),
    ],
)
def test_partitions_whose_names_make_one_key_get_keys_of_their_own(
    tmp_path: Path, names: list[str], keys: list[str]
) -> None:
    partitions = "".join(f"PartitionName={name} TotalNodes=1 State=UP\n" for name in names)
    profile, _ = written(facts_of(partitions, GPU_NODE + ",".join(names) + "\n"), tmp_path)
    assert sorted(profile.partitions) == sorted(keys)
    assert sorted(partition.name or key for key, partition in profile.partitions.items()) == sorted(names)


def test_associations_of_other_clusters_do_not_count(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_slurm / "scontrol").write_text(recorded("box-config") + recorded("box-partition"))
    (tmp_path / "sacctmgr").write_text(
        '#!/bin/sh\ncase "$*" in *assoc*cluster=slurmbox*) ;; *assoc*) echo "old|debug|debug|1" ;; *) exit 0 ;; esac\n'
        'echo "proj1|normal,long|normal|500"\n'
    )
    (tmp_path / "sacctmgr").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    facts = query_site(ClusterProfile.model_validate({"name": "c"}))
    assert (facts.default_qos, [each.account for each in facts.associations]) == ("normal", ["proj1"])
    assert "max_submitted_jobs = 500\n" in profile_toml("site", facts)


def test_names_that_are_no_keys_are_written_as_names(tmp_path: Path) -> None:
    text = (
        "PartitionName=gpu.long Default=YES MaxTime=60 TotalNodes=1 State=UP\n"
        "PartitionName=_all+extra MaxTime=60 TotalNodes=1 State=UP\nPartitionName=übung MaxTime=60 TotalNodes=1\n"
    )
    nodes = 'NodeName=n CPUTot=4 RealMemory=2000 Gres=gpu:a"b:1 AvailableFeatures=x"[],y Partitions=gpu.long\n'
    nodes += "NodeName=m CPUTot=8 RealMemory=2000 Gres= AvailableFeatures=y Partitions=gpu.long\n"
    facts = SiteFacts("site", "23", parse_partitions(text, parse_nodes(nodes)))
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", facts))
    profile, _ = load_cluster_file(path)
    names = {"gpu.long": None, "pall-extra": "_all+extra", "pbung": "übung"}
    assert {key: one.name for key, one in profile.partitions.items()} == names
    assert profile.default_partition == "gpu.long"
