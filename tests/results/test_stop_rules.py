from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hpcbench.results.stop_rules import MAX_RUNS_CHECKED, StopGroup, find_stop_reason, read_stop_group

LINE = StopGroup(["oom"], ["batch_size"], [("a", [8]), ("b", [16]), ("c", [32]), ("c2", [32])])
PLANE = StopGroup(
    ["oom", "timeout"],
    ["batch_size", "learning_rate"],
    [("a", [8, 0.5]), ("b", [16, 0.5]), ("c", [8, 1]), ("d", [16, 1])],
)


@pytest.mark.parametrize(
    ("group", "run_id", "ended", "expected"),
    [
        (LINE, "c", {"a": "oom"}, "run a with batch_size 8 ended as oom"),
        (LINE, "c", {"a": "oom", "b": "oom"}, "run b with batch_size 16 ended as oom"),
        (LINE, "b", {"c": "oom"}, None),
        (LINE, "c2", {"c": "oom"}, None),
        (LINE, "c", {"a": "ok", "b": "timeout"}, None),
        (LINE, "stranger", {"a": "oom"}, None),
        (PLANE, "d", {"a": "timeout"}, "run a with batch_size 8, learning_rate 0.5 ended as timeout"),
        (PLANE, "d", {"c": "oom"}, "run c with batch_size 8, learning_rate 1 ended as oom"),
        (PLANE, "b", {"c": "oom"}, None),
    ],
)
def test_only_smaller_runs_of_the_group_stop_a_run(
    group: StopGroup, run_id: str, ended: dict[str, str], expected: str | None
) -> None:
    assert find_stop_reason(group, run_id, ended.get) == expected


def test_nearer_runs_are_checked_first_for_a_stop() -> None:
    asked: list[str] = []
    assert find_stop_reason(PLANE, "d", asked.append) is None
    assert sorted(asked) == ["a", "b", "c"]
    assert asked[-1] == "a"


def test_only_the_nearest_runs_are_checked_for_a_stop() -> None:
    group = StopGroup(["oom"], ["x", "y"], [(f"{x}-{y}", [x, 10 * y]) for x in range(20) for y in range(20)])
    asked: list[str] = []
    assert find_stop_reason(group, "19-19", asked.append) is None
    assert len(asked) == MAX_RUNS_CHECKED
    assert set(asked[:5]) == {"18-19", "19-18", "17-19", "18-18", "19-17"}


def test_groups_are_read_by_line(tmp_path: Path) -> None:
    path = tmp_path / "stop.jsonl"
    path.write_bytes(msgspec.json.encode(LINE) + b"\n" + msgspec.json.encode(PLANE) + b'\n{"runs": 3}\n')
    assert [read_stop_group(path, line) for line in range(4)] == [LINE, PLANE, None, None]
    assert read_stop_group(tmp_path / "none", 0) is None
