"""Generator of synthetic samples for files. Sample ``index`` is the same in every process. Needs numpy, not torch."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

from hpcbench.results.data_folder import SAMPLES_FORMAT_VERSION
from hpcbench.workloads.datasets import DATASETS, sample_shape

GENERATOR_SEED = 0
JPEG_QUALITY = 90
PATTERN_EDGE = 4
PHRASE_LENGTH = 31
NOISE_FRACTION = 0.1
_MEAN_COUNT, _COUNT_STEP = 12.0, 3.0


class SampleGenerator:
    """Samples of one data set at one size: patterns that all samples share, and noise per sample."""

    def __init__(self, dataset: str, size: int) -> None:
        self.dataset, self.size = dataset, size
        self.kind = DATASETS[dataset].kind
        self.outputs = DATASETS[dataset].outputs
        self.shape = sample_shape(dataset, size)
        common = np.random.default_rng([GENERATOR_SEED])
        if self.kind == "tokens":
            self._phrase = common.integers(self.outputs, size=PHRASE_LENGTH, dtype=np.uint16)
        else:
            coarse = (PATTERN_EDGE,) * (len(self.shape) - 1)
            self._patterns = common.standard_normal((self.outputs, self.shape[0], *coarse), dtype=np.float32)

    def parameters(self) -> str:
        """Return a digest of everything that determines the samples."""
        values = (
            *(SAMPLES_FORMAT_VERSION, GENERATOR_SEED),
            *(self.dataset, self.size, self.shape, self.outputs),
            *(JPEG_QUALITY, PATTERN_EDGE, PHRASE_LENGTH, NOISE_FRACTION, _MEAN_COUNT, _COUNT_STEP),
        )
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:12]

    def image(self, index: int) -> tuple[Any, int]:
        """Return pixels [height, width] or [height, width, 3], and the class; pixels are its pattern plus noise."""
        rng = _sample_rng(index)
        label = int(rng.integers(self.outputs))
        channels, height, width = self.shape
        noise = rng.standard_normal((channels, -(-height // 2), -(-width // 2)), dtype=np.float32)
        grown = noise.repeat(2, axis=1).repeat(2, axis=2)[:, :height, :width]
        values = 128 + 40 * (_upsample(self._patterns[label], (height, width)) + grown)
        pixels = np.clip(values, 0, 255).astype(np.uint8)
        return (pixels[0] if channels == 1 else pixels.transpose(1, 2, 0)), label

    def volume(self, index: int) -> tuple[Any, Any]:
        """Return counts [n, n, n, channels] (int16) and the target values, as in CosmoFlow's files."""
        rng = _sample_rng(index)
        values = (rng.random(self.outputs, dtype=np.float32) * 2 - 1).astype(np.float32)
        channels, *extents = self.shape
        counts = np.empty((*extents, channels), dtype=np.int16)
        coarse = np.einsum("v,vcdhw->cdhw", values, self._patterns)
        for channel in range(channels):
            pattern = _upsample(coarse[channel : channel + 1], tuple(extents))[0]
            # Plane by plane, so that a large volume is in memory only once.
            for plane in range(extents[0]):
                noise = rng.standard_normal(tuple(extents[1:]), dtype=np.float32)
                drawn = _MEAN_COUNT + _COUNT_STEP * (noise + pattern[plane])
                counts[plane, ..., channel] = np.clip(drawn, 0, 32_000).astype(np.int16)
        return counts, values

    def tokens(self, number: int, samples: int) -> Any:
        """Return the tokens of ``samples`` samples: a phrase repeated, with some tokens replaced."""
        rng = _sample_rng(number)
        length = samples * self.size + 1
        tokens = np.resize(np.roll(self._phrase, -int(rng.integers(PHRASE_LENGTH))), length)
        is_noise = rng.random(length, dtype=np.float32) < NOISE_FRACTION
        tokens[is_noise] = self._phrase[rng.integers(PHRASE_LENGTH, size=int(is_noise.sum()))]
        return tokens


def _sample_rng(index: int) -> np.random.Generator:
    return np.random.default_rng([GENERATOR_SEED, index + 1])


def _upsample(coarse: Any, extents: tuple[int, ...]) -> Any:
    """Return ``coarse`` [channels, 4, ...] enlarged to ``extents`` by repeating every value."""
    grown = coarse
    for axis, extent in enumerate(extents, start=1):
        grown = grown.take(np.arange(extent) * PATTERN_EDGE // extent, axis=axis)
    return grown
