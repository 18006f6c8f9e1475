from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.worker.measure.environment_record import package_versions, torch_build_facts
from hpcbench.worker.measure.host import (
    cores_per_numa_node,
    cpu_facts,
    host_facts,
    infiniband_ports,
    interface_facts,
)
from tests.worker.trees import write_tree

CPU = "sys/devices/system/cpu"


def two_sockets() -> dict[str, object]:
    """Two sockets of one core with two threads each."""
    places = {f"{CPU}/cpu{thread}/topology": (thread % 2, 0) for thread in range(4)}
    files: dict[str, object] = {}
    for folder, (socket, core) in places.items():
        files |= {f"{folder}/physical_package_id": socket, f"{folder}/core_id": core}
    for index, (level, kind, size) in enumerate([(1, "Data", "32K"), (1, "Instruction", "64K"), (3, "Unified", "96M")]):
        folder = f"{CPU}/cpu2/cache/index{index}"
        files |= {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/size": size}
    return files | {
        f"{CPU}/smt/control": "on", f"{CPU}/cpu2/cpufreq/scaling_governor": "powersave",
        f"{CPU}/cpu2/cpufreq/cpuinfo_max_freq": 3_500_000, "sys/devices/system/node/node0/cpulist": "0,2",
        "sys/devices/system/node/node1/cpulist": "1,3",
    }  # fmt: skip


def test_processor_facts_are_read_from_sysfs(tmp_path: Path) -> None:
    root = write_tree(tmp_path, two_sockets())
    assert cpu_facts([2, 3], root) == {
        "sockets": 2, "cores": 2, "threads": 4, "smt": "on", "numa_nodes": 2, "caches": {"L1": "32K", "L3": "96M"},
        "governor": "powersave", "max_hz": 3_500_000_000,
    }  # fmt: skip
    assert cores_per_numa_node([0, 2, 3], root) == {"0": 2, "1": 1}
    assert cores_per_numa_node([0, 2], root) == {"0": 2}


def test_machine_facts_are_read_from_proc_and_cgroup(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {
        "etc/os-release": 'NAME="Rocky"\nPRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"\n',
        "proc/meminfo": "MemTotal:       1024 kB\nHugePages_Total:       8", "proc/self/cgroup": "0::/job",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/fs/cgroup/job/cpu.max": "400000 100000", "sys/fs/cgroup/memory.max": 2**30, "run/.containerenv": "",
    })  # fmt: skip
    assert {key: value for key, value in host_facts([0], root).items() if value} == {
        "os": "Rocky Linux 9.4 (Blue Onyx)", "memory_bytes": 2**20, "container_kind": "podman",
        "hugepages": {"transparent": "madvise", "reserved": 8},
        "cgroup": {"cpu_quota_cores": 4.0, "memory_limit_bytes": 2**30},
    }  # fmt: skip


def test_network_interfaces_are_read_from_sysfs(tmp_path: Path) -> None:
    net, port = "sys/class/net", "sys/class/infiniband/mlx5_0/ports/1"
    root = write_tree(tmp_path, {
        f"{net}/eno1/device/vendor": "x", f"{net}/eno1/speed": 25000, f"{net}/eno1/mtu": 9000, f"{net}/eno1/operstate": "up",
        f"{net}/ib0/operstate": "down", f"{net}/ib0/speed": -1, f"{net}/lo/mtu": 65536, f"{net}/veth1/mtu": 1500,
        f"{port}/link_layer": "InfiniBand", f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/state": "4: ACTIVE",
    })  # fmt: skip
    assert interface_facts(root) == [
        {"name": "eno1", "state": "up", "speed_bit_per_s": 25 * 10**9, "mtu_bytes": 9000},
        {"name": "ib0", "state": "down"},
    ]
    assert infiniband_ports(root) == ["mlx5_0/1 InfiniBand, 400 Gb/sec (4X NDR), ACTIVE"]


def test_unreadable_files_give_no_machine_facts(tmp_path: Path) -> None:
    facts = host_facts([0], tmp_path)
    assert {key: value for key, value in facts.items() if value} == {}
    assert facts["container_kind"] is None


def test_package_versions_are_read_with_torchs_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia_nccl_cu12-2.27.5", "nvidia_ml_py-13.0", "other-1.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = package_versions()
    assert found["nvidia-nccl-cu12"] == "2.27.5"
    assert "numpy" in found
    assert not {"nvidia-ml-py", "other"} & set(found)
    assert {"blas", "openmp", "parallel_backend", "cpu_capability", "with"} <= set(torch_build_facts())
