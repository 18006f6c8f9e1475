"""Models on the meta device, and the forms of activations and of operators' results, kept for all dry runs of this
process.

torch computes the results of operators on fake tensors in Python, and its own cache takes as long to ask as a small
operator on a GPU takes. Equal arguments give results of equal form: one operator of each kind is computed by torch, and
the results of the others are made of its. Arguments or results about which more must be known than their form go to
torch each time.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.parallel.catalog import SINGLE_DEVICE, get_model
from hpcbench.worker.models.build import build_meta_model, copy_to_meta
from hpcbench.worker.strategies.pipeline.chunk import ActivationMeta, ActivationMetaCache

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DEVICE_NAME = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"
"""The attribute in which a fake tensor keeps its device: the second one before torch 2.13."""

_MODEL_PARAMETERS = ("model", "dataset", "input_size", "model_options", "precision", "channels_last")


@lru_cache(maxsize=8)
def _built_model(spec_bytes: bytes) -> nn.Sequential:
    return build_meta_model(msgspec.json.decode(spec_bytes, type=RunSpec), None)


def _template(spec: RunSpec) -> nn.Sequential:
    values = {name: getattr(spec, name) for name in _MODEL_PARAMETERS}
    plain = RunSpec(strategy=SINGLE_DEVICE, batch_size=1, **values)
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


_MAX_KEPT = 200_000
_CHANGE_STORAGES = frozenset({"resize_", "resize_as_", "lift_fresh", "lift_fresh_copy", "_local_scalar_dense"})
"""Operators whose effect is another one than their result, or depends on values."""
_ABSOLUTE_OFFSETS = frozenset({"as_strided", "as_strided_", "as_strided_scatter"})
_PLAIN = (str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_NUMBERS = (bool, int, float)


class _UnknownFormError(Exception):
    """An argument or a result that is no fake tensor, or one with more than a form."""


class _Result(NamedTuple):
    """The form of one result: a constant, an argument itself, a view of it, or a new tensor."""

    constant: Any = None
    argument: int | None = None
    """Number of the argument that the result is a view of, or that it is itself if ``state`` is ``None``."""
    shape: Any = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    """Elements between the beginning of the argument and that of its view."""
    dtype: torch.dtype | None = None
    state: dict[str, Any] | None = None
    """Attributes of the fake tensor."""


class _Results(NamedTuple):
    container: type | None
    """``list`` or ``tuple``; ``None`` for one result."""
    members: tuple[_Result, ...]


_known: dict[Any, _Results | None] = {}
"""The results by operator and arguments; ``None`` where torch is to be asked each time."""


def run_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: FakeTensorMode | None) -> Any:
    """Return what ``func`` makes of its arguments.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: More of them.
        mode: The mode of the fake tensors; ``None`` where it is not known.
    """
    if mode is not None and func._opname == "set_":
        # torch's cache keys by the storage itself and would keep it alive for the rest of the process.
        with patch.object(mode, "cache_enabled", new=False):
            return func(*args, **kwargs)
    if mode is None or func.namespace != "aten" or func._opname in _CHANGE_STORAGES:
        return func(*args, **kwargs)
    tensors: list[Tensor] = []
    try:
        key = _key(func, args, kwargs, tensors)
        results = _known[key]
    except _UnknownFormError:
        return func(*args, **kwargs)
    except KeyError:
        out = func(*args, **kwargs)
        if len(_known) >= _MAX_KEPT:
            _known.clear()
        _known[key] = _results_of(out, tensors) if key == _key(func, args, kwargs, []) else None
        return out
    if results is None:
        return func(*args, **kwargs)
    with torch._C._DisableTorchDispatch():
        members = [_make(result, tensors, mode) for result in results.members]
    return members[0] if results.container is None else results.container(members)


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    key = func, _form(args, tensors), _form(tuple(kwargs.items()), tensors) if kwargs else ()
    return (*key, *(tensor.storage_offset() for tensor in tensors)) if func._opname in _ABSOLUTE_OFFSETS else key


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """Return what ``value`` is for an operator, hashable; append its tensors to ``tensors``."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _UnknownFormError
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, getattr(value, DEVICE_NAME)
    if kind in _NUMBERS:
        return kind, value
    if kind is list or kind is tuple or kind is torch.Size:
        return tuple([_form(element, tensors) for element in value])
    if kind in _PLAIN:
        return value
    raise _UnknownFormError


def _results_of(out: Any, tensors: list[Tensor]) -> _Results | None:
    members = out if isinstance(out, list | tuple) else (out,)
    container = type(out) if members is out else None
    if container not in (None, list, tuple):
        return None
    arguments = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
    storages = [member.untyped_storage()._cdata for member in members if isinstance(member, Tensor)]
    new_storages = [storage for storage in storages if storage not in arguments]
    try:
        results = tuple(_result_of(member, tensors, arguments) for member in members)
    except _UnknownFormError:
        return None
    return _Results(container, results) if len(new_storages) == len(set(new_storages)) else None


def _result_of(out: Any, tensors: list[Tensor], arguments: dict[int, int]) -> _Result:
    if type(out) in _NUMBERS or out is None:
        return _Result(constant=out)
    if type(out) is not FakeTensor or out.constant is not None or out.layout is not torch.strided:
        raise _UnknownFormError
    for number, tensor in enumerate(tensors):
        if out is tensor:
            return _Result(argument=number)
    if out.is_conj() or out.is_neg():
        raise _UnknownFormError
    storage = out.untyped_storage()
    argument = arguments.get(storage._cdata)
    if argument is None:
        last = sum((size - 1) * step for size, step in zip(out.shape, out.stride(), strict=True)) + 1
        numbers = last if out.numel() else 0
        if out.storage_offset() or storage.nbytes() != numbers * out.element_size():
            raise _UnknownFormError
    state = {name: value for name, value in vars(out).items() if name not in ("fake_mode", "_is_param")}
    offset = 0 if argument is None else int(out.storage_offset()) - int(tensors[argument].storage_offset())
    return _Result(None, argument, tuple(out.shape), out.stride(), offset, out.dtype, state)


def _make(result: _Result, tensors: list[Tensor], mode: FakeTensorMode) -> Any:
    if result.state is None:
        return result.constant if result.argument is None else tensors[result.argument]
    if result.argument is None:
        form = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
    else:
        form = torch.empty(0, dtype=result.dtype, device="meta")
        base = tensors[result.argument]
        form.set_(base.untyped_storage(), base.storage_offset() + result.offset, result.shape, result.stride)
    device = result.state[DEVICE_NAME]
    fake = Tensor._make_subclass(FakeTensor, form, False, dispatch_device=True, device_for_backend_keys=device)
    vars(fake).update(result.state, fake_mode=mode)
    return fake
