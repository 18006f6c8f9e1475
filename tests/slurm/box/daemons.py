"""Starting, finding and stopping the daemons: four services on the machine and one slurmd per node."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import cgroups, machine, paths, release
from .errors import BoxError
from .shell import clean_env, run, succeeds, wait_for
from .slurmconf import SLURMD_PORT

SERVICES = ("munged", "mariadbd", "slurmdbd", "slurmctld")

# Enter the control groups, write the process id, and become the program. Arguments: the id's file (or ""), the groups'
# files, `--`, the program.
_ENTER = """
pid_file=$1; shift
while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift
[ -z "$pid_file" ] || echo $$ > "$pid_file"
exec "$@"
"""
# nsenter and not `ip netns exec`: the latter mounts a /sys without cgroups, and slurmd refuses to start.
_NODE = 'hostname "$1"; shift; exec "$@"'


def enter_argv(group: str, argv: Sequence[str], pid_file: Path | None = None) -> list[str]:
    """Command that runs `argv` in a control group of the box."""
    pid = str(pid_file) if pid_file else ""
    return ["sh", "-c", _ENTER, "sh", pid, *cgroups.join_files(group), "--", *argv]


def node_argv(node: str, argv: Sequence[str], group: str | None = None, pid_file: Path | None = None) -> list[str]:
    """Command that runs `argv` on a node: its network, its host name, and its control group unless told another."""
    inside = ["nsenter", f"--net={paths.NETNS_DIR / paths.netns(node)}", "unshare", "--uts"]
    return enter_argv(group or node, [*inside, "sh", "-c", _NODE, "sh", node, *argv], pid_file)


def _spawn(name: str, argv: Sequence[str]) -> None:
    """Start a daemon in a session of its own; it is no child of this process, so it leaves no zombie here."""
    paths.pid_file(name).unlink(missing_ok=True)
    with open(paths.log_file(f"{name}.out"), "ab") as log:
        subprocess.run(
            ["setsid", "--fork", *argv],
            env=clean_env(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=10,
            check=True,
        )
    wait_for(f"the process of {name} to start", paths.pid_file(name).exists, 10, lambda: log_end(name))


def service_command(name: str) -> list[str]:
    """Command line of a service."""
    if name == "munged":
        data, run_dir = paths.MUNGE_DATA, paths.MUNGE_SOCKET.parent
        return [
            "munged", "--foreground", "--force", "--num-threads=4", f"--key-file={data}/munge.key",
            f"--socket={paths.MUNGE_SOCKET}", f"--pid-file={run_dir}/munged.pid",
            f"--log-file={paths.log_file('munged')}", f"--seed-file={data}/seed",
        ]  # fmt: skip
    if name == "mariadbd":
        # The data are thrown away with the box, so nothing waits for the disk.
        return [
            "mariadbd", "--no-defaults", "--user=root", f"--datadir={paths.DB_DATA}", f"--socket={paths.DB_SOCKET}",
            "--skip-networking", f"--pid-file={paths.DB_SOCKET.parent}/mariadbd.pid",
            "--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--innodb-doublewrite=0",
            "--innodb-buffer-pool-size=128M", "--innodb-lock-wait-timeout=900", "--performance-schema=OFF",
        ]  # fmt: skip
    if name == "slurmdbd":
        return [str(paths.BIN / "slurmdbd"), "-D"]
    if name == "slurmctld":
        return [str(paths.BIN / "slurmctld"), "-D", "-f", str(paths.SLURM_CONF)]
    raise BoxError(f"no daemon {name!r}: one of {', '.join(SERVICES)}")


def make_database() -> None:
    """Fresh data folder of MariaDB: root by socket, no password."""
    run(
        [
            "mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={paths.DB_DATA}",
            "--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve",
            "--innodb-flush-method=nosync", "--innodb-doublewrite=0",
        ],
        timeout=120,
    )  # fmt: skip


def is_ready(name: str) -> bool:
    """Whether a service answers."""
    if not is_alive(name):
        return False
    if name == "munged":
        return succeeds(["munge", "-n", f"--socket={paths.MUNGE_SOCKET}"])
    if name == "mariadbd":
        return succeeds(["mariadb-admin", "--no-defaults", f"--socket={paths.DB_SOCKET}", "ping"])
    if name == "slurmdbd":
        return succeeds(["sacctmgr", "-n", "show", "cluster"])
    status, text = run(["scontrol", "ping"], timeout=10, check=False)
    return status == 0 and " UP" in text


def start_service(name: str, timeout: float = 60) -> None:
    """Start a service and wait until it answers."""
    argv = service_command(name)
    _spawn(name, enter_argv(paths.SERVICES, argv, paths.pid_file(name)))
    wait_for(f"{name} to answer", lambda: is_ready(name), timeout, lambda: log_end(name))


def start_slurmd(node: str) -> None:
    """Start a node's slurmd, without waiting for it, outside of the limits that its jobs have."""
    stepd = ["-d", str(_stepd_path(node))]
    argv = [str(paths.BIN / "slurmd"), "-D", "-N", node, *stepd, "-f", str(paths.SLURM_CONF)]
    _spawn(node, node_argv(node, argv, paths.slurmd_group(node), paths.pid_file(node)))


