from __future__ import annotations

from collections.abc import Callable

from hpcbench.config.expand import count_points, expand
from hpcbench.config.load import Sweep

Write = Callable[[str], Sweep]


def test_last_axis_moves_fastest_and_repeats_fastest_of_all(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\nrepeats = 2\n[fixed]\nseed = 5\n[grid]\nnodes = [1, 2]\nbatch_size = [8, 16]\n')
    points = list(expand(sweep))
    assert [(point["nodes"], point["batch_size"], point["repeat"]) for point in points] == [
        (1, 8, 0), (1, 8, 1), (1, 16, 0), (1, 16, 1), (2, 8, 0), (2, 8, 1), (2, 16, 0), (2, 16, 1),
    ]  # fmt: skip
    assert count_points(sweep) == len(points)
    assert all(point["seed"] == 5 for point in points)


def test_nested_axes_join_fixed_options(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\n[fixed.options]\nstatic_graph = true\n[grid.options]\nbucket_cap_mb = [1, 25]\n')
    assert [point["options"] for point in expand(sweep)] == [
        {"static_graph": True, "bucket_cap_mb": 1},
        {"static_graph": True, "bucket_cap_mb": 25},
    ]
    assert sweep.fixed["options"] == {"static_graph": True}


def test_a_sweep_without_axes_is_one_point(write_sweep: Write) -> None:
    assert list(expand(write_sweep('name = "s"\n[fixed]\nnodes = 2'))) == [{"nodes": 2, "repeat": 0}]
