"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8, shipped with the package, resident on the device."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.resident import Resident
from hpcbench.worker.failure import install_hint


class Digits(Resident):
    """The first 1,500 images train, the last 297 are held out."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        inputs, labels = _load()
        count = DATASETS[spec.dataset].samples
        train = inputs[:count]
        inputs = (inputs - train.mean()) / train.std()
        super().__init__(spec, device, (inputs[:count], labels[:count]), (inputs[count:], labels[count:]))


def _load() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] and labels [1797]: a line of the package's file is 64 pixels and the digit.

    Not ``load_digits``: with it comes scipy, which takes every rank a second of start-up and a file system a thousand
    files.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise WorkerError(
            "dataset digits needs scikit-learn, and this python has none",
            status="unsupported",
            hint=install_hint("sklearn"),
        )
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise WorkerError(
            f"dataset digits: this scikit-learn has no {path}: {error}",
            status="unsupported",
            hint="python -m pip install --upgrade scikit-learn",
        ) from error
    numbers = bytearray(map(int, text.replace("\n", ",").rstrip(",").split(",")))
    rows = torch.frombuffer(numbers, dtype=torch.uint8).view(-1, 65)
    return rows[:, :-1].double().reshape(-1, 1, 8, 8), rows[:, -1].long()