def stepd_script(node: str) -> str:
    """Return the script that a node's slurmd starts for each job step in place of slurmstepd."""
    joins = "".join(f"echo $$ > {file} || exit 1\n" for file in cgroups.join_files(node))
    return f'#!/bin/sh\n{joins}exec {paths.BIN}/slurmstepd "$@"\n'


def is_alive(name: str) -> bool:
    """Whether a service, or a node's slurmd, runs: its recorded process is one of its control group."""
    pid = pid_of(name)
    return pid is not None and pid in cgroups.processes(
        paths.SERVICES if name in SERVICES else paths.slurmd_group(name)
    )


def listens(address: str) -> bool:
    """Whether slurmd at this address takes connections."""
    with contextlib.suppress(OSError), socket.create_connection((address, SLURMD_PORT), timeout=2):
        return True
    return False


def pid_of(name: str) -> int | None:
    """Recorded process id of a service or of a node's slurmd."""
    with contextlib.suppress(OSError, ValueError):
        return int(paths.pid_file(name).read_text())
    return None


def stop_service(name: str, timeout: float = 15) -> None:
    """SIGTERM, and after the time limit SIGKILL; returns when the process is gone."""
    if name not in SERVICES:
        raise BoxError(f"no daemon {name!r}: one of {', '.join(SERVICES)}")
    pid = pid_of(name)
    if pid is None or not is_alive(name):
        return
    os.kill(pid, signal.SIGTERM)
    try:
        wait_for(f"{name} to end", lambda: not is_alive(name), timeout)
    except BoxError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_for(f"{name} to end after SIGKILL", lambda: not is_alive(name), 10)


def make_links(nodes: Sequence[str], slurm: str) -> None:
    """Links to the real daemons, and each node's script for job steps.

    SLURM's programs look at their own name: as `slurmctld-wlm` or `slurmstepd-wlm` they crash.
    """
    for program in ("slurmctld", "slurmd", "slurmstepd", "slurmdbd"):
        (paths.BIN / program).symlink_to(release.daemon(program) if slurm else machine.real_daemon(program))
    if slurm:
        release.link_commands()
    for node in nodes:
        _stepd_path(node).write_text(stepd_script(node))
        _stepd_path(node).chmod(0o755)


def _stepd_path(node: str) -> Path:
    return paths.BIN / f"slurmstepd-{node}"


def log_end(name: str) -> str:
    """The last lines of what the daemon wrote."""
    for path in (paths.log_file(name), paths.log_file(f"{name}.out")):
        with contextlib.suppress(OSError):
            lines = path.read_text(errors="replace").strip().splitlines()
            if lines:
                return f"end of {path}:\n  " + "\n  ".join(lines[-4:])
    return f"no log in {paths.LOGS}"
