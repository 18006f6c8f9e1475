"""The command line of a script that measures cases of the day one by one, in a process of its own."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.gpu_day.parts import Size
from hpcbench.config.run_spec import RunSpec, run_label
from hpcbench.fileio import encode_indented_json, write_atomic


class Figures(Protocol):
    """What is measured of one case; ``error`` where that failed."""

    spec: RunSpec
    error: str | None


FiguresT = TypeVar("FiguresT", bound=Figures)


def measure_cases(
    module: str,
    arguments: Sequence[str] | None,
    cases: Callable[[Size], Iterable[FiguresT]],
    measure: Callable[[FiguresT, torch.device, Size], None],
) -> int:
    """Measure each case and write all figures after it, until ``--limit-s`` have passed; return the exit status.

    Args:
        module: whose command line it is.
        arguments: of the command line; ``None`` are those of the process.
        cases: empty figures of each case.
        measure: fills them in; where it raises, the other cases are still measured.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.gpu_day.{module}")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--size", choices=("full", "small"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    began_s, done = time.monotonic(), list[Any]()
    for figures in cases(options.size):
        case_began_s = time.monotonic()
        if case_began_s - began_s > options.limit_s:
            break
        try:
            measure(figures, device, options.size)
        except Exception as error:  # noqa: BLE001 - the others are still measured
            traceback.print_exc()
            figures.error = f"{type(error).__name__}: {error}"[:2000]
        done.append(figures)
        write_atomic(options.out, encode_indented_json(done))
        seconds = time.monotonic() - case_began_s
        print(f"{module} {figures.error or 'ok'} {seconds:.1f} s: {run_label(figures.spec)}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return int(any(figures.error for figures in done))
