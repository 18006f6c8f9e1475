"""The exceptions that users see, their exit codes, and the hint that names the nearest valid choice.
Any other exception is a bug of hpcbench and keeps its traceback."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

EXIT_OK = 0
EXIT_RUNS_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_SYSTEM_REFUSED = 3
EXIT_NOTHING_TO_DO = 10
"""Exit code of the worker's ``begin`` where the run needs no attempt."""
EXIT_PREEMPTED = 11
"""Exit code of the worker's ``end`` where the job is being preempted and the run is to be run again."""


INSTALL_REPORT = "pip install altair scipy vl-convert-python xlsxwriter"
"""Installs what plots as files and Excel files need: packages, never the distribution."""
INSTALL_WORKER = "pip install torch torchvision scikit-learn numpy pillow h5py nvidia-ml-py msgspec psutil"
"""Installs what a rank needs."""


class HpcbenchError(Exception):
    """An error with its place (``file:line`` or a path) and a hint that mends it.

    ``exit_code`` is 2 if the user's input is wrong, and 3 if the scheduler or the file system refused.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  {self.hint}" if self.hint else text


class ConfigError(HpcbenchError):
    """A TOML file, a name or an option that the user gave is wrong."""


class ConfigErrors(HpcbenchError):
    """All errors of an input together, so that a user can correct them at once."""

    def __init__(self, problems: Sequence[HpcbenchError]) -> None:
        assert problems, "an empty list of problems is not an error"
        # An axis has a problem once, however many values it has.
        self.problems = list({str(problem): problem for problem in problems}.values())
        super().__init__("\n".join(map(str, self.problems)))


class RenderError(HpcbenchError):
    """A template is missing, wrong, or names a variable that does not exist."""


class SubmitError(HpcbenchError):
    """The scheduler is absent or refused."""

    exit_code = EXIT_SYSTEM_REFUSED


class StorageError(HpcbenchError):
    """The file system refused: a folder that cannot be written, a foreign lock that does not end."""

    exit_code = EXIT_SYSTEM_REFUSED
    errno: int | None = None
    """The system's number of the error, if it came from a system call."""


class WorkerError(HpcbenchError):
    """A run cannot go on; ``status`` is the status of its result."""

    def __init__(self, message: str, *, status: str = "failed", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.log_tail = ""
        """The last lines of a program that failed, instead of a traceback."""


def unsupported(message: str, hint: str | None = None) -> WorkerError:
    """Return the error of a run that is impossible with this machine's devices, packages or files."""
    return WorkerError(message, status="unsupported", hint=hint)


_KEYS_OF_OTHER_TOOLS = {
    "pipeline_stages": "pp_degree", "num_stages": "pp_degree", "stages": "pp_degree", "pp": "pp_degree",
    "tp": "tp_degree", "tensor_parallel_size": "tp_degree", "dp": "dp_degree", "sp": "sp_degree",
    "world_size": "tasks_per_node", "gpus": "tasks_per_node", "lr": "learning_rate",
    "micro_batch_size": "micro_batches", "gradient_accumulation_steps": "micro_batches", "epochs": "steps",
    "sbatch": "directives", "queues": "partitions",
}  # fmt: skip
"""Keys of a sweep or a profile by their names in other tools."""
_MAX_LISTED = 30
"""A hint that names a near choice leaves out a longer list of choices."""


@runtime_checkable
class HasOtherNames(Protocol):
    """A choice that has other names in other tools."""

    other_names: tuple[str, ...]


def did_you_mean(wrong: str, choices: Iterable[str]) -> str:
    """A hint that names the nearest choice, if one is near, and then all of them unless they are many.

    Where ``choices`` is a mapping, a choice whose value has ``wrong`` among its ``other_names`` is near, too.
    """
    ordered = sorted(choices)
    other = wrong.lower()
    entries = choices.items() if isinstance(choices, Mapping) else ()
    named = [name for name, entry in entries if isinstance(entry, HasOtherNames) and other in entry.other_names]
    same = [theirs for theirs, ours in _KEYS_OF_OTHER_TOOLS.items() if ours == other]
    near = [name for name in (_KEYS_OF_OTHER_TOOLS.get(other), *same, *named) if name in ordered]
    near = near or difflib.get_close_matches(wrong, ordered, n=1)
    if near and len(ordered) > _MAX_LISTED:
        return f"did you mean {near[0]!r}?"
    listed = f"choices: {', '.join(ordered)}" if ordered else "there are none to choose from"
    if len(ordered) > _MAX_LISTED:
        listed = textwrap.fill(listed, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return f"did you mean {near[0]!r}? {listed}" if near else listed
