"""The order in which runs are sent: no configuration has an hour of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.run_spec import config_id
from hpcbench.config.sweep_loader import Sweep
from hpcbench.errors import ConfigErrors, HpcbenchError
from hpcbench.report.plan_view import plan_renderables
from hpcbench.results.results_tree import ClusterTree
from hpcbench.results.schema import ResultSummary
from hpcbench.submit.journal import read_journal
from hpcbench.submit.plan import SweepPlan, make_plan
from hpcbench.submit.run_order import MAX_SLICES, order_seed
from hpcbench.submit.submission_record import next_submission_folder
from hpcbench.submit.submit import render_submission, submit

HEAD = """name = "order"
repeats = {repeats}
[fixed]
model = "resnet18"
dataset = "digits"
strategy = "ddp"
[grid]
{grid}
"""
ONE_SHAPE = "batch_size = [4, 8, 16, 32]"
TWO_SHAPES = f"nodes = [1, 2]\n{ONE_SHAPE}"


@pytest.fixture
def planned(write_sweep: Callable[[str], Sweep], slurm_profile: ClusterProfile, cluster_tree: ClusterTree) -> Any:
    def make(grid: str, more: str = "", repeats: int = 5) -> SweepPlan:
        sweep = write_sweep(HEAD.format(grid=grid, repeats=repeats) + more)
        return make_plan(sweep, slurm_profile, cluster_tree)

    return make


def sent(plan: SweepPlan) -> list[str]:
    return [key for array in plan.arrays(plan.missing) for key in array.run_ids]


def test_without_repeats_runs_are_in_the_order_of_the_sweep(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(ONE_SHAPE, repeats=1)
    assert sent(plan) == list(plan.runs)
    assert plan.order_seed is None


def test_with_repeats_runs_are_shuffled_and_each_is_sent_once(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(ONE_SHAPE)
    order = sent(plan)
    assert order != list(plan.runs)
    assert Counter(order) == Counter(list(plan.runs))
    assert plan.order_seed == order_seed(plan.runs)
    assert sent(planned(ONE_SHAPE)) == order


def test_launches_of_a_configuration_are_spread(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(ONE_SHAPE)
    order = [config_id(plan.runs[key]) for key in sent(plan)]
    assert [len(set(order[first : first + 4])) for first in range(0, 20, 4)] == [4] * 5


def test_the_seed_is_a_key_of_the_sweep(planned: Callable[..., SweepPlan]) -> None:
    orders = {tuple(sent(planned(ONE_SHAPE, f"[submit]\nseed = {seed}\n"))) for seed in range(6)}
    assert len(orders) > 1
    assert planned(ONE_SHAPE, "[submit]\nseed = 3\n").order_seed == 3
    grid = planned(ONE_SHAPE, '[submit]\norder = "grid"\n')
    assert sent(grid) == list(grid.runs)
    assert sent(planned(ONE_SHAPE, '[submit]\norder = "shuffled"\nseed = 1\n', repeats=1)) != list(grid.runs)


@pytest.mark.parametrize("seed", range(5))
def test_runs_that_a_stop_rule_compares_ascend_in_each_part(planned: Callable[..., SweepPlan], seed: int) -> None:
    grid = f"{ONE_SHAPE}\nlearning_rate = [0.1, 0.2, 0.3]"
    plan = planned(grid, f'[stop]\noom = "batch_size"\n[submit]\nseed = {seed}\n')
    order = [plan.runs[key] for key in sent(plan)]
    for first in range(0, len(order), 12):
        for rate in (0.1, 0.2, 0.3):
            sizes = [spec.batch_size for spec in order[first : first + 12] if spec.learning_rate == rate]
            assert sizes == [4, 8, 16, 32]


def test_arrays_of_two_shapes_alternate_in_few_slices(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(TWO_SHAPES)
    nodes = [array.shape.nodes for array in plan.arrays(plan.missing)]
    assert nodes == [1, 2] * MAX_SLICES
    assert Counter(sent(plan)) == Counter(list(plan.runs))
    assert len(plan.jobs(plan.missing)) == 2


def test_packs_stay_whole_in_slices(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(TWO_SHAPES, "[submit]\npack = 3\n")
    arrays = plan.arrays(plan.missing)
    assert sum(array.jobs for array in arrays) == sum(group.jobs for group in plan.jobs(plan.missing)) == 14


def test_render_shows_the_order_that_submit_sends(
    planned: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path
) -> None:
    plan = planned(TWO_SHAPES)
    folder = next_submission_folder(cluster_tree, plan.sweep.name)
    rendered = render_submission(plan, plan.missing, cluster_tree, folder)
    outcome = submit(plan, cluster_tree)
    assert outcome.folder == folder
    assert outcome.record is not None
    assert outcome.record.order_seed == plan.order_seed
    for name, data in rendered.files.items():
        assert (folder / name).read_bytes() == data


def plan_text(plan: SweepPlan) -> str:
    return "\n".join(part.plain for part in plan_renderables(plan) if isinstance(part, Text))


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("pack", [1, 3])
def test_plan_states_once_what_submit_sends(
    planned: Callable[..., SweepPlan], cluster_tree: ClusterTree, fake_slurm: Path, most: int | None, pack: int
) -> None:
    plan = planned(TWO_SHAPES, f"[submit]\npack = {pack}\n")
    scheduler = {"kind": "slurm", "max_array_size": most}
    plan.profile = ClusterProfile.model_validate({"name": "test", "scheduler": scheduler})
    first, *others = plan_text(plan).splitlines()
    submitted = submit(plan, cluster_tree)
    assert submitted.folder is not None
    batches = read_journal(submitted.folder).batches
    assert f"40 to submit as {submitted.sent.jobs} jobs in {len(batches)} arrays, " in first
    assert f"order: shuffled (seed {plan.order_seed})" in others
    assert "arrays" not in "\n".join(others)


def test_plan_of_a_finished_sweep_states_no_jobs_and_no_order(planned: Callable[..., SweepPlan]) -> None:
    plan = planned(ONE_SHAPE)
    plan.heads = {run_id: ResultSummary("ok") for run_id in plan.runs}
    assert plan_text(plan).startswith("order on test: 20 runs, none to submit\n")
    assert "shuffled" not in plan_text(plan)


@pytest.mark.parametrize(
    ("submit_table", "words"),
    [
        ('order = "random"', "shuffled"),
        ('reference = { strategy = "ddp" }', "unknown key 'reference' in [submit]"),
    ],
)
def test_wrong_order_keys_are_refused(planned: Callable[..., SweepPlan], submit_table: str, words: str) -> None:
    with pytest.raises(HpcbenchError) as caught:
        planned(ONE_SHAPE, f"[submit]\n{submit_table}\n")
    problems = caught.value.problems if isinstance(caught.value, ConfigErrors) else [caught.value]
    assert words in "\n".join(map(str, problems))
