"""The command ``hpcbench``: its subcommands, each imported when called, and the handling of errors."""

from __future__ import annotations

import errno
import gc
import io
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

import hpcbench
from hpcbench.cli.lazy_group import LazyGroup
from hpcbench.errors import EXIT_BAD_INPUT, EXIT_SYSTEM_REFUSED, HpcbenchError
from hpcbench.fileio import printable_text, read_error

COMMANDS = {
    "check": ("hpcbench.cli.sweep_commands:check_files", "Validate sweeps and profiles."),
    "plan": ("hpcbench.cli.sweep_commands:show_plan", "Show the runs and jobs of a sweep."),
    "render": ("hpcbench.cli.sweep_commands:render_sweep", "Show the job scripts that submit would send."),
    "dry-run": ("hpcbench.cli.dry_run_command:dry_run", "Build and step every configuration without devices."),
    "submit": ("hpcbench.cli.run_commands:submit_sweep", "Submit the runs of a sweep that have no result yet."),
    "run": ("hpcbench.cli.run_commands:run_sweep", "Submit, wait with progress, print the table."),
    "status": ("hpcbench.cli.status_command:status", "Show the state of runs."),
    "logs": ("hpcbench.cli.logs_command:logs", "Print the logs of a run."),
    "cancel": ("hpcbench.cli.cancel_command:cancel_sweep", "Stop the runs of a sweep."),
    "retry": ("hpcbench.cli.run_commands:retry_sweep", "Submit again what failed, timed out or was lost."),
    "clean": ("hpcbench.cli.cancel_command:clean", "Show or remove what killed submits and old attempts left."),
    "results": ("hpcbench.cli.remove_command:results_group", "Remove results that are no longer wanted."),
    "collect": ("hpcbench.cli.results_commands:collect_sources", "Gather results into one file."),
    "table": ("hpcbench.cli.results_commands:show_results", "Print results as a table."),
    "plot": ("hpcbench.cli.report_commands:draw_plot", "Draw results in the terminal or into a file."),
    "compare": (
        "hpcbench.cli.compare_command:compare_sources",
        "Compare two sets of results; exit code 1 for a regression.",
    ),
    "report": (
        "hpcbench.cli.report_commands:report_findings",
        "Summarise the findings of results, with their significance.",
    ),
    "bundle": ("hpcbench.cli.report_commands:pack_sweep", "Pack a sweep with its results into one file."),
    "cluster": ("hpcbench.cli.cluster_commands:cluster", "List, show and write cluster profiles."),
    "predict": ("hpcbench.cli.oracle_commands:predict_sweep", "Predict step time and memory of a sweep's runs."),
    "recommend": ("hpcbench.cli.oracle_commands:rank_strategies", "Rank all strategies for a model on a cluster."),
    "validate": ("hpcbench.cli.validate_command:validate_predictions", "Compare measurements with predictions."),
    "models": ("hpcbench.cli.project_commands:models", "Show parameters, FLOPs, activations and layers of the models."),
    "data": ("hpcbench.cli.project_commands:data", "Make synthetic samples in files, and list data sets."),
    "schema": ("hpcbench.cli.project_commands:schema", "Print a JSON Schema for editors and scripts."),
    "doctor": ("hpcbench.cli.project_commands:doctor", "Check the installation for a cluster's jobs."),
    "init": ("hpcbench.cli.project_commands:init", "Write a project folder to start from."),
}
"""Name to implementation and help. Kept here so that ``--help`` imports nothing but click."""

_GC_THRESHOLD = 100_000


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
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = error.exit_code
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
