"""The models that a sweep can name, their options, and files of users' own models."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcbench.config.option import Option
from hpcbench.errors import ConfigError, did_you_mean
from hpcbench.plugins import add_plugins

CUSTOM_MODEL_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


def is_custom_model(model: str) -> bool:
    """Whether a model's name means a user's own; those of the shipped ones have no colon."""
    return ":" in model


def custom_model_file(model: str, folder: Path) -> Path | None:
    """The file of the model's module below ``folder``, if it is there."""
    place = folder.joinpath(*model.partition(":")[0].split("."))
    candidates = (place / "__init__.py", place.with_name(place.name + ".py"))
    return next((path for path in candidates if path.is_file()), None)


def check_custom_model(model: str, folder: Path | None, where: str) -> ConfigError | None:
    """Return the error in ``model`` as far as its text shows it; nothing of it is executed.

    ``where`` is the place of its name. Without a ``folder`` only the form is looked at.
    """
    if not re.match(CUSTOM_MODEL_PATTERN, model):
        return ConfigError(
            f"{model!r} is not a model of your own",
            where=where,
            hint="write it as 'module:function' or 'package.module:function'",
        )
    if folder is None:
        return None
    module, _, function = model.partition(":")
    path = custom_model_file(model, folder)
    if path is None:
        siblings = sorted(folder.joinpath(*module.split(".")[:-1]).glob("*.py"))[:_MAX_LISTED_MODULES]
        near = (".".join(file.relative_to(folder).with_suffix("").parts) for file in siblings)
        return ConfigError(
            f"model {model!r}: there is no {module.replace('.', '/')}.py in {folder}",
            where=where,
            hint=did_you_mean(module, {name.removesuffix(".__init__") for name in near}),
        )
    try:
        names = set(_top_level_names(ast.parse(path.read_bytes(), str(path)).body))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        said = getattr(error, "msg", None) or error
        return ConfigError(f"model {model!r}: not valid Python: {said}", where=f"{path}:{line}" if line else str(path))
    except OSError as error:
        return ConfigError(f"model {model!r}: cannot read {path}: {error.strerror}", where=where)
    if function in names or "*" in names:
        return None
    return ConfigError(
        f"model {model!r}: {path} has no function {function!r}", where=where, hint=did_you_mean(function, names)
    )


_MAX_LISTED_MODULES = 1000


