"""Models on the meta device and the forms of their activations, shared by all dry runs of this process."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import msgspec
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_model
from hpcbench.worker.models.build import build_meta_model
from hpcbench.worker.strategies.pipeline.chunk import ActivationMeta, ActivationMetaCache

_MODEL_PARAMETERS = ("model", "dataset", "input_size", "model_options", "precision", "channels_last")


@lru_cache(maxsize=8)
def _built_model(spec_bytes: bytes, model_folder: str | None) -> nn.Sequential:
    return build_meta_model(msgspec.json.decode(spec_bytes, type=RunSpec), model_folder)


def shared_meta_model(spec: RunSpec, model_folder: str | None) -> nn.Sequential:
    """Return the run's model on the meta device; a shipped one is built once and copied, which is faster."""
    if get_model(spec.model).own:
        return build_meta_model(spec, model_folder)
    values = {name: getattr(spec, name) for name in _MODEL_PARAMETERS}
    plain = RunSpec(strategy="single", batch_size=1, **values)
    return copy.deepcopy(_built_model(msgspec.json.encode(plain, order="deterministic"), None))


_TRACE = ActivationMetaCache._trace
_traced_blocks: dict[Any, list[ActivationMeta]] = {}
"""The form of every block's output, by the model, its samples and their number: of all pipelines of this process."""


def trace_once(cache: ActivationMetaCache, samples: int) -> list[ActivationMeta]:
    """Return the forms of the chunks' outputs; the stages of shipped models are slices of one trace."""
    with _disable_current_modes():
        spec = cache._spec
        if get_model(spec.model).own:
            return _TRACE(cache, samples)
        key = samples, str(cache.device), *(str(getattr(spec, name)) for name in _MODEL_PARAMETERS)
        if key not in _traced_blocks:
            by_block = copy.copy(cache)
            by_block._blocks = [range(number, number + 1) for number in range(len(cache._model))]
            _traced_blocks[key] = _TRACE(by_block, samples)
        return [_traced_blocks[key][blocks.stop - 1] for blocks in cache._blocks]
