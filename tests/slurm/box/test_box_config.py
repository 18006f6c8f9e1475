"""The box's pure parts: sizes, limits, addresses and configuration texts. Needs neither root nor SLURM."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from . import accounting, cgroups, cli, hosts, lock, machine, network, paths, slurmconf, status
from .errors import BoxError
from .options import GIB, MIB, Options, format_link, parse_link, parse_mem


@pytest.mark.parametrize(
    ("text", "size"),
    [("3g", 3 * GIB), ("3G", 3 * GIB), ("3GiB", 3 * GIB), ("512m", 512 * MIB), ("1.5g", 1536 * MIB)],
)
def test_a_memory_size_is_parsed_to_bytes(text: str, size: int) -> None:
    assert parse_mem(text) == size


@pytest.mark.parametrize(("text", "rate"), [("1gbit", 10**9), ("200mbit", 2 * 10**8), ("2.5Gbit", 25 * 10**8)])
def test_link_texts_read_back(text: str, rate: int) -> None:
    assert parse_link(text) == rate
    assert parse_link(format_link(rate)) == rate


@pytest.mark.parametrize("text", ["", "g", "3x", "-3g", "3 giga"])
def test_bad_mem_names_the_text_and_an_example(text: str) -> None:
    with pytest.raises(BoxError, match="write it like 3g"):
        parse_mem(text)


@pytest.mark.parametrize("text", ["", "1g", "fast", "1gbyte", "-1gbit"])
def test_bad_link_names_the_text_and_an_example(text: str) -> None:
    with pytest.raises(BoxError, match="write it like 1gbit"):
        parse_link(text)


def test_options_are_read_from_their_json() -> None:
    options = Options(nodes=2, cpus=0.75, link=5 * 10**8)
    assert Options.from_json(options.to_json()) == options
    assert Options.from_json("{") is None
    assert Options.from_json('{"colour": 3}') is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "nodes is 0, allowed is 1 to 64"),
        ({"cpus": 0.01}, "cpus is 0.01, the least is 0.05"),
        ({"mem": 100 * MIB}, "mem is 100 MiB, the least is 256 MiB"),
        ({"link": 5}, "link is 5 bit/s"),
        ({"subnet": "10.0.0.0/30"}, "has room for 1 nodes, 4 are wanted"),
        ({"subnet": "ten"}, "subnet 'ten' is not a network"),
    ],
)
def test_bad_options_state_both_numbers(values: dict[str, object], message: str) -> None:
    with pytest.raises(BoxError, match=message):
        Options(**values)  # type: ignore[arg-type]


def test_nodes_and_controller_have_consecutive_addresses() -> None:
    options = Options(nodes=3)
    assert options.names == ["n1", "n2", "n3"]
    assert [options.address(name) for name in options.names] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert options.controller_address == "10.77.0.254"
    assert options.prefix_length == 24


def test_defaults_fit_a_machine_of_2_cores_and_24_gib() -> None:
    machine.check_capacity(Options(), cores=2, mem=int(23.5 * GIB))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(nodes=4, cpus=0.5), r"4 nodes x 0.5 cores = 2 cores, this machine of 2 can give 1.8: .* CPUS=0.45"),
        (Options(nodes=7, cpus=0.1), r"7 nodes x 3 GiB = 21 GiB, this machine of 23.5 GiB can give 20 GiB"),
    ],
)
def test_a_box_larger_than_the_machine_is_refused(options: Options, message: str) -> None:
    with pytest.raises(BoxError, match=message):
        machine.check_capacity(options, cores=2, mem=int(23.5 * GIB))


def test_the_proposed_value_is_accepted() -> None:
    machine.check_capacity(Options(nodes=4, cpus=0.45), cores=2, mem=24 * GIB)


@pytest.mark.parametrize(("cpus", "quota"), [(0.4, (4000, 10000)), (0.05, (5000, 100000)), (2, (20000, 10000))])
def test_the_cpu_quota_is_at_least_a_millisecond(cpus: float, quota: tuple[int, int]) -> None:
    assert cgroups.cpu_quota(cpus) == quota
    assert quota[0] >= 1000, "the kernel refuses less"


def test_cgroup_limit_files_exist_for_both_versions() -> None:
    assert cgroups.limit_files(2, 0.4, 3 * GIB) == {
        "cpu.max": "4000 10000",
        "memory.max": "3221225472",
        "memory.swap.max": "0",
    }
    assert list(cgroups.limit_files(1, 0.4, 3 * GIB)) == [
        "cpu.cfs_period_us",
        "cpu.cfs_quota_us",
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
    ]


def test_cgroup_version_is_read_from_the_tree(tmp_path: Path) -> None:
    assert cgroups.version(tmp_path) == 0
    for controller in ("cpu", "memory"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").touch()
    assert cgroups.version(tmp_path) == 1
    (tmp_path / "cgroup.controllers").write_text("cpuset io\n")
    assert cgroups.version(tmp_path) == 0
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    assert cgroups.version(tmp_path) == 2


def test_burst_grows_with_the_rate() -> None:
    assert network.tbf_args(10**9) == ["root", "tbf", "rate", "1000000000bit", "burst", "262144b", "latency", "50ms"]
    assert "burst 2500000b" in " ".join(network.tbf_args(10**10))


def test_interface_names_are_short_enough() -> None:
    assert all(len(name) <= 15 for name in (paths.BRIDGE, network.host_end("n64")))


def test_the_hosts_block_is_added_and_removed() -> None:
    for before in ("", "127.0.0.1 localhost\n"):
        after = hosts.with_block(before, Options(nodes=2))
        assert "10.77.0.2 n2\n10.77.0.254 slurmbox-controller\n" in after
        assert hosts.with_block(after, Options(nodes=2)) == after
        assert hosts.without_block(after) == before


def test_names_of_other_hosts_are_noticed() -> None:
    text = hosts.with_block("10.1.1.1 n2 # n3\n", Options())
    assert hosts.conflicts(text, ["n1", "n2", "n3"]) == ["n2"]


def _keys(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "NodeName", "PartitionName"))]
    return dict(line.split("=", 1) for line in lines)


def test_slurm_conf_lists_limits_nodes_and_partitions() -> None:
    text = slurmconf.slurm_conf(Options(nodes=2, max_array_size=5001), "laptop")
    keys = _keys(text)
    assert keys["SlurmctldHost"] == "laptop(10.77.0.254)"
    assert keys["AccountingStorageEnforce"] == "associations,limits,qos"
    assert (keys["MaxArraySize"], keys["MaxJobCount"], keys["KillWait"]) == ("5001", "200000", "5")
    assert keys["DefMemPerCPU"] == "384"
    node = "NodeName=n2 NodeAddr=10.77.0.2 CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1"
    assert f"{node} RealMemory=3072 Gres=gpu:4 State=UNKNOWN\n" in text
    assert "PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=10\n" in text
    assert not [line for line in text.splitlines() if "{" in line]


def test_a_box_with_gpus_of_a_type() -> None:
    assert " Gres=gpu:a100:4 State" in slurmconf.slurm_conf(Options(gpu_type="a100"), "laptop")


def test_a_box_without_gpus_configures_none() -> None:
    options = Options(gpus=0)
    assert "gpu" not in slurmconf.slurm_conf(options, "laptop").lower()
    assert slurmconf.gres_conf(options) == ""


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (Options(), "NodeName=n[1-4] Name=gpu File=/run/hpcbench-slurmbox/dev/nvidia[0-3]\n"),
        (Options(gpu_type="a100"), "NodeName=n[1-4] Name=gpu Type=a100 File=/run/hpcbench-slurmbox/dev/nvidia[0-3]\n"),
        (Options(nodes=1, gpus=1), "NodeName=n1 Name=gpu File=/run/hpcbench-slurmbox/dev/nvidia0\n"),
    ],
)
def test_gres_conf_lists_the_gpu_device_files(options: Options, line: str) -> None:
    assert slurmconf.gres_conf(options) == line


def test_every_daemon_uses_the_boxs_own_munge() -> None:
    options = Options()
    for text in (slurmconf.slurm_conf(options, "laptop"), slurmconf.slurmdbd_conf(options)):
        assert _keys(text)["AuthInfo"].startswith(f"socket={paths.MUNGE_SOCKET}")


def test_cgroup_plugin_is_disabled_where_the_switch_exists() -> None:
    assert slurmconf.cgroup_conf((22, 5)) == ""
    assert slurmconf.cgroup_conf((23, 11)) == "CgroupPlugin=disabled\n"


def test_accounting_commands_name_all_users() -> None:
    commands = accounting.commands(["root", "boxuser1"])
    assert any("MaxSubmitJobsPerUser=5" in command for command in commands)
    assert commands[-1][:3] == ["add", "user", "root,boxuser1"]


@pytest.mark.parametrize(
    ("state", "good"), [("idle", True), ("mixed", True), ("idle*", False), ("down*", False), ("drained", False)]
)
def test_only_idle_and_mixed_nodes_are_good(state: str, good: bool) -> None:
    assert status.is_good(state) is good


def test_lock_serialises_and_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    seen: list[str] = []

    def second() -> None:
        with lock.locked(path, timeout=5):
            seen.append("second")

    with lock.locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        seen.append("first")
    thread.join(5)
    assert seen == ["first", "second"]
    assert not path.exists()


def test_a_waiting_lock_gives_up_and_names_the_other_call(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with lock.locked(path), pytest.raises(BoxError, match="waited 0.1 s for the other call"):  # noqa: SIM117
        with lock.locked(path, timeout=0.1):
            pass


def test_bad_values_exit_2_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["up", "--mem", "much"]) == 2
    assert capsys.readouterr().err == "slurm box: mem 'much' is not a size: write it like 3g or 512m\n"


def test_not_root_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["up"]) == 2
    assert "needs root for namespaces and cgroups, this is user 1000: use sudo" in capsys.readouterr().err
