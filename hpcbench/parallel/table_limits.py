"""What excludes a run once the table of its layers is known: of users' own models names and integers tell nothing."""

from __future__ import annotations

from hpcbench.config.spec import RunSpec
from hpcbench.errors import ConfigError
from hpcbench.parallel import channel_limits
from hpcbench.parallel.layers import LayerTable
from hpcbench.parallel.spatial_limits import cannot, grid_of
from hpcbench.parallel.strategies.fairscale_pipe import STRATEGIES as FAIRSCALE_PIPE
from hpcbench.parallel.strategies.pipedream import STRATEGIES as PIPEDREAM
from hpcbench.parallel.strategies.pipeline import STRATEGIES as PIPELINES
from hpcbench.parallel.strategies.pipeline import layout_of, wrong_cuts
from hpcbench.parallel.tensor import BLOCK


def excluded_by_table(spec: RunSpec, table: LayerTable) -> str | None:
    """Why the strategy of the run cannot split the model of ``table``."""
    pipes = {*PIPELINES, *PIPEDREAM, *FAIRSCALE_PIPE}
    splits_blocks = spec.strategy == "tensor" or (spec.strategy in pipes and spec.tp_degree > 1)
    if splits_blocks and not any(layer.kind == BLOCK for layer in table.layers):
        return f"{spec.strategy} splits transformer blocks, and {spec.model} has none"
    if spec.strategy in pipes:
        return wrong_cuts(spec, layout_of(spec), table.blocks)
    if spec.strategy in ("filter", "channel"):
        return channel_limits.excluded_by(spec, table)
    if spec.strategy == "spatial" and spec.sp_degree > 1:
        try:
            return cannot(table, grid_of(spec), int(spec.options.get("until", 0)))
        except ConfigError as error:
            return f"spatial: {error.message}"
    return None
