"""The examples in docstrings of the package, executed by ``doctest`` in the names of their module.

An example may also use ``spec``, ``table`` and ``machine``: a run, its layer table and the machine that prices it.
It runs in the folder of the repository.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.cluster_profile import load_cluster
from hpcbench.config.run_spec import RunSpec
from hpcbench.predict.machine import nominal_machine
from hpcbench.strategies.layer_table import read_shipped_table
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def _modules_with_examples() -> list[str]:
    paths = [path for path in (ROOT / "hpcbench").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)


@pytest.fixture(scope="module")
def example_names() -> dict[str, Any]:
    spec = resolve_point(
        {"strategy": "ddp", "model": "resnet18", "dataset": "digits", "batch_size": 8, "tasks_per_node": 2},
        PartitionLimits("any"),
    )
    assert isinstance(spec, RunSpec)
    machine = nominal_machine(load_cluster("abci-v100")[0])
    return {"spec": spec, "table": read_shipped_table(spec.model, spec.dataset), "machine": machine}


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_of_a_module_print_their_stated_output(
    name: str, example_names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    module = importlib.import_module(name)
    results = doctest.testmod(module, globs=example_names | vars(module), optionflags=OPTIONS)
    assert results.failed == 0
