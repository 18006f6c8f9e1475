"""The largest images of the largest models, cut and tried without a number of them: shapes alone."""

from __future__ import annotations

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.pipeline.rank_cost import PipelineRank
from hpcbench.strategies.pipeline.schedules import PipelineLayout
from hpcbench.strategies.pipeline.train.chunk import ActivationMetaCache
from hpcbench.strategies.pipeline.train.stage_assignment import assign_blocks
from hpcbench.worker.models.build import build_meta_model
from tests.distributed.cases import CPU

OPTIONS = {"cuts": "", "balance": "time"}


@pytest.mark.parametrize("dataset", ["imagenet", "highres"])
@pytest.mark.parametrize("model", ["resnet152", "mobilenetv2"])
def test_stage_boundaries_of_large_images_follow_the_layer_table(model: str, dataset: str) -> None:
    """Every boundary of eight chunks is what the table of layers says, which was found by running single layers."""
    spec = RunSpec(
        model=model, dataset=dataset, strategy="interleaved_1f1b", pp_degree=4, tasks_per_node=4, batch_size=8
    )
    table = read_shipped_table(model, dataset, None, {})
    assert table is not None
    whole = build_meta_model(spec)
    blocks = assign_blocks(whole, spec, OPTIONS, PipelineLayout(4, 2))
    assert [len(part) > 0 for part in blocks] == [True] * 8
    boundaries, run = ActivationMetaCache(whole, blocks, spec, CPU), PipelineRank(spec, table, 0)
    assert run.blocks == blocks
    for chunk in range(7):
        (shape,) = boundaries.outputs_of(chunk, 3).shapes
        assert shape.dtype == torch.float32
        assert shape.sizes[0] == 3
        assert 4 * torch.Size(shape.sizes).numel() == 3 * run.boundary_bytes(chunk)
    (logits,) = boundaries.outputs_of(7, 3).shapes
    assert logits.sizes == (3, 1000)
