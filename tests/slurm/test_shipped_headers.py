"""Every shipped profile's header, read by a real sbatch: what it does not know as an option is a typing error of ours.

That it knows no such partition, QOS, account, feature or node is no fault of a profile.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster_file
from tests.render.test_shipped_profiles import FILES, SITES, job
from tests.slurm.box import Box

pytestmark = pytest.mark.slurm

ELSEWHERE = {
    "uenv": "CSCS' plugin uenv",
    "view": "CSCS' plugin uenv",
    "image": "shifter's plugin",
    "module": "shifter's plugin",
}
"""Options that only a plugin of the site knows."""
UNKNOWN = re.compile(r"unrecognized option '?(?:--)?([\w-]+)")
REFUSED = re.compile(
    r"allocation failure: (?:Invalid (?:partition|account|qos|feature)|Requested node configuration is not available|"
    r"Job violates|Node count specification invalid|Requested partition|User's group)|to start at",
    re.IGNORECASE,
)  # fmt: skip


def headers() -> list[tuple[str, str | None, str | None]]:
    found: list[tuple[str, str | None, str | None]] = []
    for name in (*SITES, "generic-slurm"):
        profile, _ = load_cluster_file(FILES[name])
        if profile.scheduler.kind == "slurm" and profile.launcher == "srun":
            found += [(name, partition, None) for partition in profile.partitions or [None]]
            found += [(name, None, environment) for environment in profile.environments]
    return found


def test_sbatch_accepts_every_option_of_shipped_profiles(box: Box, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    env["SLURM_CONF"] = str(box.slurm_conf)
    complaints, plugins = [], set()
    for cluster, partition, environment in headers():
        chosen = {"partition": partition, "environment": environment}
        script = job(cluster, **{key: value for key, value in chosen.items() if value is not None})
        while True:
            (tmp_path / "job.sh").write_text(script)
            command = ["sbatch", "--test-only", str(tmp_path / "job.sh")]
            said = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stderr
            unknown = UNKNOWN.search(said)
            if unknown is None or unknown[1] not in ELSEWHERE:
                break
            plugins.add(unknown[1])
            script = re.sub(rf"^#SBATCH --{unknown[1]}\b.*\n", "", script, flags=re.MULTILINE)
        if not REFUSED.search(said):
            complaints.append(f"{cluster} {partition or environment}: {said.strip()}")
    assert complaints == []
    assert plugins == ELSEWHERE.keys()


def test_a_wrong_option_would_be_noticed(box: Box, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#SBATCH --gpus-per-nod3=4\n")
    env = {**os.environ, "SLURM_CONF": str(box.slurm_conf)}
    command = ["sbatch", "--test-only", str(tmp_path / "job.sh")]
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=False).stderr
    assert UNKNOWN.search(said)
    assert not REFUSED.search(said)
