"""Which blocks each chunk of a run's model gets, decided alike on every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.cutting import chunk_blocks
from hpcbench.parallel.layers import LayerTable, read_table
from hpcbench.parallel.partition import balanced, ranges
from hpcbench.parallel.schedule import Layout
from hpcbench.parallel.stages import given_cuts
from hpcbench.worker.layers import table_of
from hpcbench.worker.pipeline.boundary import skeleton
from hpcbench.worker.pipeline.measured import measured_blocks


def blocks_of_chunks(model: nn.Sequential, spec: RunSpec, options: Mapping[str, Any], layout: Layout) -> list[range]:
    """The blocks of every chunk, as ``options.cuts`` or ``options.balance`` say.

    ``WorkerError`` where a balance needs a table of layers and fake tensors cannot give one.
    """
    chunks = layout.chunks
    if chunks == 1:
        return [range(len(model))]
    if options["cuts"]:
        return ranges(given_cuts(options["cuts"]) or (), len(model))
    if options["balance"] == "measured":
        return measured_blocks(spec, chunks)
    if options["balance"] == "blocks":
        return ranges(balanced([1] * len(model), chunks), len(model))
    return chunk_blocks(spec, options, layout, _table(model, spec))


def _table(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    shipped = read_table(spec.model, spec.dataset, spec.input_size, spec.model_options)
    if shipped is not None and shipped.blocks == len(model):
        return shipped
    plain = nn.Sequential(OrderedDict(skeleton(model).named_children())).float()
    return table_of(plain, spec)
