from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.models.build import build_meta_model, build_model, count_parameters
from hpcbench.worker.models.transformer import Attention, BlockStyle, RotaryEmbedding
from hpcbench.workloads.models import MODELS
from tests.worker.helpers import DECODERS, make_spec

IMAGES = [name for name, entry in MODELS.items() if entry.kind == "images"]
DATASET = {"images": "cifar10", "volumes": "cosmoflow", "tokens": "tokens"}
SIZES = {"images": 32, "volumes": 16, "tokens": 16}

# The counts of DDLBench's, torchvision's and the papers' models.
COUNTS = [
    ("resnet18", "digits", {}, 11_172_810),
    ("resnet18", "mnist", {}, 11_172_810),
    ("resnet18", "cifar10", {}, 11_173_962),
    ("resnet18", "imagenet", {}, 11_689_512),
    ("resnet50", "cifar10", {}, 23_520_842),
    ("resnet50", "imagenet", {}, 25_557_032),
    ("resnet152", "cifar10", {}, 58_156_618),
    ("resnet152", "imagenet", {}, 60_192_808),
    ("vgg11", "mnist", {}, 9_229_962),
    ("vgg11", "cifar10", {}, 9_231_114),
    ("vgg11", "cifar10", {"batch_norm": False}, 9_225_610),
    ("vgg11", "imagenet", {}, 132_863_336),
    ("vgg16", "cifar10", {}, 14_728_266),
    ("vgg16", "imagenet", {}, 138_357_544),
    ("vgg16", "highres", {}, 138_357_544),
    ("mobilenetv2", "cifar10", {}, 2_296_922),
    ("mobilenetv2", "imagenet", {}, 3_504_872),
    ("vit_b16", "imagenet", {}, 86_567_656),
    ("vit_l16", "imagenet", {}, 304_326_632),
    ("gpt_125m", "tokens", {"tied": True, "context": 1024}, 124_439_808),
    ("gpt_350m", "tokens", {"tied": True, "context": 1024}, 354_823_168),
    ("llama_8b", "tokens", {}, 8_030_261_248),
    ("llama_70b", "tokens", {}, 70_553_706_496),
    ("llama_405b", "tokens", {}, 405_853_388_800),
    ("llama_1b", "tokens", {}, 1_235_814_400),
    ("llama_1b", "tokens", {"tied": False}, 1_235_814_400 + 128_256 * 2048),
]


@pytest.mark.parametrize(("model", "dataset", "options", "count"), COUNTS)
def test_models_have_the_published_parameter_counts(
    model: str, dataset: str, options: dict[str, Any], count: int
) -> None:
    assert count_parameters(build_meta_model(make_spec(model=model, dataset=dataset, model_options=options))) == count


def test_cosmoflow_has_the_parameter_count_of_mlperf() -> None:
    """MLPerf's by hand: five convolutions, three linear layers."""
    filters = (4, 32, 64, 128, 256, 512)
    convolutions = sum(27 * a * b + b for a, b in itertools.pairwise(filters))
    linear = 4**3 * 512 * 128 + 128 + 128 * 64 + 64 + 64 * 4 + 4
    more = 27 * 512 * 512 + 512
    for number, dataset in enumerate(("cosmoflow", "cosmoflow_256", "cosmoflow_512")):
        built = build_meta_model(make_spec(model="cosmoflow", dataset=dataset))
        assert count_parameters(built) == convolutions + linear + number * more


