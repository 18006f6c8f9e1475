"""Every private name of torch in hpcbench is listed here. ``make test-torch`` looks them up in other releases.

torch may move or drop such a name in any release. Where it has, the test names the files that need another way.
``python -m tests.worker.test_private_names`` looks them all up, for a torch without pytest beside it.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    import pytest

VERSIONS = ("2.6.0", "2.8.0", "2.11.0", "2.13.0", "2.14.1")
"""Releases in which all of these names were found, the oldest that hpcbench works with first."""
PACKAGE = Path(__file__).parents[2] / "hpcbench"

NAMES = frozenset({
    "torch._C.DisableTorchFunction",
    "torch._C._DisableTorchDispatch",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._current_autograd_node",
    "torch._C._distributed_c10d.HashStore",
    "torch._C._distributed_c10d.PrefixStore",
    "torch._C._distributed_c10d.Store",
    "torch._C._distributed_c10d.TCPStore",
    "torch._C.DispatchKey",
    "torch._C.DispatchKeySet",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._get_cudnn_enabled",
    "torch._C._get_mkldnn_enabled",
    "torch._C._set_cudnn_enabled",
    "torch._C._set_mkldnn_enabled",
    "torch.Tensor._make_subclass",
    "torch._dynamo",
    "torch._dynamo.utils.counters",
    "torch._inductor",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._subclasses.fake_tensor.UnsupportedOperatorException",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.cuda._sleep",
    "torch.distributed.distributed_c10d._process_group_name",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.ops.aten._fused_adam_.default",
    "torch.ops.aten._fused_adamw_.default",
    "torch.ops.aten._fused_sgd_.default",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._to_copy.default",
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
})  # fmt: skip
"""Modules, functions and classes. Of names with ``|`` between them each release has one."""


def _profiler_event() -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        torch.ones(1).add(1)
    return profiled.profiler.kineto_results.events()[0]


def _fake_tensor() -> torch.Tensor:
    fake_tensors = importlib.import_module("torch._subclasses.fake_tensor")
    with fake_tensors.FakeTensorMode():
        return torch.ones(1)


MEMBERS: dict[str, Callable[[], Any]] = {
    # A private member, or the names that it has in different releases, and what it is a member of.
    "_buffers": lambda: nn.Linear(1, 1),
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_fake_device|fake_device": _fake_tensor,
    "cache_enabled": lambda: importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(),
    "_modules": lambda: nn.Linear(1, 1),
    "_opname": lambda: torch.ops.aten.add.Tensor,
    "_parameters": lambda: nn.Linear(1, 1),
    "_process_group_name": lambda: importlib.import_module("torch.distributed.distributed_c10d"),
    "_reversed_padding_repeated_twice": lambda: nn.Conv2d(1, 1, 1),
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_shutdown_workers": lambda: importlib.import_module("torch.utils.data.dataloader")._MultiProcessingDataLoaderIter,
    "_sequence_nr": lambda: torch.ones(1, requires_grad=True).sum().grad_fn,
    # No underscore, and not documented: the profiler's raw events.
    "linked_correlation_id": _profiler_event,
    "is_user_annotation": _profiler_event,
}

OTHERS = frozenset({
    # Named tuples and the standard library.
    "_asdict", "_exit", "_fields", "_getframe", "_replace",
    # fairscale 0.4.13, the last release.
    "_is_root", "_orig_size", "_param_name_groups", "_param_numels", "_param_shapes", "_param_to_rank",
    "_setup_streams", "_setup_streams_for_cuda", "_streams",
})  # fmt: skip
"""Private members of other libraries."""


class Use(NamedTuple):
    """A private name in a file of hpcbench."""

    name: str
    file: str


def is_private(dotted: str) -> bool:
    """Return whether a part of ``dotted`` begins with a single underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


@cache
def parsed_files() -> dict[str, ast.Module]:
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return what the names that a file imports from torch stand for."""
    stands_for: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    stands_for[each.asname or "torch"] = each.name if each.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                stands_for[each.asname or each.name] = f"{node.module}.{each.name}"
    return stands_for


def dotted_name(node: ast.expr, stands_for: dict[str, str]) -> str | None:
    """Return the full name of ``node``, an attribute of something imported from torch."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in stands_for:
        return ".".join([stands_for[node.id], *reversed(parts)])
    return None


