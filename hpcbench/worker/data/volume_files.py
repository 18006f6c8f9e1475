"""CosmoFlow's HDF5 files: ``full`` [n, n, n, channels] holds matter counts, ``unitPar`` the target values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcbench.errors import WorkerError


class VolumeReader:
    """Each file is one sample, or with ``cut`` as many cubes of the samples' size as fit into it.

    The logarithm of the counts is taken (as MLPerf's ``apply_log``), and channels come first.
    """

    def __init__(self, files: Sequence[Path], shape: tuple[int, ...], values: int, cut: bool = False) -> None:
        self.where = str(files[0].parent)
        self._files, self._shape, self._values = files, shape, values
        extent = self._extent(files[0]) if cut else shape[-1]
        self._per_edge = extent // shape[-1]
        if self._per_edge == 0:
            raise WorkerError(
                f"{files[0]} holds a volume of {extent}^3, too small for samples of {shape[-1]}^3",
                status="unsupported",
                hint=f"an input_size of {extent} or less",
            )

    def __len__(self) -> int:
        return len(self._files) * self._per_edge**3

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """See ``loader.Samples``."""
        number, cube = divmod(index, self._per_edge**3)
        path = self._files[number]
        size, channels = self._shape[-1], self._shape[0]
        across = (cube // self._per_edge**2, cube // self._per_edge % self._per_edge, cube % self._per_edge)
        region = tuple(slice(place * size, (place + 1) * size) for place in across)
        try:
            with h5py.File(path, "r") as file:
                full, wanted = file["full"], file["unitPar"]
                _check_volume(path, full, channels, self._per_edge * size)
                counts = _read_contiguous(path, full) if self._per_edge == 1 else None
                if counts is None:
                    counts = full[region]
                values = wanted[: self._values]
        except (OSError, KeyError, RuntimeError) as error:
            raise WorkerError(
                f"cannot read the volume {path}: {error}", hint="fetch or make this file again"
            ) from error
        if values.shape != target.shape:
            raise WorkerError(f"{path} has {values.shape} values in unitPar, {target.shape} are wanted")
        # Channel by channel: the whole volume is never in memory twice as floating point.
        for channel in range(channels):
            np.log1p(counts[..., channel], out=inputs[channel], dtype=np.float32, casting="unsafe")
        target[:] = values

    @staticmethod
    def _extent(path: Path) -> int:
        try:
            with h5py.File(path, "r") as file:
                return int(file["full"].shape[0])
        except (OSError, KeyError, IndexError) as error:
            raise WorkerError(
                f"cannot read the volume {path}: {error}",
                status="unsupported",
                hint="HDF5 with full [n, n, n, 4] and unitPar [4] is expected",
            ) from error


def _check_volume(path: Path, full: Any, channels: int, extent: int) -> None:
    shape = tuple(full.shape)
    if len(shape) != 4 or shape[3] != channels or min(shape[:3]) < extent:
        raise WorkerError(
            f"{path} holds a volume of {' x '.join(str(edge) for edge in shape)}; "
            f"{extent} x {extent} x {extent} x {channels} is wanted"
        )


def _read_contiguous(path: Path, full: Any) -> Any:
    """The whole of a dataset that lies in one piece, read past the library, which lets one thread in at a time."""
    offset = full.id.get_offset()
    if offset is None or full.chunks is not None or full.compression is not None:
        return None
    with open(path, "rb") as file:
        counts = np.fromfile(file, dtype=full.dtype, count=full.size, offset=offset)
    if counts.size != full.size:
        raise OSError(f"it ends after {counts.size} of {full.size} numbers")
    return counts.reshape(full.shape)
