"""Expansion over generated sweeps, against what the tables of the file say when read by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.config.run_spec import RunSpec, run_id
from hpcbench.config.sweep_loader import ExcludedPoint, Sweep, count_points, expand_sweep, load_sweep
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

VALUES: dict[str, list[Any]] = {
    "nodes": [1, 2, 3, 4, 8],
    "tasks_per_node": [1, 2, 4],
    "batch_size": [1, 6, 8, 64],
    "steps": [1, 20, 21],
    "learning_rate": [0.0, 0.01, 0.5],
    "precision": ["fp32", "bf16"],
    "channels_last": [True, False],
    "options.static_graph": [True, False],
    "options.bucket_cap_mb": [1.0, 25.0],
}
CONDITIONS = {
    "nodes > 2": lambda point: point.get("nodes", 1) > 2,
    "nodes * tasks_per_node == 4": lambda point: point.get("nodes", 1) * point.get("tasks_per_node", 1) == 4,
    "precision == 'bf16' or steps == 1": lambda point: point.get("precision") == "bf16" or point.get("steps") == 1,
}
FIXED = {"model": "resnet18", "dataset": "imagenet", "strategy": "ddp"}


@st.composite
def sweeps(draw: st.DrawFn) -> dict[str, Any]:
    """A sweep as data, its points few."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), unique=True, max_size=5))
    # TOML holds the keys of one table together, wherever they are written.
    names.sort(key=lambda name: "." in name)
    grid = {
        name: draw(st.lists(st.sampled_from(VALUES[name]), unique=True, min_size=1, max_size=3)) for name in names[:3]
    }
    moving = {name: VALUES[name][:2] for name in names[3:]}
    excludes = draw(
        st.lists(
            st.tuples(
                st.sampled_from([{}, {"nodes": [2, 4]}, {"steps": 20}, {"options.static_graph": True}]),
                st.sampled_from([None, *CONDITIONS]),
            ).filter(any),
            max_size=2,
        )
    )
    includes = draw(st.lists(st.fixed_dictionaries({"nodes": st.sampled_from(VALUES["nodes"])}), max_size=2))
    return {
        "grid": grid, "zip": moving, "excludes": excludes, "includes": includes,
        "repeats": draw(st.integers(1, 3)), "batch_size": "batch_size" not in names,
    }  # fmt: skip


def toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(toml(one) for one in value)}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def loaded(data: dict[str, Any], folder: Any) -> Sweep:
    fixed = {**FIXED, **({"batch_size": 8} if data["batch_size"] else {})}
    tables = [("[fixed]", fixed), ("[grid]", data["grid"])]
    tables += [("[[zip]]", data["zip"])] if data["zip"] else []
    tables += [("[[include]]", {"batch_size": 16, **include}) for include in data["includes"]]
    tables += [("[[exclude]]", {**keys, **({} if when is None else {"when": when})}) for keys, when in data["excludes"]]
    lines = ["name = 'generated'", f"repeats = {data['repeats']}"]
    for header, table in tables:
        # A condition holds single quotes.
        lines += [
            header,
            *(f"{key} = {toml(value) if key != 'when' else chr(34) + value + chr(34)}" for key, value in table.items()),
        ]
    path = folder / "generated.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return load_sweep(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("sweeps")


def value_of(point: dict[str, Any], name: str) -> Any:
    table, _, key = name.partition(".")
    return point.get(table, {}).get(key) if key else point.get(name)


def matches(point: dict[str, Any], keys: dict[str, Any], when: str | None) -> bool:
    seen = {"steps": 20, "nodes": 1, **point}
    wanted = {name: value if isinstance(value, list) else [value] for name, value in keys.items()}
    if any(value_of(seen, name) not in allowed for name, allowed in wanted.items()):
        return False
    return when is None or bool(CONDITIONS[when](point))


@given(sweeps())
def test_expansion_gives_as_many_points_as_counted(folder: Any, data: dict[str, Any]) -> None:
    sweep = loaded(data, folder)
    has_product = data["grid"] or data["zip"] or not data["includes"]
    product = math.prod(len(values) for values in data["grid"].values()) * (2 if data["zip"] else 1) * bool(has_product)
    expected = (product + len(data["includes"])) * data["repeats"]
    assert count_points(sweep) == len(list(expand_sweep(sweep))) == expected


@given(sweeps())
def test_a_point_is_left_out_exactly_where_a_rule_matches_it(folder: Any, data: dict[str, Any]) -> None:
    for point in expand_sweep(loaded(data, folder)):
        inner = point.point if isinstance(point, ExcludedPoint) else point
        assert any(matches(inner, *rule) for rule in data["excludes"]) == isinstance(point, ExcludedPoint)


@given(sweeps())
def test_points_come_in_the_order_of_the_axes(folder: Any, data: dict[str, Any]) -> None:
    points = [
        point.point if isinstance(point, ExcludedPoint) else point for point in expand_sweep(loaded(data, folder))
    ]
    product = points[: len(points) - len(data["includes"]) * data["repeats"]]
    names = list(data["grid"])
    places = [
        (
            *(data["grid"][name].index(value_of(point, name)) for name in names),
            *(data["zip"][name].index(value_of(point, name)) for name in list(data["zip"])[:1]),
            point["repeat"],
        )
        for point in product
    ]
    assert places == sorted(places)


def run_ids(sweep: Sweep) -> set[str]:
    resolved = (
        resolve_point(point, PartitionLimits("test"))
        for point in expand_sweep(sweep)
        if not isinstance(point, ExcludedPoint)
    )
    return {run_id(spec) for spec in resolved if isinstance(spec, RunSpec)}


@given(sweeps(), st.data())
def test_a_longer_axis_keeps_every_run(folder: Any, data: dict[str, Any], drawn: st.DataObject) -> None:
    before = run_ids(loaded(data, folder))
    if not data["grid"]:
        data["repeats"] += 1
    else:
        name = drawn.draw(st.sampled_from(sorted(data["grid"])))
        place = drawn.draw(st.integers(0, len(data["grid"][name])))
        more = [value for value in VALUES[name] if value not in data["grid"][name]]
        data["grid"][name][place:place] = more[:1]
    assert before <= run_ids(loaded(data, folder))
