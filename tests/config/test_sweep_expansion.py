from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcbench.config.sweep_loader import ExcludedPoint, Sweep, count_points, expand_sweep
from hpcbench.errors import HpcbenchError

Write = Callable[[str], Sweep]


def kept(sweep: Sweep) -> list[dict[str, Any]]:
    return [point for point in expand_sweep(sweep) if not isinstance(point, ExcludedPoint)]


def rules(sweep: Sweep) -> list[str]:
    return [point.rule.rpartition(" (")[0] for point in expand_sweep(sweep) if isinstance(point, ExcludedPoint)]


def test_last_axis_moves_fastest_and_repeats_fastest_of_all(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\nrepeats = 2\n[fixed]\nseed = 5\n[grid]\nnodes = [1, 2]\nbatch_size = [8, 16]\n')
    points = kept(sweep)
    assert [(point["nodes"], point["batch_size"], point["repeat"]) for point in points] == [
        (1, 8, 0), (1, 8, 1), (1, 16, 0), (1, 16, 1), (2, 8, 0), (2, 8, 1), (2, 16, 0), (2, 16, 1),
    ]  # fmt: skip
    assert count_points(sweep) == len(points)
    assert all(point["seed"] == 5 for point in points)


def test_nested_axes_join_fixed_options(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\n[fixed.options]\nstatic_graph = true\n[grid.options]\nbucket_cap_mb = [1, 25]\n')
    assert [point["options"] for point in kept(sweep)] == [
        {"static_graph": True, "bucket_cap_mb": 1},
        {"static_graph": True, "bucket_cap_mb": 25},
    ]


def test_a_sweep_without_axes_is_one_point(write_sweep: Write) -> None:
    assert list(expand_sweep(write_sweep('name = "s"\n[fixed]\nnodes = 2'))) == [{"nodes": 2, "repeat": 0}]


def test_zips_move_together_and_are_one_axis_each(write_sweep: Write) -> None:
    sweep = write_sweep(
        'name = "s"\n[grid]\nsteps = [1, 2]\n[[zip]]\nnodes = [1, 2]\nbatch_size = [64, 32]\n[[zip]]\nseed = [7, 8]\noptions = { x = [1, 2] }\n'
    )
    assert count_points(sweep) == 8
    seen = {
        (point["steps"], point["nodes"], point["batch_size"], point["seed"], point["options"]["x"])
        for point in kept(sweep)
    }
    assert seen == {
        (steps, *pair, *other) for steps in (1, 2) for pair in ((1, 64), (2, 32)) for other in ((7, 1), (8, 2))
    }


def test_includes_are_further_points_over_the_fixed_ones(write_sweep: Write) -> None:
    sweep = write_sweep('name = "s"\n[fixed]\nsteps = 5\n[grid]\nnodes = [1]\n[[include]]\nnodes = 8\nsteps = 1\n')
    assert [(point["nodes"], point["steps"]) for point in kept(sweep)] == [(1, 5), (8, 1)]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", [5]),
        ("[[include]]\nnodes = 8\n[[include]]\nnodes = 9\n", [8, 9]),
        ("[grid]\nsteps = [1]\n[[include]]\nnodes = 8\n", [5, 8]),
    ],
)
def test_includes_without_axes_are_all_points(write_sweep: Write, text: str, nodes: list[int]) -> None:
    sweep = write_sweep(f'name = "s"\n[fixed]\nnodes = 5\n{text}')
    assert [point["nodes"] for point in kept(sweep)] == nodes
    assert count_points(sweep) == len(nodes)


def test_points_are_excluded_by_keys_expression_or_both(write_sweep: Write) -> None:
    sweep = write_sweep(
        'name = "s"\n[grid]\nmodel = ["a", "b"]\nnodes = [1, 2, 4]\n[[exclude]]\nmodel = "a"\nnodes = [2, 4]\n[[exclude]]\nmodel = "b"\nwhen = "nodes > 2"\n'
    )
    assert [(point["model"], point["nodes"]) for point in kept(sweep)] == [("a", 1), ("b", 1), ("b", 2)]
    assert rules(sweep) == ["[[exclude]] model = a and nodes = 2, 4"] * 2 + ["[[exclude]] model = b and nodes > 2"]


def test_expressions_see_defaults_and_what_follows_from_them(write_sweep: Write) -> None:
    sweep = write_sweep(
        'name = "s"\n[grid]\nnodes = [1, 2]\n[[exclude]]\nwhen = "devices > 1 and steps == 20 and optimizer == \'sgd\'"\n'
    )
    assert [point["nodes"] for point in kept(sweep)] == [1]


