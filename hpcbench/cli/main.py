"""The command ``hpcbench``: its subcommands, each imported when called, and the handling of errors."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any, NoReturn

import click

import hpcbench
from hpcbench.errors import HpcbenchError

COMMANDS = {
    "check": ("hpcbench.cli.sweep_commands:check", "Validate sweeps and profiles."),
    "plan": ("hpcbench.cli.sweep_commands:plan", "Show what a sweep would run."),
    "render": ("hpcbench.cli.sweep_commands:render", "Show the job scripts that submit would send."),
    "submit": ("hpcbench.cli.run_commands:submit", "Submit what a sweep still lacks."),
    "run": ("hpcbench.cli.run_commands:run", "Submit, wait with progress, print the table."),
    "status": ("hpcbench.cli.status_commands:status", "Show the state of runs."),
    "logs": ("hpcbench.cli.run_commands:logs", "Print what a run said."),
    "cancel": ("hpcbench.cli.run_commands:cancel", "Stop the runs of a sweep."),
    "retry": ("hpcbench.cli.run_commands:retry", "Submit again what failed, timed out or was lost."),
    "collect": ("hpcbench.cli.results_commands:collect", "Gather results into one file."),
    "table": ("hpcbench.cli.results_commands:table", "Print results as a table."),
    "plot": ("hpcbench.cli.report_commands:plot", "Draw results in the terminal or into a file."),
    "compare": ("hpcbench.cli.results_commands:compare", "Compare two sets of results; exit code 1 for a regression."),
    "report": ("hpcbench.cli.report_commands:report", "Say what results show, and how sure that is."),
    "bundle": ("hpcbench.cli.report_commands:bundle", "Pack a sweep into one file for handing over."),
    "cluster": ("hpcbench.cli.cluster_commands:cluster", "List, show and write cluster profiles."),
    "predict": ("hpcbench.cli.oracle_commands:predict", "Say how long a sweep's runs will take and whether they fit."),
    "recommend": ("hpcbench.cli.oracle_commands:recommend", "Rank all strategies for a model on a cluster."),
    "validate": ("hpcbench.cli.oracle_commands:validate", "Compare what was measured with what was predicted."),
    "models": ("hpcbench.cli.project_commands:models", "Show parameters, FLOPs, activations and layers of the models."),
    "data": ("hpcbench.cli.project_commands:data", "Make samples in files, and list what is there."),
    "schema": ("hpcbench.cli.project_commands:schema", "Print a JSON Schema for editors and scripts."),
    "doctor": ("hpcbench.cli.project_commands:doctor", "Say what works here and what is missing."),
    "init": ("hpcbench.cli.project_commands:init", "Write a project folder to start from."),
}
"""Name to implementation and help. Kept here so that ``--help`` imports nothing but click."""


_GC_THRESHOLD = 100_000


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order in which they are used."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        import importlib

        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest command where there is none of that name."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from hpcbench.errors import did_you_mean

            ctx.fail(f"no command {args[0]!r}: {did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from their one-line descriptions."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcbench.__version__, prog_name="hpcbench")
def cli() -> None:
    """How should this model be parallelised on that cluster, and how sure are we?

    A sweep and a cluster profile, both TOML, become SLURM jobs; every job leaves
    one JSON result; tables are read from those.
    """


def entry_point() -> NoReturn:
    """Run the command line. Users' errors are printed without a traceback; ours keep theirs."""
    # Modules and plans stay until the end: looking through them for garbage again and again only takes time.
    gc.set_threshold(_GC_THRESHOLD)
    try:
        code: Any = cli.main(standalone_mode=False)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except HpcbenchError as error:
        for problem in getattr(error, "problems", [error]):
            click.echo(f"error: {_printable(str(problem))}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone; flushing what is left would only fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    finally:
        # Nor need the interpreter look before it ends.
        gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


def _printable(text: str) -> str:
    from hpcbench.fileio import printable_text

    return printable_text(text)
