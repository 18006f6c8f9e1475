"""``mpirun -np N python -m tests.distributed.adasum_ranks OUT``: five steps with Adasum; rank 0 saves its weights."""

from __future__ import annotations

import dataclasses
import os
import sys

import torch
import torch.distributed as dist
from msgspec.structs import replace

from hpcbench.worker.data.feeds import make_feed
from hpcbench.worker.distributed.process_groups import RankContext, TCPStore, to_timedelta
from hpcbench.worker.models.build import build_model
from hpcbench.worker.strategy import resolve_runtime
from tests.distributed.cases import CPU, Case, make_case, short_epoch
from tests.distributed.test_data_parallel import PLAIN


def adasum_case() -> Case:
    """Without momentum, so that a replica's update is its gradient times the rate."""
    case = make_case(2, "vgg11", "digits", PLAIN, precision="fp64")
    return dataclasses.replace(case, spec=replace(case.spec, momentum=0.0))


def main() -> None:
    torch.set_num_threads(1)
    rank, port = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["STORE_PORT"])
    store = TCPStore("127.0.0.1", port, None, False, to_timedelta(60), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=to_timedelta(60))
    case = adasum_case()
    options = {"op": "adasum", "controller": "mpi"}
    spec = replace(case.spec, strategy="horovod", options=options)
    with short_epoch(spec.dataset, case.samples):
        feed, strategy = make_feed(spec, CPU), resolve_runtime("horovod")()
        strategy.setup(build_model(spec), spec, RankContext(rank, 2, CPU))
        for step in range(case.steps):
            strategy.step(feed, step)
    if rank == 0:
        torch.save(strategy.weights(), sys.argv[1])
    strategy.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
