"""Decoders on GPUs that were learned from published training runs: the runs of layouts, and predictions for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import CommandLayout
from hpcbench.config.profile_tables import DeviceConfig
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.predict.command_layouts import layout_of_command
from hpcbench.predict.decoder.layout import Layout, nominal_rates
from hpcbench.predict.decoder.layout_search import priced_only_reason, software_of
from hpcbench.predict.decoder.machines import FittedMachine, fitted_machine, loop_interval_s, predict_step
from hpcbench.predict.decoder.memory import GIB, MemoryTerms, reserved_gib, stage_memory_terms
from hpcbench.predict.decoder.pricing import StepTerms, step_terms, step_time
from hpcbench.predict.decoder.work import step_work
from hpcbench.predict.machine import Machine
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import Prediction, PredictionBasis, PredictionInterval
from hpcbench.strategies.catalog import options_with_defaults, representative
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape, named_shapes
from hpcbench.strategies.layer_table import default_input_size


def machine_of_profile(profile: ClusterProfile, partition: str | None, per_node: int) -> FittedMachine:
    """Return the fitted machine that a profile's device names, with the profile's links.

    An unknown name is a ConfigError with the valid ones.
    """
    device = device_of_profile(profile, partition)
    if device is None or device.fitted is None:
        raise ConfigError(f"the profile {profile.name} names no fitted machine", hint="devices.X.fitted")
    try:
        machine = fitted_machine(device.fitted)
    except ConfigError as error:
        name = profile.partition(partition).node.device_type
        raise ConfigError(error.message, where=f"{profile.name}: devices.{name}.fitted", hint=error.hint) from error
    node = replace(machine.device, gpus=per_node)
    intra, inter = profile.links.intra_node, profile.links.inter_node
    if intra is not None:
        node = replace(node, nvlink_bytes_s=intra.bandwidth_bytes_per_s)
    if inter is not None:
        devices = profile.partition(partition).node.devices or per_node
        node = replace(node, nic_bytes_s=inter.bandwidth_bytes_per_s * inter.per_node / devices)
    return msgspec.structs.replace(machine, device=node)


def missing_machine_reason(profile: ClusterProfile, partition: str | None) -> str | None:
    """Return why a partition's device has no fitted machine; ``None`` where it has one."""
    device = device_of_profile(profile, partition)
    if device is not None and device.fitted is not None:
        return None
    name = profile.partition(partition).node.device_type or "this device"
    return f"no published run of {name} was learned from (the profile has no devices.{name}.fitted)"


def device_of_profile(profile: ClusterProfile, partition: str | None) -> DeviceConfig | None:
    """Return the device that a partition's nodes have, where the profile describes it."""
    name = profile.partition(partition).node.device_type
    return profile.devices.get(name) if name is not None else None


def run_point(layout: Layout) -> dict[str, Any]:
    """Return the parameters of the run of a layout that hpcbench can run."""
    point: dict[str, Any] = {
        "batch_size": layout.micro_batch * layout.accumulation, "dp_degree": layout.data_degree,
        "micro_batches": layout.accumulation, "activation_checkpointing": layout.recompute == "full",
    }  # fmt: skip
    if layout.shards > 1:
        hybrid = {"options": {"shard_degree": layout.shards}} if layout.replicas > 1 else {}
        return {**point, "strategy": representative("sharded_parameters"), **hybrid}
    if layout.tensor > 1:
        strategy = representative("split_layers")
        return {**point, "strategy": strategy, "tp_degree": layout.tensor, "options": {"sequence_parallel": True}}
    if layout.pipeline > 1:
        interleaved = {"options": {"virtual_stages": layout.chunks}} if layout.chunks > 1 else {}
        schedule = representative("interleaved_stages" if interleaved else "stages")
        return {**point, "strategy": schedule, "pp_degree": layout.pipeline, **interleaved}
    if layout.zero:
        return {**point, "strategy": representative("sharded_optimizer")}
    return {**point, "strategy": representative("replicas" if layout.gpus > 1 else "single_device")}


def layout_of_run(spec: RunSpec) -> Layout | None:
    """Return the layout that ``run_point`` maps to ``spec``; ``None`` where none does, as in other precisions."""
    is_alike = spec.model in named_shapes() and spec.precision == "bf16" and spec.optimizer in ("adam", "adamw")
    if not is_alike or spec.compile or spec.model_options:
        return None
    options = options_with_defaults(spec)
    is_sharded = spec.strategy == representative("sharded_parameters")
    shards = int(options.get("shard_degree") or spec.dp_degree) if is_sharded else 1
    try:
        layout = Layout(
            gpus=spec.ranks,
            sequence=spec.input_size or default_input_size(spec.dataset),
            micro_batch=spec.batch_size // spec.micro_batches,
            global_batch=spec.batch_size * spec.dp_degree,
            replicas=spec.dp_degree // shards,
            shards=shards,
            zero=int(spec.strategy == representative("sharded_optimizer")),
            tensor=spec.tp_degree,
            pipeline=spec.pp_degree,
            chunks=int(options.get("virtual_stages") or 1) if spec.pp_degree > 1 else 1,
            recompute="full" if spec.activation_checkpointing else "none",
        )
    except ConfigError:
        return None
    layout = replace(layout, software=software_of(named_shape(spec.model), layout))
    point = run_point(layout)
    point["options"] = {**options, **point.get("options", {})}
    values = {**msgspec.structs.asdict(spec), "options": options}
    is_runnable = priced_only_reason(named_shape(spec.model), layout) is None
    return layout if is_runnable and all(values[name] == value for name, value in point.items()) else None


def by_published_runs(prediction: Prediction, spec: RunSpec, profile: ClusterProfile, machine: Machine) -> Prediction:
    """Return ``prediction`` with the step of published runs, where the profile alone priced a decoder's step.

    Its parts keep their shares. Memory stays that of hpcbench's own loop, which no published run has.
    """
    device = device_of_profile(profile, spec.partition)
    layout = layout_of_run(spec) if machine.depth == "nominal" and device is not None and device.fitted else None
    if layout is None or prediction.step_time_s <= 0:
        return prediction
    fitted = machine_of_profile(profile, spec.partition, spec.tasks_per_node)
    work = step_work(named_shape(spec.model), layout, fitted.device, nominal_rates(fitted.device, layout.gpus))
    step_s = step_time(work, fitted.figures_of(layout.software)).total_s
    low_s, high_s = loop_interval_s(step_s, layout, fitted)
    return prediction.scaled(
        step_s / prediction.step_time_s,
        interval=PredictionInterval(low=low_s, high=high_s),
        rests_on=PredictionBasis(kind="published runs"),
        source=f"{prediction.source}; published runs of decoders: {fitted.name}",
    )


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
