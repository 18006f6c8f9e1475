"""A training as many users write it: torch's DistributedDataParallel, one process for each device.

The ranks meet through MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, which hpcbench and torchrun set.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from perceptron import build
from torch.nn.parallel import DistributedDataParallel


def main():
    """Train for some steps, and print the time of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    wanted = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build((1, 8, 8), 10, wanted.width).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.rand(wanted.batch_size, 1, 8, 8, device=device)
    labels = torch.randint(10, (wanted.batch_size,), device=device)
    for step in range(wanted.steps):
        dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f} elapsed {elapsed:.6f}", flush=True)
    del model  # before its group, or gloo may wait for ever: pytorch/pytorch#190489
    dist.destroy_process_group()


main()
