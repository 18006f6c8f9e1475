"""Stand-ins for the threads and the subclass of tensors of fairscale, which no recorder of fake tensors follows.

``hpcbench dry-run`` answers ``not_fakeable`` for its strategies; these tests step them. Horovod's threads have none.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.catalog import get_strategy
from hpcbench.strategies.pipeline.train import fairscale_pipe, stage_assignment
from hpcbench.worker.models.build import build_meta_model


@contextmanager
def library_stand_ins(spec: RunSpec, device: torch.device) -> Iterator[None]:
    """Replace the parts of fairscale that fake tensors on ``device`` do not pass, where the strategy is fairscale's."""
    is_fairscale = get_strategy(spec.strategy).library_name == "fairscale"
    with ExitStack() as stack:
        for replacement in _fairscale_replacements(spec, device) if is_fairscale else ():
            stack.enter_context(patch.object(*replacement))
        yield


def _fairscale_replacements(spec: RunSpec, device: torch.device) -> list[tuple[Any, str, Any]]:
    wrapper = importlib.import_module("fairscale.nn.misc.flatten_params_wrapper")
    pipeline = importlib.import_module("fairscale.nn.pipe.pipeline")

    def assign_blocks(_model: nn.Module, *arguments: Any) -> Any:
        with _disable_current_modes():
            return stage_assignment.assign_blocks(build_meta_model(spec, None), *arguments)

    return [
        (fairscale_pipe, "assign_blocks", assign_blocks),
        (wrapper, "FlatParameter", make_flat_parameter(wrapper.FlatParameter)),
        (pipeline, "create_workers", create_inline_workers),
        (pipeline, "join_workers", lambda *_queues: None),
        # It compares values of all ranks, once, on cuda.
        (
            importlib.import_module("fairscale.nn.data_parallel.fully_sharded_data_parallel"),
            "validate_process_group", lambda *_group: None,
        ),
        # Tensors that it keeps for the process would be those of an earlier step.
        (importlib.import_module("fairscale.nn.pipe.phony"), "_phonies", dict[Any, Any]()),
        (importlib.import_module("fairscale.nn.pipe.copy"), "get_device", lambda _stream: device),
    ]  # fmt: skip


def make_flat_parameter(fairscale_class: Any) -> Callable[..., Any]:
    """Return the stand-in for fairscale's ``FlatParameter``: a fake parameter is no instance of a user's subclass."""

    def flat_parameter(parameters: Sequence[nn.Parameter], requires_grad: bool = True) -> Any:
        flat: Any = nn.Parameter(torch.cat([parameter.detach().reshape(-1) for parameter in parameters]), requires_grad)
        flat._param_numels = [parameter.numel() for parameter in parameters]
        flat._param_shapes = [parameter.size() for parameter in parameters]
        flat._param_infos, flat._shared_param_infos = [], []
        reference = weakref.ref(flat)
        for name in ("get_param_views", "metadata"):
            method = getattr(fairscale_class, name)
            setattr(flat, name, lambda *args, method=method: method(reference(), *args))
        return flat

    return flat_parameter


class _InlineQueues:
    """The two queues of a worker thread of fairscale's Pipe; a task is computed when it is put, in this thread."""

    def __init__(self) -> None:
        self._results: list[Any] = []

    def put(self, task: Any) -> None:
        if task is None:
            self._results.append((False, None))
            return
        try:
            self._results.append((True, (task, task.compute())))
        except Exception:  # noqa: BLE001 - as fairscale's worker: raised by the reader of the results
            self._results.append((False, sys.exc_info()))

    def get(self) -> Any:
        return self._results.pop(0)


def create_inline_workers(devices: Sequence[torch.device]) -> tuple[list[_InlineQueues], list[_InlineQueues]]:
    """Return the stand-in for Pipe's worker threads, which no recorder of this thread follows."""
    queues = [_InlineQueues() for _ in devices]
    return queues, queues
