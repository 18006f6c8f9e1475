"""Decoders on GPUs that were learned from published training runs: the runs of layouts, and predictions for them."""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from typing import Any, NamedTuple

import msgspec

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.command import CommandLayout
from hpcbench.config.profile_tables import DeviceConfig
from hpcbench.config.run_spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.predict.command_layouts import layout_of_command
from hpcbench.predict.decoder.allocated import GIB, AllocatedMemory, allocated_memory, occupied_bytes
from hpcbench.predict.decoder.layout import GpuNode, Layout, nominal_rates
from hpcbench.predict.decoder.layout_search import priced_only_reason, software_of
from hpcbench.predict.decoder.low_precision import node_of_products
from hpcbench.predict.decoder.machines import (
    FittedMachine,
    fitted_machine,
    loop_interval_s,
    machine_without_runs,
    unlearned_log_error,
)
from hpcbench.predict.decoder.pricing import Figures, step_time
from hpcbench.predict.decoder.site import Site, gradient, site_step, site_terms
from hpcbench.predict.decoder.work import Work, step_work
from hpcbench.predict.machine import Machine
from hpcbench.predict.measured_factors import MAX_NEIGHBOURS_NAMED, Neighbour
from hpcbench.predict.peak_memory import MemoryBreakdown
from hpcbench.predict.prediction import NORMAL_90, Prediction, PredictionBasis, PredictionInterval
from hpcbench.strategies.catalog import options_with_defaults, representative
from hpcbench.strategies.decoder_shapes import DecoderShape, named_shape, named_shapes
from hpcbench.strategies.layer_table import default_input_size

USUAL_PROCESSORS, USUAL_LINK_BYTES_S, USUAL_BEST_PRODUCT = 128, 300e9, 0.8
"""Figures of a device whose profile does not state them: multiprocessors, links between devices, share of the peak."""


def machine_of_profile(profile: ClusterProfile, partition: str | None, per_node: int) -> FittedMachine:
    """Return the machine of a profile's device, with the profile's links: fitted, or by the vendor's figures alone.

    An unknown name, and a device without figures, is a ConfigError.
    """
    device, name = device_of_profile(profile, partition), profile.partition(partition).node.device_type
    if reason := missing_machine_reason(profile, partition):
        raise ConfigError(reason, where=profile.name)
    assert device is not None, "it has figures"
    try:
        machine = fitted_machine(device.fitted) if device.fitted else machine_without_runs(_node_of(device, str(name)))
    except ConfigError as error:
        raise ConfigError(error.message, where=f"{profile.name}: devices.{name}.fitted", hint=error.hint) from error
    peaks = device.peak_flops_per_s
    # A fitted machine may be held below its vendor's peak, by a limit of power for instance.
    held = machine.device.peak_flops / peaks.get("bf16", machine.device.peak_flops)
    low = {name: held * peaks.get(name, 0.0) for name in ("fp8", "fp4")}
    node = replace(machine.device, gpus=per_node, fp8_flops=low["fp8"], fp4_flops=low["fp4"])
    intra, inter = profile.links.intra_node, profile.links.inter_node
    if intra is not None:
        node = replace(node, nvlink_bytes_s=intra.bandwidth_bytes_per_s, is_shared=intra.shared)
    if inter is not None:
        devices = profile.partition(partition).node.devices or per_node
        node = replace(node, nic_bytes_s=inter.bandwidth_bytes_per_s * inter.per_node / devices)
    return msgspec.structs.replace(machine, device=node)


def missing_machine_reason(profile: ClusterProfile, partition: str | None) -> str | None:
    """Return why decoders cannot be priced on a partition's device; ``None`` where they can."""
    device = device_of_profile(profile, partition)
    name = profile.partition(partition).node.device_type or "X"
    if device is None:
        return f"the profile describes no device of its nodes (devices.{name})"
    if device.fitted is not None:
        return None
    needed = {
        "peak_flops_per_s.bf16": device.peak_flops_per_s.get("bf16"),
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s, "memory_bytes": device.memory_bytes,
    }  # fmt: skip
    missing = [key for key, value in needed.items() if not value]
    return f"devices.{name} has neither fitted nor {' and '.join(missing)}" if missing else None


