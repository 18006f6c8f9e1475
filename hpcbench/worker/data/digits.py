"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8, shipped with the package, resident on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcbench.config.spec import RunSpec
from hpcbench.errors import WorkerError
from hpcbench.parallel.datasets import DATASETS
from hpcbench.worker.data.resident import Resident


class Digits(Resident):
    """The first 1,500 images train, the last 297 are held out."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        inputs, labels = _load()
        count = DATASETS[spec.dataset].samples
        train = inputs[:count]
        inputs = (inputs - train.mean()) / train.std()
        super().__init__(spec, device, (inputs[:count], labels[:count]), (inputs[count:], labels[count:]))


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise WorkerError(
            f"dataset digits needs scikit-learn: {error}",
            status="unsupported",
            hint="python -m pip install scikit-learn",
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images.astype("float64")).unsqueeze(1)
    return images, torch.from_numpy(bunch.target.astype("int64"))
