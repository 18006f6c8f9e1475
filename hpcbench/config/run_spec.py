"""The specification of one run, its identifiers, and the task file that carries it to the worker.
The sweep's schema, the task file and the result are all derived from ``RunSpec``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hpcbench.errors import WorkerError
from hpcbench.units import MAX_COUNT

SPEC_VERSION = 1
"""Increase it whenever a default below changes, or an unchanged sweep has another run under the same ``run_id``."""

DEGREE_NAMES = ("dp_degree", "tp_degree", "sp_degree", "pp_degree")

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
OptionValue = bool | int | float | str
EnvValue = Annotated[str, Meta(pattern=r"^[^\x00]*$", max_length=100_000)]
NodeName = Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")
EACH_NODE = "each"
"""Value of ``node`` in ``[grid]``: every node of the partition."""
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


CollectiveOperation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "reduce", "send", "pairs"
]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The specification of one run: a point of a sweep whose degrees are filled in.

    The fields are the parameters of a sweep. The product of the four degrees is the number of devices. ``batch_size``
    counts the samples of one replica in a step: ``global_batch_size = batch_size * dp_degree``. ``run_id`` and
    ``config_id`` are hashes of the parameters that differ from their default.

    ``resolve_point`` and decoding raise ``msgspec.ValidationError`` for an unknown field, a wrong type or a value out
    of its bounds; the constructor checks nothing.
    """

    # Every training sets these four. Their defaults are no valid values, so that all four are part of the hash.
    model: Annotated[str, Meta(description="a shipped model (docs/models.md), or module:function of your own")] = ""
    dataset: Annotated[str, Meta(description="what is fed: images, volumes or tokens, see docs/data.md")] = ""
    strategy: Annotated[str, Meta(description="how the run is parallelised")] = ""
    batch_size: Annotated[Count, Meta(description="samples per data-parallel replica and step")] = 0
    spec_version: Literal[1] = 1

    workload: Annotated[
        Literal["training", "command", "collectives"],
        Meta(description="a training of hpcbench, the sweep's [command], or collectives without any training"),
    ] = "training"
    operation: (
        Annotated[
            CollectiveOperation,
            Meta(description="of collectives; send: to and fro between two ranks; pairs: send of each pair of nodes"),
        ]
        | None
    ) = None
    message_bytes: Annotated[Count, Meta(description="size of a collective, counted as nccl-tests does")] | None = None
    group_tasks: (
        Annotated[Count, Meta(description="ranks of each node in one group of collectives; else all")] | None
    ) = None
    parameters: Annotated[dict[str, OptionValue], Meta(description="parameters of the sweep's [command]")] = {}
    command_digest: Annotated[str, Meta(description="hash of [command], 16 hex digits")] = ""

    model_options: Annotated[dict[str, OptionValue], Meta(description="the model's own options")] = {}
    input_size: Annotated[Count, Meta(description="edge length, or tokens; the dataset's own by default")] | None = None
    options: Annotated[dict[str, OptionValue], Meta(description="the strategy's own options")] = {}

    nodes: Annotated[Count, Meta(description="nodes of the job")] = 1
    tasks_per_node: Annotated[Count, Meta(description="ranks on each node")] = 1
    devices_per_task: Annotated[Count, Meta(description="devices that one rank drives")] = 1
    micro_batches: Annotated[Count, Meta(description="parts that batch_size is cut into")] = 1
    dp_degree: Annotated[Count, Meta(description="data-parallel replicas")] = 1
    tp_degree: Annotated[Count, Meta(description="ranks that share a layer's channels")] = 1
    sp_degree: Annotated[Count, Meta(description="ranks that share a sample's extent (spatial)")] = 1
    pp_degree: Annotated[Count, Meta(description="pipeline stages")] = 1

    precision: Annotated[
        Literal["fp64", "fp32", "tf32", "bf16", "fp16", "bf16_params"],
        Meta(description="arithmetic of forward and backward; bf16_params: weights too, with fp32 master weights"),
    ] = "fp32"
    compile: Annotated[bool, Meta(description="torch.compile the model")] = False
    activation_checkpointing: Annotated[bool, Meta(description="recompute activations in the backward pass")] = False
    channels_last: Annotated[bool, Meta(description="memory format of images and convolutions")] = False
    cudnn_benchmark: Annotated[
        bool, Meta(description="cuDNN tries its algorithms and keeps the fastest; cuda only")
    ] = True
    optimizer: Annotated[Literal["sgd", "adam", "adamw"], Meta(description="who updates the weights")] = "sgd"
    learning_rate: Annotated[float, Meta(ge=0, description="constant over the run")] = 0.01
    momentum: Annotated[float, Meta(ge=0, lt=1, description="of sgd")] = 0.9
    weight_decay: Annotated[float, Meta(ge=0, description="L2 penalty")] = 0.0
    warmup_steps: Annotated[CountOrZero, Meta(description="steps before the timed ones")] = 5
    steps: Annotated[Count, Meta(description="timed steps")] = 20
    profile_steps: Annotated[CountOrZero, Meta(description="steps after the timed ones that are split by phase")] = 3
    drop_last: Annotated[bool, Meta(description="leave out the partial batch at the end of an epoch")] = False
    data: Annotated[
        Literal["device", "host", "files", "real"],
        Meta(description="synthetic: on the device, copied from the host each step, in files; real: its own files"),
    ] = "device"
    evaluate_every: Annotated[CountOrZero, Meta(description="steps between evaluations; 0 is at the end only")] = 0
    target_accuracy: Annotated[float, Meta(gt=0, le=1, description="measure the time until it is reached")] | None = (
        None
    )
    verify: Annotated[bool, Meta(description="also train the single-device reference and compare")] = False
    seed: Annotated[int, Meta(ge=0, le=2**62, description="of weights and data; a repeat adds its number")] = 0
    repeat: Annotated[CountOrZero, Meta(description="which launch of the same configuration")] = 0

    time_limit_min: Annotated[float, Meta(gt=0, description="limit of one launch")] | None = None
    partition: Annotated[str, Meta(description="a partition of the profile; its default otherwise")] | None = None
    node: Annotated[str, NodeName, Meta(description="the node that a run of one node is for")] | None = None
    environment: Annotated[str, Meta(description="an environment named in the profile")] | None = None
    env: Annotated[dict[EnvName, EnvValue], Meta(description="variables set for the ranks")] = {}

    @property
    def ranks(self) -> int:
        """Processes of the run, ``world_size`` in torch's words."""
        return self.nodes * self.tasks_per_node

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node: a process of a command starts those of its devices itself."""
        return self.tasks_per_node * (self.devices_per_task if self.workload == "command" else 1)

    @property
    def devices(self) -> int:
        """Devices of the run: the product of all degrees."""
        return self.ranks * self.devices_per_task

    @property
    def compute_precision(self) -> str:
        """Precision of products, by which devices' peaks and measured kernels are listed."""
        return "bf16" if self.precision == "bf16_params" else self.precision

    @property
    def global_batch_size(self) -> int:
        """Samples of one step over all replicas."""
        return self.batch_size * self.dp_degree


