"""What excludes a run of ``filter`` or ``channel``: ParaDL's limits (Nguyen et al. 2021, table III), and ours."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.channel_table import has_attention, split_layers
from hpcbench.parallel.channels import Scheme, fits, largest_degree
from hpcbench.parallel.layers import LayerTable, read_table


def scheme_of(spec: RunSpec) -> Scheme:
    """The strategy of the run with its options."""
    return Scheme(spec.strategy, str(spec.options.get("form", "sharded")), bool(spec.options.get("split_last", False)))


def excluded(spec: RunSpec) -> str | None:
    """Why the run cannot be; a user's own model is looked at by the worker."""
    if spec.precision == "fp16":
        return f"{spec.strategy} with fp16 would need a loss scale that all shards agree on: use bf16"
    if spec.compile:
        return f"{spec.strategy} communicates inside the layers, which torch.compile cannot trace: compile = false"
    # Channels depend neither on the input's size nor on the options of the shipped models.
    table = read_table(spec.model, spec.dataset)
    return None if table is None else excluded_by(spec, table)


def excluded_by(spec: RunSpec, table: LayerTable) -> str | None:
    """Why the model of ``table`` cannot be split as the run asks for."""
    if has_attention(table):
        return (
            f"{spec.strategy} splits convolutions and what lies between them; {spec.model} is a transformer: use tensor"
        )
    layers, scheme = split_layers(table), scheme_of(spec)
    if fits(layers, scheme, spec.tp_degree):
        return None
    most = largest_degree(layers, scheme, spec.tp_degree)
    return (
        f"tp_degree {spec.tp_degree}, but {spec.strategy} of {spec.model} needs a channel of every layer for every "
        f"rank: the largest tp_degree that works is {most}"
    )
