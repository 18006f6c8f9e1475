"""The tables of layers against real tensors, torch's own counter, the literature, and what is shipped."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpcbench.errors import WorkerError
from hpcbench.strategies.decoder_shapes import named_shape
from hpcbench.strategies.layer_table import (
    LayerTable,
    LayerTableRequest,
    encode_layer_table,
    read_shipped_table,
    shipped_table_path,
)
from hpcbench.strategies.resolve import shipped_model_dataset_pairs
from hpcbench.worker.layers import answer_request, make_layer_table, write_shipped_tables, zero_batch
from hpcbench.worker.measure.layer_trace import trace_layers
from hpcbench.worker.measured_run import model_table, recomputed_share
from hpcbench.worker.model_execution import summed_loss
from hpcbench.worker.models.build import build_model
from tests.worker.helpers import DECODERS, make_spec

# One small pair of every family of models, measured anew in every run of the tests; `make check-layers` takes all.
SAMPLE = [
    ("cosmoflow", "cosmoflow_512"),
    ("gpt", "tokens"),
    ("llama", "tokens"),
    ("mobilenetv2", "digits"),
    ("resnet18", "imagenet"),
    ("vgg11", "digits"),
    ("vit", "mnist"),
]


def shipped(model: str, dataset: str) -> LayerTable:
    table = read_shipped_table(model, dataset)
    assert table is not None, f"{shipped_table_path(model, dataset).name} is missing: make layers"
    return table


@pytest.mark.parametrize(("model", "dataset"), SAMPLE)
def test_the_shipped_table_is_what_is_measured(model: str, dataset: str) -> None:
    made = encode_layer_table(make_layer_table(LayerTableRequest(model=model, dataset=dataset)))
    assert made == gzip.decompress(shipped_table_path(model, dataset).read_bytes()), "make layers"


@pytest.mark.soak
def test_all_shipped_tables_are_what_is_measured(tmp_path: Path) -> None:
    write_shipped_tables(tmp_path)
    folder = shipped_table_path("any", "any").parent
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in folder.iterdir())
    different = [path.name for path in tmp_path.iterdir() if path.read_bytes() != (folder / path.name).read_bytes()]
    assert different == [], "make layers"


# Activation bytes of a batch of 3: what autograd keeps of real tensors is what the table says of fake ones.
REAL = [
    ("resnet18", "digits", {}),
    ("vgg11", "cifar10", {}),
    ("vgg11", "imagenet", {"input_size": 64}),
    ("mobilenetv2", "digits", {}),
    ("cosmoflow", "cosmoflow", {"input_size": 16}),
    ("gpt", "tokens", {"input_size": 8, "model_options": {"dropout": 0.1, "tied": True}}),
    ("llama", "tokens", {"input_size": 8, "model_options": {"dropout": 0.1, "tied": True}}),
    ("vit", "digits", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dataset", "more"), REAL)
def test_fake_tensors_keep_what_real_ones_keep(model: str, dataset: str, more: dict[str, Any]) -> None:
    table = make_layer_table(LayerTableRequest(model=model, dataset=dataset, **more))
    spec = make_spec(model=model, dataset=dataset, **more)
    rows = {row.name: row for row in trace_layers(build_model(spec), *zero_batch(spec, 3))}
    seen = 0
    for layer in table.layers:
        if [one.name for one in table.layers].count(layer.name) > 1:
            continue
        row = rows[layer.name]
        assert row.activation_bytes == 3 * layer.activation_bytes + layer.activation_fixed_bytes, layer.name
        assert row.flops == [3 * layer.forward_flops, 3 * layer.backward_flops], layer.name
        seen += 1
    assert seen > 10


def test_flops_are_those_of_torchs_counter() -> None:
    """Models without groups and fused attention, for which that counter is right."""
    for model, dataset in (("resnet18", "cifar10"), ("vgg11", "mnist")):
        spec = make_spec(model=model, dataset=dataset)
        inputs, targets = zero_batch(spec, 2)
        built = build_model(spec)
        with FlopCounterMode(display=False) as counter:
            loss = summed_loss(built(inputs), targets)
            forward = counter.get_total_flops()
            torch.autograd.backward(loss)
        totals = shipped(model, dataset).totals()
        assert (2 * totals.forward_flops, 2 * totals.backward_flops) == (forward, counter.get_total_flops() - forward)


def test_computation_around_child_modules_is_a_separate_row() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return (x + torch.relu(self.inner(x))) * self.scale

    rows = {row.name: row for row in trace_layers(nn.Sequential(Residual()), torch.zeros(2, 4), torch.zeros(2, 4))}
    assert list(rows) == ["0.inner", "0", "", "loss"]
    kept = rows["0"].activation_bytes
    assert kept == 2 * 2 * 4 * 4, "relu's result and the product's factor, 2 x 4 numbers each"
    assert rows["0.inner"].activation_bytes == 2 * 4 * 4, "its input"
    assert rows["0"].moved_bytes[0] == (2 + 3 + 2) * 32 + 16, "relu 2, sum 3, product 2 and the scale"


def test_tied_and_uncalled_parameters_are_counted_once() -> None:
    for model, dataset in shipped_model_dataset_pairs():
        table = shipped(model, dataset)
        assert table.totals().parameters == sum(
            torch.Size(tensor.shape).numel() for tensor in table.parameter_tensors
        ), (model, dataset)


# Multiply-adds of a forward pass in 1e9, and parameters, as torchvision's documentation of its models gives them; it
# counts convolutions and linear layers, so that ViT's attention comes on top: 2 * 12 layers * 197^2 * 768.
PUBLISHED = [
    ("resnet18", "imagenet", 1.814, 11_689_512),
    ("resnet50", "imagenet", 4.089, 25_557_032),
    ("resnet152", "imagenet", 11.514, 60_192_808),
    ("vgg11", "imagenet", 7.609, 132_863_336),
    ("vgg16", "imagenet", 15.470, 138_357_544),
    ("mobilenetv2", "imagenet", 0.301, 3_504_872),
    ("vit_b16", "imagenet", 16.849 + 0.715, 86_567_656),
]


@pytest.mark.parametrize(("model", "dataset", "giga_macs", "parameters"), PUBLISHED)
def test_operations_and_parameters_are_the_published_ones(
    model: str, dataset: str, giga_macs: float, parameters: int
) -> None:
    totals = shipped(model, dataset).totals()
    assert totals.parameters == parameters
    assert totals.forward_flops / 2e9 == pytest.approx(giga_macs, abs=0.0006)


@pytest.mark.parametrize("model", DECODERS)
def test_a_decoder_takes_the_flops_of_the_convention(model: str) -> None:
    """PaLM's and torchtitan's: but for the vectors of norms and biases, which multiply no matrix."""
    table, shape = shipped(model, "tokens"), named_shape(model)
    length = table.input_size
    vectors = shape.layers * (shape.layer_parameters - shape.layer_matmul_parameters)
    vectors += shape.norm_vectors * shape.hidden
    assert table.totals().parameters == shape.parameters
    assert table.flops_per_sample() == length * (shape.flops_per_token(length) - 6 * vectors)


def test_a_decoder_has_its_own_length() -> None:
    assert shipped("llama_70b", "tokens").input_size == 8192
    assert read_shipped_table("llama_70b", "tokens", 128) is None


def test_attention_names_its_heads() -> None:
    shared = [layer for layer in shipped("llama_8b", "tokens").layers if layer.kind == "Attention.other"]
    assert {(row.attributes["heads"], row.attributes["kv_heads"]) for row in shared} == {(32, 8)}
    rows = [layer for layer in shipped("gpt_125m", "tokens").layers if layer.kind == "Attention.other"]
    assert [row.attributes["heads"] for row in rows] == [12] * 12


@pytest.mark.slow
def test_a_table_takes_no_memory() -> None:
    """The peak is at most 300 MB above a process that has only imported torch; real activations would take GiB."""
    code = (
        "import sys; from hpcbench.worker.layers import answer_request\n"
        "def peak(): return next(int(line.split()[1]) for line in open('/proc/self/status') if 'VmHWM' in line)\n"
        "from hpcbench.worker.models.torchvision_models import import_torchvision_models; import_torchvision_models(); before = peak()\n"
        "got = answer_request(sys.stdin.buffer.read()); assert got.table, got.error\n"
        "print(before, peak(), got.table.totals().activation_bytes)"
    )
    request = msgspec.json.encode(LayerTableRequest(model="vgg11", dataset="highres", input_size=4096))
    done = subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, check=True)
    before, after, activations = (int(word) for word in done.stdout.split())
    assert after - before < 300 * 1024, "KiB"
    assert activations > 10 * 2**30


def test_a_run_whose_model_cannot_be_measured_has_a_warning(tmp_path: Path) -> None:
    warnings: list[str] = []
    assert model_table(make_spec(), None, warnings) == shipped("resnet18", "digits")
    assert warnings == []
    spec = make_spec(model="not_there:build")
    assert model_table(spec, str(tmp_path), warnings) is None
    assert warnings == [f"no FLOP/s: model not_there:build: there is no module not_there in {tmp_path}"]


def test_an_impossible_layer_table_names_the_reason() -> None:
    with pytest.raises(WorkerError, match="resnet18 takes images; tokens holds tokens"):
        make_layer_table(LayerTableRequest(model="resnet18", dataset="tokens"))
    unknown = answer_request(msgspec.json.encode(LayerTableRequest(model="resnet19", dataset="digits")))
    assert (unknown.table, unknown.is_input) == (None, True)
    assert "unknown model 'resnet19'" in unknown.error


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.0),
        ({"activation_checkpointing": True}, 1.0),
        ({"strategy": "1f1b", "pp_degree": 2, "micro_batches": 4, "options": {"recompute": "except_last"}}, 0.75),
        ({"strategy": "1f1b", "pp_degree": 2, "micro_batches": 4, "options": {"recompute": "always"}}, 1.0),
    ],
)
def test_the_share_of_the_forward_pass_that_is_repeated(changes: dict[str, Any], share: float) -> None:
    assert recomputed_share(make_spec(**changes)) == share
