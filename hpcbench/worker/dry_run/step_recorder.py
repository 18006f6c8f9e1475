"""The recorder of a dry run: live bytes of tensors, operators, collectives, and waits of the host for the device.

On a GPU the host waits where it reads a value, and at each copy between device and host unless it is asynchronous.
Bytes and operators are those of the device: tensors of the host are not counted. Bytes are counted by storage, from the
operator that creates it until Python and autograd have released it. The layer of an operator is in the forward pass the
innermost module that runs, in the backward pass the module that created the node of autograd's graph. A storage belongs
to the module that owns it as a parameter or a buffer, and otherwise to the layer whose operator created it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

import hpcbench
from hpcbench.worker.dry_run.layer_marks import LayerMarks
from hpcbench.worker.measure import traffic_recorder
from hpcbench.worker.measure.layer_trace import COMM_NAMESPACES
from hpcbench.worker.measure.traffic_recorder import TrafficRecorder

_PACKAGE = Path(hpcbench.__file__).resolve().parent
UNNAMED_FILES = [str(Path(torch.__file__).parent), str(Path(__file__).parent), traffic_recorder.__file__]
"""Beginnings of paths that are never the site of a wait; other recorders add their own file."""
_PYTHON = str(Path(weakref.__file__).parent)
"""Files of Python itself, outside of ``site-packages``: neither."""


class DataDependentBranch(RuntimeError):
    """The program branches on the value of a tensor, or hands it on, which a fake one does not have."""


class RefusedOnDevice(TypeError):
    """torch itself refuses this for a tensor on a device; for a fake one it would not."""


_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_WITHOUT_KERNEL = (torch.ops.aten.set_.source_Storage, torch.ops.aten.record_stream.default)
"""Operators that change a tensor's description alone."""
_FUSED_UPDATES = (
    torch.ops.aten._fused_sgd_.default,
    torch.ops.aten._fused_adam_.default,
    torch.ops.aten._fused_adamw_.default,
)
"""Updates in place that make no tensor. Of some of them torch has no form for fake tensors: it would compute them on
real zeros of the same shapes."""
DEVICE_NAME = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"
"""The attribute in which a fake tensor keeps its device: the second one before torch 2.13."""
_HOST = torch.device("cpu")
_DEVICE_OF = torch.ops.prim.device.default
_FAKE_ONLY = (FakeTensor,)
_FROM_VALUES = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
_TO_NUMPY = (Tensor.numpy, Tensor.__array__)
_POOLS_OF_VOLUMES = (
    F.max_pool3d, F.max_pool3d_with_indices, F.avg_pool3d, F.adaptive_avg_pool3d, F.adaptive_max_pool3d,
)  # fmt: skip
"""Computed in the type of their input by autocast on cuda, and in fp32 on a cpu."""
_WATCHED = frozenset(
    {Tensor.new_tensor, *_TO_NUMPY, Tensor.data_ptr, Tensor.pin_memory, Tensor.is_pinned, *_POOLS_OF_VOLUMES}
)  # fmt: skip
"""Functions that are looked at although they have no keyword arguments."""
_MADE_LIKE = (torch.ops.aten.zeros_like.default, torch.ops.aten.empty_like.default, torch.ops.aten.clone.default)
"""Outside of modules their results belong to the layer of their argument: an optimizer makes its state so."""


class Peak(NamedTuple):
    """A moment at which more bytes were alive than at all others."""

    live_bytes: int
    held: Mapping[str, int]
    """Live bytes of each layer."""
    running: str
    """The layer whose operator ran."""


