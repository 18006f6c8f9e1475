"""Costs of spatial parallelism and its hybrid with replicas. ``docs/formulas.md`` derives the formulas."""

from __future__ import annotations

from hpcbench.config.run_spec import RunSpec
from hpcbench.oracle.model_parallel import ModelParallelCost, RankCost, plan_reductions
from hpcbench.oracle.placement import halo_placement, place_group
from hpcbench.oracle.strategies.spatial_rows import SpatialRank, whole_row
from hpcbench.oracle.tensor_sizes import buffer_bytes, parameter_bytes
from hpcbench.parallel.catalog import options_with_defaults
from hpcbench.parallel.gradient_buckets import MIB
from hpcbench.parallel.layer_table import LayerTable
from hpcbench.parallel.mesh import RankMesh
from hpcbench.parallel.strategies.spatial import spatial_grid, spatial_split_of_run


class SpatialCost(ModelParallelCost):
    """One replica's ranks share every sample; with replicas ParaDL's data+spatial."""

    # A halo is cut out, sent, received and joined; with overlap the interior and the borders are computed apart.
    operators_per_call = 10

    def describe(self, spec: RunSpec, table: LayerTable, rank: int) -> RankCost:
        sizes = parameter_bytes(spec, table)
        split = spatial_split_of_run(spec, table) if spec.sp_degree > 1 else None
        if split is None:
            rows, cut = [whole_row(spec, row) for row in table.layers], [False] * len(sizes)
        else:
            rows = SpatialRank(spec, split, RankMesh.of(spec).coordinates(rank).sp).describe_rows()
            cut = [split.is_cut(tensor.name) for tensor in table.parameter_tensors]
        # Gradients of cut layers are reduced over all ranks that share them, others over the replicas.
        parts = ((cut, ("dp", "sp")), ([not is_cut for is_cut in cut], ("dp",)))
        cap_bytes = max(int(float(options_with_defaults(spec)["bucket_cap_mb"]) * MIB), 1)
        reductions = plan_reductions(spec, sizes, parts, cap_bytes)
        return RankCost(rows, sizes, reductions, sum(buffer_bytes(spec, table)))

    def slowest_rank(self, spec: RunSpec) -> int:
        """Return a rank with neighbours on all sides, and one on another node where there are several."""
        place = halo_placement(spatial_grid(spec), place_group(spec, "sp")).place if spec.sp_degree > 1 else 0
        return RankMesh.of(spec).rank(RankMesh(dp=0, pp=0, sp=place, tp=0))

    def ranks_that_differ(self, spec: RunSpec) -> list[int]:
        """Return the rank with the largest part of a sample, and the one with the most halos."""
        return sorted({0, self.slowest_rank(spec)})
