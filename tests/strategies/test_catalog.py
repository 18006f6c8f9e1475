"""The registry is whole: every entry has a runtime, a model file has what it declares, the glossary knows the words."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigError, ConfigErrors
from hpcbench.predict.strategy_cost import Cost, find_cost, resolve_cost
from hpcbench.strategies.catalog import PROBES, STRATEGIES, get_strategy
from hpcbench.strategies.check_sweep import check_names
from hpcbench.worker.strategy import Strategy, resolve_runtime
from hpcbench.worker.verification.reference_pipelines import resolve_reference_trainer
from hpcbench.workloads.models import MODELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("key", STRATEGIES)
def test_a_strategy_has_a_row_in_the_generated_catalog(key: str) -> None:
    assert f"| `{key}` |" in (ROOT / "docs" / "catalog.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", MODELS)
def test_every_model_has_a_builder(key: str) -> None:
    module, _, name = MODELS[key].builder.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ddp'"):
        get_strategy("dpp")


def test_check_sweep_lists_everything_that_is_wrong(write_sweep: Callable[[str], Sweep]) -> None:
    sweep = write_sweep(
        'name = "s"\n[fixed]\nmodel = "resnet81"\ndataset = "digit"\n[fixed.options]\nstatic_graf = true\n[grid]\nstrategy = ["ddp"]\n'
    )
    with pytest.raises(ConfigErrors) as caught:
        check_names(sweep)
    text = str(caught.value)
    for part in (
        "batch_size or global_batch_size: neither is set",
        ":3: unknown model: 'resnet81'",
        "'resnet18'?",
        ":4: unknown dataset",
        ":6: no strategy",
        "'static_graph'?",
    ):
        assert part in text


def test_an_option_of_the_wrong_type_is_refused(write_sweep: Callable[[str], Sweep]) -> None:
    sweep = write_sweep(
        'name = "s"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\nbatch_size = 8\noptions = { static_graph = 1 }\n'
    )
    with pytest.raises(ConfigErrors, match="options.static_graph: true or false expected, not 1"):
        check_names(sweep)


@pytest.mark.parametrize("key", [*STRATEGIES, *PROBES])
def test_training_and_cost_override_their_base_classes_with_the_same_parameters(key: str) -> None:
    """mypy compares what it can see; a plugin's classes are found by name."""
    runtime = resolve_runtime(key)
    assert issubclass(runtime, Strategy)
    assert not inspect.isabstract(runtime)
    assert callable(resolve_reference_trainer(key))
    pairs: list[tuple[type, type]] = [(Strategy, runtime)]
    if find_cost(key) is not None:
        pairs.append((Cost, type(resolve_cost(key))))
    for base, own in pairs:
        for name, member in vars(base).items():
            if inspect.isfunction(member) and not name.startswith("_") and name != "phases":
                expected, actual = (inspect.signature(getattr(owner, name)).parameters for owner in (base, own))
                assert list(actual) == list(expected), name


def strategies_named(source: str) -> Iterator[str]:
    """Yield the names of strategies that ``source`` compares with a strategy, or makes one."""
    for node in ast.walk(ast.parse(source)):
        near: list[ast.AST] = []
        if isinstance(node, ast.Compare) and ".strategy" in ast.unparse(node):
            near = [node.left, *node.comparators]
        elif isinstance(node, ast.keyword) and node.arg == "strategy":
            near = [node.value]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            near = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "strategy"]
        texts = (part.value for one in near for part in ast.walk(one) if isinstance(part, ast.Constant))
        yield from (text for text in texts if isinstance(text, str) and text in STRATEGIES)


def test_only_the_families_name_strategies() -> None:
    package = ROOT / "hpcbench"
    others = [path for path in package.rglob("*.py") if package / "strategies" not in path.parents]
    named = {path.name: [*strategies_named(path.read_text(encoding="utf-8"))] for path in others}
    assert {name: found for name, found in named.items() if found} == {}, "put it into StrategyEntry, Strategy or Cost"


def test_a_planted_name_of_a_strategy_is_found() -> None:
    source = 'x = run.spec.strategy in ("model", "x"), {"model": "vit", "strategy": "ddp"}, RunSpec(strategy="tensor")'
    assert [*strategies_named(source)] == ["model", "ddp", "tensor"]
