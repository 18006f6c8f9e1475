"""The shipped profiles of real clusters, against what their sites want: typed from the sites' documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli

from hpcbench.config.cluster_profile import load_cluster_file
from hpcbench.paths import shared_folder
from hpcbench.predict.decoder.machines import fitted_machine
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.submit.plan import partition_limits

FOLDER = Path("/shared/submissions/sweep-0001")
ENGINE = TemplateEngine([shared_folder("templates")])
FILES = {path.stem: path for pattern in ("*.toml", "*/*.toml") for path in shared_folder("clusters").glob(pattern)}
OURS = {"local", "slurmbox", "generic-slurm"}
SITES = sorted(FILES.keys() - OURS)


class Case(NamedTuple):
    """A job on two nodes with all their devices, unless ``spec`` says otherwise, and lines of its script."""

    cluster: str
    contains: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    spec: dict[str, Any] = {}  # noqa: RUF012 - never changed


CASES = [
    Case(
        "snellius",
        ("#SBATCH --partition=gpu_a100", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=18"),
        ("--account", "--mem"),
    ),
    Case(
        "snellius",
        ("#SBATCH --partition=gpu_h100", "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=16"),
        spec={"partition": "gpu_h100"},
    ),
    Case(
        "perlmutter",
        (
            "#SBATCH --constraint=gpu", "#SBATCH --qos=regular", "#SBATCH --gpus-per-node=4", "#SBATCH --ntasks-per-node=4",
            "#SBATCH --cpus-per-task=32", "#SBATCH --account=project", "--cpu-bind=cores", "--gpu-bind=none",
            "export CUDA_VISIBLE_DEVICES=3,2,1,0", "export FI_MR_CACHE_MONITOR=userfaultfd",
        ),
        ("--partition", "--mem", "--gres"),
    ),
    Case("perlmutter", ("#SBATCH --constraint='gpu&hbm80g'",), ("--partition",), {"partition": "regular_hbm80g"}),
    Case("perlmutter", ("#SBATCH --qos=debug",), ("--partition",), {"partition": "debug"}),
    Case(
        "perlmutter",
        ("#SBATCH --qos=shared", "#SBATCH --gpus-per-node=1", "#SBATCH --cpus-per-task=32"),
        ("CUDA_VISIBLE_DEVICES",),
        {"partition": "shared", "tasks_per_node": 1, "nodes": 1},
    ),
    Case(
        "perlmutter",
        ("#SBATCH --image=nersc/pytorch:25.02.01", "#SBATCH --module=gpu,nccl-plugin", "python=(shifter python3)"),
        spec={"environment": "shifter"},
    ),
    Case("perlmutter", (), ("CUDA_VISIBLE_DEVICES",), {"tasks_per_node": 1, "nodes": 1}),
    Case(
        "juwels-booster",
        (
            "#SBATCH --partition=booster", "#SBATCH --gres=gpu:4", "#SBATCH --hint=nomultithread", "#SBATCH --cpus-per-task=12",
            "#SBATCH --account=project", "--cpus-per-task=12", "export CUDA_VISIBLE_DEVICES=0,1,2,3",
            "export NCCL_SOCKET_IFNAME=ib0", "export GLOO_SOCKET_IFNAME=ib0", "export NCCL_IB_TIMEOUT=50",
            "export NCCL_IB_RETRY_CNT=10", "export UCX_RC_TIMEOUT=4s",
        ),
        ("--gpus-per-node", "torch.distributed.run", "--cpu-bind"),
    ),
    Case(
        "jupiter",
        ("#SBATCH --partition=booster", "#SBATCH --gres=gpu:4", "#SBATCH --cpus-per-task=72", "export NCCL_SOCKET_IFNAME=ib0"),
        ("--mem",),
    ),
    Case(
        "lumi-g",
        (
            "#SBATCH --partition=standard-g", "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=8",
            "#SBATCH --cpus-per-task=7", "#SBATCH --account=project",
            "--cpu-bind=mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000",
            "export ROCR_VISIBLE_DEVICES=$SLURM_LOCALID", "export NCCL_SOCKET_IFNAME=hsn", "export NCCL_NET_GDR_LEVEL=3",
            "export CXI_FORK_SAFE=1", "export CXI_FORK_SAFE_HP=1", "export FI_CXI_DISABLE_CQ_HUGETLB=1",
        ),
    ),
    Case("lumi-g", ("#SBATCH --partition=small-g",), ("mask_cpu",), {"partition": "small-g"}),
    Case("lumi-g", (), ("mask_cpu",), {"tasks_per_node": 4, "nodes": 1}),
    Case(
        "leonardo",
        (
            "#SBATCH --partition=boost_usr_prod", "#SBATCH --qos=normal", "#SBATCH --gres=gpu:4", "#SBATCH --ntasks-per-node=4",
            "#SBATCH --cpus-per-task=8", "#SBATCH --account=project",
        ),
    ),
    Case(
        "leonardo",
        ("#SBATCH --partition=boost_usr_prod", "#SBATCH --qos=boost_qos_dbg", "#SBATCH --time=0-00:30:00"),
        spec={"partition": "debug"},
    ),
    Case(
        "marenostrum5",
        (
            "#SBATCH --partition=acc", "#SBATCH --qos=acc_ehpc", "#SBATCH --gres=gpu:4", "#SBATCH --cpus-per-task=20",
            "export NCCL_SOCKET_IFNAME=ib0,ib1,ib2,ib3", "export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_4,mlx5_5",
        ),
        ("--mem", "--partition=acc_ehpc"),
    ),
    Case(
        "alps-daint",
        ("#SBATCH --partition=normal", "#SBATCH --gpus-per-task=1", "#SBATCH --ntasks-per-node=4", "ulimit -c 0"),
        ("--gres", "--mem", "--uenv", "NCCL_NET_PLUGIN"),
    ),
    Case(
        "alps-daint",
        (
            "#SBATCH --uenv=pytorch/v2.8.0:/user-environment", "#SBATCH --view=default", "export NCCL_NET='AWS Libfabric'",
            "export NCCL_PROTO='^LL128'", "export MPICH_GPU_SUPPORT_ENABLED=0",
        ),
        ("NCCL_NET_PLUGIN",),
        {"environment": "uenv"},
    ),
    Case("alps-clariden", ("#SBATCH --partition=normal", "#SBATCH --gpus-per-task=1", "ulimit -c 0"), ("--gres",)),
    Case("alps-clariden", ("#SBATCH --time=0-00:22:30",), spec={"partition": "debug", "nodes": 4}),
    Case(
        "frontier",
        (
            "#SBATCH --partition=batch", "#SBATCH --account=project", "--gpus-per-task=1", "--gpu-bind=closest",
            "--cpus-per-task=7", "export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3", "export NCCL_CROSS_NIC=1",
            "export FI_MR_CACHE_MONITOR=kdreg2", "#SBATCH --network=disable_rdzv_get", "export FI_CXI_RDZV_PROTO=alt_read",
            "else export NCCL_NET=OFI", "rccl-net-plugin", "cpe/26.03",
        ),
        ("#SBATCH --gpus", "#SBATCH --gres", "torch.distributed.run"),
    ),
    Case(
        "vista",
        ("#SBATCH --partition=gh", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1"),
        ("--gres", "--gpus", "--mem", "--export", "--nodelist", "--account"),
    ),
    Case("vista", ("#SBATCH --partition=gh-dev",), ("--gres", "--mem"), {"partition": "gh-dev"}),
    Case(
        "delta",
        (
            "#SBATCH --partition=gpuA100x4", "#SBATCH --gpus-per-node=4", "#SBATCH --mem=0", "#SBATCH --exclusive",
            "#SBATCH --account=project", "--gpu-bind=none", "export NCCL_SOCKET_IFNAME=hsn",
        ),
    ),
    Case("delta", ("#SBATCH --gpus-per-node=8", "#SBATCH --cpus-per-task=12"), spec={"partition": "gpuH200x8", "nodes": 1}),
    Case(
        "generic-pyxis",
        (
            "#SBATCH --gpus-per-node=8", "#SBATCH --ntasks-per-node=8", "#SBATCH --exclusive", "#SBATCH --mem=0",
            "'--container-image=nvcr.io#nvidia/pytorch:25.02-py3'", "--no-container-mount-home",
        ),
        ("#SBATCH --container",),
    ),
    Case(
        "abci-3",
        (
            "#PBS -P project", "#PBS -q rt_HF", "#PBS -l select=2:mpiprocs=8", "#PBS -l walltime=00:30:00", "#PBS -v USE_SSH=1",
            "source /etc/profile.d/modules.sh", "module load hpcx", '-hostfile "$PBS_NODEFILE"',
        ),
        ("#SBATCH", "srun", "scontrol"),
    ),
]  # fmt: skip


def job(cluster: str, **given: Any) -> str:
    """The script of a job with all devices of two nodes, in an account called project where the site wants one."""
    profile, _ = load_cluster_file(FILES[cluster])
    if profile.account_required:
        profile = profile.model_copy(update={"account": "project"})
    devices = profile.partition(given.get("partition")).node.devices or 1
    shape = make_job_shape(profile, **{"nodes": 2, "tasks_per_node": devices, **given})
    return render_script(ENGINE, shape, "sweep", FOLDER, 0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cluster}-{'-'.join(map(str, case.spec.values()))}")
def test_a_shipped_profiles_script_follows_its_site(case: Case) -> None:
    script = job(case.cluster, **case.spec)
    assert [text for text in case.contains if text not in script] == []
    assert [text for text in case.lacks if text in script] == []


def test_every_site_is_in_the_table() -> None:
    historic = {path.stem for path in (shared_folder("clusters") / "historic").glob("*.toml")}
    assert historic == {"lisa", "abci-v100", "selene"}
    nodes = {path.stem for path in (shared_folder("clusters") / "nodes").glob("*.toml")}
    assert {load_cluster_file(FILES[name])[0].scheduler.kind for name in historic | nodes} == {"none"}
    assert {case.cluster for case in CASES} == set(SITES) - historic - nodes


def test_nodes_agree_with_the_machines_that_they_name() -> None:
    """A profile's figures are the vendor's; the fitted machine has them, too, but for the power limit of one."""
    without = set()
    for path in (shared_folder("clusters") / "nodes").glob("*.toml"):
        profile, _ = load_cluster_file(path)
        assert profile.node.device_type is not None
        device = profile.devices[profile.node.device_type]
        if device.fitted is None:
            without.add(path.stem)
            continue
        machine = fitted_machine(device.fitted).device
        assert device.memory_bandwidth_bytes_per_s == pytest.approx(machine.memory_bytes_s), path.stem
        assert device.processors == machine.multiprocessors
        assert profile.node.devices == machine.gpus
        slower = 0.8 if device.fitted == "h100-96gb-500w" else 1.0
        assert machine.peak_flops == pytest.approx(slower * device.peak_flops_per_s["bf16"])
        assert profile.links.intra_node is not None
        assert profile.links.intra_node.bandwidth_bytes_per_s == pytest.approx(machine.nvlink_bytes_s)
    assert without == {"a100-80gb-pcie", "b200-180gb-ib", "mi250x-128gb-slingshot", "mi300x-192gb-ib"}, "without runs"


@pytest.mark.parametrize(
    ("cluster", "device_type", "units", "clock_hz", "flops_per_clock", "bus_bits", "bits_per_s"),
    [
        ("mi300x-192gb-ib", "mi300x", 304, 2.1e9,
         {"fp64": 256, "fp32": 256, "tf32": 1024, "bf16": 2048, "fp16": 2048, "fp8": 4096}, 8192, 5.2e9),
        *((name, "mi250x_gcd", 110, 1.7e9, {"fp64": 256, "fp32": 256, "bf16": 1024, "fp16": 1024}, 4096, 3.2e9)
          for name in ("mi250x-128gb-slingshot", "lumi-g", "frontier")),
    ],
)  # fmt: skip
def test_figures_of_amds_devices_follow_from_their_units_and_clocks(
    cluster: str, device_type: str, units: int, clock_hz: float, flops_per_clock: dict[str, int], bus_bits: int,
    bits_per_s: float,
) -> None:  # fmt: skip
    """The data sheets round: peaks to four digits, rates of memory to two."""
    device = load_cluster_file(FILES[cluster])[0].devices[device_type]
    peaks = {precision: units * clock_hz * flops for precision, flops in flops_per_clock.items()}
    assert device.peak_flops_per_s == pytest.approx(peaks, rel=1e-3)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(bus_bits * bits_per_s / 8, rel=0.03)
    assert device.processors in (None, units)


@pytest.mark.parametrize("name", SITES)
def test_a_shipped_profile_has_source_and_date_and_no_account(name: str) -> None:
    data = tomli.loads(FILES[name].read_text(encoding="utf-8"))
    profile, _ = load_cluster_file(FILES[name])
    assert profile.source
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", profile.date)
    assert profile.verified in ("none", "docs")
    assert "account" not in data
    device = profile.node.device_type
    types = {device} | {profile.partition(key).node.device_type for key in profile.partitions}
    assert types <= {None, *profile.devices}


def test_rendezvous_names_follow_the_site() -> None:
    """JUWELS' InfiniBand names end in i; Frontier's rank 0 is reached by its host name."""
    assert load_cluster_file(FILES["juwels-booster"])[0].network.host_suffix == "i"
    assert load_cluster_file(FILES["jupiter"])[0].network.host_suffix == ""
    assert load_cluster_file(FILES["frontier"])[0].network.meet_by == "host-name"


@pytest.mark.parametrize(
    ("cluster", "nodes", "minutes"),
    [("frontier", 91, 120.0), ("frontier", 92, 360.0), ("frontier", 183, 360.0), ("frontier", 184, 720.0),
     ("abci-3", 128, 10080.0)],
)  # fmt: skip
def test_the_longest_job_of_a_partition_depends_on_its_nodes(cluster: str, nodes: int, minutes: float) -> None:
    assert load_cluster_file(FILES[cluster])[0].partition(None).longest_min(nodes) == minutes


def test_snellius_refuses_part_of_a_node_on_several() -> None:
    from hpcbench.strategies.resolve import InfeasiblePoint, resolve_point

    profile, _ = load_cluster_file(FILES["snellius"])
    point = {
        "model": "resnet18",
        "dataset": "digits",
        "strategy": "ddp",
        "batch_size": 8,
        "nodes": 2,
        "tasks_per_node": 1,
    }
    dropped = resolve_point(point, partition_limits(profile, "gpu_a100"))
    assert isinstance(dropped, InfeasiblePoint)
    assert dropped.reason == "1 of 4 devices on each of 2 nodes, but gpu_a100 wants all of them"


def test_a_core_mask_has_the_cores_of_its_device() -> None:
    profile, _ = load_cluster_file(FILES["lumi-g"])
    bind = profile.binding.whole_node_cpu_bind
    assert bind is not None
    masks = [int(mask, 16) for mask in bind.removeprefix("mask_cpu:").split(",")]
    assert [mask.bit_count() for mask in masks] == [profile.request.cpus_per_device] * 8
    assert sum(masks).bit_count() == profile.node.cores