def test_derived_parameters_may_use_those_above_them(write_sweep: Write) -> None:
    sweep = write_sweep(
        'name = "s"\n[grid]\nnodes = [1, 4]\n[derive]\nbatch_size = "64 / nodes"\nmicro_batches = "max(1, batch_size // 32)"\n"options.x" = "nodes * 1.5"\n[[include]]\nnodes = 2\nbatch_size = 3\n'
    )
    seen = [
        (point["nodes"], point["batch_size"], point["micro_batches"], point["options"]["x"]) for point in kept(sweep)
    ]
    assert seen == [(1, 64, 2, 1.5), (4, 16, 1, 6.0), (2, 3, 1, 3.0)]


def test_a_value_derived_as_none_stays_unset(write_sweep: Write) -> None:
    text = """
        name = "s"
        [grid]
        strategy = ["ddp", "fsdp"]
        [derive]
        "options.bucket_cap_mb" = "5 if strategy == 'ddp' else None"
        dp_degree = "2 if strategy == 'fsdp' else None"
        """
    seen = [(point.get("options"), point.get("dp_degree")) for point in kept(write_sweep(text))]
    assert seen == [({"bucket_cap_mb": 5}, None), (None, 2)]


def test_weak_and_strong_scaling_set_batch_per_node_count(write_sweep: Write) -> None:
    weak = write_sweep('name = "s"\n[fixed]\nbatch_size = 8\n[scaling]\nkind = "weak"\nnodes = [1, 2]\n')
    assert [(point["nodes"], point["batch_size"]) for point in kept(weak)] == [(1, 8), (2, 8)]
    strong = write_sweep('name = "s"\n[scaling]\nkind = "strong"\nnodes = [1, 2]\nglobal_batch_size = 64\n')
    assert [(point["nodes"], point["global_batch_size"]) for point in kept(strong)] == [(1, 64), (2, 64)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[zip]]\nnodes = [1, 2]\nsteps = [1]",
            r"sweep.toml:2: lists of a zip have equal lengths: nodes has 2, steps has 1",
        ),
        (
            "[grid]\nnodes = [1]\n[[zip]]\nnodes = [1]",
            r"sweep.toml:5: nodes is set in \[grid\] and in \[\[zip\]\] number 1",
        ),
        ("[fixed]\nnodes = 1\n[scaling]\nkind = 'weak'\nnodes = [1]", r"nodes is set in \[fixed\] and in \[scaling\]"),
        ("[fixed]\nnodes = 1\n[derive]\nnodes = '2'", r"sweep.toml:5: nodes is set in \[fixed\] and in \[derive\]"),
        (
            "[derive]\nbatch_size = 'steps * 2'\nsteps = 'batch_size // 2'",
            r"sweep.toml:3: derive: batch_size reads steps, which is derived below it\n  put steps above it",
        ),
        (
            "[derive]\nsteps = 'options.x + 1'\n'options.x' = '2'",
            r"sweep.toml:3: derive: steps reads options.x, which is derived below it",
        ),
        ("[derive]\nnodess = '2'", r"sweep.toml:3: derive: unknown parameter 'nodess'\n  did you mean 'nodes'"),
        (
            "[derive]\nnodes = 'stepps * 2'",
            r"sweep.toml:3: expression 'stepps \* 2': unknown name 'stepps'\n  did you mean 'steps'",
        ),
        ("[[exclude]]\nwhen = 'nodes >'", r"sweep.toml:3: expression 'nodes >': not a valid expression"),
        (
            "[[include]]\nform = 'x'",
            r"(?s)sweep.toml:3: unknown key 'form' in \[include.0\]\n  .*; parameters of a single strategy belong in options",
        ),
        ("[[exclude]]\nnodess = 3", r"sweep.toml:3: unknown key 'nodess' in \[exclude.0\]\n  did you mean 'nodes'"),
        ("[[exclude]]", r"sweep.toml:2: an \[\[exclude\]\] without keys"),
        ("[scaling]\nkind = 'strong'\nnodes = [1]", "strong scaling needs global_batch_size"),
        (
            "[scaling]\nkind = 'week'\nnodes = [1]",
            r"sweep.toml:3: scaling.kind: input should be 'weak' or 'strong', not 'week'",
        ),
    ],
)
def test_invalid_sweep_tables_are_refused_with_file_and_line(write_sweep: Write, text: str, message: str) -> None:
    with pytest.raises(HpcbenchError, match=message):
        write_sweep(f'name = "s"\n{text}\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[derive]\nnodes = '3 / 2'", r"sweep.toml:3: derive: nodes = 1.5 does not fit"),
        ("[derive]\nnodes = '1 - 1'", r"sweep.toml:3: derive: nodes = 0 does not fit"),
        ("[derive]\nnodes = '1 // (steps - 20)'", r"sweep.toml:3: .*cannot be computed"),
        ("[[exclude]]\nwhen = 'nodes'", r"sweep.toml:3: .*where true or false is needed"),
    ],
)
def test_mistakes_in_evaluated_values_are_refused(write_sweep: Write, text: str, message: str) -> None:
    with pytest.raises(HpcbenchError, match=message):
        list(expand_sweep(write_sweep(f'name = "s"\n{text}\n')))
