"""The table strategy x model x {ok, reason} of ``python -m tests.cuda``."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import STRATEGIES
from hpcbench.worker.dry_run.__main__ import describe_outcome
from tests.cuda.cases import MODELS, exclusion, gpu_run, ranks_to_step
from tests.cuda.checks import MEMORY_TOLERANCE, memory_problems, memory_ratio, order_problems, step_problems
from tests.cuda.fake_gpu import GpuSteps, step_on_gpu


class Outcome(NamedTuple):
    """The outcome of a strategy with a model. ``answer`` is ``ok``, ``excluded``, ``not_fakeable`` or ``wrong``."""

    answer: str
    reasons: list[str]
    modelled: list[str] = []  # noqa: RUF012 - never changed
    """Stand-ins for code that cannot run on fake tensors."""
    ratios: dict[int, float] = {}  # noqa: RUF012 - never changed
    """Each rank's live bytes at their peak over the oracle's."""


def outcome_of(spec: RunSpec) -> Outcome:
    """Step the first, an inner and the last rank of ``spec``, and check each of them and their order."""
    if (reason := exclusion(spec)) is not None:
        return Outcome("excluded", [reason])
    by_rank: dict[int, GpuSteps] = {}
    problems: list[str] = []
    ratios: dict[int, float] = {}
    for rank in ranks_to_step(spec):
        try:
            by_rank[rank] = step_on_gpu(spec, rank)
        except Exception as error:  # noqa: BLE001 - whatever it is, the table names it
            answer, reason = describe_outcome(error)
            return Outcome("wrong" if answer == "unsupported" else answer, [f"rank {rank}: {reason}"])
        problems += step_problems(spec, rank, by_rank[rank]) + memory_problems(spec, rank, by_rank[rank])
        ratios[rank] = memory_ratio(spec, rank, by_rank[rank])
    problems += order_problems(spec, by_rank)
    modelled = sorted({name for steps in by_rank.values() for name in steps.modelled})
    return Outcome("wrong" if problems else "ok", problems, modelled, ratios)


def print_table(arguments: Sequence[str]) -> int:
    """Print an outcome for every strategy and kind of model; return 1 if one is neither ok nor excluded."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="GPUs of every run (default 8)")
    parser.add_argument("--precision", default="fp32", help="precision of every run (default fp32)")
    parser.add_argument("--memory", action="store_true", help="print the rows of memory_ratios.tsv instead")
    parser.add_argument("strategies", nargs="*", choices=[[], *STRATEGIES], help="strategies (default: all)")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    failed = 0
    if chosen.memory:
        return print_memory_ratios(chosen.strategies or list(STRATEGIES), chosen.ranks)
    print(f"{'strategy':17} {'model':12} {'answer':13} {'memory':10} reasons, or stand-ins")
    for key in chosen.strategies or STRATEGIES:
        for kind in MODELS:
            outcome = outcome_of(gpu_run(key, kind, chosen.ranks, precision=chosen.precision))
            failed += outcome.answer not in ("ok", "excluded")
            first, *others = outcome.reasons or [f"modelled: {', '.join(outcome.modelled)}" if outcome.modelled else ""]
            memory = f"{min(outcome.ratios.values()):.2f}-{max(outcome.ratios.values()):.2f}" if outcome.ratios else ""
            print(f"{key:17} {kind:12} {outcome.answer:13} {memory:10} {first}", flush=True)
            for reason in others:
                print(f"{'':55} {reason}")
    return int(failed > 0)


def print_memory_ratios(strategies: Sequence[str], ranks: int) -> int:
    """Print the ratios of memory that are further from 1 than the tolerance, as ``memory_ratios.tsv`` lists them."""
    for key in strategies:
        for kind in MODELS:
            spec = gpu_run(key, kind, ranks)
            if spec.devices_per_task == 1:
                for rank, ratio in outcome_of(spec).ratios.items():
                    if abs(ratio - 1) > MEMORY_TOLERANCE:
                        print(f"{key}\t{spec.model}\t{spec.ranks}\t{rank}\t{ratio:.3f}", flush=True)
    return 0
