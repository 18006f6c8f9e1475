"""Sources of a layer table: the package, the user's cache, or a worker's interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hpcbench.errors import ConfigError, WorkerError
from hpcbench.predict.layer_table_cache import load_layer_table
from hpcbench.strategies.layer_table import LayerTable, LayerTableRequest, LayerTableResponse, read_shipped_table
from tests.layer_tables import table_of

ASKED = LayerTableRequest(model="vgg11", dataset="cifar10", input_size=40)

Python = Callable[..., str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hpcbench" / "layers"


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """An interpreter that keeps what it is asked and says what it is told to; it counts its calls."""

    def make(said: bytes, error: str = "", code: int = 0) -> str:
        (tmp_path / "said").write_bytes(said)
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\ncat > {tmp_path}/asked; echo "$PYTHONPATH $*" >> {tmp_path}/calls\n'
            f"cat {tmp_path}/said; echo '{error}' >&2; exit {code}\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def table() -> LayerTable:
    found = table_of("vgg11", "cifar10")
    return msgspec.structs.replace(found, input_size=40)


def good() -> bytes:
    return msgspec.json.encode(LayerTableResponse(table=table()))


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_a_shipped_layer_table_starts_no_worker(tmp_path: Path, python: Python) -> None:
    found = load_layer_table(LayerTableRequest(model="vgg11", dataset="cifar10"), python=python(b""))
    assert found == read_shipped_table("vgg11", "cifar10")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_that_a_table_is_made_and_not_that_it_is_read(
    python: Python, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    line = "hpcbench: tracing the layers of vgg11 on cifar10 once, for up to a minute\n"
    for expected in (line if is_terminal else "", ""):
        load_layer_table(ASKED, python=python(good()))
        assert capsys.readouterr().err == expected


def test_a_measured_layer_table_is_cached(tmp_path: Path, python: Python, cache: Path) -> None:
    assert load_layer_table(ASKED, python=python(good())) == table()
    assert json.loads((tmp_path / "asked").read_bytes()) == {"model": "vgg11", "dataset": "cifar10", "input_size": 40}
    assert calls(tmp_path) == [f"{os.environ.get('PYTHONPATH', '')} -m hpcbench.worker.layers"]
    assert load_layer_table(ASKED, python=python(b"")) == table(), "from the cache"
    (kept,) = cache.iterdir()
    kept.write_bytes(b"spoilt")
    assert load_layer_table(ASKED, python=python(good())) == table()
    assert len(calls(tmp_path)) == 2
    assert kept.read_bytes() != b"spoilt"


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, python: Python, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.touch()
    assert load_layer_table(ASKED, python=python(good())) == table()


def test_a_changed_custom_model_is_measured_again(tmp_path: Path, python: Python) -> None:
    source = tmp_path / "code" / "mine" / "nets.py"
    source.parent.mkdir(parents=True)
    for text, made in (("1", 1), ("1", 1), ("2", 2)):
        source.write_text(text)
        request = LayerTableRequest(model="mine.nets:small", dataset="cifar10", model_folder=str(tmp_path / "code"))
        load_layer_table(request, python(good()))
        assert len(calls(tmp_path)) == made, text
    assert json.loads((tmp_path / "asked").read_bytes())["model_folder"] == str(tmp_path / "code")


@pytest.mark.parametrize(
    ("said", "error", "kind", "expected"),
    [
        (b"", "ModuleNotFoundError: No module named 'torch'", WorkerError, "pip install torch torchvision"),
        (b"", "ModuleNotFoundError: No module named 'mine'", WorkerError, "No module named 'mine'"),
        (b"", "Killed", WorkerError, "says: Killed"),
        (b"", "", WorkerError, "exit code 1"),
        (b'{"error": "resnet18 takes images", "hint": "another"}', "", WorkerError, "resnet18 takes images\n  another"),
        (b'{"error": "unknown model", "is_input": true}', "", ConfigError, "unknown model"),
    ],
)
def test_missing_layer_table_has_a_reason(
    tmp_path: Path, python: Python, cache: Path, said: bytes, error: str, kind: type[Exception], expected: str
) -> None:
    with pytest.raises(kind) as caught:
        load_layer_table(ASKED, python=python(said, error.replace("'", "'\\''"), code=1))
    assert expected in str(caught.value)
    assert "vgg11 on cifar10" in str(caught.value)
    assert not cache.exists()


def test_a_missing_interpreter_is_named_as_a_worker_error() -> None:
    with pytest.raises(WorkerError, match="nowhere/python"):
        load_layer_table(ASKED, python="/nowhere/python")
