"""One job script: its #SBATCH or #PBS directives, the variables of its template, and the rendering of ``job.sh.j2``."""

from __future__ import annotations

import math
import re
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import hpcbench
from hpcbench.config.cluster_profile import ClusterProfile
from hpcbench.config.profile_tables import EnvironmentConfig, NodeConfig, ResourceRequest
from hpcbench.config.scheduler_kinds import MakeDirectives
from hpcbench.errors import EXIT_NOTHING_TO_DO, EXIT_PREEMPTED, RenderError, did_you_mean
from hpcbench.fileio import printable_text
from hpcbench.paths import search_folders
from hpcbench.render import launch_step
from hpcbench.units import format_slurm_time

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f]")


class TemplateEngine:
    """Renders templates; those of the project and of the user's folder override the shipped ones by name."""

    def __init__(self, folders: list[Path] | None = None) -> None:
        self.folders = search_folders("templates") if folders is None else folders
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in self.folders]),
            undefined=jinja2.StrictUndefined,
            autoescape=True,
            finalize=_quote_shell_word,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters.update(
            raw=Markup,
            directive=_quote_directive,
            variable=_check_variable_name,
            comment=_comment_text,
            expandable=_quote_expandable,
        )

    def render(self, name: str, context: dict[str, Any]) -> str:
        """The text of the template ``name``. Raises ``RenderError`` with the template's file and line."""
        try:
            return self._environment.get_template(name).render(context)
        except jinja2.TemplateSyntaxError as error:
            raise RenderError(f"{error.message}", where=f"{error.filename or error.name}:{error.lineno}") from error
        except jinja2.UndefinedError as error:
            match = re.match(r"'(\w+)' is undefined", str(error.message))
            hint = did_you_mean(match[1], context) if match else None
            raise RenderError(str(error.message), where=self._where(error), hint=hint) from error
        except jinja2.TemplateNotFound as error:
            folders = ", ".join(str(folder) for folder in self.folders)
            raise RenderError(f"no template {error.name!r} in {folders or 'any folder'}") from error
        except (TypeError, ValueError) as error:
            raise RenderError(str(error), where=self._where(error)) from error

    def _where(self, error: Exception) -> str | None:
        """The innermost line of a template that the error passed through."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if any(Path(frame.filename).is_relative_to(folder) for folder in self.folders):
                return f"{frame.filename}:{frame.lineno}"
        return None


def _quote_shell_word(value: Any) -> Any:
    """Return the text of ``{{ value }}``: one shell word, unless a filter or a block has made it text of a script."""
    if isinstance(value, (Markup, jinja2.Undefined)):
        return value
    text = str(value)
    if "\x00" in text:
        raise ValueError(f"{text!r} holds a NUL, which no shell word can")
    return Markup(shlex.quote(text))  # noqa: S704 - quoted for the shell; no HTML is made here


def _quote_directive(value: Any) -> Markup:
    """A name or a value on an #SBATCH line, which sbatch reads with quotes of its own but never over a line's end."""
    text = str(value)
    if _CONTROL_CHARACTERS.search(text):
        raise ValueError(f"{printable_text(text)!r} cannot stand in an #SBATCH line: it holds a control character")
    return Markup(shlex.quote(text))  # noqa: S704


def _check_variable_name(value: Any) -> Markup:
    """The name of an environment variable."""
    if not _VARIABLE_NAME.fullmatch(str(value)):
        raise ValueError(f"{printable_text(str(value))!r} is no name of an environment variable")
    return Markup(str(value))  # noqa: S704


def _quote_expandable(value: Any) -> Markup:
    """A path as one word in which ``$VARIABLES`` are the job's; nothing else in it means anything to the shell."""
    text = str(value)
    parts = re.split(r"(\$[A-Za-z_][A-Za-z0-9_]*)", text)
    return Markup("".join(f'"{part}"' if part.startswith("$") else shlex.quote(part) for part in parts if part))  # noqa: S704


