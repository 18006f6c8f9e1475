"""The command line: up, down, status, and the tools for fault tests."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from . import daemons, lifecycle, machine, paths, status
from .errors import BoxError
from .options import Options, format_link, parse_link, parse_mem
from .shell import clean_env


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 the box is not healthy, 2 refused."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except BoxError as err:
        print(f"slurm box: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("slurm box: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(prog="slurm-box", description="A real SLURM of several nodes on this machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start the box, or do nothing when it is up with these values")
    up.set_defaults(command=_up)
    up.add_argument("--nodes", type=int, default=default.nodes)
    up.add_argument("--gpus", type=int, default=default.gpus, help="pretend GPUs of each node (default: %(default)s)")
    up.add_argument("--cpus", type=float, default=default.cpus, help="real cores of each node (default: %(default)s)")
    up.add_argument("--mem", default="3g", help="memory of each node (default: %(default)s)")
    up.add_argument("--link", default=format_link(default.link), help="rate of each link (default: %(default)s)")
    up.add_argument(
        "--slots", type=int, default=default.slots, help="CPUs SLURM counts per node (default: %(default)s)"
    )
    up.add_argument("--max-array-size", type=int, default=default.max_array_size, help="(default: %(default)s)")
    up.add_argument(
        "--grace-time", type=int, default=default.grace_time,
        help="seconds from SIGTERM to SIGKILL at preemption (default: %(default)s)",
    )  # fmt: skip
    up.add_argument("--subnet", default=default.subnet, help="network of the nodes (default: %(default)s)")

    up.add_argument(
        "--slurm", default=default.slurm, metavar="RELEASE", help="another SLURM than the machine's, as 24.11"
    )

    for name, function, text in (
        ("down", _down, "remove the box and everything it made"),
        ("status", _status, "one line per daemon and node; exit status 0 when all work"),
    ):
        commands.add_parser(name, help=text).set_defaults(command=function)

    run = commands.add_parser("exec", help="run a command on a node: exec n1 -- hostname")
    run.set_defaults(command=_exec)
    run.add_argument("name")
    run.add_argument("argv", nargs=argparse.REMAINDER)

    for name, action, text in (
        ("kill-node", lifecycle.kill_node, "end all processes of a node at once, as a power cut does"),
        ("restart-node", lifecycle.restart_node, "start a node again and wait until it takes jobs"),
        ("stop-daemon", lifecycle.stop_daemon, f"stop one of {', '.join(daemons.SERVICES)}"),
        ("start-daemon", lifecycle.start_daemon, "start it again"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("name")
        sub.set_defaults(command=_named(action))
    return parser


def _named(action: Callable[[str], None]) -> Callable[[argparse.Namespace], int]:
    def command(args: argparse.Namespace) -> int:
        action(args.name)
        return 0

    return command


def _up(args: argparse.Namespace) -> int:
    start = time.monotonic()
    options = Options(
        nodes=args.nodes,
        gpus=args.gpus,
        cpus=args.cpus,
        mem=parse_mem(args.mem),
        link=parse_link(args.link),
        slots=args.slots,
        max_array_size=args.max_array_size,
        grace_time=args.grace_time,
        subnet=args.subnet,
        slurm=args.slurm,
    )
    started = lifecycle.up(options)
    seconds = time.monotonic() - start
    print(f"slurm box: {'up' if started else 'already up'} ({seconds:.1f} s): {options.describe()}")
    path = f" PATH={paths.BIN}:$PATH" if options.slurm else ""
    print(f"use it: export SLURM_CONF={paths.SLURM_CONF}{path}")
    return 0


def _down(_: argparse.Namespace) -> int:
    print(f"slurm box: {'removed' if lifecycle.down() else 'there was none'}")
    return 0


def _status(_: argparse.Namespace) -> int:
    machine.check_system()
    lines = status.report()
    if not lines:
        found = status.traces()
        print(f"slurm box: down{', but left over: ' + ', '.join(found) if found else ''}")
        return 1
    for line in lines:
        print(f"{line.name:<10} {'ok ' if line.healthy else 'BAD'} {line.state}")
    return 0 if status.is_healthy(lines) else 1


def _exec(args: argparse.Namespace) -> int:
    machine.check_system()
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise BoxError("exec needs a command: exec n1 -- hostname")
    command = daemons.node_argv(lifecycle.node_of(args.name), argv)
    env = {**os.environ, "SLURM_CONF": clean_env()["SLURM_CONF"]}
    os.execvpe(command[0], command, env)
