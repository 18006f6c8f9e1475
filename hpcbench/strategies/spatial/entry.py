"""Spatial parallelism: registry entries."""

from __future__ import annotations

from hpcbench.config.option import Option
from hpcbench.strategies.gradient_buckets import DEFAULT_BUCKET_CAP_MB
from hpcbench.strategies.spatial.spatial_split import (
    LOCAL_STATISTICS_TOLERANCE,
    spatial_exclusion,
    spatial_table_exclusion,
)
from hpcbench.strategies.strategy_entry import HybridAlias, StrategyEntry, refuse_bf16_params

STRATEGIES = {
    "spatial": StrategyEntry(
        own_degree="sp_degree",
        description="images and volumes cut into parts with halo exchange; the fully connected layers whole",
        options={
            "grid": Option("", "ranks along each spatial dim, such as '2x2'; by default all along the first"),
            "until": Option(0, "the first block that is whole again; 0 is as late as the extents allow"),
            "overlap": Option(True, "halos travel while the interior or the weights' gradient is computed"),
            "batch_norm": Option(
                "group",
                "statistics over all parts, or of a rank's own part: lossy",
                ("group", "local"),
                lossy={"local": LOCAL_STATISTICS_TOLERANCE},
            ),
            "global_pool": Option(
                "reduce", "the mean over all positions: of sums, or after gathering them", ("reduce", "gather")
            ),
            "bucket_cap_mb": Option(DEFAULT_BUCKET_CAP_MB, "size of a gradient bucket in MiB"),
        },
        exclusion=refuse_bf16_params("its split layers take fp32 weights", spatial_exclusion),
        hybrid=("dp_degree",),
        table_exclusion=spatial_table_exclusion,
        other_names=("sp",),
    )
}

ALIASES = {"data_spatial": HybridAlias("spatial")}