@pytest.mark.slow
@pytest.mark.parametrize("model", IMAGES)
@pytest.mark.parametrize("size", [8, 17, 63, 224])
def test_every_image_model_takes_every_size_from_its_smallest_on(model: str, size: int) -> None:
    if size < MODELS[model].min_size:
        size = MODELS[model].min_size
    built = build_meta_model(make_spec(model=model, dataset="cifar10", input_size=size))
    assert built(torch.randn(2, 3, size, size, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("size", [8, 15, 16, 32, 33])
def test_cosmoflow_computes_small_volumes(size: int) -> None:
    built = build_model(make_spec(model="cosmoflow", dataset="cosmoflow", input_size=size))
    outputs = built(torch.randn(2, 4, size, size, size))
    assert outputs.shape == (2, 4)
    assert outputs.abs().max() < 1.2


def sample(model: str, device: str = "cpu", count: int = 2) -> torch.Tensor:
    kind = MODELS[model].kind
    assert kind is not None
    size = SIZES[kind]
    if kind == "tokens":
        return torch.randint(50_257, (count, size), device=device)
    return torch.randn(count, *({"images": (3, size, size), "volumes": (4, size, size, size)}[kind]), device=device)


def spec_of(model: str, **values: Any) -> RunSpec:
    kind = MODELS[model].kind
    assert kind is not None
    return make_spec(**{"model": model, "dataset": DATASET[kind], "input_size": SIZES[kind], **values})


@pytest.mark.parametrize("model", ["resnet18", "vgg16", "mobilenetv2", "cosmoflow", "gpt", "llama", "vit"])
def test_seed_and_repeat_determine_the_initial_weights(model: str) -> None:
    def weights(**values: int) -> list[torch.Tensor]:
        torch.rand(3)
        return list(build_model(spec_of(model, **values)).parameters())

    same = zip(weights(seed=3), weights(seed=3), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    repeated = zip(weights(seed=2, repeat=1), weights(seed=3), strict=True)
    assert all(torch.equal(a, b) for a, b in repeated), "a repeat adds its number to the seed"
    another = zip(weights(seed=4), weights(seed=3), strict=True)
    assert not all(torch.equal(a, b) for a, b in another)


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "vgg11", "mobilenetv2", "cosmoflow", "gpt", "llama", "vit"])
@pytest.mark.parametrize("values", [{}, {"input_size": 64, "channels_last": True, "precision": "fp64"}])
def test_shapes_are_the_models_without_its_numbers(model: str, values: dict[str, Any]) -> None:
    if values and model in ("cosmoflow", "vgg11"):  # a large one is slow to build
        values = values | {"input_size": 16}
    spec = spec_of(model, **values)
    torch.manual_seed(5)
    shapes = build_meta_model(spec)
    drawn = torch.rand(3)
    built = build_model(spec)
    assert [type(block) for block in shapes] == [type(block) for block in built]
    there, here = shapes.state_dict(), built.state_dict()
    assert {tensor.device.type for tensor in there.values()} == {"meta"}
    assert [(name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in there.items()] == [
        (name, tensor.shape, tensor.dtype, tensor.stride()) for name, tensor in here.items()
    ]
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3)), "the generator is as it was"


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if model not in DECODERS[2:]])
def test_every_model_is_a_chain_of_blocks_that_can_be_copied(model: str) -> None:
    built = build_meta_model(spec_of(model))
    assert isinstance(built, torch.nn.Sequential)
    assert len(built) > 5, "a sequential view of its blocks"
    copied = pickle.loads(pickle.dumps(copy.deepcopy(built)))
    copied.load_state_dict(built.state_dict())
    assert [name for name, _ in copied.named_parameters()] == list(dict(built.named_parameters()))
    tied = "tied" in MODELS[model].options and MODELS[model].options["tied"].default
    assert len({id(parameter) for parameter in built.state_dict(keep_vars=True).values()}) == (
        len(built.state_dict()) - bool(tied)
    ), "no block shares a weight with another, unless the published model does"
    x = sample(model, "meta")
    chained = x
    for block in built:
        chained = block(chained)
    assert chained.shape == built(x).shape


