"""Real ranks that take their samples from the device, from the host, and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.config.run_spec import run_id
from hpcbench.worker.data.feed import DataSource
from hpcbench.worker.data.make_samples import make_samples
from tests.distributed.cases import Case, run_reference
from tests.distributed.launching import Launch
from tests.distributed.pool import Pool
from tests.worker.helpers import make_spec, tree_of, write_tasks

pytestmark = pytest.mark.slow

SAMPLES = 12
"""The epoch ends, with a partial batch, within the steps of a case; the pool is smaller still."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    list(make_samples(made, "mnist", 28, 13, workers=1))
    return made


def test_two_ranks_compute_the_same_from_the_device_and_from_the_host(pool: Pool, folder: Path) -> None:
    losses = {}
    for data in ("device", "host", "files"):
        spec = make_spec(
            dataset="mnist", strategy="ddp", tasks_per_node=2, dp_degree=2, batch_size=4, data=data, precision="fp64"
        )
        case = Case(spec, SAMPLES, steps=3, source=DataSource(folder, 1), narrow=True)
        parts = pool.run(case)
        losses[data] = parts[0].trained.losses
        assert [sum(step) for step in zip(*(rank.counts for rank in parts), strict=True)] == [8, 4, 8]
        assert losses[data] == pytest.approx(run_reference(case).losses, rel=1e-9), (
            "one process reads what all ranks read"
        )
    assert losses["device"] == losses["host"]
    assert losses["files"] != losses["device"]


def test_the_provenance_of_a_run_states_its_sample_files(tmp_path: Path, folder: Path) -> None:
    spec = make_spec(dataset="mnist", strategy="ddp", tasks_per_node=2, dp_degree=2, steps=2, data="files")
    launch = Launch(tmp_path, forks=True)
    assert launch.by_hand(2, write_tasks(tmp_path, spec, data_folder=str(folder))).wait() == [0, 0], launch.logs()
    result = tree_of(tmp_path).read_result(run_id(spec))
    assert result is not None
    assert result.provenance["data"] == {
        "kind": "synthetic", "storage": "files", "epoch_samples": 60_000, "distinct_samples": 13,
        "data_folder": str(folder), "loader_workers": 1,
    }  # fmt: skip


def test_a_run_without_its_files_is_unsupported_with_the_command_that_makes_them(tmp_path: Path) -> None:
    spec = make_spec(dataset="mnist", data="files")
    tasks = write_tasks(tmp_path, spec, data_folder="$NOT_SET_ANYWHERE/data")
    launch = Launch(tmp_path, forks=True)
    assert launch.lone(tasks).wait() == [1], launch.logs()
    result = tree_of(tmp_path).read_result(run_id(spec))
    assert result is not None
    assert result.status == "unsupported"
    assert result.error is not None
    assert result.error.hint == "hpcbench data make mnist --folder '$NOT_SET_ANYWHERE/data'"
