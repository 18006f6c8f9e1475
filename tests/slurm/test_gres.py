"""Accelerators of a job with two ranks, for each style of request: what SLURM shows each rank."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import load_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.releases, pytest.mark.timeout(600)]

VISIBLE = {
    "gres": ({}, 2),
    "gpus-per-node": ({}, 2),
    "gpus": ({}, 2),
    "gpus-per-task": ({}, 1),
    "gpus-per-task on the step": ({"gpus_on": "both"}, 1),
}
"""For each partition of the profile: further keys of its request, and how many of the two devices each rank sees."""
PROGRAM = """\
import os
visible = os.environ.get("SLURM_STEP_GPUS")
print(f"rank {os.environ['RANK']} sees {visible};")
print("took 0.1 s")
"""
SWEEP = """\
name = "devices"
[command]
argv = {argv}
[[command.metrics]]
name = "step_time"
unit = "s"
better = "lower"
pattern = 'took ([0-9.]+) s'
[fixed]
tasks_per_node = 2
time_limit_min = 6
[grid]
partition = {partitions}
"""


def test_each_rank_sees_the_devices_of_its_request(
    hpcbench: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    keys = {style: style.replace(" ", "-") for style in VISIBLE}
    text = load_cluster("slurmbox")[1].text.replace('name = "slurmbox"', 'name = "devices"')
    for style, (more, _) in VISIBLE.items():
        request = "".join(f"{key} = {json.dumps(value)}\n" for key, value in more.items())
        text += f'[partitions.{keys[style]}]\nname = "normal"\n[partitions.{keys[style]}.request]\n'
        text += f'gpus = "{style.split()[0]}"\n{request}'
    profile, script, sweep = tmp_path / "devices.toml", tmp_path / "show.py", tmp_path / "sweep.toml"
    profile.write_text(text)
    script.write_text(PROGRAM)
    argv = json.dumps([sys.executable, str(script)])
    sweep.write_text(SWEEP.format(argv=argv, partitions=json.dumps(list(keys.values()))))
    done = hpcbench("run", str(sweep), "--cluster", str(profile))
    assert done.returncode == 0, done.stderr + done.stdout
    assert len(list((tmp_path / "results" / "devices" / "runs").glob("*/*/result.json"))) == len(VISIBLE)
    style_of = {key: style for style, key in keys.items()}
    for path in (tmp_path / "results" / "devices" / "runs").glob("*/*/result.json"):
        spec = json.loads(path.read_bytes())["spec"]
        logs = hpcbench("logs", path.parent.name).stdout
        seen = dict(re.findall(r"rank (\d) sees ([0-9,]+);", logs))
        devices = [set(seen[rank].split(",")) for rank in ("0", "1")]
        seen_by_each = VISIBLE[style_of[spec["partition"]]][1]
        assert [len(each) for each in devices] == [seen_by_each, seen_by_each], (spec["partition"], seen)
        assert len(devices[0] | devices[1]) == 2, (spec["partition"], seen)
