"""Search over the layouts of a decoder on a number of GPUs: degrees, micro-batches and recomputation, ranked by time.

Three rules leave out what cannot be better. A layout without recomputation that fits is never slower than the same one
with it. Where a micro-batch does not fit with full recomputation no larger one does. Context parallelism goes with
micro-batches of one sample: with more, fewer GPUs a sample have as many tokens each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp, hypot, log, sqrt
from statistics import fmean
from typing import NamedTuple

import msgspec

from hpcbench.config.command import LayerPrecision, Recompute, Software
from hpcbench.errors import ConfigError
from hpcbench.predict.candidate_points import divisors
from hpcbench.predict.decoder.allocated import GIB, SAFE_SHARE, allocated_memory, occupied_bytes
from hpcbench.predict.decoder.layout import CollectiveRates, Layout, nominal_rates
from hpcbench.predict.decoder.low_precision import node_of_products
from hpcbench.predict.decoder.machines import (
    FittedMachine,
    fit_interval_s,
    interval_class,
    loop_interval_s,
    unlearned_log_error,
)
from hpcbench.predict.decoder.pricing import Figures, StepTime
from hpcbench.predict.decoder.site import CONFIGURATION_SPREAD, Site, gradient, site_step
from hpcbench.predict.decoder.software import LOOPS
from hpcbench.predict.decoder.work import Work, step_work
from hpcbench.strategies.decoder_shapes import DecoderShape

WHOLE_SOFTWARE: Software = "fsdp"
SHARDED_SOFTWARE: Software = "torchtitan"
SPLIT_SOFTWARE: Software = "megatron"
"""Software whose published runs price layouts: those that hpcbench runs by torch's own kernels, as its loop has them,
with whole parameters; fully sharded ones; and those of other programs alone."""
MAX_TENSOR = 16
MAX_CONTEXT = 16
MIN_CONTEXT_TOKENS = 1024
"""Fewest tokens of a sequence on one GPU."""
MAX_MICRO_BATCH = 16
MAX_CHUNKS = 5
"""Most chunks of an interleaved pipeline: the formulas charge nothing for the messages of further ones."""
RECOMPUTATION: tuple[Recompute, ...] = ("none", "full")
"""Selective recomputation is left out: with fused attention it frees nothing that the memory formulas count."""
_NORMAL_90 = 1.645
MAX_COMPARED = 10
"""Layouts, the best ones, of which one is named as the run to make next."""
_MAX_GRADIENTS = 40
"""Layouts, the best ones, whose errors are compared factor by factor; those after them have the errors of the last."""


class RankedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that fits; ``ratio`` is its time per sample (or step) over the best one's, with a 90 % interval."""

    layout: Layout
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    parts: StepTime
    peak_memory_gib: float
    priced_only: str | None = None
    """Why hpcbench cannot run the layout; memory is then that of other programs."""
    ratio: float = 1.0
    ratio_low: float = 1.0
    ratio_high: float = 1.0

    @property
    def samples_per_s(self) -> float:
        return self.layout.global_batch / self.step_time_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.samples_per_s * self.layout.sequence / self.layout.gpus

    @property
    def is_told_apart(self) -> bool:
        """Whether it is significantly slower than the best."""
        return self.ratio_low > 1.0


class NextRun(NamedTuple):
    """The layout among the best ones whose run would narrow the ratios to the best most, and by how much."""

    layout: Layout
    spread_now: float
    """Mean standard deviation of the logarithm of the ratios."""
    spread_then: float


