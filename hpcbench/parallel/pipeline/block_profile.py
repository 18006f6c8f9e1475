"""The file format of a block profile: the measured forward and backward time of every block of a model on one
device."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

import hpcbench
from hpcbench.errors import ConfigError
from hpcbench.parallel.layer_table import ModelResponse
from hpcbench.parallel.pipeline.stage_partition import BlockCost
from hpcbench.parallel.workloads import custom_model_file, is_custom_model

BLOCK_PROFILE_VERSION = 1
"""Raised when a field's meaning changes: what an older version has cached is then measured anew."""


class BlockProfileRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which model is measured, on what. ``input_size`` is the data set's own where absent."""

    model: str
    dataset: str
    micro_batch_size: Annotated[int, Meta(ge=1)]
    input_size: int | None = None
    model_options: dict[str, Any] = {}
    model_folder: str | None = None
    """Absolute path of the folder that a user's own model is in."""
    precision: str = "fp32"
    channels_last: bool = False
    device: str = "cpu"


class MeasuredBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One block with a whole micro-batch; times are medians, with the middle half's width beside them."""

    name: str
    forward_s: float
    forward_iqr_s: float
    backward_s: float
    backward_iqr_s: float
    output_bytes: int
    parameter_bytes: int
    """Tied parameters count with the first block that uses them."""
    kept_bytes: int
    """Bytes that autograd keeps for the backward pass, each storage once; no parameters, no buffers."""


class BlockProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's blocks in order; the loss belongs to the last one."""

    version: int = BLOCK_PROFILE_VERSION
    request: BlockProfileRequest
    device_name: str
    torch: str
    threads: int
    """Threads of torch on a cpu."""
    blocks: list[MeasuredBlock]

    def chain(self) -> list[BlockCost]:
        """Return the blocks' costs, for ``stage_partition``."""
        return [BlockCost(*(getattr(block, field) for field in BlockCost._fields)) for block in self.blocks]


class BlockProfileResponse(ModelResponse, frozen=True, kw_only=True, omit_defaults=True):
    """The output of the worker's module: the measured chain, or why there is none."""

    chain: BlockProfile | None = None


def block_profile_digest(request: BlockProfileRequest, device_name: str, torch: str, threads: int) -> str:
    """Return a digest of all that a measurement depends on; of a user's own model the text of its file too."""
    source = None
    if request.model_folder is not None and is_custom_model(request.model):
        path = custom_model_file(request.model, Path(request.model_folder))
        source = hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None
    known = [request, device_name, torch, threads, hpcbench.__version__, BLOCK_PROFILE_VERSION, source]
    return hashlib.sha256(msgspec.json.encode(known, order="deterministic")).hexdigest()[:32]


def decode_block_profile(data: bytes, where: str) -> BlockProfile:
    """``data`` as a measured chain; ``ConfigError`` where it is none of this version."""
    try:
        chain = msgspec.json.decode(data, type=BlockProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"no measured chain of blocks: {error}", where=where) from error
    if chain.version != BLOCK_PROFILE_VERSION:
        raise ConfigError(f"a measured chain of version {chain.version}, not {BLOCK_PROFILE_VERSION}", where=where)
    return chain