def strategy_label(spec: RunSpec) -> str:
    """The strategy, of a hybrid with its degrees: ``filter dp2 tp4``."""
    degrees = [
        f"{name.removesuffix('_degree')}{getattr(spec, name)}" for name in DEGREE_NAMES if getattr(spec, name) > 1
    ]
    return " ".join([spec.strategy, *degrees]) if len(degrees) > 1 else spec.strategy


def run_label(spec: RunSpec) -> str:
    """A run in a few words: ``ddp on 2 ranks, resnet18, batch 16``."""
    repeat = f", repeat {spec.repeat}" if spec.repeat else ""
    ranks = f"{spec.ranks} rank" + ("s" if spec.ranks > 1 else "")
    if spec.workload == "collectives":
        return f"{spec.operation or 'messages'} of {spec.message_bytes or 'several'} bytes on {ranks}{repeat}"
    if spec.workload == "command":
        ranks = f"{spec.devices} device" + ("s" if spec.devices > 1 else "")
        # Paths would hide the other values.
        texts = {name: str(value) or "''" for name, value in spec.parameters.items()}
        words = "".join(f", {name} {text}" for name, text in texts.items() if "/" not in text)
        return f"{spec.strategy} on {ranks}{words}{repeat}"
    return f"{strategy_label(spec)} on {ranks}, {spec.model}, batch {spec.batch_size}{repeat}"


_EXCLUDED_FROM_RUN_ID = frozenset({"time_limit_min"})
LAUNCH_PARAMETERS = _EXCLUDED_FROM_RUN_ID | {"repeat", "seed", "verify"}
"""Parameters that launches of one configuration may differ in."""


def spec_document(spec: RunSpec) -> dict[str, Any]:
    """Return ``spec`` as plain data with its version, without parameters at their default."""
    # msgspec leaves out the default object itself, not an equal value such as a text that was read from a file.
    defaults = PARAMETER_DEFAULTS.items()
    changed = {name: value for name, value in msgspec.to_builtins(spec).items() if (name, value) not in defaults}
    return {"spec_version": SPEC_VERSION, **changed}


PARAMETER_DEFAULTS = {
    field.name: field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(RunSpec)
    if not field.required
}
"""Default of every parameter that has one; it must not be changed in place."""


def run_id(spec: RunSpec) -> str:
    """Return the 16 hex digits of a run.

    Parameters at their default are left out, so that a new parameter changes no existing ``run_id``.
    """
    return _hash_values(spec_document(spec), _EXCLUDED_FROM_RUN_ID)


