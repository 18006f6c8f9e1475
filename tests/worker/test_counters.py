"""Counters read around the timed steps, from files that a kernel could have written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcbench.worker.distributed.rank_environment import RankInfo
from hpcbench.worker.measure import counters as module
from hpcbench.worker.measure.counters import (
    CoreTimes,
    EnergyMeter,
    RegionCounters,
    count_thermal_throttles,
    mean_core_hz,
    open_node_meter,
    process_tree_cpu_s,
    process_tree_pids,
    read_core_times,
)
from hpcbench.worker.measure.host import cpu_quota_cores, throttled_s
from hpcbench.worker.measure.interference import interference_warnings
from tests.worker.helpers import make_rank, make_spec
from tests.worker.trees import write_tree

CPU = "sys/devices/system/cpu"
TICKS = os.sysconf("SC_CLK_TCK")


def stat(**ticks: str) -> str:
    return "cpu 9 9 9 9 9 9 9 9 0 0\n" + "\n".join(f"{core} {fields}" for core, fields in ticks.items()) + "\nintr 1 2"


def test_core_times_are_read_from_proc_stat(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {"proc/stat": stat(cpu0="100 20 30 999 5 7 8 40 3 0", cpu3="0 0 0 1 0 0 0 0 0 0")})
    assert read_core_times([0, 3], root) == [CoreTimes(150 / TICKS, 40 / TICKS), CoreTimes(0.0, 0.0)]
    assert read_core_times([0, 1], root) == [], "a core that a container hides"
    assert read_core_times([0], tmp_path / "absent") == []
    assert read_core_times([0], write_tree(tmp_path, {"proc/stat": stat(cpu0="x 0 0 0 0 0 0 0")})) == []


def test_core_clocks_and_throttles_are_read_from_sysfs(tmp_path: Path) -> None:
    root = write_tree(tmp_path, {
        f"{CPU}/cpu0/cpufreq/scaling_cur_freq": 2_000_000, f"{CPU}/cpu1/cpufreq/scaling_cur_freq": 3_000_000,
        f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 2, f"{CPU}/cpu1/thermal_throttle/core_throttle_count": 3,
        f"{CPU}/cpu0/thermal_throttle/package_throttle_count": 7,
        f"{CPU}/cpu1/thermal_throttle/package_throttle_count": 7,
    })  # fmt: skip
    assert (mean_core_hz([0, 1], root), count_thermal_throttles([0, 1], root)) == (2.5e9, 12)
    assert (mean_core_hz([2], root), count_thermal_throttles([2], root)) == (None, None)


@pytest.mark.parametrize(
    ("proc", "files", "quota", "held_s"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000", "job/step/cpu.max": "max 100000",
                          "job/cpu.stat": "usage_usec 9\nnr_throttled 4\nthrottled_usec 2500000",
                          "job/step/cpu.stat": "throttled_usec 500000"}, 1.5, 3.0),
        ("2:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000",
                                "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
                                "cpu/job/cpu.stat": "nr_periods 3\nnr_throttled 2\nthrottled_time 250000000"}, 0.5, 0.25),
        ("0::/", {"cpu.stat": "usage_usec 9"}, None, None),
        ("nonsense", {}, None, None),
    ],
)  # fmt: skip
def test_cpu_quota_and_throttled_time_are_read_from_cgroups(
    tmp_path: Path, proc: str, files: dict[str, object], quota: Any, held_s: Any
) -> None:
    groups = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = write_tree(tmp_path, {"proc/self/cgroup": proc, **groups})
    assert (cpu_quota_cores(root), throttled_s(root)) == (quota, held_s)


def test_own_time_is_that_of_threads_and_children_that_live_or_have_ended() -> None:
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = process_tree_cpu_s()
    child = subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    living = process_tree_cpu_s()
    assert living - before >= 0.25
    assert {os.getpid(), child.pid} <= process_tree_pids()
    child.communicate(b"\n")
    assert process_tree_cpu_s() >= living
    assert child.pid not in process_tree_pids()


# Energy

POWER = "sys/class/powercap"


def rapl(**zones: tuple[str, int]) -> dict[str, object]:
    files: dict[str, object] = {}
    for zone, (name, energy_uj) in zones.items():
        folder = f"{POWER}/{zone.replace('_', ':')}".replace("intel:rapl", "intel-rapl")
        files |= {f"{folder}/name": name, f"{folder}/energy_uj": energy_uj, f"{folder}/max_energy_range_uj": 10**12}
    return files


def test_rapl_adds_packages_and_memory_and_wraps_around(tmp_path: Path) -> None:
    zones = {"intel_rapl_0": ("package-0", 10**12 - 4_000_000), "intel_rapl_1": ("package-1", 0),
             "intel_rapl_0_0": ("core", 1), "intel_rapl_0_1": ("dram", 500_000), "intel_rapl_2": ("psys", 1)}  # fmt: skip
    meter, absent = open_node_meter(write_tree(tmp_path, rapl(**zones)))
    assert isinstance(meter, EnergyMeter)
    assert (meter.source, absent) == ("rapl package + dram, whole node", None)
    meter.begin()
    write_tree(tmp_path, rapl(intel_rapl_0=("package-0", 6_000_000), intel_rapl_1=("package-1", 30_000_000),
                              intel_rapl_0_0=("core", 99_000_000), intel_rapl_0_1=("dram", 3_000_000)))  # fmt: skip
    assert meter.advance(wall_s=1.0) == 10 + 30 + 2.5
    assert meter.advance(wall_s=3600.0) is None, "it may have wrapped around twice"


def test_energy_of_a_cray_node_is_read_from_pm_counters(tmp_path: Path) -> None:
    assert open_node_meter(tmp_path) == (None, None)
    files: dict[str, object] = {"sys/cray/pm_counters/energy": "1000 J 17 us"}
    meter, _ = open_node_meter(write_tree(tmp_path, files))
    assert isinstance(meter, EnergyMeter)
    assert meter.source == "pm_counters node, whole node"
    meter.begin()
    write_tree(tmp_path, {"sys/cray/pm_counters/energy": "1250 J 18 us"})
    assert meter.advance(1.0) == 250.0
    write_tree(tmp_path, {"sys/cray/pm_counters/energy": "3 J 18 us"})
    assert meter.advance(1.0) is None
    of_cpu, _ = open_node_meter(write_tree(tmp_path, {"sys/cray/pm_counters/cpu_energy": "1 J 1 us"}))
    assert of_cpu is not None
    assert of_cpu.source == "pm_counters cpu, whole node"


# Both edges


def info(local_rank: int = 0) -> RankInfo:
    return RankInfo(local_rank, local_rank, 2, 2, 0, "srun", "x")


def test_counters_are_differences_between_the_timed_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_mask", lambda: [0, 3])
    files: dict[str, object] = {
        "proc/stat": stat(cpu0="100 0 0 0 0 0 0 10 0 0", cpu3="0 0 0 0 0 0 0 0 0 0"),
        "proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "20000 10000",
        "sys/fs/cgroup/job/cpu.stat": "throttled_usec 1000000",
        f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 5,
        f"{CPU}/cpu0/cpufreq/scaling_cur_freq": 3_000_000, **rapl(intel_rapl_0=("package-0", 1_000_000)),
    }  # fmt: skip
    watch = RegionCounters(torch.device("cpu"), info(), write_tree(tmp_path, files))
    watch.begin()
    write_tree(tmp_path, {
        "proc/stat": stat(cpu0=f"{100 + 50 * TICKS} 0 0 0 0 0 0 {10 + TICKS} 0 0", cpu3=f"0 0 {TICKS} 0 0 0 0 0 0 0"),
        "sys/fs/cgroup/job/cpu.stat": "throttled_usec 4000000",
        f"{CPU}/cpu0/thermal_throttle/core_throttle_count": 6,
        f"{CPU}/cpu0/cpufreq/scaling_cur_freq": 1_500_000, **rapl(intel_rapl_0=("package-0", 43_000_000)),
    })  # fmt: skip
    watch.end()
    seen = watch.watched
    assert seen is not None
    assert (seen.busy_s, seen.stolen_s) == ([50.0, 1.0], [1.0, 0.0])
    assert (seen.throttled_s, seen.cpu_quota_cores, seen.hot_events, seen.core_hz) == (3.0, 2.0, 1, [3.0e9, 1.5e9])
    assert (watch.energy_j, watch.energy_source) == (42.0, "rapl package, whole node")
    seen.wall_s = 60.0
    rank = make_rank(0, cpu_mask=[0, 3], watched=seen)
    kinds = [text.partition(":")[0] for text in interference_warnings(make_spec(), {0: rank})]
    assert kinds == ["other processes used the cores during the timed steps",
                     "a control group's CPU quota held threads back", "cores lowered their clock for heat",
                     "the cores' clock fell during the timed steps"]  # fmt: skip


def test_one_rank_per_node_reads_its_energy_counter(tmp_path: Path) -> None:
    root = write_tree(tmp_path, rapl(intel_rapl_0=("package-0", 1)))
    watch = RegionCounters(torch.device("cpu"), info(local_rank=1), root)
    watch.begin()
    watch.end()
    assert watch.watched is not None
    assert (watch.energy_j, watch.energy_source, watch.watched.busy_s) == (None, None, [])


def test_a_lost_counter_is_no_value_and_no_error(tmp_path: Path) -> None:
    root = write_tree(tmp_path, rapl(intel_rapl_0=("package-0", 1)))
    watch = RegionCounters(torch.device("cpu"), info(), root)
    watch.begin()
    (root / POWER / "intel-rapl:0" / "energy_uj").unlink()
    watch.end()
    assert (watch.energy_j, watch.energy_source) == (None, None)


def test_readings_inside_a_region_count_what_wraps_around_and_show_the_power_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(
        module, "time", SimpleNamespace(time=lambda: now.s, monotonic=lambda: now.s, process_time=lambda: 0.0)
    )
    watch = RegionCounters(torch.device("cpu"), info(), write_tree(tmp_path, rapl(intel_rapl_0=("package-0", 0))))
    watch.begin()
    # The counter wraps around at 10^6 J: 100 W for 10 s, then 70 kW for 20 s, twice beyond the end, then 50 W.
    for second, energy_j in ((10, 1000), (20, 701_000), (30, 401_000), (40, 401_500)):
        now.s = 1000.0 + second
        write_tree(tmp_path, rapl(intel_rapl_0=("package-0", energy_j * 10**6)))
        watch.read_energy()
    watch.end()
    assert watch.energy_j == 1000 + 1_400_000 + 500
    for timed, power_w in (((1010.0, 1030.0), 70_000), ((1005.0, 1010.0), 100), ((1005.0, 1020.0), 700_500 / 15)):
        watch.timed_unix_s = timed
        rank = make_rank(0)
        watch.write_into(rank)
        assert rank.device_power["node"].steps_power_w == pytest.approx(power_w)
        assert rank.device_power["node"].energy_j == watch.energy_j
    watch.timed_unix_s = (1010.0, 1010.0)
    rank = make_rank(0)
    watch.write_into(rank)
    assert rank.device_power == {}, "steps of no time have no power"


def test_regions_add_up_and_what_lies_between_them_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_mask", lambda: [0])

    def at(second: int, clock_khz: int) -> None:
        write_tree(tmp_path, {
            "proc/stat": stat(cpu0=f"{second * TICKS} 0 0 0 0 0 0 {second * TICKS} 0 0"), "proc/self/cgroup": "0::/",
            "sys/fs/cgroup/cpu.stat": f"throttled_usec {second * 10**6}",
            f"{CPU}/cpu0/thermal_throttle/core_throttle_count": second,
            f"{CPU}/cpu0/cpufreq/scaling_cur_freq": clock_khz, **rapl(intel_rapl_0=("package-0", second * 10**6)),
        })  # fmt: skip

    at(0, 3_000_000)
    watch = RegionCounters(torch.device("cpu"), info(), tmp_path)
    for begin, end, clock_khz in ((1, 3, 2_500_000), (10, 14, 2_000_000)):
        at(begin, 3_000_000)
        watch.begin()
        at(end, clock_khz)
        watch.end()
    watch.end()
    seen = watch.watched
    assert seen is not None
    assert (seen.busy_s, seen.stolen_s, seen.throttled_s, seen.hot_events) == ([6.0], [6.0], 6.0, 6)
    assert (watch.energy_j, seen.core_hz) == (6.0, [3.0e9, 2.0e9])
