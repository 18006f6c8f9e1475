"""The report of a probe job about its node, and the recognition of a cluster's machine."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcbench.cli.cluster_commands import cluster
from hpcbench.config.cluster_profile import (
    ClusterProfile,
    LoginNodeMatch,
    is_login_node,
    load_cluster,
    load_cluster_file,
)
from hpcbench.config.toml_tables import TomlSource
from hpcbench.errors import SubmitError
from hpcbench.site.cluster_doctor import check_cluster, compare_probe
from hpcbench.site.node_probe import parse_probe, render_probe, run_probe
from hpcbench.site.profile_writer import profile_toml
from hpcbench.submit.slurm_scheduler import SlurmScheduler
from tests.site.test_slurm_facts import box, recorded

PROBED = """=== hpcbench interfaces
1: lo    inet 127.0.0.1/8 scope host lo
2: hsn0    inet 10.1.0.3/16 brd 10.1.255.255 scope global hsn0
3: eth0@if7    inet 10.77.0.1/24 scope global eth0
3: eth0    inet6 fe80::1/64 scope link
=== hpcbench nvidia
GPU 0: NVIDIA GH200 120GB (UUID: GPU-1)
=== hpcbench cores
pid 123's current affinity list: 0-3,5-6
=== hpcbench memory
MemTotal:        1000 kB
=== hpcbench tmp
tmpfs
=== hpcbench runtimes
/usr/bin/apptainer
=== hpcbench folder $SCRATCH
writable
=== hpcbench worker
{"ready": true, "host": "n1"}
=== hpcbench end
"""


def test_a_probe_report_is_parsed_into_a_profile() -> None:
    probe = parse_probe(PROBED)
    assert probe.interfaces == {"hsn0": "10.1.0.3", "eth0": "10.77.0.1"}
    assert (probe.fabric, len(probe.devices), probe.tmp_in_memory, probe.memory_bytes) == ("hsn", 1, True, 1024000)
    assert (probe.runtimes, probe.worker) == (["apptainer"], {"ready": True, "host": "n1"})
    assert probe.cpus == 6
    text = profile_toml("site", box(), probe)
    for line in (
        'interface = "hsn"', 'device = "cuda"', "tmp_in_memory = true", "# memory_includes_devices = true", "# cores = 6",
    ):  # fmt: skip
        assert f"\n{line}\n" in text
    blind = profile_toml("site", box(), parse_probe(PROBED.replace("GPU 0", "no device")))
    assert '\ndevice = "cpu"\n' in blind
    assert '\ngpus = "none"\n' in blind


def test_a_probe_that_contradicts_the_profile_gives_findings() -> None:
    made = ClusterProfile.model_validate({
        "name": "c", "device": "cuda", "node": {"devices": 4, "scratch_folder": "$SCRATCH"}, "network": {"interface": "ib"},
    })  # fmt: skip
    found = {finding.what: finding.works for finding in compare_probe(made, parse_probe(PROBED))}
    assert found == {"interface": False, "devices": False, "tmp": False, "folder": True}
    refused = PROBED.replace(
        "\nwritable\n", "\ndoes not exist: /scrach\n=== hpcbench modules\nmodule M/1 cannot be loaded\n"
    )
    checks = {check.what: check for check in compare_probe(made, parse_probe(refused))}
    assert (checks["folder"].works, checks["folder"].needed) == (False, True)
    assert (checks["modules"].works, checks["modules"].detail) == (False, "module M/1 cannot be loaded")


def test_on_a_machine_without_a_scheduler_a_missing_module_is_found(tmp_path: Path) -> None:
    made = ClusterProfile.model_validate({
        "name": "c", "launcher": "torchrun", "scheduler": {"kind": "local"}, "default_environment": "v",
        "environments": {"v": {"modules": ["absent/1.0"], "python": "/nonexistent"}},
    })  # fmt: skip
    checks = {check.what: check for check in check_cluster(made, TomlSource(Path("c.toml"), ""), tmp_path)}
    assert (checks["modules"].works, checks["modules"].needed) == (False, True)
    assert checks["modules"].detail.startswith("module absent/1.0 cannot be loaded on ")
    assert not checks["python"].works


def test_folders_of_a_profile_that_do_not_exist_are_named(tmp_path: Path, fake_slurm: Path) -> None:
    scheduler = {"kind": "slurm", "bin_folder": str(tmp_path / "bin"), "config_file": str(tmp_path / "slurm.conf")}
    made = ClusterProfile.model_validate({"name": "c", "scheduler": scheduler})
    checks = {
        check.what: check for check in check_cluster(made, TomlSource(Path("c.toml"), ""), tmp_path) if not check.works
    }
    assert checks["bin_folder"].detail == f"{tmp_path}/bin does not exist"
    assert checks["config_file"].needed
    assert checks["scheduler"].detail == "not queried: scheduler.bin_folder does not exist"
    (tmp_path / "slurm.conf").touch()
    with pytest.raises(SubmitError, match=f"no folder {tmp_path}/bin"):
        SlurmScheduler(made).check()


def test_the_probe_runs_in_the_jobs_own_environment(tmp_path: Path) -> None:
    made = ClusterProfile.model_validate({
        "name": "c", "node": {"devices": 4, "scratch_folder": "/a b/$SCRATCH/$(id)"}, "request": {"gpus": "gres"},
        "environments": {"e": {"modules": ["m"], "python": "python3"}}, "default_environment": "e",
    })  # fmt: skip
    text = render_probe(made, tmp_path)
    for line in (
        "#SBATCH --gres=gpu:4",
        'module load m; check_module m "$?"',
        f"#SBATCH --output={tmp_path}/log",
        "#SBATCH --time=0-00:05:00",
    ):
        assert f"\n{line}\n" in text
    assert """\nfolder='/a b/'"$SCRATCH"'/$(id)'\n""" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_refused_probe_quotes_the_scheduler(
    fake_slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_slurm / "scontrol").write_text("".join(recorded(f"box-{name}") for name in ("config", "node", "partition")))
    monkeypatch.setenv("FAKE_SBATCH", "refuse")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cluster, ["init", "mine", "--probe"])
    assert isinstance(done.exception, SubmitError)
    assert "Invalid account" in done.exception.message
    assert "wrote clusters/mine.toml from the scheduler alone" in done.output
    assert load_cluster_file(tmp_path / "clusters" / "mine.toml")[0].node.devices == 4


def test_interrupting_a_probe_cancels_its_job(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcbench.site.node_probe._wait_for_output", stop)
    monkeypatch.setenv("XDG_CACHE_HOME", str(fake_slurm / "cache"))
    with pytest.raises(KeyboardInterrupt):
        run_probe(ClusterProfile.model_validate({"name": "c"}), lambda text: None)
    assert "scancel 4711" in (fake_slurm / "queries").read_text().splitlines()


@pytest.mark.parametrize("behaviour", ["ok", "refuse"])
def test_a_probe_leaves_no_folder_and_few_scheduler_queries(
    fake_slurm: Path, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    monkeypatch.setenv("FAKE_SBATCH", behaviour)
    monkeypatch.setenv("XDG_CACHE_HOME", str(fake_slurm / "cache"))
    monkeypatch.setattr("hpcbench.site.node_probe._POLL_S", 0.01)
    (fake_slurm / "squeue").write_text("4711|PENDING|Resources\n")
    with pytest.raises(SubmitError):
        run_probe(ClusterProfile.model_validate({"name": "c"}), lambda text: None, wait_s=0.3)
    assert list((fake_slurm / "cache").rglob("probes/*")) == []
    queries = (fake_slurm / "queries").read_text().splitlines() if (fake_slurm / "queries").exists() else []
    assert len([line for line in queries if line.startswith("squeue")]) == (behaviour == "ok")
    assert ("scancel 4711" in queries) is (behaviour == "ok")


def test_a_terminated_probe_cancels_its_job(fake_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(fake_slurm / "cache"))
    monkeypatch.setattr("hpcbench.site.node_probe._wait_for_output", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        run_probe(ClusterProfile.model_validate({"name": "c"}), lambda text: None)
    assert "scancel 4711" in (fake_slurm / "queries").read_text().splitlines()


def test_a_probe_makes_no_folder_of_the_profile(tmp_path: Path) -> None:
    absent = tmp_path / "nvme"
    profile = ClusterProfile.model_validate({"name": "c", "node": {"scratch_folder": str(absent)}})
    lines = render_probe(profile, tmp_path).splitlines()
    first = lines.index(f"folder={absent}")
    script = "\n".join(lines[first : first + 3])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert (done.stdout, absent.exists()) == (f"does not exist: {absent}\n", False)


def test_the_probe_takes_as_many_nodes_as_it_must(tmp_path: Path) -> None:
    made = ClusterProfile.model_validate({"name": "c", "default_partition": "p", "partitions": {"p": {"min_nodes": 3}}})
    assert "\n#SBATCH --nodes=3\n" in render_probe(made, tmp_path)


@pytest.mark.parametrize(
    ("match", "host", "expected"),
    [
        ({"hosts": [r".*\.snellius\.surf\.nl"]}, "int4.snellius.surf.nl", True),
        ({"hosts": [r".*\.snellius\.surf\.nl"]}, "int4.snellius.surf.nl.evil.org", False),
        ({"hosts": [r"alogin\d+"]}, "alogin1.bsc.es", True),
        ({"variables": {"NERSC_HOST": "perlmutter"}}, "login01", True),
        ({"variables": {"NERSC_HOST": "cori"}}, "login01", False),
        ({}, "anything", False),
    ],
)
def test_a_login_node_is_recognised_by_host_and_variables(match: dict[str, object], host: str, expected: bool) -> None:
    assert is_login_node(LoginNodeMatch.model_validate(match), host, {"NERSC_HOST": "perlmutter"}) is expected


def test_a_login_node_is_recognised_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "systemname").write_text("juwelsbooster\n")
    assert is_login_node(LoginNodeMatch(files={str(tmp_path / "systemname"): "juwelsbooster"}), "x", {})
    assert not is_login_node(LoginNodeMatch(files={str(tmp_path / "other"): "juwelsbooster"}), "x", {})


_AMD_SMI = "GPU: 0\n    BDF: 0000:46:00.0\n    UUID: 30ff74b5\nGPU: 1\n    BDF: 0000:4e:00.0"
_ROCM_SMI = "GPU[0]\t\t: Card Series: \t\tAMD Instinct MI250X\nGPU[0]\t\t: Card Vendor: \t\tAMD"


@pytest.mark.parametrize(
    ("tools", "devices"),
    [
        ({"amd-smi": _AMD_SMI}, ["GPU: 0", "GPU: 1"]),
        ({"rocm-smi": _ROCM_SMI}, [_ROCM_SMI.splitlines()[0]]),
        ({"amd-smi": _AMD_SMI, "rocm-smi": _ROCM_SMI}, ["GPU: 0", "GPU: 1"]),
        ({"amd-smi": "", "rocm-smi": _ROCM_SMI}, [_ROCM_SMI.splitlines()[0]]),
        ({}, []),
    ],
    ids=["ROCm 7", "ROCm 5", "both", "a broken amd-smi", "no AMD"],
)
def test_amd_devices_are_listed_by_the_tool_that_the_node_has(
    tmp_path: Path, tools: dict[str, str], devices: list[str]
) -> None:
    profile, _ = load_cluster("local")
    script = render_probe(profile, tmp_path)
    begin, end = script.index("section()"), script.index("section cores")
    (tmp_path / "timeout").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for name, output in tools.items():
        (tmp_path / f"{name}.txt").write_text(output)
        (tmp_path / name).write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/{name}.txt\n[ -s {tmp_path}/{name}.txt ]\n")
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    done = subprocess.run(
        ["/bin/bash", "-c", script[begin:end]], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert parse_probe(done.stdout).devices == devices