def torch_names(file: str, tree: ast.Module) -> Iterator[Use]:
    """Yield the private names that a file imports, takes from what it imports, or writes as text, as patches do."""
    stands_for = imported_names(tree)
    for name in stands_for.values():
        if is_private(name):
            yield Use(name, file)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            full_name = dotted_name(node, stands_for)
            if full_name is not None and is_private(full_name):
                yield Use(full_name, file)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for text in re.findall(r"\btorch(?:[.:]\w+)+", node.value):
                if is_private(text.replace(":", ".")):
                    yield Use(text.replace(":", "."), file)


def member_names(tree: ast.Module) -> set[str]:
    """Return the private members that a file takes from objects."""
    stands_for = imported_names(tree)
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and dotted_name(node, stands_for) is None
    }


def own_names() -> set[str]:
    """Return the private names that hpcbench itself defines."""
    found: set[str] = set()
    for tree in parsed_files().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def is_listed(name: str) -> bool:
    """Return whether ``name``, a module of a listed name, or a member of one is in ``NAMES``."""
    known = [each for listed in NAMES for each in listed.split("|")]
    return any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in known)


def find(dotted: str) -> Any:
    """Return what ``dotted`` names; raises ``AttributeError`` or ``ImportError`` where torch has it no more."""
    found: Any = torch
    path = "torch"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def exists(dotted: str) -> bool:
    """Return whether this torch has what ``dotted`` names."""
    try:
        find(dotted)
    except (AttributeError, ImportError):
        return False
    return True


def missing(names: str) -> str | None:
    """Return the message about a name, or several with ``|`` between them, of which this torch has none."""
    if not any(exists(each) for each in names.split("|")):
        wanted = tuple(names.split("|"))
        users = sorted({use.file for uses in all_uses().values() for use in uses if use.name.startswith(wanted)})
        return (
            f"torch {torch.__version__} has no {names}, which hpcbench/{', hpcbench/'.join(users)} needs; "
            f"it exists in torch {', '.join(VERSIONS)}"
        )
    return None


def missing_everywhere() -> list[str]:
    """Return the messages about all names and members that this torch lacks."""
    gone = [message for name in sorted(NAMES) if (message := missing(name))]
    for name, make in MEMBERS.items():
        owner = make()
        if not any(hasattr(owner, each) for each in name.split("|")):
            versions = ", ".join(VERSIONS)
            gone.append(f"torch {torch.__version__}: {type(owner).__name__} has no {name}; it exists in {versions}")
    return gone


@cache
def all_uses() -> dict[str, list[Use]]:
    """Return the private names of torch in hpcbench, each with its uses."""
    found: dict[str, list[Use]] = defaultdict(list)
    for file, tree in parsed_files().items():
        for use in torch_names(file, tree):
            found[use.name].append(use)
    return dict(found)


def test_every_private_name_is_listed() -> None:
    unlisted = {name: sorted({use.file for use in uses}) for name, uses in all_uses().items() if not is_listed(name)}
    assert unlisted == {}, "add these to NAMES once they were found in each of VERSIONS"


def test_every_private_member_is_listed() -> None:
    own = own_names()
    for file, tree in parsed_files().items():
        unlisted = member_names(tree) - own - MEMBERS.keys() - OTHERS
        assert unlisted == set(), f"hpcbench/{file}: add these to MEMBERS, or to OTHERS if they are not torch's"


def test_every_private_name_and_member_exists() -> None:
    assert missing_everywhere() == []


def test_names_that_are_gone_are_reported_with_their_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    monkeypatch.setitem(MEMBERS, "_weight|weight_", lambda: nn.Linear(1, 1))
    monkeypatch.setitem(MEMBERS, "_weight|weight", lambda: nn.Linear(1, 1))
    versions = "2.6.0, 2.8.0, 2.11.0, 2.13.0, 2.14.1"
    assert missing_everywhere() == [
        f"torch {torch.__version__} has no torch.cuda._sleep, which hpcbench/worker/measure/clocks.py needs; "
        f"it exists in torch {versions}",
        f"torch {torch.__version__}: Linear has no _weight|weight_; it exists in {versions}",
    ]


if __name__ == "__main__":
    sys.exit("\n".join(missing_everywhere()) or 0)
