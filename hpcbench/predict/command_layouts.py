"""Predictions for a user's own program that trains a decoder whose layout its sweep declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import Command, CommandLayout, command_values
from hpcbench.config.expression import Expression
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError, HpcbenchError
from hpcbench.predict.decoder.layout import SOFTWARE, Layout, check_layout, nominal_rates
from hpcbench.predict.decoder.machines import FittedMachine, predict_step
from hpcbench.predict.decoder.memory import GIB, MemoryTerms, reserved_gib, stage_memory_terms
from hpcbench.predict.decoder.pricing import StepTerms, step_terms
from hpcbench.predict.decoder.work import step_work
from hpcbench.predict.fitted_decoders import machine_of_profile, missing_machine_reason
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import Prediction, PredictionBasis, PredictionInterval
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import STATUS_OK
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape
from hpcbench.submit.submission_record import read_sweep_record

LAYOUT_FIELDS = {"dp": "replicas", "tp": "tensor", "pp": "pipeline", "cp": "context"}
"""Names of ``[command.layout]`` that ``Layout`` calls otherwise."""
_DEGREES = ("dp", "shards", "tp", "pp", "cp")
_LARGEST = 2**31
_NO_WORDS = Command(argv=[])


class PricedCommand(NamedTuple):
    """A run's decoder, its layout, and the machine that prices it."""

    shape: DecoderShape
    layout: Layout
    machine: FittedMachine

    def terms(self) -> StepTerms:
        """Return the seconds of a step by their purpose."""
        node = self.machine.device
        work = step_work(self.shape, self.layout, node, nominal_rates(node, self.layout.gpus))
        return step_terms(work, self.machine.figures_of(self.layout.software))


def layout_of_command(spec: RunSpec, declared: CommandLayout) -> tuple[DecoderShape, Layout]:
    """Return the decoder and the layout that a run has by its sweep's declaration.

    ``ConfigError`` where a term has a wrong value, or where the degrees fit neither each other nor the run's devices.
    """
    values = command_values(spec, _NO_WORDS)
    terms: dict[str, Any] = {}
    for name, term in declared.terms.items():
        value = Expression(term, where=declared.where)(values) if isinstance(term, str) else term
        terms[name] = _checked_term(name, value, declared.where)
    shape = named_shape(declared.model)
    degrees = {name: terms.get(name, 1) for name in _DEGREES}
    if prod(degrees.values()) != spec.devices:
        named = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "no degree above 1"
        raise ConfigError(
            f"layout: the degrees multiply to {prod(degrees.values())} ({named}), but the run has {spec.devices} "
            "devices",
            where=declared.where,
        )
    try:
        fields = {LAYOUT_FIELDS.get(name, name): value for name, value in terms.items()}
        layout = Layout(gpus=spec.devices, software=declared.software, **fields)
        check_layout(shape, layout)
        if layout.pipeline > shape.layers:
            raise ConfigError(f"{layout.pipeline} stages for {shape.layers} layers")
    except ConfigError as error:
        raise ConfigError(f"layout: {error.message}", where=declared.where) from error
    except TypeError as error:
        # The record of a sweep may be another version's, or anybody's.
        raise ConfigError(f"layout: {error}", where=declared.where) from error
    return shape, layout


def _checked_term(name: str, value: Any, where: str) -> Any:
    if name == "recompute":
        return value
    if name == "compiled":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"layout: {name} is {value!r:.40}, true or false is needed", where=where)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ConfigError(f"layout: {name} is {value!r:.40}, a whole number is needed", where=where)
    if not (0 if name == "zero" else 1) <= value < _LARGEST:
        raise ConfigError(f"layout: {name} is {value}, 1 to {_LARGEST - 1} can be priced", where=where)
    return int(value)


def layout_refusal(command: Command | None) -> Callable[[RunSpec], str | None] | None:
    """Return the rule that refuses runs whose declared layout is impossible; ``None`` without a layout."""
    declared = command.layout if command is not None else None
    if declared is None:
        return None

    def refuse(spec: RunSpec) -> str | None:
        try:
            layout_of_command(spec, declared)
        except ConfigError as error:
            return f"{error.message} ({error.where})"
        return None

    return refuse


