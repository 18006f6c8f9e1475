"""Facts of the scheduler: parsing, writing a profile, comparing a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.toml_tables import TomlSource, validate_table
from hpcbench.site.profile_check import compare_profile
from hpcbench.site.profile_writer import profile_toml
from hpcbench.site.slurm_facts import (  # fmt: skip
    GpuCount,
    NodeFacts,
    SiteFacts,
    parse_associations,
    parse_gres,
    parse_json_nodes,
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


def test_nodes_from_json_equal_those_from_text() -> None:
    text = (RECORDED / "box-sinfo.json").read_text(encoding="utf-8")
    assert parse_json_nodes(text) == parse_nodes(recorded("box-node"))
    newer = (
        '{"nodes": [{"name": "g1", "cpus": 72, "effective_cpus": 64, "real_memory": {"set": true, "infinite": false, "number": 9},'
        ' "gres": "gpu:h100:4(S:0-1)", "features": ["nvme", "h100"], "partitions": ["gpu"], "threads": 2, "architecture": null}]}'
    )
    found = NodeFacts(64, 9 * 2**20, (GpuCount("h100", 4),), frozenset({"nvme", "h100"}), "", 2)
    assert parse_json_nodes(newer) == {"gpu": [found]}


@pytest.mark.parametrize(
    "text", ["", "sinfo: unrecognized option", "[]", "{}", '{"nodes": {"a": 1}}', '{"nodes": [3]}', "\xff{"]
)
def test_json_of_another_form_gives_no_nodes(text: str) -> None:
    assert parse_json_nodes(text) == {}


def test_json_is_read_if_the_text_lists_no_nodes(fake_slurm: Path) -> None:
    (fake_slurm / "scontrol").write_text(recorded("box-config") + recorded("box-partition"))
    (fake_slurm / "sinfo").write_text((RECORDED / "box-sinfo.json").read_text(encoding="utf-8"))
    facts = query_site(ClusterProfile.model_validate({"name": "c"}))
    assert facts.partitions["normal"].kinds[0].gpus == (GpuCount(None, 4),)


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
    list(compare_profile(made, facts, TomlSource(Path("c.toml"), "")))
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
        str(problem).split("planted.toml:", 1)[1].splitlines()[0] for problem in compare_profile(profile, box(), source)
    }
    assert found == {
        "3: you have no account 'box2' here",
        "6: max_array_size = 5000, the scheduler's is 1001",
        "7: max_submitted_jobs = 9, the QOS allows 5",
        "9: cores = 16, nodes of normal have 8",
        "10: jobs ask for 4.0 GiB a node, those of normal have 3.0 GiB",
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
        ({"allowed_qos": frozenset({"fast"})}, {"partitions": {"normal": {"qos": "limited"}}}, "does not take QOS 'limited': fast"),
        ({"is_up": False}, {"partitions": {"normal": {}}}, "partition normal is not up"),
        ({"allowed_accounts": frozenset({"a"})}, {"account": "box", "partitions": {"normal": {}}}, "does not take account 'box': a"),
        ({"max_time_min": 20.0}, {"partitions": {"normal": {}}}, "time_limit_min = 30 min, partition normal allows 20"),
        ({}, {"request": {"gpus": "gres"}, "node": {"devices": 8}}, "devices = 8, nodes of normal have 4"),
        ({"nodes": 9}, {"partitions": {"normal": {"qos": "limited", "max_nodes": 3}}}, "max_nodes = 3, QOS limited allows 2"),
        ({"min_nodes": 2}, {"partitions": {"normal": {}}}, "normal takes no job of fewer than 2 nodes\n  min_nodes = 2"),
        ({"allowed_qos": frozenset({"large"}), "qos": "large"}, {"partitions": {"normal": {}}}, "QOS large takes no job of fewer"),
        ({}, {"account_required": True, "partitions": {"normal": {}}}, "cluster c takes no job without an account"),
    ],
)  # fmt: skip
def test_a_profile_beyond_a_partitions_limits_is_reported(
    changes: dict[str, object], profile: dict[str, object], expected: str
) -> None:
    made = ClusterProfile.model_validate({"name": "c", **profile})
    problems = list(compare_profile(made, with_partition(box(), "normal", **changes), TomlSource(Path("c.toml"), "")))
    assert len(problems) == 1
    assert expected in str(problems[0])


def test_a_correct_profile_has_no_problems() -> None:
    made = ClusterProfile.model_validate({
        "name": "c", "account": "box", "request": {"gpus": "gres", "memory": "node"},
        "node": {"cores": 8, "memory_bytes": "3 GiB", "devices": 4},
        "partitions": {"normal": {"max_nodes": 2, "max_time_min": "1 day"}, "fast": {"name": "high", "qos": "limited", "max_time_min": "2 h"}},
    })  # fmt: skip
    assert list(compare_profile(made, box(), TomlSource(Path("c.toml"), ""))) == []


def test_a_profile_is_written_that_its_own_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", box(), config_file="/etc/slurm.conf"))
    profile, source = load_cluster_file(path)
    assert list(compare_profile(profile, box(), source)) == []
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
    assert list(compare_profile(profile, facts, source)) == []
    gpu, cpu = profile.partitions["gpu"], profile.partitions["cpu"]
    assert (gpu.max_time_min, gpu.max_nodes, gpu.whole_nodes, cpu.max_nodes) == (20.0, 1, True, 1)
    assert (profile.request.gpus, profile.request.memory, profile.node.gres_type) == ("gres", "node", "h100")
    assert (profile.node.arch, profile.node_of("cpu").devices, profile.request_of("cpu").gpus) == ("aarch64", 0, "none")
    assert profile.time_limit_min == 20.0
    assert "# Its nodes are of 2 kinds" in source.text


def test_names_that_are_no_keys_are_written_as_names(tmp_path: Path) -> None:
    text = (
        "PartitionName=gpu.long Default=YES MaxTime=60 TotalNodes=1 State=UP\n"
        "PartitionName=_all+extra MaxTime=60 TotalNodes=1 State=UP\nPartitionName=übung MaxTime=60 TotalNodes=1\n"
    )
    nodes = 'NodeName=n CPUTot=4 RealMemory=100 Gres=gpu:a"b:1 AvailableFeatures=x"[],y Partitions=gpu.long\n'
    nodes += "NodeName=m CPUTot=8 RealMemory=100 Gres= AvailableFeatures=y Partitions=gpu.long\n"
    facts = SiteFacts("site", "23", parse_partitions(text, parse_nodes(nodes)))
    path = tmp_path / "site.toml"
    path.write_text(profile_toml("site", facts))
    profile, _ = load_cluster_file(path)
    names = {"gpu.long": None, "pall-extra": "_all+extra", "pbung": "übung"}
    assert {key: one.name for key, one in profile.partitions.items()} == names
    assert profile.default_partition == "gpu.long"
