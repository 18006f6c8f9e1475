"""`up`, `down` and the faults that tests put into a running box."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import sys
import threading
import time
from pathlib import Path

from . import accounting, cgroups, daemons, hosts, machine, network, paths, release, slurmconf, status, users
from .errors import BoxError
from .lock import locked
from .options import Options
from .shell import run, wait_for


def up(options: Options) -> bool:
    """Have a healthy box with these options; False when there was one already."""
    machine.check_system()
    machine.check_capacity(options, machine.cores(), machine.memory())
    with locked():
        if status.saved_options() == options and status.is_healthy(status.report()):
            return False
        if status.traces():
            _say("replacing the box that is there")
        _teardown()
        try:
            machine.install_packages(release.fetching_tools(options.slurm) if options.slurm else ())
            network.check(options.subnet)
            hosts.check(options)
            cgroups.check()
            _build(options)
        except BaseException:
            # A half-made box would only be in the way; its logs stay until the next `up` or `down`.
            _teardown(keep_logs=True)
            raise
    return True


def down() -> bool:
    """Remove the box and everything it made; False when there was none."""
    machine.check_system()
    with locked():
        found = bool(status.traces())
        _teardown()
    return found


def _say(text: str) -> None:
    print(f"slurm box: {text}", file=sys.stderr, flush=True)


def _build(options: Options) -> None:
    _make_folders()
    if options.slurm:
        release.install(options.slurm)
    _write_configuration(options)
    # The database takes longest: make it while the nodes are wired.
    failure: list[BoxError] = []
    database = threading.Thread(target=_start_database, args=(failure,), daemon=True)
    cgroups.create(paths.SERVICES)
    database.start()
    users.create()
    hosts.write(options)
    network.create(options)
    for node in options.names:
        cgroups.create(node, options.cpus, options.mem)
        cgroups.create(paths.slurmd_group(node))
    database.join()
    if failure:
        raise failure[0]
    daemons.start_service("slurmdbd", timeout=10)
    accounting.create(users.accounted())
    daemons.start_service("slurmctld")
    for node in options.names:
        daemons.start_slurmd(node)
    _wait_for_nodes(options, options.names)
    # Written last: it says that the box is complete.
    paths.OPTIONS_FILE.write_text(options.to_json())


def _start_database(failure: list[BoxError]) -> None:
    try:
        daemons.start_service("munged")
        daemons.make_database()
        daemons.start_service("mariadbd")
    except BoxError as err:
        failure.append(err)


def _make_folders() -> None:
    """Open to all: configuration and socket folders, and the way to the home folders; closed: what daemons keep."""
    for folder in (paths.STATE, paths.DATA, paths.BIN, paths.PIDS, paths.DEVICES, paths.LOGS, paths.HOMES):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    for folder in (paths.MUNGE_SOCKET.parent, paths.NODE_SPOOL):
        folder.mkdir()
        folder.chmod(0o755)
    for folder in (paths.MUNGE_DATA, paths.DB_DATA, paths.CTLD_STATE, paths.DB_SOCKET.parent):
        folder.mkdir()
        folder.chmod(0o700)
    (paths.STATE / "log").symlink_to(paths.LOGS)
    key = paths.MUNGE_DATA / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(128))


def _write_configuration(options: Options) -> None:
    daemons.make_links(options.names, options.slurm)
    files = {
        paths.SLURM_CONF: slurmconf.slurm_conf(options, socket.gethostname().split(".")[0]),
        paths.GRES_CONF: slurmconf.gres_conf(options),
        paths.CGROUP_CONF: slurmconf.cgroup_conf(machine.slurm_version(paths.BIN / "slurmctld")),
    }
    for path, text in files.items():
        path.write_text(text)
        path.chmod(0o644)
    paths.EPILOG.write_text(slurmconf.epilog(str(cgroups.folders("")[-1])))
    paths.EPILOG.chmod(0o755)
    paths.SLURMDBD_CONF.touch(mode=0o600)
    paths.SLURMDBD_CONF.write_text(slurmconf.slurmdbd_conf(options))
    for number in range(options.gpus):
        # 1:3 is /dev/null: SLURM only wants a device file to be there.
        os.mknod(paths.DEVICES / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))


def _wait_for_nodes(options: Options, names: list[str], timeout: float = 45) -> None:
    """Until slurmd of each node listens and slurmctld gives it jobs."""

    def ready() -> bool:
        states = status.node_states()
        for name in names:
            if not daemons.is_alive(name):
                raise BoxError(f"slurmd of {name} ended: {daemons.log_end(name)}")
            if states.get(name, "").rstrip("*") in {"down", "drained", "draining"}:
                run(["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        return all(
            status.is_good(states.get(name, "unknown")) and daemons.listens(options.address(name)) for name in names
        )

    try:
        wait_for(f"{', '.join(names)} to be idle", ready, timeout)
    except BoxError as err:
        seen = ", ".join(f"{name} {state}" for name, state in status.node_states().items())
        raise BoxError(f"{err} (seen: {seen or 'nothing'}); {daemons.log_end(names[0])}") from None


def _teardown(keep_logs: bool = False) -> None:
    cgroups.remove_all()
    network.remove_all()
    hosts.remove()
    users.remove()
    _remove_tree(paths.STATE)
    if keep_logs and paths.LOGS.is_dir():
        for folder in paths.DATA.iterdir():
            if folder != paths.LOGS:
                _remove_tree(folder)
    else:
        _remove_tree(paths.DATA)


def _remove_tree(folder: Path) -> None:
    """A process that was killed a moment ago may still be writing: try for a while."""
    end = time.monotonic() + 5
    while folder.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        if folder.exists() and time.monotonic() > end:
            raise BoxError(f"cannot remove {folder}: is something mounted or running there?")


def running_options() -> Options:
    """Options of the box that is up."""
    options = status.saved_options()
    if options is None:
        raise BoxError("no box is up: start one with `up`")
    return options


def node_of(name: str) -> str:
    """The name, checked against the box that is up."""
    names = running_options().names
    if name not in names:
        raise BoxError(f"no node {name!r}: this box has {', '.join(names)}")
    return name


def kill_node(name: str) -> None:
    """End every process of the node at once, as a power cut does. SLURM notices after SlurmdTimeout."""
    machine.check_system()
    # slurmd first: it could start another job step.
    for group in (paths.slurmd_group(node_of(name)), name):
        cgroups.kill(group)


def restart_node(name: str) -> None:
    """Start the node again, killing what runs there, and wait until SLURM gives it jobs."""
    kill_node(name)
    daemons.start_slurmd(name)
    _wait_for_nodes(running_options(), [name])


def stop_daemon(name: str) -> None:
    """Stop a service; jobs that run go on."""
    machine.check_system()
    daemons.stop_service(name)


def start_daemon(name: str) -> None:
    """Start a service again, unless it runs; slurmctld then waits for the nodes that are alive."""
    machine.check_system()
    options = running_options()
    if daemons.is_alive(name):
        return
    daemons.start_service(name)
    if name == "slurmctld":
        _wait_for_nodes(options, [node for node in options.names if daemons.is_alive(node)])
