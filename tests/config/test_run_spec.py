from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcbench.config.run_spec import (
    RunSpec,
    RunTask,
    TaskFileHeader,
    config_id,
    encode_task_file,
    read_task,
    run_id,
    run_label,
    spec_document,
)
from hpcbench.errors import WorkerError

SPEC = RunSpec(model="resnet18", dataset="digits", strategy="ddp", batch_size=16, tasks_per_node=2, dp_degree=2)


def test_run_and_configuration_ids_equal_the_recorded_ones() -> None:
    """Frozen: a change of these values orphans every result that people have."""
    assert run_id(SPEC) == "3ff14687f840b6fa"
    assert config_id(SPEC) == run_id(SPEC)


def test_ids_leave_out_their_documented_parameters() -> None:
    other = msgspec.structs.replace
    assert run_id(other(SPEC, time_limit_min=5.0)) == run_id(SPEC)
    assert run_id(other(SPEC, repeat=1)) != run_id(SPEC)
    assert config_id(other(SPEC, repeat=1, seed=7)) == config_id(SPEC)
    assert config_id(other(SPEC, steps=21)) != config_id(SPEC)


def test_defaults_are_left_out_so_that_a_later_parameter_moves_no_run() -> None:
    assert spec_document(SPEC) == {
        "spec_version": 1, "model": "resnet18", "dataset": "digits", "strategy": "ddp", "batch_size": 16,
        "tasks_per_node": 2, "dp_degree": 2,
    }  # fmt: skip
    assert run_id(msgspec.structs.replace(SPEC, steps=20, options={})) == run_id(SPEC)
    # As read from a file or a table of results: equal to the default, and another object.
    assert run_id(msgspec.structs.replace(SPEC, precision="".join(["fp", "32"]), weight_decay=0)) == run_id(SPEC)


@given(
    st.dictionaries(
        st.text(),
        st.one_of(
            st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()
        ),
    )
)
def test_identity_survives_a_file_and_the_order_of_keys(options: dict[str, bool | int | float | str]) -> None:
    spec = msgspec.structs.replace(SPEC, options=options)
    read = msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec)
    assert run_id(read) == run_id(spec)
    turned = dict(reversed(options.items()))
    assert run_id(msgspec.structs.replace(SPEC, options=turned)) == run_id(spec)


def test_a_task_file_is_read_back_as_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    header = TaskFileHeader(cluster="c", device="cpu", tree=str(tmp_path), submission="s-0001")
    tasks = [
        RunTask(
            run_id=run_id(SPEC),
            config_id=config_id(SPEC),
            sweep="s",
            spec=msgspec.structs.replace(SPEC, repeat=number),
            time_limit_s=60,
        )
        for number in range(3)
    ]
    path = tmp_path / "0.jsonl"
    path.write_bytes(encode_task_file(header, tasks))
    assert read_task(path, 2) == (header, tasks[2])
    with pytest.raises(WorkerError, match="has no run number 3"):
        read_task(path, 3)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WorkerError, match="is not a task file"):
        read_task(path, 2)


def test_the_label_of_a_hybrid_has_its_degrees() -> None:
    given: dict[str, Any] = {"model": "vgg11", "dataset": "digits", "batch_size": 4, "strategy": "filter"}
    assert run_label(RunSpec(tasks_per_node=4, tp_degree=4, **given)) == "filter on 4 ranks, vgg11, batch 4"
    assert run_label(RunSpec(tasks_per_node=4, dp_degree=2, tp_degree=2, **given)).startswith(
        "filter dp2 tp2 on 4 ranks"
    )


def test_the_label_of_a_command_shows_empty_text() -> None:
    parameters: dict[str, Any] = {"stage": "", "count": 0, "name": "a", "folder": "/opt/x"}
    spec = RunSpec(workload="command", strategy="command", parameters=parameters)
    assert run_label(spec) == "command on 1 device, stage '', count 0, name a"
