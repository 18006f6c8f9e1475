"""Needs of sites in job scripts: devices on the step, binding, containers, limits, PBS."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.paths import shared_folder
from hpcbench.render.job_script import make_job_shape, render_script
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.submit.plan import partition_limits

FOLDER = Path("/shared/submissions/sweep-0001")
ENGINE = TemplateEngine([shared_folder("templates")])
WHOLE, PART = (2, 4), (1, 2)
"""Nodes and ranks on each: all devices of the nodes, and half of them."""


def profile(**values: Any) -> ClusterProfile:
    node = {"cores": 64, "devices": 4, "device_type": "a100", **values.pop("node", {})}
    partition = {"whole_nodes": True, **values.pop("partition", {})}
    return ClusterProfile.model_validate({"name": "c", "node": node, "partitions": {"p": partition}, **values})


def contained(kind: str, **values: Any) -> dict[str, Any]:
    environment = {"container": {"kind": kind, "image": "im:age", **values}}
    return {"environments": {"e": environment}, "default_environment": "e"}


def script(ranks: tuple[int, int], made: ClusterProfile, runs: int = 1) -> str:
    text = render_script(ENGINE, make_job_shape(made, *ranks, 1, 600.0, partition="p"), "sweep", FOLDER, 0, runs=runs)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    # A word may hold commas: masks of cores, lists of mounts.
    shellcheck = [
        str(Path(sys.executable).with_name("shellcheck")),
        "--shell=bash",
        "--severity=warning",
        "--exclude=SC2054",
        "-",
    ]
    done = subprocess.run(shellcheck, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return text


def launch(text: str) -> list[str]:
    """The words of the command that starts the ranks."""
    body = text.split("ranks_command=(", 1)[1].split("-m hpcbench.worker)", 1)[0]
    return [word.rstrip(")") for word in shlex.split(body)]


MASKS = "mask_cpu:fe,fe00"


@pytest.mark.parametrize(
    ("ranks", "values", "words", "absent"),
    [
        (WHOLE, {"request": {"gpus": "gpus-per-task", "gpus_on": "step"}}, ["--gpus-per-task=1"], []),
        (WHOLE, {"request": {"gpus": "gpus", "gpus_on": "both"}}, ["--gpus=8"], []),
        (PART, {"request": {"gpus": "gres", "gpus_on": "step"}}, ["--gres=gpu:2"], []),
        (WHOLE, {"request": {"gpus": "gpus-per-node"}}, [], ["--gpus-per-node=4"]),
        (
            WHOLE,
            {"launcher": "torchrun", "request": {"gpus": "gpus-per-task", "gpus_on": "step"}},
            ["--gpus-per-task=4"],
            ["--gpus-per-task=1"],
        ),
        (WHOLE, {"binding": {"cpu_bind": "cores", "gpu_bind": "none"}}, ["--cpu-bind=cores", "--gpu-bind=none"], []),
        (WHOLE, {"binding": {"cpu_bind": "cores", "whole_node_cpu_bind": MASKS}}, [f"--cpu-bind={MASKS}"], []),
        (PART, {"binding": {"whole_node_cpu_bind": MASKS}}, [], [f"--cpu-bind={MASKS}"]),
        (
            WHOLE,
            {"binding": {"whole_node_cpu_bind": MASKS}, "partition": {"whole_nodes": False}},
            [],
            [f"--cpu-bind={MASKS}"],
        ),
        (WHOLE, {"launcher": "torchrun", "binding": {"cpu_bind": "cores"}}, [], ["--cpu-bind=cores"]),
        (
            WHOLE,
            {"binding": {"one_device_per_rank": True, "device_variable": "ROCR_VISIBLE_DEVICES"}},
            ["bash", 'export ROCR_VISIBLE_DEVICES=$SLURM_LOCALID; exec "$@"'],
            [],
        ),
        (
            WHOLE,
            {"binding": {"one_device_per_rank": True, "device_order": [3, 2, 1, 0]}},
            ['order=(3 2 1 0); export CUDA_VISIBLE_DEVICES=${order[SLURM_LOCALID]}; exec "$@"'],
            [],
        ),
        (WHOLE, {"launcher_args": ["--mpi=pmix"], "binding": {"cpu_bind": "cores"}}, ["--cpu-bind=cores", "--mpi=pmix"], []),
        (
            WHOLE,
            {**contained("pyxis", mounts=["/a:/b", "/c:/d:ro"], options=["--no-container-mount-home"]), "env": {"A": "1"}},
            ["--container-image=im:age", "--container-mounts=/a:/b,/c:/d:ro", "--container-env=A", "--no-container-mount-home"],
            [],
        ),
        (WHOLE, {"launcher": "ibrun", "launcher_args": ["-o", "0"]}, ["ibrun", "-o", "0"], ["srun", "--cpu-bind"]),
        (WHOLE, contained("cscs-engine"), ["--environment=im:age"], []),
    ],
)  # fmt: skip
def test_the_launcher_has_the_arguments_of_its_step(
    ranks: tuple[int, int], values: dict[str, Any], words: list[str], absent: list[str]
) -> None:
    found = launch(script(ranks, profile(**values)))
    assert [word for word in words if word not in found] == []
    assert [word for word in absent if word in found] == []


def test_a_rank_is_shown_its_own_device(tmp_path: Path) -> None:
    made = profile(binding={"one_device_per_rank": True, "device_order": [3, 2, 1, 0]})
    words = launch(script(WHOLE, made))
    wrapper = words[words.index("bash") :][:4]
    env = {"SLURM_LOCALID": "1", "PATH": "/usr/bin:/bin"}
    show = [*wrapper, "bash", "-c", "echo $CUDA_VISIBLE_DEVICES $1", "x", "a b"]
    assert subprocess.run(show, env=env, capture_output=True, text=True, check=True).stdout == "2 a b\n"


def directives(text: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(("#SBATCH ", "#PBS "))]


@pytest.mark.parametrize(
    ("values", "lines", "absent"),
    [
        ({"request": {"gpus": "gpus-per-task", "gpus_on": "step"}}, [], ["--gpus-per-task"]),
        ({"request": {"gpus": "gpus", "gpus_on": "both"}}, ["--gpus=8"], []),
        ({"request": {"gpus": "gres-typed"}, "node": {"gres_type": "A100_sxm4"}}, ["--gres=gpu:A100_sxm4:4"], []),
        ({"request": {"cpus_per_device": 7}}, ["--cpus-per-task=7"], []),
        ({"request": {"exclude_nodes": ["n[1-3]", "n7"]}}, ["--exclude='n[1-3],n7'"], []),
        ({"request": {"drop": ["partition"]}}, [], ["--partition"]),
        ({"partition": {"request": {"memory": "all"}}, "request": {"gpus": "gres"}}, ["--mem=0", "--gres=gpu:4"], []),
        (contained("shifter", modules=["gpu", "nccl-plugin"]), ["--image=im:age", "--module=gpu,nccl-plugin"], []),
        (contained("uenv", modules=["default"]), ["--uenv=im:age", "--view=default"], []),
        ({"directives": {"uenv": True, "network": ["a", "b"]}}, ["--uenv", "--network=a", "--network=b"], []),
    ],
)  # fmt: skip
def test_a_job_has_the_directives_of_its_profile(values: dict[str, Any], lines: list[str], absent: list[str]) -> None:
    found = directives(script(WHOLE, profile(**values)))
    assert [line for line in lines if line not in found] == []
    assert [name for name in absent if any(line.startswith(name) for line in found)] == []


@pytest.mark.parametrize(
    ("container", "prefix"),
    [
        ({"kind": "apptainer", "options": ["--nv"], "mounts": ["/a:/b"]}, "apptainer exec --nv --bind /a:/b im:age python3"),
        ({"kind": "singularity", "options": ["--rocm"]}, "singularity exec --rocm im:age python3"),
        ({"kind": "shifter"}, "shifter python3"),
        ({"kind": "podman-hpc", "options": ["--gpu"]}, "podman-hpc run --rm --env-host --gpu im:age python3"),
        ({"kind": "pyxis"}, "python3"),
        ({"kind": "uenv"}, "python3"),
    ],
)  # fmt: skip
def test_a_container_command_precedes_the_interpreter(container: dict[str, Any], prefix: str) -> None:
    text = script(WHOLE, profile(**contained(**container)))
    assert f"\npython=({prefix})\n" in text


def test_short_steps_run_where_the_container_is() -> None:
    text = script(WHOLE, profile(**contained("pyxis")))
    start = "worker=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --container-image=im:age "
    assert f'\n{start}"${{python[@]}}" -m hpcbench.worker)\n' in text
    assert "--container-image=im:age" in launch(script((1, 1), profile(launcher="torchrun", **contained("pyxis"))))


def test_the_device_order_is_exported_for_whole_nodes_only() -> None:
    made = profile(binding={"device_order": [3, 2, 1, 0]})
    assert "\nexport CUDA_VISIBLE_DEVICES=3,2,1,0\n" in script(WHOLE, made)
    assert "CUDA_VISIBLE_DEVICES" not in script(PART, made)


def test_the_environment_of_a_job_is_prepared_in_order() -> None:
    made = profile(
        setup=["source /etc/profile.d/modules.sh"], env={"A": "1"}, env_unset=["B"],
        network={"nccl_interfaces": ["hsn0", "hsn1"], "nccl_hcas": ["mlx5_0"], "gloo_interface": "hsn0"},
        environments={"e": {"modules": ["m"], "modules_start": "reset", "env": {"A": "2"}, "env_unset": ["C"]}},
        default_environment="e",
    )  # fmt: skip
    before = "source /etc/profile.d/modules.sh\nmodule reset\n"
    lines = [
        'module load m; check_module m "$?"', "unset B", "unset C", "export NCCL_SOCKET_IFNAME=hsn0,hsn1",
        "export NCCL_IB_HCA=mlx5_0", "export GLOO_SOCKET_IFNAME=hsn0", "export A=2",
    ]  # fmt: skip
    text = script(WHOLE, made)
    assert 0 < text.index(before) < text.index("\n".join(lines))


def test_the_default_time_limit_is_the_partitions() -> None:
    steps = [{"nodes": 2, "max_time_min": "10 min"}]
    made = profile(partition={"max_time_by_nodes": steps, "max_time_min": "20 min"}, default_partition="p")
    assert make_job_shape(made, 2, 1).time_limit_s == 600.0
    assert make_job_shape(made, 3, 1).time_limit_s == 1200.0
    assert partition_limits(made, "p").time_steps == ((2, 10.0),)


def test_cpus_come_with_the_devices() -> None:
    assert make_job_shape(profile(request={"cpus_per_device": 16}), 1, 2, 2).cpus_per_task == 32


@pytest.mark.parametrize(
    ("request_", "partition", "cpus"),
    [
        ({"gpus": "gpus-per-node"}, {"whole_nodes": False}, [16, 16, 16, 32]),
        ({"gpus": "gres", "gpus_on": "both"}, {"whole_nodes": False}, [16, 16, 16, 32]),
        ({"gpus": "gpus-per-node"}, {"whole_nodes": True}, [64, 32, 16, 32]),
        ({"gpus": "gpus-per-node", "exclusive": True}, {"whole_nodes": False}, [64, 32, 16, 32]),
        ({"gpus": "gres", "gpus_on": "step"}, {"whole_nodes": False}, [64, 32, 16, 32]),
        ({"gpus": "none"}, {"whole_nodes": False}, [64, 32, 16, 32]),
        ({"gpus": "gpus-per-node", "cpus_per_task": 3}, {"whole_nodes": False}, [3, 3, 3, 3]),
    ],
)
def test_ranks_leave_other_devices_of_a_shared_node_their_cpus(
    request_: dict[str, Any], partition: dict[str, Any], cpus: list[int]
) -> None:
    """1, 2 and 4 ranks of one device, and 2 ranks of two, on nodes of 64 cores and 4 devices."""
    made = profile(request=request_, partition=partition)
    shapes = [(1, 1), (2, 1), (4, 1), (2, 2)]
    assert [make_job_shape(made, 1, *shape, partition="p").cpus_per_task for shape in shapes] == cpus


def test_ranks_on_processors_share_the_nodes_cpus() -> None:
    made = profile(request={"gpus": "gpus-per-node"}, partition={"whole_nodes": False})
    assert make_job_shape(made, 1, 2, 0, partition="p").cpus_per_task == 32


def test_a_pbs_script_has_pbs_directives() -> None:
    made = profile(
        scheduler={"kind": "pbs"}, launcher="mpirun", account="group1", partition={"name": "rt_HF"},
        env={"NCCL_DEBUG": "WARN"}, directives={"v": "USE_SSH=1"},
    )  # fmt: skip
    text = script(WHOLE, made, runs=8)
    assert directives(text) == [
        "-N hpcbench-sweep-0001-0", "-P group1", "-q rt_HF", "-l select=2:mpiprocs=4", "-l walltime=00:10:00",
        "-J 0-7", "-S /bin/bash", "-j oe", "-o /shared/submissions/sweep-0001/", "-v USE_SSH=1",
    ]  # fmt: skip
    assert "#SBATCH" not in text
    assert "SLURM" not in text
    assert "${PBS_ARRAY_INDEX:-0}" in text
    assert '-hostfile "$PBS_NODEFILE"' in text
    assert "variables=(-x PATH -x PYTHONSAFEPATH -x NCCL_DEBUG)" in text
    assert not [line for line in directives(script(WHOLE, made)) if line.startswith("-J")]
