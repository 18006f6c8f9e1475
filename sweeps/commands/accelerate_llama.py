"""A small Llama of transformers, trained by Accelerate on random tokens."""

import argparse
import json
import os
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def main():
    """Train for some steps; the file $HPCBENCH_METRICS gets a line of JSON for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    wanted = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=wanted.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=wanted.tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = torch.randint(1000, (wanted.steps * wanted.batch_size * accelerator.num_processes, wanted.tokens))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=wanted.batch_size))
    with open(os.environ.get("HPCBENCH_METRICS", os.devnull), "w") as metrics:
        began = time.perf_counter()
        for step, tokens in enumerate(loader):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            value = accelerator.reduce(loss.detach(), "mean").item()
            now = time.perf_counter()
            accelerator.print(f"step {step}: loss {value:.4f}, {now - began:.4f} s")
            metrics.write(json.dumps({"step_time": now - began, "loss": value}) + "\n")
            began = now
    accelerator.print("training completed")
    # The model goes before its group, or gloo may wait for ever: pytorch/pytorch#190489
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


main()