def test_tied_weights_are_one_tensor_also_in_a_copy() -> None:
    built: Any = copy.deepcopy(build_model(spec_of("gpt", model_options={"tied": True})))
    assert built[0].tokens.weight is built[-1].output.weight


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_no_position_sees_a_later_one(model: str) -> None:
    built = build_model(spec_of(model)).eval()
    x = sample(model, count=1)
    changed = x.clone()
    changed[0, 10:] = 7
    before, after = built(x), built(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_gpt_takes_an_input_longer_than_its_context() -> None:
    built = build_model(make_spec(model="gpt", dataset="tokens", input_size=40, model_options={"context": 16}))
    assert built(torch.randint(50_257, (1, 40))).shape == (1, 40, 50_257)


def test_dropout_acts_only_in_training() -> None:
    for model in ("gpt", "llama", "vit"):
        built = build_model(spec_of(model, model_options={"dropout": 0.3}))
        x = sample(model)
        assert not torch.equal(built(x), built(x)), model
        built.eval()
        assert torch.equal(built(x), built(x)), model


def test_the_gradient_of_rotary_positions_is_numerically_correct() -> None:
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: RotaryEmbedding.apply(x, 100.0), (x,))  # type: ignore[no-untyped-call]


def test_heads_that_share_keys_attend_as_with_copies_of_them() -> None:
    shared: Any = build_model(spec_of("llama"))[1].attention
    copied = Attention(128, 4, causal=True, dropout=0.0, style=BlockStyle(rotary_base=10_000.0, biases=False))
    copied.query, copied.output = shared.query, shared.output
    for name in ("key", "value"):
        weight = getattr(shared, name).weight.view(2, 1, 32, 128).expand(2, 2, 32, 128).reshape(128, 128)
        getattr(copied, name).weight = torch.nn.Parameter(weight)
    x = torch.randn(2, 5, 128)
    torch.testing.assert_close(shared(x), copied(x))


def test_models_have_the_runs_precision_and_memory_format() -> None:
    assert next(build_model(make_spec(precision="fp64")).parameters()).dtype == torch.float64
    convolution = next(build_model(make_spec(channels_last=True, dataset="cifar10")).parameters())
    assert convolution.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_the_large_forms_compute_what_torchvision_computes() -> None:
    from hpcbench.worker.models.torchvision_models import import_torchvision_models

    inputs = torch.randn(1, 3, 64, 64)
    names = {"resnet18": "resnet18", "resnet50": "resnet50", "vgg11": "vgg11", "mobilenetv2": "mobilenet_v2"}
    for name, theirs in names.items():
        torch.manual_seed(0)
        whole = getattr(import_torchvision_models(), theirs)(weights=None, num_classes=1000).eval()
        ours = build_model(make_spec(model=name, dataset="imagenet", input_size=64)).eval()
        assert torch.equal(ours(inputs), whole(inputs)), name


def test_vit_computes_what_torchvision_computes() -> None:
    from hpcbench.worker.models.torchvision_models import import_torchvision_models

    vision = import_torchvision_models().vision_transformer.VisionTransformer
    theirs = vision(32, 4, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=512, num_classes=10).eval()
    torch.nn.init.normal_(theirs.heads.head.weight)
    ours: Any = build_model(make_spec(model="vit", dataset="cifar10")).eval()
    state = theirs.state_dict()
    with torch.no_grad():
        ours[0].patches.load_state_dict({"weight": state["conv_proj.weight"], "bias": state["conv_proj.bias"]})
        ours[0].class_token.copy_(state["class_token"])
        ours[0].positions.copy_(state["encoder.pos_embedding"])
        for number, block in enumerate(list(ours)[1:-1]):
            layer = theirs.encoder.layers[number]
            block.norm1.load_state_dict(layer.ln_1.state_dict())
            block.norm2.load_state_dict(layer.ln_2.state_dict())
            weights = layer.self_attention.in_proj_weight.chunk(3)
            biases = layer.self_attention.in_proj_bias.chunk(3)
            for linear, weight, bias in zip(
                (block.attention.query, block.attention.key, block.attention.value), weights, biases, strict=True
            ):
                linear.load_state_dict({"weight": weight, "bias": bias})
            block.attention.output.load_state_dict(layer.self_attention.out_proj.state_dict())
            block.mlp.up.load_state_dict(layer.mlp[0].state_dict())
            block.mlp.down.load_state_dict(layer.mlp[3].state_dict())
        ours[-1].norm.load_state_dict(theirs.encoder.ln.state_dict())
        ours[-1].output.load_state_dict(theirs.heads.head.state_dict())
    inputs = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(inputs), theirs(inputs))
