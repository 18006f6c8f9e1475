"""Run and configuration ids of generated specifications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpcbench.config.run_spec import (
    RunSpec,
    RunTask,
    TaskFileHeader,
    config_id,
    encode_task_file,
    read_task,
    run_id,
    spec_document,
)
from hpcbench.config.sweep_loader import expand_sweep, load_sweep
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import RunResult
from hpcbench.strategies.resolve import PartitionLimits, resolve_point

TEXT = st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
SCALAR = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), TEXT)
FREE = PartitionLimits("test")

PARAMETERS: dict[str, st.SearchStrategy[Any]] = {
    "batch_size": st.integers(1, 64),
    "input_size": st.integers(32, 256),
    "nodes": st.integers(1, 64),
    "tasks_per_node": st.integers(1, 8),
    "precision": st.sampled_from(["fp64", "fp32", "bf16"]),
    "channels_last": st.booleans(),
    "optimizer": st.sampled_from(["sgd", "adam"]),
    "learning_rate": st.floats(0, 10),
    "momentum": st.floats(0, 0.99),
    "weight_decay": st.floats(0, 1),
    "warmup_steps": st.integers(0, 9),
    "steps": st.integers(1, 99),
    "seed": st.integers(0, 2**31),
    "partition": st.sampled_from(["gpu", "cpu"]),
    "environment": st.sampled_from(["one", "two"]),
    "env": st.dictionaries(NAME, TEXT, max_size=4),
    "options": st.fixed_dictionaries(
        {}, optional={"bucket_cap_mb": st.floats(1, 100), "static_graph": st.booleans()}
    ),
}  # fmt: skip
POINTS = st.fixed_dictionaries({}, optional=PARAMETERS).map(lambda given: {"batch_size": 8, **given})
_FIELDS = {one.name: one for one in msgspec.structs.fields(RunSpec)}


def spec_of(point: dict[str, Any]) -> RunSpec:
    spec = resolve_point({"model": "resnet18", "dataset": "imagenet", "strategy": "ddp", **point}, FREE)
    assert isinstance(spec, RunSpec), spec
    return spec


def default(name: str) -> Any:
    field = _FIELDS[name]
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


@given(st.dictionaries(NAME, SCALAR, max_size=5), st.dictionaries(NAME, TEXT, max_size=5), st.randoms())
def test_the_order_of_keys_changes_no_id(options: dict[str, Any], env: dict[str, str], random: Any) -> None:
    def shuffled(table: dict[str, Any]) -> dict[str, Any]:
        return dict(random.sample(list(table.items()), len(table)))

    base = RunSpec(model="m", dataset="d", strategy="s", batch_size=1, options=options, model_options=options, env=env)
    turned = msgspec.structs.replace(
        base, options=shuffled(options), model_options=shuffled(options), env=shuffled(env)
    )
    assert run_id(turned) == run_id(base)


@given(POINTS, st.one_of(st.none(), st.floats(0.1, 1e4)), st.integers(0, 9))
def test_time_limits_change_no_id_and_repeats_only_run_ids(
    point: dict[str, Any], limit_min: float | None, repeat: int
) -> None:
    spec = spec_of(point)
    assert run_id(msgspec.structs.replace(spec, time_limit_min=limit_min)) == run_id(spec)
    other = msgspec.structs.replace(spec, repeat=repeat)
    assert config_id(other) == config_id(spec)
    assert (run_id(other) == run_id(spec)) == (repeat == 0)


@given(POINTS, st.data())
def test_any_other_change_is_another_run(point: dict[str, Any], drawn: st.DataObject) -> None:
    name = drawn.draw(st.sampled_from(sorted(PARAMETERS)))
    value = drawn.draw(PARAMETERS[name])
    one, two = spec_of(point), spec_of({**point, name: value})
    assume(spec_document(one) != spec_document(two))
    assert run_id(one) != run_id(two)


@given(POINTS, st.sampled_from(sorted(name for name in PARAMETERS if not _FIELDS[name].required)))
def test_an_explicit_default_changes_no_id(point: dict[str, Any], name: str) -> None:
    left_out = {key: value for key, value in point.items() if key != name}
    assert run_id(spec_of({**left_out, name: default(name)})) == run_id(spec_of(left_out))
    options = {key: value for key, value in point.get("options", {}).items() if key != "bucket_cap_mb"}
    written = spec_of({**point, "options": {**options, "bucket_cap_mb": 25}})
    assert run_id(written) == run_id(spec_of({**point, "options": options}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(POINTS, NAME)
def test_a_run_keeps_its_name_from_the_sweep_to_the_result(folder: Path, point: dict[str, Any], name: str) -> None:
    path = folder / "sweep.toml"
    lines = [
        f"{key} = {toml(value)}"
        for key, value in {"model": "resnet18", "dataset": "imagenet", "strategy": "ddp", **point}.items()
    ]
    path.write_text("\n".join([f"name = 's{name}'", "[fixed]", *lines]), encoding="utf-8", newline="")
    (read,) = expand_sweep(load_sweep(path))
    assert isinstance(read, dict)
    spec = resolve_point(read, FREE)
    assert isinstance(spec, RunSpec)
    assert spec == spec_of(point)

    task = RunTask(run_id=run_id(spec), config_id=config_id(spec), sweep=name, spec=spec, time_limit_s=1.0)
    header = TaskFileHeader(cluster="c", device="cpu", tree="t", submission="s-0001")
    (folder / "0.jsonl").write_bytes(encode_task_file(header, [task]))
    carried = read_task(folder / "0.jsonl", 0)[1]
    assert carried == task

    tree = ClusterTree(folder / "tree")
    result = RunResult(
        run_id=carried.run_id, config_id=carried.config_id, attempt=1, sweep=name, cluster="c", status="failed",
        spec=carried.spec,
    )  # fmt: skip
    tree.result_path(carried.run_id).unlink(missing_ok=True)
    tree.write_result(result)
    stored = tree.read_result(carried.run_id)
    assert stored is not None
    assert (run_id(stored.spec), config_id(stored.spec)) == (task.run_id, task.config_id)
