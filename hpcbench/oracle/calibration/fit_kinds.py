"""What a kernel takes within a step over what it takes by itself, by its kind: in a step caches hold others' data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log

import msgspec

from hpcbench.config.spec import RunSpec
from hpcbench.oracle.calibration.evidence import median
from hpcbench.oracle.fitting.least_squares import mode
from hpcbench.oracle.kernels import update_kernels, whole_passes
from hpcbench.oracle.machine import Compute
from hpcbench.oracle.tensors import parameter_bytes
from hpcbench.parallel.alike import Alike
from hpcbench.parallel.layers import LayerTable

_NOISE = 0.03
"""Of a step, as a logarithm."""
_PRIOR = 0.3
"""How far kinds are thought to differ from each other, as a logarithm."""


def seconds_by_kind(compute: Compute, spec: RunSpec, table: LayerTable) -> dict[str, float]:
    """What the kernels of a lone device's step take, by kind of layer; those of the update by its optimizer."""
    judge, found = Alike.of(compute), defaultdict[str, float](float)
    for one in whole_passes(spec, table):
        for kernel in one:
            found[kernel.kind] += judge.seconds(kernel)
    for kernel in update_kernels(spec, parameter_bytes(spec, table)):
        found[kernel.kind] += judge.seconds(kernel)
    return dict(found)


def fit_kinds(steps: Sequence[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """By kind a factor that makes the kernels of every step as far too short as those of the others.

    ``steps``: seconds by kind, and what the whole step takes. Robust ridge regression of the logarithms; kinds that no
    two models tell apart are drawn to 1, as all are where one model alone was measured.
    """
    names = sorted({name for parts, _ in steps for name in parts})
    common = median(whole_s / sum(parts.values()) for parts, whole_s in steps)

    def misses(logs: list[float]) -> list[float]:
        factors = dict(zip(names, map(exp, logs), strict=True))
        return [
            log(common * sum(factors[name] * seconds for name, seconds in parts.items()) / whole_s) / _NOISE
            for parts, whole_s in steps
        ]

    found = mode(misses, [_PRIOR] * len(names))
    return dict(zip(names, map(exp, found.at), strict=True))


def within_steps(compute: Compute, kinds: Mapping[str, float]) -> Compute:
    """``compute`` with its samples as long as they take within steps."""
    samples = [
        msgspec.structs.replace(one, seconds=one.seconds * kinds.get(one.kernel.kind, 1.0)) for one in compute.samples
    ]
    return msgspec.structs.replace(compute, samples=samples)
