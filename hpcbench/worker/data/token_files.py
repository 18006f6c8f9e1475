"""Flat uint16 token files: a sample is a stretch of tokens, its targets are the next tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hpcbench.errors import WorkerError

BYTES_PER_TOKEN = 2


class TokenReader:
    """Sample after sample of ``length`` tokens, file after file; what is left at a file's end is not used.

    ``counts`` are the samples of each file; as many as fit into it without.
    """

    def __init__(
        self, files: Sequence[Path], length: int, vocabulary: int, counts: Sequence[int] | None = None
    ) -> None:
        self.where = str(files[0].parent)
        self._files, self._length, self._vocabulary = files, length, vocabulary
        self._data = [_map_tokens(path) for path in files]
        fitting = [max(0, (len(data) - 1) // length) for data in self._data]
        self._ends = list(accumulate(counts or fitting))
        for path, wanted, there in zip(files, counts or fitting, fitting, strict=True):
            if wanted > there:
                raise WorkerError(f"{path} holds {there} samples of {length} tokens, {wanted} should be there")
        if self._ends[-1] == 0:
            raise WorkerError(
                f"{files[0]} holds {len(self._data[0])} tokens, too few for one sample of {length} and its next token",
                status="unsupported",
                hint="uint16 tokens one after another, without a header",
            )

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int, inputs: Any, target: Any) -> None:
        """See ``loader.Samples``."""
        number = bisect.bisect_right(self._ends, index)
        first = (index - (self._ends[number - 1] if number else 0)) * self._length
        said = self._data[number][first : first + self._length + 1]
        largest = int(said.max())
        if largest >= self._vocabulary:
            raise WorkerError(
                f"{self._files[number]} holds token {largest} near position {first}; the vocabulary has "
                f"{self._vocabulary}",
                hint="uint16 tokens of GPT-2's vocabulary are expected",
            )
        inputs[:] = said[:-1]
        target[:] = said[1:]


def _map_tokens(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size == 0 or size % BYTES_PER_TOKEN:
            raise WorkerError(
                f"{path} has {size} bytes, which are no uint16 tokens", status="unsupported", hint="fetch it again"
            )
        return np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise WorkerError(f"cannot read the tokens {path}: {error.strerror}", status="unsupported") from error
