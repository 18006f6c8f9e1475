"""From an exception to what a result says about it. No torch here: exceptions are told by name and message."""

from __future__ import annotations

import re
import sys
import traceback

from hpcbench.errors import WorkerError
from hpcbench.fileio import printable
from hpcbench.results.schema import Failure
from hpcbench.worker.asked import memory_here

_TAIL_CHARACTERS = 4000

OOM_HINT = "a smaller batch_size or more micro_batches need less memory"

_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc", re.IGNORECASE
)
# What a rank sees of another one's end: never the cause, always a consequence.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited|socket (closed|timeout)"
    r"|timed out|timeout|no longer reachable|connectFullMesh|failed to (recv|send), got|wait timeout"
    r"|Horovod has been shut down",
    re.IGNORECASE,
)
_NO_COMPILER = re.compile(r"No working C\+\+ compiler|working triton|Failed to find C compiler", re.IGNORECASE)
_PEER_LOST_TYPES = {"DistNetworkError", "DistBackendError", "DistStoreError", "PeerEnded"}
_MAY_BE_PEER_LOST = {"RuntimeError", "OSError", "TimeoutError", "ConnectionError", "ConnectionResetError",
                     "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError",
                     "HorovodInternalError"}  # fmt: skip

_INSTALL = {
    "torch": "torch", "torchvision": "torchvision", "sklearn": "scikit-learn", "numpy": "numpy", "psutil": "psutil",
    "h5py": "h5py", "PIL": "pillow",
}  # fmt: skip


def describe(error: BaseException) -> tuple[str, Failure]:
    """The status of a run that ``error`` ended, and the record of it."""
    hint = error.hint if isinstance(error, WorkerError) else None
    status = "failed"
    if isinstance(error, WorkerError):
        status = error.status
    elif is_out_of_memory(error):
        status, hint = "oom", OOM_HINT
    elif isinstance(error, ModuleNotFoundError) and error.name:
        status, hint = "unsupported", install_hint(error.name)
    message = error.message if isinstance(error, WorkerError) else str(error)
    if is_of_compiler(error) and status == "failed":
        status, hint = _of_compiler(message)
        message = _headline(message)
    if status == "oom" and "CUDA" not in message:
        # The framework says itself what an accelerator has.
        message = f"{message or type(error).__name__} ({memory_here()})"
    return status, Failure(
        type=type(error).__name__, message=printable(message), hint=hint, traceback_tail=_tail(error)
    )


def is_of_compiler(error: BaseException) -> bool:
    """Whether ``error`` is torch.compile's own."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _headline(message: str) -> str:
    """The first line, with the next where it only announces that."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [message]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _of_compiler(message: str) -> tuple[str, str]:
    if _NO_COMPILER.search(message):
        return "unsupported", "compile = true needs a C++ compiler on the nodes (on GPUs triton too); set CXX to it"
    return "failed", "compile = false measures the model as it is written; the traceback holds the compiler's words"


def install_hint(module: str) -> str:
    """The command that mends a missing module."""
    name = module.partition(".")[0]
    if name == "fairscale":
        # Its dependencies would change nothing but versions; the release is the one that is tested.
        return "python -m pip install --no-deps fairscale==0.4.13"
    if name == "horovod":
        # It has no wheels, and its source does not build against today's torch as it stands.
        return f"{sys.executable} -m hpcbench.worker.build_horovod (in a checkout: make horovod)"
    return f"python -m pip install {_INSTALL.get(name, name)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device had no more memory to give."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY.search(str(error)))


def is_peer_lost(error: BaseException) -> bool:
    """Whether ``error`` only says that another rank is gone or late."""
    if isinstance(error, WorkerError) or is_out_of_memory(error):
        return False
    if isinstance(error, RuntimeError | OSError) or type(error).__name__ in _PEER_LOST_TYPES:
        return says_peer_lost(type(error).__name__, str(error))
    return False


def says_peer_lost(kind: str, message: str) -> bool:
    """As ``is_peer_lost``, from what a record holds of the exception."""
    return kind in _PEER_LOST_TYPES or (kind in _MAY_BE_PEER_LOST and bool(_PEER_LOST.search(message)))


def _tail(error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return printable(text[-_TAIL_CHARACTERS:])
