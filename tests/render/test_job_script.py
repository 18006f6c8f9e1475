"""Rendered scripts against golden files, bash and shellcheck; every launcher, every way to ask for devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.scheduler_kinds import WRITTEN_DIRECTIVES
from hpcbench.paths import shared_folder
from hpcbench.render.job_script import (
    PIPELINE_VARIABLES,
    JobShape,
    make_job_shape,
    pbs_directives,
    render_script,
    sbatch_directives,
    template_context,
)
from hpcbench.render.template_engine import TemplateEngine
from hpcbench.submit.plan import SweepPlan

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FOLDER = Path("/shared/results/cluster/submissions/sweep-0001")

RICH = {
    "name": "rich", "device": "cuda", "account": "project 42", "default_partition": "gpu", "launcher_args": ["--cpu-bind=cores"],
    "node": {"cores": 64, "devices": 4, "device_type": "a100", "memory_bytes": "480 GiB"},
    "request": {"gpus": "gres-typed", "memory": "node", "exclusive": True, "drop": ["comment"]},
    "partitions": {"gpu": {"name": "gpu_a100", "qos": "high", "constraint": "a&b", "directives": {"switches": "2@1:00:00"}}},
    "directives": {"no-requeue": True, "uenv": ["one", "two"]},
    "environments": {
        "mod": {"modules": ["2025", "PyTorch/2.6"], "setup": ["ulimit -c 0"], "python": "python3", "env": {"A": "it's $HOME"},
                "container": {"command": ["apptainer", "exec", "/im age.sif"]}}
    },
    "default_environment": "mod",
}  # fmt: skip


def profile_of(**values: Any) -> ClusterProfile:
    return ClusterProfile.model_validate({**RICH, **values})


def shape_of(limit_s: float = 5400.0, **values: Any) -> JobShape:
    return make_job_shape(profile_of(**values), 2, 4, 1, limit_s)


CASES: dict[str, Callable[[], JobShape]] = {
    "local": lambda: make_job_shape(load_cluster("local")[0], 1, 2, 1, 1800.0),
    "slurmbox-pack": lambda: make_job_shape(load_cluster("slurmbox")[0], 2, 1, 1, 600.0, partition="normal"),
    "rich-srun": shape_of,
    "rich-mpirun": lambda: shape_of(launcher="mpirun"),
}


def rendered(case: str) -> str:
    pack = 3 if case.endswith("-pack") else 1
    engine = TemplateEngine([shared_folder("templates")])
    script = render_script(engine, CASES[case](), "sweep", FOLDER, 0, pack=pack, runs=8)
    return script.replace(sys.executable, "/venv/bin/python")


@pytest.mark.parametrize("case", CASES)
def test_scripts_are_as_reviewed(case: str) -> None:
    path = GOLDEN / f"{case}.sh"
    if os.environ.get("HPCBENCH_GOLDEN") == "write":
        path.write_text(rendered(case), encoding="utf-8")
    assert rendered(case) == path.read_text(encoding="utf-8"), "make golden, then review the diff"


@pytest.mark.parametrize("case", CASES)
def test_scripts_pass_bash_and_shellcheck(case: str, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(rendered(case), encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [str(shellcheck), "--shell=bash", "--severity=warning", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"gpus": "gpus-per-node"}, ("gpus-per-node", 4)),
        ({"gpus": "gpus-per-task"}, ("gpus-per-task", 1)),
        ({"gpus": "gres"}, ("gres", "gpu:4")),
        ({"gpus": "gres-typed"}, ("gres", "gpu:a100:4")),
        ({"memory": "all"}, ("mem", 0)),
        ({"memory": "node"}, ("mem", "491520M")),
        ({"memory_bytes": "8 GiB"}, ("mem", "8192M")),
        ({"cpus_per_task": 20}, ("cpus-per-task", 20)),
        ({}, ("cpus-per-task", 16)),
        ({"exclusive": True}, ("exclusive", True)),
    ],
)
def test_device_requests_become_the_sbatch_directive_of_the_profile(
    request_: dict[str, Any], expected: tuple[str, Any]
) -> None:
    assert expected in sbatch_directives(shape_of(request=request_), "job", "/f", 0)


@pytest.mark.parametrize(
    ("limit_s", "pack", "job_s", "time", "warning"),
    [
        (600.0, 1, 600.0, "0-00:10:00", "USR2@60"),
        (600.0, 3, 1890.0, "0-00:31:30", "USR2@30"),
        (84.5, 2, 229.0, "0-00:03:49", "USR2@30"),
    ],
)
def test_the_limit_of_a_job_is_that_of_its_runs_and_their_launches(
    limit_s: float, pack: int, job_s: float, time: str, warning: str
) -> None:
    shape = shape_of(limit_s)
    assert shape.job_limit_s(pack) == job_s
    lines = dict(sbatch_directives(shape, "job", "/f", 0, pack))
    assert (lines["time"], lines["signal"]) == (time, warning)


@pytest.mark.parametrize(
    ("device", "strategy", "needs"),
    [
        ("cuda", "gpipe", True),
        ("cuda", "pipedream", True),
        ("cuda", "fairscale_pipe", False),
        ("cuda", "ddp", False),
        ("cpu", "gpipe", False),
    ],
)
def test_only_pipelines_over_nccl_get_their_variables(device: str, strategy: str, needs: bool) -> None:
    plan: Any = SweepPlan(sweep=None, profile=profile_of(device=device), runs={}, dropped=[], tree=None)  # type: ignore[arg-type]
    spec = RunSpec(model="vgg11", dataset="digits", strategy=strategy, batch_size=8, pp_degree=2, tasks_per_node=2)
    variables = plan.shape(spec).variables
    assert (variables.keys() >= PIPELINE_VARIABLES.keys()) is needs


def test_the_profile_decides_about_the_variables_of_pipelines() -> None:
    profile = profile_of(env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    shape = make_job_shape(profile, 2, 4, has_nccl_pipeline=True)
    assert shape.variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_the_written_directives_are_those_of_the_table_of_their_scheduler() -> None:
    """Profiles are checked by the tables: `drop` takes these names, and `directives` must not contradict them."""
    written = set[str]()
    full: dict[str, Any] = {"memory": "all", "exclusive": True, "exclude_nodes": ["n"]}
    for gpus in ("gpus", "gpus-per-node", "gpus-per-task", "gres"):
        for kind in ("shifter", "uenv"):
            container = {"kind": kind, "image": "i", "modules": ["m"], "mounts": ["a:b"] if kind == "shifter" else []}
            environments, request = {"mod": {"container": container}}, {**full, "gpus": gpus}
            shape = shape_of(account="a", request=request, directives={}, environments=environments)
            written |= {name for name, _ in sbatch_directives(replace(shape, node="n1"), "job", "/f", 0)}
    # Arrays are an option of the command.
    assert written | {"array"} == {*WRITTEN_DIRECTIVES["slurm"], "switches"}
    shape = shape_of(scheduler={"kind": "pbs"}, directives={}, partitions={"gpu": {}}, request={})
    assert {name for name, _ in pbs_directives(shape, "job", "/f", 0, 1, 2)} == set(WRITTEN_DIRECTIVES["pbs"])


def test_a_bare_request_names_neither_devices_nor_memory() -> None:
    shape = shape_of(request={"drop": ["signal", "nodes"]})
    names = {name for name, _ in sbatch_directives(shape, "job", "/f", 0)}
    assert not names & {"gres", "gpus-per-node", "gpus-per-task", "mem", "exclusive", "signal", "nodes"}


def test_the_readme_of_the_templates_lists_every_variable() -> None:
    text = (shared_folder("templates") / "README.md").read_text(encoding="utf-8")
    names = template_context(shape_of(), "sweep", FOLDER, 0)
    assert [name for name in names if f"| `{name}` |" not in text] == []
