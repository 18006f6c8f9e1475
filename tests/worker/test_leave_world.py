"""Gloo waits for ever if a model's reducer drops the last reference to its group: ``leave_world`` frees models first."""

from __future__ import annotations

import subprocess
import sys

TRAIN_AGAIN_AND_AGAIN = """
import gc
import torch
import torch.distributed as dist
from hpcbench.worker.distributed.world import leave_world

gc.disable()
gc.freeze()  # collections look at new objects alone
for _ in range(25):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for vector in torch.ones(64, 64):
        dist.all_reduce(vector)
    held = [model]
    held.append(held)
    del model, held
    leave_world()
print("done")
"""


def test_a_model_goes_before_its_group() -> None:
    command = [sys.executable, "-c", TRAIN_AGAIN_AND_AGAIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.stdout == "done\n", done.stderr
