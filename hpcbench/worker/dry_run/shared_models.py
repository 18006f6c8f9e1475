"""Models on the meta device and the forms of their activations, shared by all dry runs of this process."""

from __future__ import annotations

import copy
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import get_model
from hpcbench.worker.models.build import build_meta_model, copy_to_meta
from hpcbench.worker.strategies.pipeline.chunk import ActivationMeta, ActivationMetaCache

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MODEL_PARAMETERS = ("model", "dataset", "input_size", "model_options", "precision", "channels_last")


@lru_cache(maxsize=8)
def _built_model(spec_bytes: bytes) -> nn.Sequential:
    return build_meta_model(msgspec.json.decode(spec_bytes, type=RunSpec), None)


def _template(spec: RunSpec) -> nn.Sequential:
    values = {name: getattr(spec, name) for name in _MODEL_PARAMETERS}
    plain = RunSpec(strategy="single", batch_size=1, **values)
    return _built_model(msgspec.json.encode(plain, order="deterministic"))


def shared_meta_model(spec: RunSpec, model_folder: str | None) -> nn.Sequential:
    """Return the run's model on the meta device; a shipped one is built once and copied, which is faster."""
    if get_model(spec.model).own:
        return build_meta_model(spec, model_folder)
    return copy_module(_template(spec), {})


def forms_of_model(spec: RunSpec, model: nn.Sequential) -> nn.Sequential:
    """Return a copy of ``model`` on the meta device that is only read: of a shipped one the copy of all runs."""
    return copy_to_meta(model) if get_model(spec.model).own else _template(spec)


_COPIED_AS_THEY_ARE = (bool, int, float, str, type(None), torch.dtype, torch.Size, FunctionType)


def copy_module(module: ModuleT, memo: dict[int, Any]) -> ModuleT:
    """Return a deep copy of ``module`` in a third of the time that ``copy.deepcopy`` takes.

    Args:
        module: Its parts are modules or parameters, and what else it refers to.
        memo: The copies of what was copied before, by identity, as for ``copy.deepcopy``.
    """
    if id(module) in memo:
        known: ModuleT = memo[id(module)]
        return known
    copied = memo[id(module)] = module.__class__.__new__(module.__class__)
    for name, value in vars(module).items():
        if isinstance(value, _COPIED_AS_THEY_ARE):
            new: Any = value
        elif name == "_modules":
            new = {key: part and copy_module(part, memo) for key, part in value.items()}
        elif name in ("_parameters", "_buffers"):
            new = {key: tensor if tensor is None else _copy_tensor(tensor, memo) for key, tensor in value.items()}
        elif not value and isinstance(value, dict | set | list):
            new = value.copy()
        else:
            new = copy.deepcopy(value, memo)
        vars(copied)[name] = new
    return copied


def _copy_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        empty = torch.empty_like(tensor)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    known: Tensor = memo[id(tensor)]
    return known


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
