"""Freed memory is kept: counted in page faults, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

_PROGRAM = """
import resource, sys, torch
from torch import nn
from hpcbench.worker.measure.host import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(8, 24, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(24, 24, 3), nn.ReLU())
x = torch.randn(16, 8, 64, 64)
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.zero_grad()
    model(x).square().mean().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


# glibc raises its thresholds as blocks are freed, so that its faults depend on the heap's layout; fixed, they do not.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def faults_of_ten_steps(mode: str, settings: Mapping[str, str]) -> int:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", _PROGRAM, mode]
    done = subprocess.run(command, env={**env, **settings}, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_freed_memory_is_kept_for_the_next_step() -> None:
    # A process that gives every large block back shows that the steps need new pages: each large activation has 1,400.
    assert faults_of_ten_steps("give back", _GIVE_BACK) > 50_000
    assert faults_of_ten_steps("keep", {}) < 2000


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_allocator_settings_of_the_user_stay(name: str) -> None:
    from hpcbench.worker.measure.host import keep_freed_memory

    assert not keep_freed_memory({name: "1"})
