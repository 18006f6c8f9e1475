"""Caches by identity and by the fields of a run."""

from __future__ import annotations

import msgspec

from hpcbench.config.run_spec import RunSpec
from hpcbench.strategies.gradient_buckets import first_use_rows
from hpcbench.strategies.layer_table import LayerTable, cached_by_identity, cached_by_run_fields, read_shipped_table


def test_a_cached_function_runs_once_per_object_and_argument() -> None:
    asked: list[tuple[int, int]] = []

    @cached_by_identity(3)
    def size(of: list[int], more: int = 0) -> int:
        asked.append((len(of), more))
        return len(of) + more

    one, other = [1], [1, 2]
    assert [size(one), size(one), size(one, 1), size(one, more=1), size(other), size(other)] == [1, 1, 2, 2, 2, 2]
    assert asked == [(1, 0), (1, 1), (1, 1), (2, 0)]
    # An equal object is another one; the oldest answer was given up for the fourth.
    assert (size(list(one)), size(one)) == (1, 1)
    assert len(asked) == 6


def test_cached_rows_are_shared_and_immutable() -> None:
    table = read_shipped_table("vgg11", "digits")
    assert table is not None
    rows = first_use_rows(table)
    assert isinstance(rows, tuple)
    assert first_use_rows(table) is rows
    assert rows[0] == 0


def test_a_cached_list_is_computed_once_per_used_fields() -> None:
    made: list[int] = []

    @cached_by_run_fields("batch_size", "precision")
    def sizes(spec: RunSpec, table: LayerTable) -> list[int]:
        made.append(spec.batch_size)
        return [spec.batch_size, len(table.layers)]

    one, other = read_shipped_table("resnet18", "cifar10"), read_shipped_table("vgg11", "cifar10")
    assert one is not None
    assert other is not None
    spec = RunSpec(model="resnet18", dataset="cifar10", strategy="ddp", batch_size=8)
    first = sizes(spec, one)
    first.append(0)
    # Who gets a list may change it.
    assert sizes(msgspec.structs.replace(spec, nodes=2, dp_degree=2), one) == first[:2]
    assert made == [8]
    assert sizes(spec, other) != first[:2]
    assert sizes(msgspec.structs.replace(spec, batch_size=16), one)[0] == 16
    assert made == [8, 8, 16]