def _comment_text(value: Any) -> Markup:
    """Text within a comment: on one line, whatever it holds."""
    return Markup(_CONTROL_CHARACTERS.sub(" ", printable_text(str(value))))  # noqa: S704


DirectiveValue = str | int | bool


def sbatch_directives(
    shape: launch_step.JobShape, profile: ClusterProfile, job_name: str, folder: str, number: int, pack: int = 1,
    _runs: int = 1,
) -> list[tuple[str, DirectiveValue]]:  # fmt: skip
    """Names and values of the #SBATCH lines; ``True`` is a flag without a value.

    ``folder`` is the submission's: jobs run there, and the script's output goes to ``<number>.<job>.<task>.log``.
    """
    partition = profile.partition(shape.partition)
    node, request = profile.node_of(shape.partition), profile.request_of(shape.partition)
    warning_s = profile.scheduler.warning_s
    # SLURM replaces what follows a percent sign in the names of logs.
    log = f"{folder.replace('%', '%%')}/{number}.%A.%a.log"
    lines: dict[str, DirectiveValue | list[str] | None] = {
        "job-name": job_name,
        "comment": job_name,
        "partition": (partition.name or shape.partition) if shape.partition else None,
        "account": profile.account,
        "qos": partition.qos,
        "constraint": partition.constraint,
        "nodes": shape.nodes,
        "ntasks-per-node": shape.tasks_per_node,
        "cpus-per-task": launch_step.cpus_per_task(shape, profile),
        **(launch_step.gpu_option(shape, request, profile) if request.gpus_on != "step" else {}),
        "mem": _requested_memory(request, node),
        "exclusive": request.exclusive or None,
        "exclude": ",".join(request.exclude_nodes) or None,
        "time": format_slurm_time(launch_step.job_time_limit_s(shape, pack)),
        # A job's ranks are told this long before its limit. In a pack each run watches a limit of its own.
        "signal": f"USR2@{math.ceil(warning_s if pack == 1 else min(warning_s, launch_step.LAUNCH_OVERHEAD_S))}",
        "open-mode": "append",
        "chdir": folder,
        "output": log,
        "error": log,
    }
    lines.update(launch_step.container_directives(profile.environment(shape.environment).container))
    return _merged_directives(lines, profile, shape.partition)


def _merged_directives(
    directives: Mapping[str, DirectiveValue | list[str] | None], profile: ClusterProfile, partition: str | None
) -> list[tuple[str, str | int | bool]]:
    """Names and values of ``directives`` without dropped ones, and those of the profile; a list gives several lines."""
    dropped = profile.request_of(partition).drop
    own = {name: value for name, value in directives.items() if name not in dropped}
    merged = {**own, **profile.directives, **profile.partition(partition).directives}
    return [
        (name, line)
        for name, value in merged.items()
        if value is not None and value is not False
        for line in (value if isinstance(value, list) else [value])
    ]


def _requested_memory(request: ResourceRequest, node: NodeConfig) -> DirectiveValue | None:
    if request.memory == "all":
        return 0
    wanted = request.memory_bytes or (node.memory_bytes if request.memory == "node" else None)
    return f"{int(wanted // 2**20)}M" if wanted else None


