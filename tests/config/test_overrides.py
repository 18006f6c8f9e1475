"""``--set key=value``: what it changes of a sweep, and that it is validated like the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcbench.config.sweep_loader import ExcludedPoint, Sweep, count_points, expand_sweep, load_sweep
from hpcbench.errors import HpcbenchError

SWEEP = """name = "s"
[fixed]
model = "resnet18"
dataset = "digits"
steps = 20
options = { a = 1 }
[grid]
batch_size = [1, 2, 4]
strategy = ["single", "ddp"]
[stop]
oom = "batch_size"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "s.toml").write_text(SWEEP)
    return tmp_path / "s.toml"


def values(sweep: Sweep, name: str) -> set[Any]:
    return {point[name] for point in expand_sweep(sweep) if not isinstance(point, ExcludedPoint)}


@pytest.mark.parametrize(
    ("overrides", "points", "name", "expected"),
    [
        (["steps=5"], 6, "steps", {5}),
        (["batch_size=8"], 2, "batch_size", {8}),
        (["strategy=fsdp"], 3, "strategy", {"fsdp"}),
        (["grid.batch_size=8,16"], 4, "batch_size", {8, 16}),
        (["grid.steps=[5, 6]"], 12, "steps", {5, 6}),
        (["repeats=5"], 30, "repeat", {0, 1, 2, 3, 4}),
        (["fixed.learning_rate=1e-3"], 6, "learning_rate", {0.001}),
        (["batch_size=8", "strategy=ddp"], 1, "strategy", {"ddp"}),
    ],
)
def test_a_sweep_is_changed(path: Path, overrides: list[str], points: int, name: str, expected: set[Any]) -> None:
    sweep = load_sweep(path, overrides)
    assert (count_points(sweep), values(sweep, name)) == (points, expected)


def test_options_and_variables_are_set_one_by_one(path: Path) -> None:
    sweep = load_sweep(path, ["options.b=true", "env.NCCL_ALGO=Ring,Tree", "submit.pack=4", "name=other"])
    (point, *_) = expand_sweep(sweep)
    assert not isinstance(point, ExcludedPoint)
    assert (point["options"], point["env"]) == ({"a": 1, "b": True}, {"NCCL_ALGO": "Ring,Tree"})
    assert (sweep.submit.pack, sweep.name) == (4, "other")


def test_every_table_that_varies_a_parameter_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "s"\n[fixed]\nmodel = "m"\n[scaling]\nkind = "weak"\nnodes = [1, 2]\n'
        '[[zip]]\nsteps = [1, 2]\nseed = [3, 4]\n[derive]\nmicro_batches = "nodes * 2"\n'
        "[[include]]\nnodes = 8\nsteps = 9\n"
    )
    sweep = load_sweep(path, ["steps=5", "nodes=4", "micro_batches=3"])
    assert [values(sweep, name) for name in ("steps", "nodes", "micro_batches")] == [{5}, {4}, {3}]
    assert count_points(sweep) == 3, "two of the zip, which is left with the seeds, and the include"


def test_a_grid_overridden_to_one_value_keeps_its_point(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "s"\n[grid]\nsteps = [1, 2]\n[[include]]\nseed = 7\n')
    assert count_points(load_sweep(path, ["steps=5"])) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: no key=value"),
        ("stps=5", "--set stps=5: unknown key 'stps'\n  did you mean 'steps'?"),
        ("grid.stps=5", "--set grid.stps=5: unknown parameter 'stps'\n  did you mean 'steps'?"),
        ("steps=many", "--set steps=many: fixed.steps: input should be a valid integer, not 'many'"),
        ("steps=5,6", "--set steps=5,6: steps is one value\n  an axis is grid.steps=5,6"),
        ("exclude.steps=5", "--set exclude.steps=5: [exclude] cannot be set here"),
        ("repeats=0", "--set repeats=0: repeats: input should be greater than or equal to 1, not 0"),
    ],
)
def test_wrong_overrides_are_named(path: Path, override: str, message: str) -> None:
    with pytest.raises(HpcbenchError) as caught:
        load_sweep(path, [override])
    assert str(caught.value).startswith(message)


def test_the_file_is_still_named_for_what_it_sets(path: Path) -> None:
    path.write_text(SWEEP.replace("steps = 20", "steps = 0"))
    with pytest.raises(HpcbenchError, match=r"s\.toml:5: fixed\.steps"):
        load_sweep(path, ["seed=1"])
