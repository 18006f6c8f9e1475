"""The command ``hpcbench``: its subcommands, each imported when called, and the handling of errors."""

from __future__ import annotations

import errno
import gc
import importlib
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import hpcbench
from hpcbench.errors import EXIT_BAD_INPUT, EXIT_SYSTEM_REFUSED, HpcbenchError, did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "check": ("hpcbench.cli.commands:check", "Validate sweeps and profiles."),
    "plan": ("hpcbench.cli.commands:plan", "Show the runs and jobs of a sweep."),
    "render": ("hpcbench.cli.commands:render", "Show the job scripts that submit would send."),
    "dry-run": ("hpcbench.cli.dry_run_command:dry_run", "Build and step every configuration without devices."),
    "submit": ("hpcbench.cli.commands:submit", "Submit the runs of a sweep that have no result yet."),
    "run": ("hpcbench.cli.commands:run", "Submit, wait with progress, print the table."),
    "status": ("hpcbench.cli.status_commands:status", "Show the state of runs."),
    "logs": ("hpcbench.cli.status_commands:logs", "Print the logs of a run."),
    "cancel": ("hpcbench.cli.commands:cancel", "Stop the runs of a sweep."),
    "retry": ("hpcbench.cli.commands:retry", "Submit again what failed, timed out or was lost."),
    "clean": ("hpcbench.cli.clean_command:clean", "Show or remove what killed submits and old attempts left."),
    "collect": ("hpcbench.cli.commands:collect", "Gather results into one file."),
    "table": ("hpcbench.cli.commands:table", "Print results as a table."),
    "plot": ("hpcbench.cli.commands:plot", "Draw results in the terminal or into a file."),
    "compare": ("hpcbench.cli.commands:compare", "Compare two sets of results; exit code 1 for a regression."),
    "report": ("hpcbench.cli.commands:report", "Summarise the findings of results, with their significance."),
    "bundle": ("hpcbench.cli.commands:bundle", "Pack a sweep with its results into one file."),
    "cluster": ("hpcbench.cli.cluster_commands:cluster", "List, show and write cluster profiles."),
    "predict": ("hpcbench.cli.commands:predict", "Predict step time and memory of a sweep's runs."),
    "recommend": ("hpcbench.cli.commands:recommend", "Rank all strategies for a model on a cluster."),
    "validate": ("hpcbench.cli.commands:validate", "Compare measurements with predictions."),
    "models": ("hpcbench.cli.project_commands:models", "Show parameters, FLOPs, activations and layers of the models."),
    "data": ("hpcbench.cli.project_commands:data", "Make synthetic samples in files, and list data sets."),
    "schema": ("hpcbench.cli.project_commands:schema", "Print a JSON Schema for editors and scripts."),
    "doctor": ("hpcbench.cli.project_commands:doctor", "Check the installation for a cluster's jobs."),
    "completion": ("hpcbench.cli.common:completion", "Print the completion script for bash, zsh or fish."),
    "init": ("hpcbench.cli.project_commands:init", "Write a project folder to start from."),
}
"""Name to implementation and help. Kept here so that ``--help`` imports nothing but click."""

_GC_THRESHOLD = 100_000


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def __init__(self, *args: Any, lazy_commands: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        """Set the commands.

        Args:
            lazy_commands: For each command's name, ``module:function`` and a line of help, in the order of ``--help``.
        """
        super().__init__(*args, **kwargs)
        self._lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy_commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy_commands:
            return None
        module, _, name = self._lazy_commands[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names that begin so, without importing the commands."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(name, help=text)
            for name, (_, text) in self._lazy_commands.items()
            if name.startswith(incomplete)
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self._lazy_commands:
            ctx.fail(f"no command {args[0]!r}: {did_you_mean(args[0], self._lazy_commands)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in self._lazy_commands.items()])


@click.group(cls=LazyGroup, lazy_commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcbench.__version__, prog_name="hpcbench")
def cli() -> None:
    """hpcbench benchmarks and predicts distributed-training strategies on SLURM clusters.

    How should this model be parallelised on that cluster, and how sure are we? A sweep and a
    cluster profile (TOML files) become SLURM jobs. Each job writes one JSON result. Tables,
    plots and reports are built from these files.
    """


_REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""The file system refuses; other errors of the system are bugs of hpcbench."""


def _prepare_streams() -> None:
    """Let every message be printed: in any encoding, and where a stream was closed before this process began."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - until the end
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _refusal_code(error: OSError | SystemExit, is_stdout_replaced: bool) -> int:
    """The exit code where a stream or the file system refuses, with its message; any other error is raised again."""
    # click and rich turn a closed pipe into SystemExit(1), and click puts a stream of its own in place of stdout.
    if is_stdout_replaced or isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # The reader (head, less) has gone; flushing the rest would only fail again.
        _discard_output()
        return 0
    # Only ``getcwd`` names no file that is absent.
    is_folder_gone = isinstance(error, FileNotFoundError) and error.filename is None
    if isinstance(error, SystemExit) or (error.errno not in _REFUSALS and not is_folder_gone):
        raise error
    if is_folder_gone:
        click.echo("error: the current folder was removed: cd to another one", err=True)
    elif error.filename is None:
        click.echo(f"error: cannot write the output: {error.strerror}", err=True)
        _discard_output()
    else:
        _print_error(error)
    return EXIT_SYSTEM_REFUSED


def _print_error(error: HpcbenchError | OSError) -> None:
    # Imported here: `--help` and `--version` print no message of a user's file.
    from hpcbench.fileio import printable_text, read_error

    shown = read_error(error, Path(os.fsdecode(error.filename))) if isinstance(error, OSError) else error
    click.echo(f"error: {printable_text(str(shown))}", err=True)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry_point() -> NoReturn:
    """Run the command line; print errors of users without a traceback. Bugs of hpcbench keep their traceback."""
    # Modules and plans live until the end: collecting garbage among them again and again only takes time.
    gc.set_threshold(_GC_THRESHOLD)
    _prepare_streams()
    stdout = sys.stdout
    try:
        code: Any = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        if context is not None:
            click.echo(context.get_usage(), err=True)
        click.echo(f"error: {error.format_message()}", err=True)
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except HpcbenchError as error:
        for problem in getattr(error, "problems", [error]):
            _print_error(problem)
        code = error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "hpcbench").partition(".")[0]
        if package == "hpcbench":
            raise
        click.echo(f"error: this needs the package {package}: {sys.executable} -m pip install {package}", err=True)
        code = EXIT_BAD_INPUT
    except (OSError, SystemExit) as error:
        code = _refusal_code(error, sys.stdout is not stdout)
    finally:
        # The interpreter need not collect garbage before it ends.
        gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)
