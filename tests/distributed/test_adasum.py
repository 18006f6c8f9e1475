"""Adasum of two replicas, over MPI, is what its formula says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcbench.strategies.horovod.train import load_horovod
from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import TCPStore, to_timedelta
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.build import build_model
from hpcbench.worker.verification.reference import max_relative_difference
from tests.conftest import absent, require_horovod
from tests.distributed.adasum_ranks import adasum_case
from tests.distributed.cases import CPU, run_reference, short_epoch
from tests.distributed.launching import environment
from tests.packages import require_mpirun

pytestmark = [pytest.mark.slow, pytest.mark.strategy("horovod")]

BOUND = 1e-6
"""Horovod's dot products are exact in fp64, its tensors travel as they are: what is left is rounding."""


def test_two_replicas_are_combined_by_the_adasum_formula(tmp_path: Path) -> None:
    require_horovod()
    require_mpirun()
    if not load_horovod().mpi_built():
        absent("horovod-mpi", "this Horovod was built without MPI: rm .venv/.horovod; make horovod")
    store = TCPStore("127.0.0.1", 0, None, True, to_timedelta(60), wait_for_workers=False)
    command = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, "-m",
               "tests.distributed.adasum_ranks", str(tmp_path / "weights")]  # fmt: skip
    path = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{environment()['PYTHONPATH']}"
    env = environment(STORE_PORT=str(store.port), GLOO_SOCKET_IFNAME="lo", PYTHONPATH=path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found, expected = torch.load(tmp_path / "weights"), with_adasum()
    worst = max(max_relative_difference(found[name], expected[name]) for name in expected)
    assert worst <= BOUND
    mean = run_reference(adasum_case())
    assert max(max_relative_difference(found[name], mean.state[name]) for name in expected) > 100 * BOUND


def with_adasum() -> dict[str, Tensor]:
    """Each replica's update of its own mean gradient, tensor by tensor combined (Maleki et al. 2021)."""
    case = adasum_case()
    spec = case.spec
    with short_epoch(spec.dataset, case.samples):
        feed, model = make_feed(spec, CPU), build_model(spec).double()
        for step in range(case.steps):
            updates = []
            for replica in range(2):
                inputs, labels = feed.batch(step, replica)
                loss = summed_loss(model(inputs), labels) * 2 / feed.global_count(step)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                updates.append([-spec.learning_rate * gradient for gradient in gradients])
            with torch.no_grad():
                for parameter, a, b in zip(model.parameters(), *updates, strict=True):
                    parameter.add_(combined(a, b))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def combined(a: Tensor, b: Tensor) -> Tensor:
    common = (a * b).sum()
    return (1 - common / (2 * (a * a).sum())) * a + (1 - common / (2 * (b * b).sum())) * b
