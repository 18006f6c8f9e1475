"""The layer table of a model: shipped with the package, cached for the user, or made by a worker's interpreter."""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import msgspec

import hpcbench
from hpcbench.errors import INSTALL_WORKER, ConfigError, HpcbenchError, WorkerError
from hpcbench.fileio import printable_text, write_atomic
from hpcbench.paths import cache_folder
from hpcbench.strategies import layer_table
from hpcbench.submit.scheduler import scrubbed_environment
from hpcbench.workloads.models import custom_model_file, is_custom_model

_LAYERS_MODULE = "hpcbench.worker.layers"
_TABLE_TIME_LIMIT_S = 600
_INSTALL_HINT = f"python -m {INSTALL_WORKER}, or ask where torch is installed, for instance in a job"


def load_layer_table(
    request: layer_table.LayerTableRequest, python: str | None = sys.executable
) -> layer_table.LayerTable:
    """The table that ``request`` asks for.

    ``python`` runs the worker's module where the table is neither shipped nor cached; without one that is left.
    ``ConfigError`` where the request makes no sense, ``WorkerError`` where no table can be made.
    """
    shipped = layer_table.read_shipped_table(request.model, request.dataset, request.input_size, request.model_options)
    if shipped is not None:
        return shipped
    path = cache_folder() / "layers" / f"{_request_digest(request)}.json"
    with contextlib.suppress(OSError, ConfigError):
        return layer_table.decode_layer_table(path.read_bytes(), str(path))
    if python is None:
        raise WorkerError(f"{request.model} on {request.dataset} is neither shipped nor measured yet")
    table = _make_layer_table(request, python)
    with contextlib.suppress(OSError, HpcbenchError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, layer_table.encode_layer_table(table))
    return table


def _request_digest(request: layer_table.LayerTableRequest) -> str:
    """Return the digest of a table's request; for a custom model with the text of its file."""
    content = {
        "request": request,
        "version": (hpcbench.__version__, layer_table.LAYER_TABLE_VERSION),
        "source": _model_source_digest(request),
    }
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:32]


def _model_source_digest(request: layer_table.LayerTableRequest) -> str | None:
    if request.model_folder is None or not is_custom_model(request.model):
        return None
    path = custom_model_file(request.model, Path(request.model_folder))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None


def _make_layer_table(request: layer_table.LayerTableRequest, python: str) -> layer_table.LayerTable:
    name = f"{request.model} on {request.dataset}"
    if sys.stderr.isatty():
        print(f"hpcbench: tracing the layers of {name} once, for up to a minute", file=sys.stderr)  # noqa: T201
    try:
        done = subprocess.run(
            [python, "-m", _LAYERS_MODULE], input=msgspec.json.encode(request), env=scrubbed_environment(),
            capture_output=True, timeout=_TABLE_TIME_LIMIT_S, check=False,
        )  # fmt: skip
        answer = msgspec.json.decode(done.stdout, type=layer_table.LayerTableResponse)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkerError(f"no table of layers of {name}: {error}", hint=_INSTALL_HINT) from error
    except msgspec.DecodeError:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = printable_text(lines[-1]) if lines else f"exit code {done.returncode}"
        hint = _INSTALL_HINT if re.search("No module named '(torch|msgspec|hpcbench)", said) else None
        raise WorkerError(f"no table of layers of {name}: {python} says: {said}", hint=hint) from None
    if answer.table is None:
        kind = ConfigError if answer.is_input else WorkerError
        raise kind(f"no table of layers of {name}: {answer.error}", hint=answer.hint)
    return answer.table