def pbs_directives(
    shape: launch_step.JobShape, profile: ClusterProfile, job_name: str, folder: str, _number: int, pack: int = 1,
    runs: int = 1,
) -> list[tuple[str, str | bool]]:  # fmt: skip
    """Option letters and values; ``True`` is an option without a value, a letter may come several times.

    The range of the array stands in the script: the caller of qsub need not pass it.
    """
    partition = profile.partition(shape.partition)
    jobs = -(-runs // pack)
    select = f"select={shape.nodes}:mpiprocs={shape.tasks_per_node}"
    lines: dict[str, str | bool | int | list[str] | None] = {
        "N": job_name,
        "P": profile.account,
        "q": (partition.name or shape.partition) if shape.partition else None,
        "l": [select, f"walltime={_format_walltime(launch_step.job_time_limit_s(shape, pack))}"],
        "J": f"0-{jobs - 1}" if jobs > 1 else None,
        # Otherwise the shell that the person logs in with reads the script.
        "S": "/bin/bash",
        "j": "oe",
        "o": f"{folder}/",
    }
    merged = _merged_directives(lines, profile, shape.partition)
    return [(name, value if value is True else str(value)) for name, value in merged]


def _format_walltime(seconds: float) -> str:
    whole = max(1, int(-(-seconds // 1)))
    return f"{whole // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def render_script(
    engine: TemplateEngine, profile: ClusterProfile, shape: launch_step.JobShape, sweep: str, folder: Path, number: int,
    pack: int = 1, runs: int = 1,
) -> str:  # fmt: skip
    """The text of ``<folder>/<number>.sh``, whose jobs carry ``pack`` of the ``runs`` lines of the task file each."""
    return engine.render("job.sh.j2", template_context(profile, shape, sweep, folder, number, pack, runs))


_DIRECTIVES: dict[str, MakeDirectives] = {"slurm": sbatch_directives, "pbs": pbs_directives}
"""Functions that return the directives of a job script, by kind of scheduler."""


def template_context(
    profile: ClusterProfile,
    shape: launch_step.JobShape,
    sweep: str,
    folder: Path,
    number: int,
    pack: int = 1,
    runs: int = 1,
) -> dict[str, Any]:
    """The variables of the templates. ``templates/README.md`` describes each; a test keeps it complete."""
    environment = profile.environment(shape.environment)
    traits = profile.scheduler.traits
    is_slurm = traits.is_slurm
    directives: Sequence[tuple[str, DirectiveValue]] = []
    # Unique, so that a job can be found again by it.
    name = f"hpcbench-{folder.name}-{number}"
    make_directives = traits.directives or _DIRECTIVES.get(profile.scheduler.kind)
    if make_directives is not None:
        directives = make_directives(shape, profile, name, str(folder), number, pack, runs)
    return {
        "sweep": sweep,
        "cluster": profile.name,
        "version": hpcbench.__version__,
        "scheduler": profile.scheduler.kind,
        "launcher": profile.launcher,
        "launcher_args": profile.launcher_args,
        "step_words": launch_step.srun_options(shape, profile) if is_slurm else [],
        "container_words": launch_step.srun_container_options(shape, profile) if is_slurm else [],
        "rank_wrapper": launch_step.rank_wrapper(shape, profile) if is_slurm else [],
        # A scheduler signals the ranks itself; without one the script passes on what it is told.
        "forward_signals": not is_slurm,
        "directives": directives,
        "directive_prefix": traits.directive_form[0],
        "directive_separator": traits.directive_form[1],
        "task_file": str(folder / f"{number}.jsonl"),
        "nodes": shape.nodes,
        "tasks_per_node": shape.tasks_per_node,
        "devices_per_task": shape.devices_per_task,
        "ranks": shape.ranks,
        "cpus_per_task": launch_step.cpus_per_task(shape, profile),
        "time_limit_s": math.ceil(shape.time_limit_s),
        "pack": pack,
        "runs": runs,
        "job_limit_s": math.ceil(launch_step.job_time_limit_s(shape, pack)),
        "begin_pause_s": launch_step.BEGIN_PAUSE_S,
        "modules": environment.modules,
        "modules_start": environment.modules_start,
        "cluster_setup": profile.setup,
        "setup": environment.setup,
        "env": launch_step.job_variables(shape, profile),
        "env_unset": [*profile.env_unset, *environment.env_unset],
        "container": launch_step.container_command(environment.container),
        "python": rank_python(environment),
        "nothing_to_do": EXIT_NOTHING_TO_DO,
        "preempted": EXIT_PREEMPTED,
    }


def rank_python(environment: EnvironmentConfig) -> str:
    """The interpreter that runs the ranks: the environment's, else the image's or the submitter's own."""
    if environment.python:
        return environment.python
    if environment.venv:
        return f"{environment.venv}/bin/python"
    if environment.container and environment.container.kind:
        return "python3"
    return sys.executable
