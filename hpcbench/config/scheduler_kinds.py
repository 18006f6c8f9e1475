"""The kinds of schedulers: what profiles, job scripts and predictions read about each.

A package of a third party adds a kind by an entry point of the group ``hpcbench.schedulers``. Its name is the kind; its
value is a module with ``KIND``, a ``SchedulerKind``, and ``SCHEDULER``, a subclass of
``hpcbench.submit.scheduler.Scheduler``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tomli

from hpcbench.errors import ConfigError
from hpcbench.plugins import load_plugin, plugin_modules

GROUP = "hpcbench.schedulers"
MakeDirectives: TypeAlias = Callable[..., Sequence[tuple[str, str | int | bool]]]
"""Returns the directives of a job script, called as ``render.job_script.sbatch_directives``."""


class SchedulerKind(NamedTuple):
    """The properties of a kind of scheduler."""

    runs_here: bool = False
    """Whether jobs run on this machine, which then is the only node."""
    is_slurm: bool = False
    """Whether sbatch, srun, squeue and scontrol belong to it."""
    directives: MakeDirectives | None = None
    """``None``: those that ``render.job_script`` has for the kind, if any."""
    directive_form: tuple[str, str] = ("#SBATCH --", "=")
    """Text before the name of a directive, and between name and value."""
    submit_command: str | None = None
    """Command by which the user submits rendered scripts, if hpcbench does not."""
    note: str = "its commands are not checked"
    """A text that ``doctor`` reports."""


_DIRECTIVES = tomli.loads(Path(__file__).with_name("directives.toml").read_text(encoding="utf-8"))
WRITTEN_DIRECTIVES: dict[str, dict[str, str | bool]] = _DIRECTIVES["written"]
"""The directives that hpcbench writes, by kind of scheduler."""
SAME_REQUEST: dict[str, str] = _DIRECTIVES["same_request"]
"""Options of sbatch, each with the directive of hpcbench that it contradicts."""
_SBATCH_WORDS: dict[str, str] = _DIRECTIVES["sbatch"]["words"]
_SBATCH_WORDS |= {name: name for name in (*_DIRECTIVES["sbatch"]["options"], *_SBATCH_WORDS.values())}


def directive_name(name: str, kind: str) -> str:
    """Return the spelling of the directive that ``name`` of a profile stands for; empty where it stands for none.

    Sites add options to sbatch by plug-ins: a word that resembles none of sbatch's own is one of those.
    """
    word = re.sub(r"^#\w*\s*", "", name).strip().lstrip("-").partition("=")[0].strip()
    if kind == "slurm":
        hyphened = word.lower().replace("_", "-")
        near = [word, hyphened, *difflib.get_close_matches(hyphened, _SBATCH_WORDS, n=1, cutoff=0.85)]
        word = next((_SBATCH_WORDS[each] for each in near if each in _SBATCH_WORDS), word)
    return word if re.fullmatch(r"[A-Za-z][\w.-]+" if kind == "slurm" else "[A-Za-z]", word, re.ASCII) else ""


SHIPPED_KINDS = {
    "slurm": SchedulerKind(is_slurm=True),
    "local": SchedulerKind(runs_here=True, note="none: jobs run on this machine"),
    "pbs": SchedulerKind(
        directive_form=("#PBS -", " "), submit_command="qsub", note="PBS: render writes jobs for qsub"
    ),
    "none": SchedulerKind(note="none: predictions alone"),
}


def load_scheduler_plugin(kind: str) -> Any:
    """Import the module of a third party's ``kind``; ``None`` where no installed package has it."""
    module = plugin_modules(GROUP).get(kind)
    return None if module is None else load_plugin(GROUP, module)


def scheduler_kind(kind: str) -> SchedulerKind:
    """Return the properties of ``scheduler.kind`` of a profile, which was checked by ``check_scheduler_kind``."""
    if kind in SHIPPED_KINDS:
        return SHIPPED_KINDS[kind]
    properties = getattr(load_scheduler_plugin(kind), "KIND", None)
    if not isinstance(properties, SchedulerKind):
        reason = f"the plug-in {plugin_modules(GROUP).get(kind)} of {GROUP}: KIND is not a SchedulerKind"
        raise ConfigError(reason, hint="update it, or uninstall its package")
    return properties


def check_scheduler_kind(kind: object) -> object:
    """Return ``kind``; ``ValueError`` with the valid ones where it is neither shipped nor a third party's."""
    if taken := sorted(SHIPPED_KINDS.keys() & plugin_modules(GROUP).keys()):
        raise ValueError(f"the package of {plugin_modules(GROUP)[taken[0]]} adds {taken[0]!r}, which is hpcbench's own")
    kinds = [*SHIPPED_KINDS, *sorted(plugin_modules(GROUP))]
    if isinstance(kind, str) and kind in kinds:
        return kind
    raise ValueError(f"input should be {', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}, not {kind!r:.80}")
