"""Users' own models on the login node: what is wrong is said with file and line, and nothing of them is executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.config.cluster_profile import ClusterProfile, load_cluster_file
from hpcbench.config.run_spec import RunSpec
from hpcbench.config.sweep_loader import Sweep, load_sweep
from hpcbench.errors import ConfigError, ConfigErrors
from hpcbench.strategies.check_sweep import check_feasible, check_names, custom_model_folder
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

MODULE = """
from functools import partial
raise RuntimeError("this was executed")
if True:
    def build(in_shape, outputs): ...
else:
    class Net: ...
small = partial(build, width=2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "nets").mkdir(parents=True)
    (tmp_path / "mine" / "nets" / "wide.py").write_text(MODULE)
    (tmp_path / "mine" / "nets" / "__init__.py").write_text("from nets.wide import *\n")
    (tmp_path / "mine" / "torn.py").write_text("def build(:\n")
    return tmp_path


def sweep_of(folder: Path, model: str, head: str = 'model_folder = "mine"\n') -> Sweep:
    path = folder / "s.toml"
    path.write_text(
        f'name = "s"\n{head}[fixed]\nmodel = "{model}"\ndataset = "digits"\nstrategy = "single"\nbatch_size = 8\n'
        'model_options = { width = 3, act = "relu" }\n'
    )
    return load_sweep(path)


@pytest.mark.parametrize("model", ["nets.wide:build", "nets.wide:Net", "nets.wide:small", "nets:anything"])
def test_a_function_of_the_users_file_is_valid(folder: Path, model: str) -> None:
    sweep = sweep_of(folder, model)
    check_names(sweep)
    check_names(sweep, ClusterProfile(name="here"))
    assert sweep.model_folder == folder / "mine"


WRONG = [
    ("nets.wide:buidl", "s.toml:4: model 'nets.wide:buidl': .*wide.py has no function 'buidl'\n.*did you mean 'build'"),
    ("nets.wade:build", "s.toml:4: .*there is no nets/wade.py in .*/mine\n.*did you mean 'nets.wide'"),
    ("elsewhere.wide:build", "there is no elsewhere/wide.py"),
    ("nets.wide:", "s.toml:4: 'nets.wide:' is not a model of your own\n.*module:function"),
    ("../nets:build", "is not a model of your own"),
    ("nets.wide:os.system", "is not a model of your own"),
    ("torn:build", r"torn.py:1: model 'torn:build': not valid Python"),
]


@pytest.mark.parametrize(("model", "message"), WRONG)
def test_an_invalid_custom_model_is_reported_with_file_and_line(folder: Path, model: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        check_names(sweep_of(folder, model))


def test_the_folder_must_exist(folder: Path) -> None:
    with pytest.raises(ConfigErrors, match="s.toml:2: model_folder: there is no folder .*/yours"):
        check_names(sweep_of(folder, "nets.wide:build", 'model_folder = "yours"\n'))


def test_without_a_folder_the_form_is_checked_until_a_profile_is_named(folder: Path) -> None:
    sweep = sweep_of(folder, "nets.wide:build", "")
    check_names(sweep)
    with pytest.raises(ConfigErrors, match="neither the sweep nor cluster here says where it is"):
        check_names(sweep, ClusterProfile(name="here"))


def test_the_profiles_folder_counts_from_the_profile_on_and_after_the_sweeps(folder: Path) -> None:
    (folder / "clusters").mkdir()
    (folder / "clusters" / "here.toml").write_text('name = "here"\nmodel_folder = "../mine"\n')
    profile, _ = load_cluster_file(folder / "clusters" / "here.toml")
    sweep = sweep_of(folder, "nets.wide:build", "")
    assert custom_model_folder(sweep, profile) == folder / "mine"
    check_names(sweep, profile)
    with pytest.raises(ConfigErrors, match="has no function 'gone'"):
        check_names(sweep_of(folder, "nets.wide:gone", ""), profile)
    assert custom_model_folder(sweep_of(folder, "nets.wide:build", 'model_folder = "."\n'), profile) == folder


@pytest.mark.parametrize("dataset", ["digits", "cosmoflow", "tokens"])
def test_a_custom_model_takes_every_dataset_and_its_own_options(dataset: str) -> None:
    point = {"model": "a.b:c", "dataset": dataset, "strategy": "single", "batch_size": 4, "model_options": {"x": 1}}
    resolved = resolve_point(point, PartitionLimits("p"))
    assert isinstance(resolved, RunSpec)
    assert resolved.model_options == {"x": 1}
    assert resolved.model == "a.b:c"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "tp_degree = 3",
            "the only point of sweep 's' is infeasible on every cluster\n.*ddp has no tp_degree: 3 given",
        ),
        ("tasks_per_node = 2\n[grid]\nbatch_size = [8]\ntp_degree = [2, 3]", "every one of the 2 points of sweep 's'"),
        ("tasks_per_node = 2\n[grid]\ntp_degree = [1, 2]", None),
        ("nodes = 100", None),
    ],
)
def test_a_sweep_that_can_run_nowhere_is_refused(tmp_path: Path, lines: str, message: str | None) -> None:
    path = tmp_path / "s.toml"
    batch = "" if "batch_size" in lines else "batch_size = 8\n"
    path.write_text(f'name = "s"\n[fixed]\nmodel = "resnet18"\ndataset = "digits"\nstrategy = "ddp"\n{batch}{lines}\n')
    sweep = load_sweep(path)
    check_names(sweep)
    if message is None:
        check_feasible(sweep)
    else:
        with pytest.raises(ConfigError, match=message):
            check_feasible(sweep)
