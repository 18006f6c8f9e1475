"""The finished runs that a calibration is fitted to.

Runs that other work on their machine disturbed widen the intervals of predictions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import log
from statistics import median
from typing import NamedTuple

from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.results.schema import STATUS_OK, RunResult
from hpcbench.strategies.layer_table import LayerTable

_Z95 = 1.96


class CalibrationRun(NamedTuple):
    """The result of a run, with the layer table of its model."""

    result: RunResult
    table: LayerTable

    @property
    def spec(self) -> RunSpec:
        """The specification of the run."""
        return self.result.spec

    @property
    def step_s(self) -> float:
        """The median of its timed steps, of which each time the slowest rank counts."""
        times = self.result.metrics.step_time_s
        return times.median if times is not None else 0.0

    @property
    def doubt(self) -> float:
        """Relative uncertainty of ``step_s`` within the launch: one deviation."""
        times = self.result.metrics.step_time_s
        return 0.0 if times is None else (times.ci95_high - times.ci95_low) / (2 * _Z95 * times.median)


def usable_runs(runs: Iterable[CalibrationRun]) -> list[CalibrationRun]:
    """Return the runs that ended well and have timed steps."""
    return [run for run in runs if run.result.status == STATUS_OK and run.step_s > 0]


def runs_of_strategy(runs: Sequence[CalibrationRun], *keys: str) -> list[CalibrationRun]:
    """Return the runs of the strategies ``keys``."""
    return [run for run in runs if run.spec.strategy in keys]


DISTURBANCES = ("other processes used the cores", "other processes computed on the device")
"""Beginnings of the warnings that mark a run as disturbed by others."""
DISTURBED_NOTE = "are marked as disturbed"
_USED_SHARE = re.compile(r"(\d+)% of the \d+ core")
_SHARE_OF_DEVICE, _MAX_SHARE = 0.5, 0.95
_NORMAL_90 = 1.645


def disturbances(warnings: Iterable[str]) -> list[str]:
    """Return those of the warnings of a run that mark it as disturbed by others."""
    return [warning for warning in warnings if warning.startswith(DISTURBANCES)]


def check_disturbed(runs: Sequence[Iterable[str]], what: str, then: str, *, takes_disturbed: bool) -> list[str]:
    """Return a note with the number of disturbed runs; none if no run was disturbed.

    Args:
        runs: The warnings of each run.
        what: The runs, for the message, such as ``runs of snellius``.
        then: The consequence, for the message.
        takes_disturbed: Whether runs that were all disturbed are accepted.

    Raises:
        ConfigError: All runs were disturbed, and ``takes_disturbed`` is not set.
    """
    marks = [texts for texts in map(disturbances, runs) if texts]
    if marks and len(marks) == len(runs) and not takes_disturbed:
        raise ConfigError(
            f"all {len(runs)} {what} {DISTURBED_NOTE}: {marks[0][0]}; {then}",
            hint="measure again when the machine is quiet; --busy takes them as they are",
        )
    return [f"{len(marks)} of {len(runs)} runs {DISTURBED_NOTE}"] if marks else []


def disturbed_spread(runs: Sequence[Iterable[str]]) -> float:
    """Return the relative uncertainty by which a 90 % interval includes a machine as busy as it was during ``runs``.

    If others use a share of the cores, steps may take 1 / (1 - share) times as long. Others on the same device are
    assumed to use half of it. The median run counts, so the result is 0 if less than half of the runs were disturbed.
    """
    stretches = []
    for texts in map(disturbances, runs):
        used = (max(map(int, _USED_SHARE.findall(text)), default=100 * _SHARE_OF_DEVICE) / 100 for text in texts)
        stretches.append(1 / (1 - min(sum(used), _MAX_SHARE)))
    return log(median(stretches or [1.0])) / _NORMAL_90