def _node_of(device: DeviceConfig, name: str) -> GpuNode:
    """Return a node of the vendor's figures; the profile's links replace its own."""
    return GpuNode(
        name=name,
        gpus=1,
        peak_flops=device.peak_flops_per_s["bf16"],
        memory_bytes_s=device.memory_bandwidth_bytes_per_s or 0.0,
        memory_gib=(device.memory_bytes or 0) / GIB,
        multiprocessors=device.processors or USUAL_PROCESSORS,
        nvlink_bytes_s=USUAL_LINK_BYTES_S,
        nic_bytes_s=USUAL_LINK_BYTES_S / 10,
        best_product=device.flops_efficiency or USUAL_BEST_PRODUCT,
    )


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

    @property
    def work(self) -> Work:
        node = self.machine.device
        return step_work(self.shape, self.layout, node, nominal_rates(node, self.layout.gpus))

    @property
    def memory(self) -> AllocatedMemory:
        """Return the memory of the pipeline rank that holds most."""
        return max(allocated_memory(self.shape, self.layout), key=lambda rank: rank.total)

    @property
    def figures(self) -> Figures:
        return self.machine.figures_of(self.layout.software)


def price_command(spec: RunSpec, declared: CommandLayout, profile: ClusterProfile) -> PricedCommand:
    """Return decoder, layout and machine of a run; ``ConfigError`` where its layout or its device has no price."""
    if reason := missing_machine_reason(profile, spec.partition):
        raise ConfigError(f"{reason}: layouts of commands are priced by published runs alone")
    shape, layout = layout_of_command(spec, declared)
    machine = machine_of_profile(profile, spec.partition, spec.devices // spec.nodes)
    machine.figures_of(layout.software)
    node_of_products(machine.device, layout.precision)
    return PricedCommand(shape, layout, machine)


def predict_command(priced: PricedCommand, site: Site, key: str) -> Prediction:
    """Predict a run's step and memory from published runs of its software, and from runs at the site.

    Args:
        priced: the run.
        site: the factors of the cluster; those of ``Site()`` without runs.
        key: identifies the run's configuration among the site's runs.
    """
    work, figures = priced.work, priced.figures
    own_log, own_variance = site.own_log(key)
    terms, own = site_terms(work, figures, site.logs), exp(own_log)
    step_s = site_step(work, figures, site.logs).total_s * own
    unlearned = 0.0 if own_log else unlearned_log_error(priced.shape, priced.layout) / NORMAL_90
    spread = sqrt(site.variance(gradient(work, figures, site.logs)) + own_variance + unlearned**2)
    memory, limit = priced.memory, priced.machine.device.memory_gib * GIB
    peak = memory.total * site.memory_factor
    fits = max(peak, occupied_bytes(memory.total, priced.layout)) <= limit
    parts = {"compute": terms.own_s + terms.straggling, "bandwidth": terms.traffic_s, "bubble": terms.bubble}
    return Prediction(
        step_time_s=step_s,
        interval=PredictionInterval(low=step_s * exp(-NORMAL_90 * spread), high=step_s * exp(NORMAL_90 * spread)),
        compute_s=terms.own_s * own,
        comm_s=terms.traffic_s * own,
        exposed_comm_s=terms.traffic_s * own,
        bubble_fraction=terms.bubble * own / step_s,
        straggler_s=terms.straggling * own,
        samples_per_s=priced.layout.global_batch / step_s,
        peak_memory_bytes=round(peak),
        memory=MemoryBreakdown(
            parameters_bytes=round(memory.weights), gradients_bytes=round(memory.gradients),
            optimizer_bytes=round(memory.optimizer), activations_bytes=round(memory.activations),
            buffers_bytes=round(memory.working),
        ),
        bound_by=max(parts, key=lambda name: parts[name]) if fits else "memory",
        fits=fits,
        memory_limit_bytes=round(limit),
        depth="nominal",
        source=f"published runs of {priced.layout.software}: {priced.machine.name}{_unlearned_note(priced)}",
        rests_on=_basis(site, key, step_s / step_time(work, figures).total_s, spread),
    )  # fmt: skip


def _unlearned_note(priced: PricedCommand) -> str:
    """Name the parts of a layout of which no run was learned from."""
    precision = priced.layout.precision
    parts = ["experts"] if priced.shape.experts is not None else []
    parts += [f"products in {precision}"] if precision != "bf16" else []
    return f"; no run of {' and '.join(parts)} was learned from" if parts else ""


def _basis(site: Site, key: str, factor: float, spread: float) -> PredictionBasis:
    if not site.timed:
        return PredictionBasis(kind="published runs")
    keys = [run.key for run in site.timed]
    likes = [Neighbour(config_id=one, like="itself" if one == key else "cluster") for one in keys]
    likes.sort(key=lambda one: one.like != "itself")
    counts = {like: sum(one.like == like for one in likes) for like in ("itself", "cluster")}
    return PredictionBasis(
        kind="measured neighbours", base="published runs", factor=factor, spread=spread,
        counts={like: count for like, count in counts.items() if count}, neighbours=likes[:MAX_NEIGHBOURS_NAMED],
    )  # fmt: skip