class LayoutRanking(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts of a model on so many GPUs, the best first.

    ``tight`` are those that would be faster than all that fit safely, and that occupy more than ``SAFE_SHARE`` of the
    device: they may fit, and the allocator may make them wait. ``examined`` counts
    the combinations of degrees, micro-batches and recomputation, ``priced`` those whose time was computed, ``refused``
    those that are not among ``layouts``, by reason.
    """

    gpus: int
    sequence: int
    layouts: list[RankedLayout]
    tight: list[RankedLayout]
    examined: int
    priced: int
    refused: dict[str, int]
    next_run: NextRun | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutWish:
    """Values that all layouts share. Exactly one batch is set: that of all replicas, or that of one."""

    gpus: int
    sequence: int
    global_batch: int | None = None
    replica_batch: int | None = None
    software: Software | None = None
    """The software that trains all layouts; absent: the one that trains each best, hpcbench's own loop among them."""
    can_run: Callable[[DecoderShape, Layout], bool] | None = None
    """Whether that software runs a layout; absent: it runs all."""
    precision: LayerPrecision = "bf16"
    site: Site = field(default_factory=Site)
    """Factors of the cluster, where ``software`` was measured there."""

    def global_batch_of(self, data_degree: int) -> int:
        """Return the samples of a step; 0 where replicas cannot share them evenly."""
        if self.replica_batch is not None:
            return self.replica_batch * data_degree
        total = self.global_batch or 0
        return total if total % data_degree == 0 else 0


NEEDS_MORE_MEMORY = "more memory in hpcbench's own loop than the device has"
OwnMemory = Callable[[Layout], "tuple[float, float] | None"]
"""The peak and its limit, in GiB, of a layout that hpcbench runs; ``None`` for the others."""


def software_of(shape: DecoderShape, layout: Layout) -> Software:
    """Return the software whose published runs price ``layout``."""
    if layout.shards > 1:
        return SHARDED_SOFTWARE
    return WHOLE_SOFTWARE if priced_only_reason(shape, layout) is None else SPLIT_SOFTWARE


def priced_only_reason(shape: DecoderShape, layout: Layout) -> str | None:
    """Return why hpcbench cannot run a layout yet; ``None`` where it can."""
    if shape.experts is not None:
        return "mixtures of experts"
    if layout.precision != "bf16":
        return f"products in {layout.precision}"
    is_split = layout.tensor > 1 or layout.pipeline > 1
    if layout.context > 1:
        return "context parallelism"
    if layout.shards > 1 and is_split:
        return "fully sharded parameters inside tensor parallelism or pipelines"
    if layout.zero and is_split:
        return "ZeRO 1 across replicas of split models"
    if layout.tensor > 1 and layout.pipeline > 1:
        return "sequence parallelism inside pipelines"
    if layout.tensor > shape.kv_heads:
        return f"tensor degree above {shape.kv_heads} key-value heads"
    return None


@dataclass
class _Search:
    shape: DecoderShape
    machine: FittedMachine
    request: LayoutWish
    rates: CollectiveRates
    own_memory: OwnMemory
    fitting: list[RankedLayout] = field(default_factory=list)
    tight: list[RankedLayout] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    priced: int = 0
    figures: dict[str, Figures] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.safe_gib = self.machine.device.memory_gib * SAFE_SHARE
        node_of_products(self.machine.device, self.request.precision)

    def add(self, degrees: dict[str, int]) -> None:
        """Price the micro-batches of one choice of degrees."""
        data_degree = degrees["replicas"] * degrees["shards"]
        total = self.request.global_batch_of(data_degree)
        if not total:
            self.refused["the global batch cannot be shared evenly by the replicas"] += 1
            return
        one = Layout(
            gpus=self.request.gpus, sequence=self.request.sequence, micro_batch=1, global_batch=data_degree,
            **degrees,  # type: ignore[arg-type]
        )  # fmt: skip
        if (software := self._software_of(one)) is None:
            return
        for micro_batch in _micro_batches(total // data_degree, 1 if degrees["context"] > 1 else MAX_MICRO_BATCH):
            accumulation = total // data_degree // micro_batch
            if degrees["chunks"] > 1 and accumulation % degrees["pipeline"]:
                self.refused["interleaving needs a multiple of the stages in micro-batches"] += 1
                continue
            is_listed = False
            for recompute in RECOMPUTATION:
                layout = Layout(
                    gpus=self.request.gpus, sequence=self.request.sequence, micro_batch=micro_batch, global_batch=total,
                    recompute=recompute, software=software, precision=self.request.precision,
                    **degrees,  # type: ignore[arg-type]
                )  # fmt: skip
                reason, own = None, None
                if self.request.software is None:
                    reason, own = priced_only_reason(self.shape, layout), self.own_memory(layout)
                if own is not None and own[0] <= own[1]:
                    self.fitting.append(self._priced(layout, own[0], None))
                    break
                peak, reason = self._peak_gib(layout), reason if own is None else NEEDS_MORE_MEMORY
                if is_listed or peak > self.safe_gib:
                    if own is None and peak <= self.machine.device.memory_gib:
                        self.tight.append(self._priced(layout, peak, reason))
                    self.refused["it does not fit in memory"] += 1
                    continue
                self.fitting.append(self._priced(layout, peak, reason))
                if own is None:
                    break
                # Other programs run it so; with recomputation hpcbench may, too.
                is_listed = True
            else:
                if not is_listed:
                    return

    def _software_of(self, layout: Layout) -> Software | None:
        """Return the software that prices layouts of these degrees; ``None`` where they are left out."""
        if self.request.can_run is not None and not self.request.can_run(self.shape, layout):
            self.refused[f"{self.request.software} does not run it"] += 1
            return None
        software = self.request.software or software_of(self.shape, layout)
        # It shares the optimizer in any case, so that the layout is the same as with ZeRO 1.
        is_shared = layout.replicas * layout.context > 1 and layout.shards == 1
        is_twin = LOOPS[software].splits_optimizer and is_shared and not layout.zero
        return None if is_twin else software

    def _peak_gib(self, layout: Layout) -> float:
        """Return the memory of the process that occupies most: the first stage keeps most activations, the last has the
        logits."""
        ranks = allocated_memory(self.shape, layout, ends_only=True)
        allocated = max(rank.total for rank in ranks)
        return max(occupied_bytes(allocated, layout), allocated * self.request.site.memory_factor) / GIB

    def _priced(self, layout: Layout, peak_gib: float, priced_only: str | None) -> RankedLayout:
        parts = site_step(self.work(layout), self.figures_of(layout), self.request.site.logs)
        interval_s = loop_interval_s if self.request.software is None else fit_interval_s
        low_s, high_s = interval_s(parts.total_s, layout, self.machine)
        if unlearned := unlearned_log_error(self.shape, layout):
            low_s = parts.total_s * exp(-hypot(log(parts.total_s / low_s), unlearned))
            high_s = parts.total_s * exp(hypot(log(high_s / parts.total_s), unlearned))
        self.priced += 1
        return RankedLayout(
            layout=layout,
            step_time_s=parts.total_s,
            step_time_low_s=low_s,
            step_time_high_s=high_s,
            parts=parts,
            peak_memory_gib=peak_gib,
            priced_only=priced_only,
        )

    def work(self, layout: Layout) -> Work:
        return step_work(self.shape, layout, self.machine.device, self.rates)

    def figures_of(self, layout: Layout) -> Figures:
        if layout.software not in self.figures:
            self.figures[layout.software] = self.machine.figures_of(layout.software)
        return self.figures[layout.software]


def rank_layouts(
    shape: DecoderShape,
    machine: FittedMachine,
    request: LayoutWish,
    rates: CollectiveRates | None = None,
    own_memory: OwnMemory = lambda _: None,
) -> LayoutRanking:
    """Rank the layouts of a decoder that fit, by the time of a sample.

    ``rates`` are measured rates of collectives over all GPUs, else those of the machine's network. Raises ConfigError
    where the sequence or the batch allows no layout.
    """
    if request.gpus < 1 or request.sequence < 1:
        raise ConfigError(f"{request.gpus} GPUs and {request.sequence} tokens: at least 1 of each is required")
    if (request.global_batch is None) == (request.replica_batch is None):
        raise ConfigError("one of global batch and batch of a replica is required")
    search = _Search(shape, machine, request, rates or nominal_rates(machine.device, request.gpus), own_memory)
    for degrees in layout_degrees(shape, request.gpus, request.sequence, machine.device.gpus):
        search.add(degrees)
    ranked, tight = sorted(search.fitting, key=_rank_key), sorted(search.tight, key=_rank_key)
    if ranked:
        tight = [candidate for candidate in tight if _rank_key(candidate) < _rank_key(ranked[0])]
    slopes = [gradient(search.work(one.layout), search.figures_of(one.layout), request.site.logs)
              for one in ranked[:_MAX_GRADIENTS]]  # fmt: skip
    best = (ranked or tight)[:1]

    def compared(rows: list[RankedLayout]) -> list[RankedLayout]:
        if request.software is None or not slopes:
            return [_with_ratio(row, best[0], machine) for row in rows]
        own = [slopes[min(place, len(slopes) - 1)] for place in range(len(rows))]
        return [
            _at_site(shape, row, best[0], request.site, each, slopes[0]) for row, each in zip(rows, own, strict=True)
        ]

    return LayoutRanking(
        gpus=request.gpus,
        sequence=request.sequence,
        layouts=compared(ranked),
        tight=compared(tight),
        examined=len(ranked) + sum(search.refused.values()),
        priced=search.priced,
        refused=dict(search.refused),
        next_run=_next_run([one.layout for one in ranked[:MAX_COMPARED]], slopes[:MAX_COMPARED], request.site),
    )


def layout_degrees(shape: DecoderShape, gpus: int, sequence: int, per_node: int) -> Iterator[dict[str, int]]:
    """Yield the degrees of all layouts of a decoder: replicas, shards, tensor, pipeline, context, expert, ZeRO, chunks.

    Tensor groups divide the heads and lie in a node, or in two; a context group leaves a GPU 1,024 tokens at least;
    pipelines have a layer a stage at least. Shards are those of all data parallelism, or of decoders without experts
    whole nodes of it. An expert group contains whole tensor groups.
    """
    for tensor in divisors(gpus):
        if tensor > MAX_TENSOR or tensor > 2 * per_node or shape.heads % tensor:
            continue
        for context in divisors(gpus // tensor):
            if (
                context > MAX_CONTEXT
                or sequence % context
                or (context > 1 and sequence // context < MIN_CONTEXT_TOKENS)
            ):
                continue
            for pipeline in divisors(gpus // tensor // context):
                if pipeline > shape.layers:
                    continue
                data = gpus // tensor // context // pipeline
                for expert in _expert_degrees(shape, gpus // pipeline, tensor):
                    shared = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}
                    for chunks in _chunks(shape.layers, pipeline):
                        # ZeRO 0 is a whole optimizer state a replica, which hpcbench itself runs.
                        is_shared = data * context > 1
                        for zero in (1,) if is_shared and expert > 1 else (0, 1) if is_shared else (0,):
                            yield {**shared, "replicas": data, "shards": 1, "zero": zero, "chunks": chunks}
                    for shards in divisors(data):
                        group = shards * tensor * context
                        is_partial = group % per_node == 0 and shape.experts is None
                        if shards > 1 and (shards == data or is_partial):
                            yield {**shared, "replicas": data // shards, "shards": shards, "zero": 0, "chunks": 1}


def _expert_degrees(shape: DecoderShape, ranks: int, tensor: int) -> list[int]:
    if shape.experts is None:
        return [1]
    return [degree for degree in divisors(shape.experts.count) if ranks % degree == 0 and degree % tensor == 0]


def _chunks(layers: int, pipeline: int) -> list[int]:
    if pipeline == 1 or layers % pipeline:
        return [1]
    return [chunks for chunks in divisors(layers // pipeline) if chunks <= MAX_CHUNKS]


def _micro_batches(replica_batch: int, most: int) -> Iterator[int]:
    """Yield powers of two up to the batch of a replica, and to ``most``."""
    size = 1
    while size <= min(replica_batch, most):
        if replica_batch % size == 0:
            yield size
        size *= 2


def _rank_key(candidate: RankedLayout) -> tuple[float, int]:
    """Return the time of a sample, then the context degree: where its messages are hidden, fewer rank first."""
    return round(candidate.step_time_s / candidate.layout.global_batch, 12), candidate.layout.context


def _with_ratio(candidate: RankedLayout, best: RankedLayout, machine: FittedMachine) -> RankedLayout:
    """Return ``candidate`` with its ratio to the best. The errors of both are taken as independent."""
    ratio = candidate.step_time_s / candidate.layout.global_batch / (best.step_time_s / best.layout.global_batch)
    if candidate is best:
        return candidate
    spread = hypot(*(_log_spread(each, machine) for each in (candidate, best)))
    return msgspec.structs.replace(
        candidate, ratio=ratio, ratio_low=ratio * exp(-_NORMAL_90 * spread), ratio_high=ratio * exp(_NORMAL_90 * spread)
    )


def _at_site(
    shape: DecoderShape, candidate: RankedLayout, best: RankedLayout, site: Site, own: Sequence[float],
    of_best: Sequence[float],
) -> RankedLayout:  # fmt: skip
    """Return ``candidate`` with the intervals that runs at the site leave. Errors of factors are in both layouts."""
    unlearned = unlearned_log_error(shape, candidate.layout) / _NORMAL_90
    bound = exp(_NORMAL_90 * hypot(sqrt(site.variance(own)), CONFIGURATION_SPREAD, unlearned))
    step_s = candidate.step_time_s
    priced = msgspec.structs.replace(candidate, step_time_low_s=step_s / bound, step_time_high_s=step_s * bound)
    if candidate is best:
        return priced
    ratio = step_s / candidate.layout.global_batch / (best.step_time_s / best.layout.global_batch)
    between = exp(_NORMAL_90 * _ratio_spread(site, own, of_best))
    return msgspec.structs.replace(priced, ratio=ratio, ratio_low=ratio / between, ratio_high=ratio * between)


def _ratio_spread(site: Site, own: Sequence[float], of_best: Sequence[float], unmeasured: int = 2) -> float:
    """Return the standard deviation of the logarithm of a ratio to the best layout.

    ``unmeasured`` of the two layouts have the error of the formulas for a single configuration.
    """
    difference = [left - right for left, right in zip(own, of_best, strict=True)]
    return sqrt(site.variance(difference) + unmeasured * CONFIGURATION_SPREAD**2)


def _next_run(layouts: Sequence[Layout], slopes: Sequence[Sequence[float]], site: Site) -> NextRun | None:
    """Return the run that would narrow the ratios to the first layout most; ``None`` without two layouts."""
    if len(layouts) < 2:
        return None

    def mean_spread(known: Site, measured: int | None) -> float:
        return fmean(
            _ratio_spread(known, own, slopes[0], 2 - (measured in (0, place)))
            for place, own in enumerate(slopes) if place > 0
        )  # fmt: skip

    spreads = [mean_spread(site.with_run(own), place) for place, own in enumerate(slopes)]
    place = min(range(len(layouts)), key=lambda number: spreads[number])
    return NextRun(layouts[place], mean_spread(site, None), spreads[place])


def _log_spread(candidate: RankedLayout, machine: FittedMachine) -> float:
    kind = interval_class(candidate.layout, machine.device)
    return (machine.log_error_high[kind] - machine.log_error_low[kind]) / 2 / _NORMAL_90
