"""The table of a model's layers, for a model that is there already."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn

from hpcbench.config.spec import RunSpec
from hpcbench.parallel.layers import LayerTable, read_table
from hpcbench.parallel.spatial_limits import differing


def table_for(model: nn.Sequential, spec: RunSpec) -> LayerTable:
    """The shipped table of the run's model, else one measured here: a second or two on fake tensors.

    Raises ``WorkerError`` where the model cannot be run with fake tensors.
    """
    shipped = read_table(spec.model, spec.dataset, spec.input_size, differing(spec))
    if shipped is not None:
        return shipped
    # Fake tensors take a second to import, which no other run should wait for before its first step.
    from hpcbench.worker.layers import table_of

    return table_of(_shapes_of(model), spec)


def _shapes_of(model: nn.Sequential) -> nn.Sequential:
    """``model`` with its tensors on the meta device, in the type that tables are in; blocks called one by one."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        shape = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
    copied = copy.deepcopy(model, memo)
    if type(model).__module__.startswith("hpcbench."):
        copied = nn.Sequential(OrderedDict(copied.named_children()))
    return copied.float()
