"""Feature maps cut along their spatial dims."""

from __future__ import annotations

from hpcbench.parallel.buckets import BUCKET_CAP_MB
from hpcbench.parallel.entry import Option, Strategy

LOCAL_STATISTICS = 16.0
"""BatchNorm over a rank's own part computes another function, for which there is no bound: this one only shows numbers
that are out of all proportion. Measured: 2.0 for resnet18 on 8x8 images, where a part has few values per channel."""

STRATEGIES = {
    "spatial": Strategy(
        own_degree="sp_degree",
        runtime="hpcbench.worker.strategies.spatial:Spatial",
        description="images and volumes cut into parts with halo exchange; the fully connected layers whole",
        options={
            "grid": Option(str, "", "ranks along each spatial dim, such as '2x2'; by default all along the first"),
            "until": Option(int, 0, "the first block that is whole again; 0 is as late as the extents allow"),
            "overlap": Option(bool, True, "halos travel while the interior or the weights' gradient is computed"),
            "batch_norm": Option(
                str,
                "group",
                "statistics over all parts, or of a rank's own part: lossy",
                ("group", "local"),
                lossy={"local": LOCAL_STATISTICS},
            ),
            "global_pool": Option(
                str, "reduce", "the mean over all positions: of sums, or after gathering them", ("reduce", "gather")
            ),
            "bucket_cap_mb": Option(float, BUCKET_CAP_MB, "size of a gradient bucket in MiB"),
        },
        limit="hpcbench.parallel.spatial_limits:spatial",
        hybrid=("dp_degree",),
        cost="hpcbench.oracle.strategies.spatial:Spatial",
    ),
}

ALIASES = {"data_spatial": "spatial"}