def recorded_layouts(tree: ClusterTree) -> dict[str, CommandLayout]:
    """Return the layouts that the sweeps of a tree declare, by the digest of their command; the newest sweep's."""
    records = []
    for path in tree.path("sweeps").glob("[!.]*.json"):
        try:
            records.append(read_sweep_record(tree, path.stem))
        except (HpcbenchError, ValueError, RecursionError):
            continue
    known = [record for record in records if record is not None and record.layout is not None]
    known.sort(key=lambda record: record.written_unix_s)
    return {record.command_digest: record.layout for record in known if record.layout is not None}


def anyones_layout(layout: Layout) -> Layout:
    """Return ``layout`` without its software: equal for the same degrees and batch."""
    return replace(layout, software=SOFTWARE[0], compiled=False)


def measured_layouts(tree: ClusterTree, sweep: str) -> dict[Layout, list[float]]:
    """Return the median step time (s) of each ok launch of a sweep, by ``anyones_layout``.

    ``ConfigError`` where the sweep has no layout or none of its runs has a step time.
    """
    record = read_sweep_record(tree, sweep)
    if record is None or record.layout is None:
        raise ConfigError(f"{sweep!r} is no sweep with a [command.layout] in {tree.root}", where="--measured")
    times: dict[Layout, list[float]] = {}
    for run_id in record.run_ids:
        result = tree.read_result(run_id)
        if result is not None and result.status == STATUS_OK and result.metrics.step_time_s is not None:
            layout = anyones_layout(layout_of_command(result.spec, record.layout)[1])
            times.setdefault(layout, []).append(result.metrics.step_time_s.median)
    if not times:
        raise ConfigError(f"no run of sweep {sweep!r} has a step time yet", hint=f"hpcbench status {sweep}")
    return times


def price_command(spec: RunSpec, declared: CommandLayout, profile: ClusterProfile) -> PricedCommand:
    """Return decoder, layout and machine of a run; ``ConfigError`` where its layout or its device has no price."""
    if reason := missing_machine_reason(profile, spec.partition):
        raise ConfigError(f"{reason}: layouts of commands are priced by published runs alone")
    shape, layout = layout_of_command(spec, declared)
    machine = machine_of_profile(profile, spec.partition, spec.devices // spec.nodes)
    machine.figures_of(layout.software)
    return PricedCommand(shape, layout, machine)


def predict_command(priced: PricedCommand) -> Prediction:
    """Predict a run's step and memory from published runs of its software."""
    step, terms = predict_step(*priced), priced.terms()
    limit_gib = priced.machine.fits_below_gib
    parts = {"compute": terms.own_s + terms.straggling, "bandwidth": terms.traffic_s, "bubble": terms.bubble}
    return Prediction(
        step_time_s=step.step_time_s,
        interval=PredictionInterval(low=step.step_time_low_s, high=step.step_time_high_s),
        compute_s=terms.own_s,
        comm_s=terms.traffic_s,
        exposed_comm_s=terms.traffic_s,
        bubble_fraction=terms.bubble / step.step_time_s,
        straggler_s=terms.straggling,
        samples_per_s=priced.layout.global_batch / step.step_time_s,
        peak_memory_bytes=round(step.peak_memory_gib * GIB),
        memory=_memory(priced),
        bound_by=max(parts, key=lambda name: parts[name]) if step.fits else "memory",
        fits=step.fits,
        memory_limit_bytes=round(limit_gib * GIB),
        depth="nominal",
        source=f"published runs of {priced.layout.software}: {priced.machine.name}",
        rests_on=PredictionBasis(kind="published runs"),
    )


def _memory(priced: PricedCommand) -> MemoryBreakdown:
    """Return the reserved memory of the pipeline rank that holds most, by kind."""
    factors = MemoryTerms(**priced.machine.memory)
    stages = stage_memory_terms(priced.shape, priced.layout)
    largest = max(stages, key=lambda stage: reserved_gib(stage, factors))

    def held(*names: str) -> int:
        gib: float = sum(getattr(largest, name) * getattr(factors, name) for name in names)
        return round(gib * GIB)

    copies = ("gradients", "buckets", "sharding", "accumulation")
    activations = [name for name in priced.machine.memory if name.startswith("held_")]
    rest = [name for name in priced.machine.memory if name not in ("weights", "optimizer", *copies, *activations)]
    return MemoryBreakdown(
        parameters_bytes=held("weights"), gradients_bytes=held(*copies), optimizer_bytes=held("optimizer"),
        activations_bytes=held(*activations), buffers_bytes=held(*rest),
    )  # fmt: skip