def config_id(spec: RunSpec) -> str:
    """Return the hash of ``run_id`` without repeat, seed and verify: equal for launches of one configuration."""
    return _hash_values(spec_document(spec), LAUNCH_PARAMETERS)


def _hash_values(values: dict[str, Any], without: frozenset[str]) -> str:
    for key in without:
        values.pop(key, None)
    return hashlib.sha256(sorted_json(values).encode()).hexdigest()[:16]


def sorted_json(value: Any) -> str:
    """Return the one text of ``value``: equal values have equal texts."""
    return msgspec.json.encode(value, order="deterministic").decode()


class TaskFileHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The values that all runs of one task file share."""

    task_version: int = 1
    cluster: str
    device: str
    """``cpu`` or ``cuda``."""
    tree: str
    """Absolute path of ``results/<cluster>``."""
    submission: str
    interface: str | None = None
    """Network interface of the rendezvous and of gloo; found by the worker where absent."""
    host_suffix: str = ""
    """Appended to rank 0's host name (JUWELS' ``i``)."""
    meet_by_host_name: bool = False
    """The other ranks connect to the address of rank 0's host name, not to that of ``interface``."""
    wait_s: float = 300.0
    """Seconds that a rank waits for the other ranks before the run fails."""
    warning_s: float | None = None
    """Time before the limit of the job at which the scheduler sends SIGUSR2."""
    data_folder: str | None = None
    """Folder of the sample files; ``~`` and variables are the job's."""
    peak_flops_per_s: dict[str, float] = {}
    """Peak FLOP/s of one device, by precision; empty if the profile does not set it."""
    cores_per_task: int | None = None
    ranks_per_device: int = 1
    """Ranks that share a device; runs of several ranks then have no times."""
    pack: int = 1
    """Consecutive runs that one job carries, one after another."""
    environment_key: str | None = None
    """Hash of the jobs' software as the submitter sees it; the results contain it, so that a change is visible."""
    model_folder: str | None = None
    """Absolute path of the folder that users' own models are in."""
    scrubbed: list[str] = []
    """Names of the submitter's variables that were kept from the job."""
    command: dict[str, Any] = {}
    """The sweep's ``Command`` as plain data; empty for trainings."""


class RunTask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run of a task file."""

    run_id: str
    config_id: str
    sweep: str
    spec: RunSpec
    time_limit_s: float
    stop_groups: list[int] = []
    """Lines (from 0) of ``stop.jsonl`` beside the task file: a run is skipped where a smaller one there ended so."""
    supersedes: str | None = None
    """The ``environment_key`` whose ok result this run is to replace; that one is kept in the archive."""


def encode_task_file(header: TaskFileHeader, tasks: list[RunTask]) -> bytes:
    """The bytes of a task file."""
    encoder = msgspec.json.Encoder()
    return b"".join(encoder.encode(line) + b"\n" for line in (header, *tasks))


def read_task(path: Path, index: int) -> tuple[TaskFileHeader, RunTask]:
    """The header and the run number ``index`` (from 0) of a task file.

    Raises ``WorkerError`` where the file is absent, cut short, or not a task file.
    """
    try:
        with open(path, "rb") as file:
            header = msgspec.json.decode(file.readline(), type=TaskFileHeader)
            for number, line in enumerate(file):
                if number == index:
                    return header, msgspec.json.decode(line, type=RunTask)
    except OSError as error:
        raise WorkerError(f"cannot read the task file {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WorkerError(f"{path} is not a task file of this version of hpcbench: {error}") from error
    raise WorkerError(f"{path} has no run number {index}")


def read_tasks(path: Path) -> list[RunTask]:
    """All runs of a task file; raises as ``read_task``."""
    try:
        lines = path.read_bytes().splitlines()
        msgspec.json.decode(lines[0] if lines else b"", type=TaskFileHeader)
        return [msgspec.json.decode(line, type=RunTask) for line in lines[1:]]
    except OSError as error:
        raise WorkerError(f"cannot read the task file {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WorkerError(f"{path} is not a task file of this version of hpcbench: {error}") from error


def max_job_minutes(
    nodes: int, max_time_min: float | None, steps: Sequence[tuple[int, float]] = (), max_node_hours: float | None = None
) -> float | None:
    """The longest that a job of ``nodes`` may take, in minutes; ``None`` where nothing limits it.

    ``steps`` are pairs of a largest number of nodes and the minutes that jobs up to it may take.
    """
    limits = [] if max_time_min is None else [max_time_min]
    limits += [minutes for most, minutes in sorted(steps) if nodes <= most][:1]
    if max_node_hours is not None:
        limits.append(max_node_hours * 60 / nodes)
    return min(limits, default=None)
