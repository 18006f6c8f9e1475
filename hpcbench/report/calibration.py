"""A calibration in words: what was found, how well it fits, what stays as the profile has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import exp
from typing import TYPE_CHECKING

import msgspec

from hpcbench.fileio import printable
from hpcbench.oracle.calibration.store import Calibration, Residual
from hpcbench.oracle.machine import Machine
from hpcbench.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def findings(machine: Machine) -> Iterator[tuple[str, str]]:
    """What of the machine was found, in two columns."""
    compute, comm = machine.compute, machine.comm
    for moved in machine.posterior.parameters if machine.posterior is not None else []:
        yield moved.name, f"{exp(moved.log_factor):.2f} times; {_percent(moved.learned)} of it from the runs"
    if compute.samples:
        factors = ", ".join(f"{name} {value:.2f}" for name, value in sorted(compute.factors.items()) if name)
        yield "kernels", f"{len(compute.samples)}; a step takes so many times their sum: {factors}"
        yield "computation of other models", f"to {_percent(compute.spread)}"
    for tasks, factor in sorted(compute.crowding.items()):
        if tasks > 1:
            yield f"{tasks} ranks on a node", f"each computes {factor:.2f} times as long"
    if comm.collectives:
        yield "collectives", f"{len(comm.collectives)} lines; to {_percent(comm.spread)}"
        yield "issuing a collective", format_seconds(comm.call_s)
        yield "computing under a collective", f"{comm.overlap_slowdown:.2f} times as long"
        yield "a collective under computing", f"{comm.comm_slowdown:.2f} times as long"
    for flows, phi in sorted(comm.contention.items()):
        yield f"{flows} groups on one link", f"each takes {phi:.2f} times as long"
    yield "scatter of ranks", _percent(machine.straggling)
    yield "memory of a process", f"{machine.base_bytes / 2**20:.0f} MiB"
    for key, one in sorted(machine.strategies.items()):
        yield key, f"computes {one.compute_factor:.2f} times as long, and {format_seconds(one.step_s)} a step"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%")


def calibration_view(calibration: Calibration) -> RenderableType:
    """Tables for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = Table("found", "", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name, text in findings(calibration.machine):
        found.add_row(Text(printable(name)), Text(printable(text)))
    fits = Table("fit", "points", "error", "R2", box=None, padding=(0, 2, 0, 0))
    for one in shown(calibration.residuals):
        r2 = "" if one.r2 is None else f"{one.r2:.3f}"
        fits.add_row(Text(printable(one.what)), str(one.points), _percent(one.error), r2)
    notes = [Text(f"nominal: {printable(note)}") for note in calibration.notes]
    return Group(found, "", fits, *([""] if notes else []), *notes)


def shown(residuals: list[Residual]) -> list[Residual]:
    """One line for every operation of the collectives and for runs of the same words: the worst of them.

    The points of runs are all of theirs; of an operation they are those of its worst band.
    """
    worst: dict[str, list[Residual]] = defaultdict(list)
    for one in residuals:
        key = one.what.partition(",")[0] if one.part == "collectives" else one.what
        worst[key].append(one)
    return [_worst(found) for found in worst.values()]


def _worst(found: list[Residual]) -> Residual:
    one = max(found, key=lambda one: one.error)
    return msgspec.structs.replace(one, points=sum(other.points for other in found)) if one.part == "runs" else one