class StepRecorder(TrafficRecorder):  # type: ignore[no-untyped-call]
    """Records what this thread does with tensors of ``device``, in its context. Counts are those since ``begin_step``.

    ``host_copies`` is a context of its own, to be entered with this one.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.host_copies = HostCopies(self)
        self.live_bytes = 0
        self.setup_peak_bytes = 0
        """Peak of the setup, which ends with the first ``begin_step``."""
        self.peak_bytes = 0
        self.held: Counter[str] = Counter()
        """Live bytes by the layer that they belong to, or by the part of the step."""
        self.operators = 0
        self.host_syncs = 0
        self.host_sync_sites: dict[str, None] = {}
        self.modelled: set[str] = set()
        """Stand-ins that were used: see ``StepFigures``."""
        self.fake_mode: FakeTensorMode | None = None
        """The mode of all fake tensors."""
        self.layers = LayerMarks()
        self.storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        """Reference, bytes and layer of each storage that is alive, by its address."""
        self._pinned: dict[int, weakref.ref[Any]] = {}
        """Storages of the host whose memory is pinned, by address."""
        self._is_in_step = False
        self._is_at_peak = False
        self._peak_held: Mapping[str, int] = {}
        self._peak_running = ""

    def begin_step(self) -> None:
        """Count anew; the peak stays that of all steps."""
        self.calls.clear()
        self.layers.begin_step()
        self.operators = self.host_syncs = 0
        self.host_sync_sites.clear()
        if not self._is_in_step:
            self._is_in_step = True
            self.setup_peak_bytes = self.peak_bytes
            self._keep_peak()
            self.peak_bytes, self._peak_held, self._peak_running = self.live_bytes, dict(self.held), "setup"

    @property
    def peak(self) -> Peak:
        """The moment of the peak."""
        if self._is_at_peak:
            self._keep_peak()
        return Peak(self.peak_bytes, self._peak_held, self._peak_running)

    @property
    def peak_layer(self) -> str:
        """The module that holds the most bytes at the peak; the part of the step that does, if no module holds any."""
        held = {name: size for name, size in self.peak.held.items() if size > 0}
        modules = [name for name in held if name not in self.layers.phases]
        return max(modules or held, key=lambda name: (held[name], name), default="setup")

    def layer_of(self, tensor: Tensor) -> str:
        """Return the layer that the storage of ``tensor`` belongs to; of an unknown one the part of the step."""
        entry = self.storages.get(tensor.untyped_storage()._cdata)
        return entry[2] if entry else self.layers.phase

    def assign_layer(self, tensor: Tensor, layer: str) -> None:
        """Let the storage of ``tensor`` belong to ``layer``."""
        key = tensor.untyped_storage()._cdata
        if key in self.storages:
            reference, size, before = self.storages[key]
            self.storages[key] = (reference, size, layer)
            self.held[before] -= size
            self.held[layer] += size

    def assign_owned(self, model: nn.Module) -> None:
        """Let parameters, buffers and other tensors of modules belong to the first module that refers to them."""
        owned: dict[int, tuple[Tensor, str]] = {}
        for module in model.modules():
            name = self.layers.name_of(module)
            for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if name and isinstance(tensor, Tensor):
                    local = getattr(tensor, "_local_tensor", tensor)
                    owned.setdefault(local.untyped_storage()._cdata, (local, name))
        for local, name in owned.values():
            self.assign_layer(local, name)

    def __enter__(self) -> Any:
        self._original_resize = torch.UntypedStorage.resize_
        recorder, original = self, self._original_resize

        def resize(storage: Any, size: int) -> Any:
            resized = original(storage, size)
            recorder._follow_storage(storage)
            return resized

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        self.layers.attach()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self.layers.detach()
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return ``False``: nothing is compiled here, and torch's guard around every operator would take time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            # A question after the device, twice as many as operators: answered here, without the fake mode.
            return getattr(args[0], DEVICE_NAME, None) or func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if types != _FAKE_ONLY and any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            # A sharded tensor: its own operators come here one by one.
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_value(args[0])
        if func in _FUSED_UPDATES:
            self.operators += self._changes(args)
            return None
        self._note_copy(func, args, kwargs or {})
        if func.namespace in COMM_NAMESPACES:
            self._note(func.__name__.partition(".")[0], args)
        # What torch does within an operator is nothing that the program asked for.
        with torch._C.DisableTorchFunction():
            out = self._run(func, args, kwargs or {})
        if isinstance(out, Tensor):
            creates = self._follow(out)
            if creates and func in _MADE_LIKE and self.layer_of(out) in self.layers.phases:
                self.assign_layer(out, self.layer_of(args[0]))
        else:
            creates = max((self._follow(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), default=False)
        computes = self._changes(args) if func._schema.is_mutable else creates and "empty" not in func.__name__
        computes = computes and func not in _WITHOUT_KERNEL
        if computes and func.namespace != "c10d":
            self.operators += 1
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.fake_mode is None or func._opname != "set_":
            return func(*args, **kwargs)
        # torch's cache keys by the storage itself and would keep it alive for the rest of the process.
        with patch.object(self.fake_mode, "cache_enabled", new=False):
            return func(*args, **kwargs)

    def _changes(self, args: Any) -> bool:
        """Return whether the first tensor in ``args`` lies on the device."""
        leaf = args[0] if args else None
        if not isinstance(leaf, Tensor):
            leaf = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
        return leaf is not None and device_of(leaf) == self.device

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count a copy between device and host that the host waits for."""
        if func is torch.ops.aten._to_copy.default:
            source, target = device_of(args[0]), kwargs.get("device") or device_of(args[0])
            is_async = kwargs.get("non_blocking", False)
            # torch pins the memory of the host's tensor that it makes.
            on_host = args[0] if target == self.device else None
        elif func is torch.ops.aten.copy_.default:
            source, target = device_of(args[1]), device_of(args[0])
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            on_host = args[1] if target == self.device else args[0]
        elif func in _INDEXED:
            on_host = any(isinstance(index, Tensor) and device_of(index) != device_of(args[0]) for index in args[1])
            if on_host and device_of(args[0]) == self.device:
                self.host_sync("indices are copied from the host")
            return
        else:
            return
        if source == target or self.device not in (source, target):
            return
        copy = f"a tensor is copied {'to' if source == self.device else 'from'} the host"
        if not is_async:
            self.host_sync(copy)
        elif on_host is not None and not self.is_pinned(on_host):
            self.host_sync(f"{copy}, whose memory is not pinned")

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor of the host is pinned."""
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, whose memory is pinned from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _reference: self._pinned.pop(key, None))
        return tensor

    def host_sync(self, call: str) -> None:
        """Count a wait of the host within a step, with the line that asks for it; the cpu is its own host."""
        if self._is_in_step and self.device != _HOST:
            self.host_syncs += 1
            self.host_sync_sites[f"{calling_site()}: {call}"] = None

    def _read_value(self, tensor: Tensor) -> Any:
        """Return the value of a constant of the host, and 1 instead of the one that a fake tensor does not have."""
        if device_of(tensor) == self.device:
            self.host_sync("the host reads a value of a tensor")
        elif (constant := getattr(tensor, "constant", None)) is not None:
            with _disable_current_modes():
                return constant.item()
        if tensor.dtype == torch.bool:
            raise DataDependentBranch(f"{calling_site()} branches on the value of a tensor, which a dry run has not")
        self.modelled.add("host_values")
        return 1.0 if tensor.is_floating_point() else 1

    def _follow(self, tensor: Tensor) -> bool:
        return device_of(tensor) == self.device and self._follow_storage(tensor.untyped_storage())

    def _follow_storage(self, storage: Any) -> bool:
        """Count the bytes of ``storage``; return whether it is new."""
        key, size = storage._cdata, storage.nbytes()
        entry = self.storages.get(key)
        if entry is None:
            layer, before = self.layers.current(), 0
            reference = weakref.ref(storage, partial(self._release, key))
        else:
            reference, before, layer = entry
            if before == size:
                return False
            if size < before and self._is_at_peak:
                self._keep_peak()
        self.storages[key] = (reference, size, layer)
        self.live_bytes += size - before
        self.held[layer] += size - before
        # Of several moments with the same peak the last one.
        if self.live_bytes >= self.peak_bytes:
            self.peak_bytes, self._is_at_peak = self.live_bytes, True
            self._peak_running = layer if entry is None else self.layers.current()
        return entry is None

    def _keep_peak(self) -> None:
        """Keep what each layer holds at the peak, which ends now."""
        self._is_at_peak, self._peak_held = False, dict(self.held)

    def _release(self, key: int, _reference: Any) -> None:
        if self._is_at_peak:
            self._keep_peak()
        _, size, layer = self.storages.pop(key)
        self.live_bytes -= size
        self.held[layer] -= size


class HostCopies(TorchFunctionMode):
    """Counts the copy of what torch makes of Python's values on the device, and refuses what needs a tensor's numbers.

    torch makes such tensors on the host and copies them without an operator. Fake ones stay on the host where the cpu
    stands for the device, and are moved here. Their memory is never pinned: the recorder keeps whose would be.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _WATCHED:
            if not kwargs:
                return func(*args)
            if kwargs.get("pin_memory"):
                return self._recorder.pin(func(*args, **{**kwargs, "pin_memory": False}))
        elif func in _POOLS_OF_VOLUMES:
            is_cuda = self._recorder.device != _HOST
            with torch.autocast("cpu", enabled=False) if is_cuda else nullcontext():
                return func(*args, **(kwargs or {}))
        elif func is not Tensor.new_tensor:
            if isinstance(args[0], FakeTensor):
                return self._answer_for_fake(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        target = (kwargs or {}).get("device")
        if target is None and func is Tensor.new_tensor:
            target = device_of(args[0])
        if target is None or not isinstance(out, Tensor) or not self._is_own(torch.device(target)):
            return out
        device, on_device = self._recorder.device, device_of(out) == self._recorder.device
        values = args[1:] if func is Tensor.new_tensor else args
        # Of a tensor a copy is an operator, which the recorder sees.
        is_tensor = isinstance(values[0] if values else (kwargs or {}).get("data"), Tensor)
        if func in _FROM_VALUES and not (on_device and is_tensor):
            self._recorder.host_sync(f"{func.__name__} copies values from the host")
        if on_device:
            return out
        # What zeros_like and others make like a tensor of the host stays there, too.
        return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device).requires_grad_(
            out.requires_grad
        )

    def _answer_for_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Answer for pinned memory; refuse the rest as a run would, or because there are no numbers."""
        recorder, tensor = self._recorder, args[0]
        is_on_gpu = device_of(tensor) == recorder.device != _HOST
        if func is Tensor.is_pinned:
            return recorder.is_pinned(tensor)
        if func is Tensor.pin_memory:
            if is_on_gpu or recorder.device == _HOST:
                return func(*args, **kwargs)
            return tensor if recorder.is_pinned(tensor) else recorder.pin(tensor.clone())
        if func is Tensor.data_ptr:
            # torch itself compares addresses.
            if sys._getframe(2).f_code.co_filename.startswith(UNNAMED_FILES[0]):
                return func(*args)
            raise DataDependentBranch(f"{calling_site()} asks for the address of a tensor, which a dry run has not")
        if is_on_gpu:
            hint = "Use Tensor.cpu() to copy the tensor to host memory first."
            raise RefusedOnDevice(f"can't convert cuda:0 device type tensor to numpy. {hint}")
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if tensor.constant is not None:
            with _disable_current_modes():
                return func(tensor.constant, *args[1:], **kwargs)
        raise DataDependentBranch(f"{calling_site()} hands the values of a tensor to numpy, which a dry run has not")

    def _is_own(self, target: torch.device) -> bool:
        """Return whether ``target`` is the recorder's device and not the host.

        ``cuda`` without a number is the current device.
        """
        own = self._recorder.device
        return own != _HOST and (target == own or (own.type == "cuda" and target == torch.device("cuda")))


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of ``tensor``; asking a fake one itself would be another operator."""
    device: torch.device = getattr(tensor, DEVICE_NAME, None) or tensor.device
    return device


def calling_site() -> str:
    """Return ``file:line`` of the innermost frame that is neither torch's nor the dry run's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        site = site_of_line(frame, frame.f_lineno)
        if site is not None:
            return site
        frame = frame.f_back
    return "unknown"


def is_of_python(file: str) -> bool:
    """Return whether ``file`` belongs to Python itself."""
    return file.startswith("<") or (file.startswith(_PYTHON) and "site-packages" not in file)


def site_of_line(frame: FrameType, line: int) -> str | None:
    """Return ``file:line`` of a frame, or ``None`` for a frame of torch, of Python itself or of the dry run."""
    file = frame.f_code.co_filename
    if file.startswith(tuple(UNNAMED_FILES)) or is_of_python(file):
        return None
    path = Path(file).resolve()
    return f"{path.relative_to(_PACKAGE.parent) if path.is_relative_to(_PACKAGE) else path}:{line}"