def _top_level_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module defines at its top level, also below ``if``, ``try`` and ``with``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _top_level_names(node.body)
            yield from _top_level_names(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level_names(handler.body)


class ModelEntry(NamedTuple):
    """The registry entry of a model.

    Example:
        >>> entry = get_model("resnet18")
        >>> entry.kind, entry.min_size
        ('images', 8)
    """

    builder: str
    """``"module:function"`` of the function that builds the model; the worker imports it."""
    kind: str | None
    """The kind of data set that it takes: ``images``, ``volumes`` or ``tokens``; ``None`` is left to the model."""
    min_size: int
    """The smallest input that it accepts: edge length in pixels or voxels, or tokens."""
    description: str
    options: dict[str, Option]
    own: bool = False
    """Whether it is a user's own model, which checks its options itself."""
    input_size: int | None = None
    """Default input size, in tokens or as an edge length; ``None`` for the data set's own."""


_COSMOFLOW = ModelEntry(
    "hpcbench.worker.models.cosmoflow:build",
    "volumes",
    8,
    "",
    {"dropout": Option(0.5, "after each of the first two linear layers")},
)
_DECODER = ModelEntry(
    "hpcbench.worker.models.decoder:build_decoder",
    "tokens",
    1,
    "",
    {
        "vocabulary": Option(
            0, "words that there are weights for; 0: as published, and never fewer than the data set has"
        ),
        "tied": Option(False, "the output layer uses the embedding's weights"),
        "dropout": Option(0.0, "of embeddings, attention and after each half of a block"),
    },
)
_TIED_DECODER = _DECODER._replace(
    options=_DECODER.options | {"tied": Option(True, "the output layer uses the embedding's weights, as published")}
)
_GPT = ModelEntry(
    "hpcbench.worker.models.decoder:build_gpt",
    "tokens",
    1,
    "",
    {
        "context": Option(2048, "positions that there are weights for, at least; a longer input gets its own"),
        "tied": Option(False, "the output layer uses the embedding's weights, as published"),
        "dropout": Option(0.0, "of embeddings, attention and after each half of a block"),
    },
)
_SHORT_GPT = _GPT._replace(
    options=_GPT.options
    | {"context": Option(1024, "positions that there are weights for, at least; a longer input gets its own")}
)
_MOBILENET = ModelEntry(
    "hpcbench.worker.models.image_networks:build_mobilenet",
    "images",
    8,
    "",
    {"dropout": Option(0.2, "from 64 pixels on: dropout before the linear layer")},
)
_RESNET = ModelEntry("hpcbench.worker.models.image_networks:build_resnet", "images", 8, "", {})
_VGG = ModelEntry(
    "hpcbench.worker.models.image_networks:build_vgg",
    "images",
    8,
    "",
    {
        "batch_norm": Option(True, "below 64 pixels: BatchNorm after every convolution"),
        "dropout": Option(0.5, "from 64 pixels on: dropout between the linear layers"),
    },
)
_VIT = ModelEntry(
    "hpcbench.worker.models.image_networks:build_vit",
    "images",
    16,
    "",
    {"dropout": Option(0.0, "of embeddings, attention and after each half of a block")},
)
_SMALL_VIT = _VIT._replace(min_size=8)
MODELS: dict[str, ModelEntry] = {
    "cosmoflow": _COSMOFLOW._replace(
        description="3-D convolutions on volumes, MLPerf HPC's form at 128^3; larger volumes get more of them"
    ),
    "llama": _DECODER._replace(description="4 layers, 128 wide, 4 heads, 2 key-value heads: trains on a CPU"),
    "llama_1b": _TIED_DECODER._replace(
        input_size=8192, description="Llama 3.2 1B: 16 layers, 2048 wide, 32 heads, 8 key-value heads"
    ),
    "llama_3b": _TIED_DECODER._replace(
        input_size=8192, description="Llama 3.2 3B: 28 layers, 3072 wide, 24 heads, 8 key-value heads"
    ),
    "llama_8b": _DECODER._replace(
        input_size=8192, description="Llama 3.1 8B: 32 layers, 4096 wide, 32 heads, 8 key-value heads"
    ),
    "llama_70b": _DECODER._replace(
        input_size=8192, description="Llama 3.1 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads"
    ),
    "llama_405b": _DECODER._replace(
        input_size=8192, description="Llama 3.1 405B: 126 layers, 16384 wide, 128 heads, 8 key-value heads"
    ),
    "playbook_1b": _TIED_DECODER._replace(
        input_size=4096, description="the Ultra-Scale Playbook's 1B: 16 layers, 2048 wide, 32 heads"
    ),
    "playbook_3b": _TIED_DECODER._replace(
        input_size=4096, description="the Ultra-Scale Playbook's 3B: 28 layers, 3072 wide, 32 heads"
    ),
    "playbook_8b": _DECODER._replace(
        input_size=4096, description="the Ultra-Scale Playbook's 8B: 32 layers, 4096 wide, 32 heads"
    ),
    "playbook_70b": _DECODER._replace(
        input_size=4096, description="the Ultra-Scale Playbook's 70B: 80 layers, 8192 wide, 64 heads, 8 key-value heads"
    ),
    "playbook_80b": _DECODER._replace(
        input_size=4096, description="the Ultra-Scale Playbook's 80B: 80 layers, 8192 wide, 64 heads"
    ),
    "mpt_125m": _TIED_DECODER._replace(input_size=2048, description="MPT 125M: 12 layers, 768 wide, 12 heads"),
    "mpt_350m": _TIED_DECODER._replace(input_size=2048, description="MPT 350M: 24 layers, 1024 wide, 16 heads"),
    "mpt_760m": _TIED_DECODER._replace(input_size=2048, description="MPT 760M: 24 layers, 1536 wide, 12 heads"),
    "mpt_1b": _TIED_DECODER._replace(input_size=2048, description="MPT 1B: 24 layers, 2048 wide, 16 heads"),
    "mpt_3b": _TIED_DECODER._replace(input_size=2048, description="MPT 3B: 32 layers, 2560 wide, 20 heads"),
    "mpt_7b": _TIED_DECODER._replace(input_size=2048, description="MPT 7B: 32 layers, 4096 wide, 32 heads"),
    "mpt_13b": _TIED_DECODER._replace(input_size=2048, description="MPT 13B: 40 layers, 5120 wide, 40 heads"),
    "mpt_30b": _TIED_DECODER._replace(input_size=2048, description="MPT 30B: 48 layers, 7168 wide, 56 heads"),
    "mpt_70b": _TIED_DECODER._replace(input_size=2048, description="MPT 70B: 80 layers, 8192 wide, 64 heads"),
    "nemotron_15b": _DECODER._replace(
        input_size=4096, description="Nemotron-4 15B: 32 layers, 6144 wide, 48 heads, 8 key-value heads"
    ),
    "nemotron_340b": _DECODER._replace(
        input_size=4096, description="Nemotron-4 340B: 96 layers, 18432 wide, 96 heads, 8 key-value heads"
    ),
    "gpt3_175b": _TIED_DECODER._replace(input_size=2048, description="GPT-3 175B: 96 layers, 12288 wide, 96 heads"),
    "gpt": _SHORT_GPT._replace(description="4 layers, 128 wide, 4 heads: trains on a CPU"),
    "gpt_125m": _GPT._replace(description="GPT-3 Small: 12 layers, 768 wide, 12 heads"),
    "gpt_350m": _GPT._replace(description="GPT-3 Medium: 24 layers, 1024 wide, 16 heads"),
    "gpt_760m": _GPT._replace(description="GPT-3 Large: 24 layers, 1536 wide, 16 heads"),
    "gpt_1_3b": _GPT._replace(
        description="GPT-3 XL: 24 layers, 2048 wide, 16 heads of 128 (the paper's 24 do not divide its width)"
    ),
    "gpt_2_7b": _GPT._replace(description="GPT-3 2.7B: 32 layers, 2560 wide, 32 heads"),
    "gpt_6_7b": _GPT._replace(description="GPT-3 6.7B: 32 layers, 4096 wide, 32 heads"),
    "gpt_13b": _GPT._replace(description="GPT-3 13B: 40 layers, 5120 wide (the paper prints 5140), 40 heads of 128"),
    "gpt_17b": _SHORT_GPT._replace(description="as Turing-NLG: 78 layers, 4256 wide, 28 heads"),
    "mobilenetv2": _MOBILENET._replace(
        description="inverted residuals with depthwise convolutions; below 64 pixels it halves three times only"
    ),
    "resnet18": _RESNET._replace(description="18 layers, residual; below 64 pixels a 3x3 stem without pooling"),
    "resnet50": _RESNET._replace(
        description="50 layers, residual, bottlenecks; below 64 pixels a 3x3 stem without pooling"
    ),
    "resnet152": _RESNET._replace(
        description="152 layers, residual, bottlenecks; below 64 pixels a 3x3 stem without pooling"
    ),
    "vgg11": _VGG._replace(description="11 layers, no shortcuts, wide; below 64 pixels one linear layer and BatchNorm"),
    "vgg16": _VGG._replace(description="16 layers, no shortcuts, wide; below 64 pixels one linear layer and BatchNorm"),
    "vit": _SMALL_VIT._replace(description="4 layers, 128 wide, 4 heads, patches of 4x4: trains on a CPU"),
    "vit_b16": _VIT._replace(description="ViT-B/16: 12 layers, 768 wide, 12 heads, patches of 16x16"),
    "vit_l16": _VIT._replace(description="ViT-L/16: 24 layers, 1024 wide, 16 heads, patches of 16x16"),
}
"""Every model by its name; packages of third parties add theirs by entry points of the group ``hpcbench.models``."""

add_plugins("hpcbench.models", "MODELS", ModelEntry, MODELS)


def get_model(key: str) -> ModelEntry:
    """The entry of ``key``, also of a user's own; ``ConfigError`` with the nearest name where there is none."""
    if is_custom_model(key):
        return ModelEntry(key, None, 1, "a user's own model", {}, own=True)
    if key not in MODELS:
        raise ConfigError(f"unknown model {key!r}", hint=did_you_mean(key, MODELS))
    return MODELS[key]
