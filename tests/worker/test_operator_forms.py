"""Forms of operators' results that are kept: those that torch computes on fake tensors each time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcbench.worker.dry_run import shared_forms
from hpcbench.worker.dry_run.shared_forms import run_operator

DEVICE = torch.device("cpu", 0)


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators by their kept forms."""

    def __init__(self, mode: FakeTensorMode | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {}, self.mode)


def conv_and_norm() -> list[Any]:
    layer = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, device=DEVICE), torch.nn.BatchNorm2d(4, device=DEVICE), torch.nn.ReLU(inplace=True)
    )
    x = torch.empty(2, 3, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    y = layer(x)
    y.sum().backward()
    return [y, *(parameter.grad for parameter in layer.parameters()), *layer.buffers()]


def views_at_other_offsets() -> list[Any]:
    flat = torch.empty(24, device=DEVICE)
    parts = flat.split([6, 6, 12])  # type: ignore[no-untyped-call]
    shaped = [part.view(2, -1) for part in parts]
    return [
        *parts,
        *shaped,
        shaped[1][1],
        shaped[2].t(),
        flat.as_strided((2, 2), (1, 2)),
        flat[6:].as_strided((2,), (3,)),
    ]


def in_place_and_out() -> list[Any]:
    x = torch.empty(3, 4, device=DEVICE)
    out = torch.empty(3, 4, device=DEVICE)
    torch.mul(x, 2.0, out=out)
    same = x.add_(1)
    assert same is x
    torch._foreach_add_([x, out], 1.0)
    return [x, out, *torch._foreach_mul([x, out], 2), x.t_(), out.unsqueeze_(0)]


def types_and_numbers() -> list[Any]:
    x = torch.empty(4, dtype=torch.int64, device=DEVICE)
    return [x + 1, x + 1.0, x + True, x.to(torch.bfloat16), x.double() + 1, x.float().sum(), x.argmax(), x.dim()]


def changed_storages() -> list[Any]:
    x, y = torch.empty(4, device=DEVICE), torch.empty(8, device=DEVICE)
    x.resize_(6)
    x.set_(y.untyped_storage(), 2, (3,), (2,))
    return [x, y]


def copies() -> list[Any]:
    x = torch.nn.Parameter(torch.empty(2, 3, device=DEVICE))
    # copy.deepcopy asks for the address of a tensor's numbers.
    return [x, x.detach(), x.detach().clone(), x.detach().clone().data_ptr()]


def described(values: list[Any]) -> list[Any]:
    """The form of each tensor, and the tensors that share its storage."""
    storages = [value.untyped_storage()._cdata if isinstance(value, Tensor) else None for value in values]
    return [
        (
            type(value), value.shape, value.stride(), value.storage_offset(), value.dtype, value.device,
            value.untyped_storage().nbytes(), [place for place, other in enumerate(storages) if other == storage],
        )
        if isinstance(value, Tensor) else value
        for value, storage in zip(values, storages, strict=True)
    ]  # fmt: skip


def run(program: Callable[[], list[Any]], *, keeps: bool) -> list[Any]:
    with FakeTensorMode() as mode, Keeping(mode if keeps else None):
        values = program()
        assert all(leaf.fake_mode is mode for leaf in tree_leaves(values) if isinstance(leaf, FakeTensor))
        return described(values)


@pytest.mark.parametrize(
    "program", [conv_and_norm, views_at_other_offsets, in_place_and_out, types_and_numbers, changed_storages, copies]
)
def test_kept_forms_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, program: Callable[[], list[Any]]) -> None:
    known: dict[Any, Any] = {}
    monkeypatch.setattr(shared_forms, "_known", known)
    expected = run(program, keeps=False)
    assert not known
    assert run(program, keeps=True) == expected
    assert any(results is not None for results in known.values())
    count = len(known)
    assert run(program, keeps=True) == expected
    assert len(known) == count


def test_a_storage_is_free_though_another_tensor_referred_to_it() -> None:
    with FakeTensorMode() as mode, Keeping(mode):
        x, other = torch.empty(6, device=DEVICE), torch.empty(2, device=DEVICE)
        other.set_(x.untyped_storage())
        assert other.untyped_storage()._cdata == x.untyped_storage()._cdata
        reference = weakref.ref(x.untyped_storage())
        del x, other
    assert reference() is None


def test_a_kept_form_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_forms, "_known", {})
    calls: list[str] = []

    def operator(*args: Any, **kwargs: Any) -> Any:
        calls.append("torch")
        return torch.ops.aten.mm.default(*args, **kwargs)

    operator.namespace, operator._opname = "aten", "mm"  # type: ignore[attr-defined]
    with FakeTensorMode() as mode:
        x, y = torch.empty(2, 3, device=DEVICE), torch.empty(3, 5, device=DEVICE)
        results = [run_operator(operator, (x, y), {}, mode) for _ in range(3)]
        run_operator(operator, (y, torch.empty(5, 1, device=DEVICE)), {}, mode)
    assert calls == ["torch"] * 2
    assert [tuple(result.shape) for result in results] == [(2, 5)] * 3
    assert len({result.untyped_storage()._cdata for result in results}) == 3
