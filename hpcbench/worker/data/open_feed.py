"""The choice of the feed that serves a run's data set."""

from __future__ import annotations

import torch

from hpcbench.config.run_spec import RunSpec
from hpcbench.worker.data.feed import NO_FILES, DataFeed, DataSource
from hpcbench.worker.data.file_feed import FileFeed
from hpcbench.worker.data.resident_feed import RESIDENT_DATASETS, ResidentFeed
from hpcbench.worker.data.synthetic_feed import SyntheticFeed


def make_feed(spec: RunSpec, device: torch.device, source: DataSource = NO_FILES) -> DataFeed:
    """Create the feed of the run's data set.

    Args:
        spec: The run; ``dataset`` and ``data`` decide the feed.
        device: The device of the batches.
        source: The data folder and the number of reader threads, for data in files.

    Raises:
        WorkerError: ``unsupported`` if the data set's files are missing.
    """
    if spec.dataset == "digits" or (spec.data == "real" and spec.dataset in RESIDENT_DATASETS):
        return ResidentFeed(spec, device, source)
    if spec.data in ("device", "host"):
        return SyntheticFeed(spec, device)
    return FileFeed(spec, device, source)
