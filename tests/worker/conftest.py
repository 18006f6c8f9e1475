from __future__ import annotations

from pathlib import Path

import pytest

from hpcbench.worker.data.make_samples import make_samples


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small sets of made samples, one of each kind. Tests only read them."""
    folder = tmp_path_factory.mktemp("data")
    for dataset, size, samples in (("cifar10", 16, 300), ("mnist", 8, 12), ("cosmoflow", 8, 12), ("tokens", 16, 40)):
        assert list(make_samples(folder, dataset, size, samples, workers=1))[-1] == samples
    return folder
