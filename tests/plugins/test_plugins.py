"""What a plug-in does wrong is an error with its name, its group and the remedy."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from hpcbench import plugins
from hpcbench.config.scheduler_kinds import check_scheduler_kind, scheduler_kind
from hpcbench.errors import ConfigError
from hpcbench.predict.strategy_cost import find_cost
from hpcbench.strategies.data import cost, train
from hpcbench.worker.strategy import resolve_runtime
from hpcbench.workloads.datasets import DATASETS, Dataset

GROUP = "hpcbench.datasets"
TILES = DATASETS["digits"]._replace(description="tiles")


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that an entry point of each group names."""
    module = ModuleType("plugged")
    monkeypatch.setitem(sys.modules, "plugged", module)
    for group in plugins.GROUPS:
        monkeypatch.setitem(plugins.plugin_modules(group), "mine", "plugged")
    return module


def test_entries_of_a_plugin_are_added(plugged: ModuleType) -> None:
    vars(plugged)["DATASETS"] = {"tiles": TILES}
    entries = {"digits": DATASETS["digits"]}
    plugins.add_plugins(GROUP, "DATASETS", Dataset, entries)
    assert list(entries) == ["digits", "tiles"]


@pytest.mark.parametrize("table", [None, [TILES], {"tiles": "images"}, {"tiles": tuple(TILES)}])
def test_a_module_without_the_table_is_refused(plugged: ModuleType, table: Any) -> None:
    vars(plugged)["DATASETS"] = table
    with pytest.raises(
        ConfigError, match="the plug-in plugged of hpcbench.datasets: DATASETS is not a dictionary of Dataset"
    ):
        plugins.add_plugins(GROUP, "DATASETS", Dataset, {})


def test_a_name_that_is_there_already_is_refused(plugged: ModuleType) -> None:
    vars(plugged)["DATASETS"] = {"digits": TILES}
    with pytest.raises(ConfigError, match="has 'digits', which is there already"):
        plugins.add_plugins(GROUP, "DATASETS", Dataset, dict(DATASETS))


def test_a_module_that_cannot_be_imported_is_refused_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.plugin_modules(GROUP), "mine", "no_such_module")
    with pytest.raises(
        ConfigError, match="no_such_module of hpcbench.datasets cannot be imported: ModuleNotFoundError"
    ):
        plugins.add_plugins(GROUP, "DATASETS", Dataset, {})


@pytest.mark.parametrize(("values", "is_refused"), [(("a", "a"), False), (("a", "b"), True)])
def test_two_packages_with_one_entry_point(
    monkeypatch: pytest.MonkeyPatch, values: tuple[str, str], is_refused: bool
) -> None:
    points = metadata.EntryPoints(metadata.EntryPoint("mine", value, GROUP) for value in values)
    monkeypatch.setattr(metadata, "entry_points", lambda: points)
    find = plugins._modules_by_group.__wrapped__
    if is_refused:
        with pytest.raises(ConfigError, match="two packages have an entry point 'mine' of hpcbench.datasets: a and b"):
            find()
    else:
        assert find()[GROUP] == {"mine": "a"}


def test_a_scheduler_without_its_kind_is_refused(plugged: ModuleType) -> None:
    assert check_scheduler_kind("mine") == "mine"
    with pytest.raises(ConfigError, match="the plug-in plugged of hpcbench.schedulers: KIND is not a SchedulerKind"):
        scheduler_kind("mine")


def test_a_scheduler_with_the_name_of_a_shipped_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins.plugin_modules("hpcbench.schedulers"), "slurm", "plugged")
    with pytest.raises(ValueError, match="the package of plugged adds 'slurm', which is hpcbench's own"):
        check_scheduler_kind("local")


@pytest.mark.parametrize("entry", [None, "DdpStrategy", int])
def test_a_family_that_names_no_training_or_cost_is_refused(monkeypatch: pytest.MonkeyPatch, entry: Any) -> None:
    monkeypatch.setitem(train.TRAININGS, "ddp", entry)
    monkeypatch.setitem(cost.COSTS, "ddp", entry)
    with pytest.raises(ConfigError, match="the family of ddp: TRAININGS has .* for it, not a subclass of Strategy"):
        resolve_runtime("ddp")
    if entry is None:
        assert find_cost("ddp") is None
    else:
        with pytest.raises(ConfigError, match="the family of ddp: COSTS has .* for it, not a subclass of Cost"):
            find_cost("ddp")
