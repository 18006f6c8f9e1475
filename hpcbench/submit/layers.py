"""The table of any model's layers: shipped, else from the user's cache, else made by a worker's interpreter."""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import msgspec

import hpcbench
from hpcbench.errors import ConfigError, HpcbenchError, WorkerError
from hpcbench.fileio import printable, write_atomic
from hpcbench.parallel.layers import (
    TABLE_VERSION,
    LayerAnswer,
    LayerRequest,
    LayerTable,
    decode_table,
    encode_table,
    read_table,
)
from hpcbench.parallel.own_model import is_own, module_file
from hpcbench.paths import cache_folder
from hpcbench.submit.environment import clean_environment

_MODULE = "hpcbench.worker.layers"
_LIMIT_S = 600
_INSTALL = "python -m pip install 'hpcbench[worker]', or ask where torch is installed, for instance in a job"


def layer_table_of(request: LayerRequest, python: str | None = sys.executable) -> LayerTable:
    """The table that ``request`` asks for.

    ``python`` runs the worker's module where the table is neither shipped nor cached; without one that is left.
    ``ConfigError`` where the request makes no sense, ``WorkerError`` where no table can be made.
    """
    shipped = read_table(request.model, request.dataset, request.input_size, request.model_options)
    if shipped is not None:
        return shipped
    path = cache_folder() / "layers" / f"{_digest(request)}.json"
    with contextlib.suppress(OSError, ConfigError):
        return decode_table(path.read_bytes(), str(path))
    if python is None:
        raise WorkerError(f"{request.model} on {request.dataset} is neither shipped nor measured yet")
    table = _made(request, python)
    with contextlib.suppress(OSError, HpcbenchError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, encode_table(table))
    return table


def _digest(request: LayerRequest) -> str:
    """What the table depends on; for a user's own model the text of its file too."""
    known = {"request": request, "version": (hpcbench.__version__, TABLE_VERSION), "source": _source(request)}
    return hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()[:32]


def _source(request: LayerRequest) -> str | None:
    if request.model_folder is None or not is_own(request.model):
        return None
    path = module_file(request.model, Path(request.model_folder))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None


def _made(request: LayerRequest, python: str) -> LayerTable:
    name = f"{request.model} on {request.dataset}"
    try:
        done = subprocess.run(
            [python, "-m", _MODULE], input=msgspec.json.encode(request), env=clean_environment(),
            capture_output=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        answer = msgspec.json.decode(done.stdout, type=LayerAnswer)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkerError(f"no table of layers of {name}: {error}", hint=_INSTALL) from error
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = printable(lines[-1]) if lines else f"exit code {done.returncode}"
        hint = _INSTALL if re.search("No module named '(torch|msgspec|hpcbench)", said) else None
        raise WorkerError(f"no table of layers of {name}: {python} says: {said}", hint=hint) from None
    if answer.table is None:
        kind = ConfigError if answer.is_input else WorkerError
        raise kind(f"no table of layers of {name}: {answer.error}", hint=answer.hint)
    return answer.table
