"""Fixed names of everything the box makes, so that `down` finds them even when its records are lost."""

from __future__ import annotations

from pathlib import Path

CLUSTER = "slurmbox"

# Small files that any user must reach: configuration, sockets, process ids, links to the daemons.
STATE = Path("/run/hpcbench-slurmbox")
# What grows (database, spool, logs, home folders): /run is often a tmpfs of a few hundred megabytes.
DATA = Path("/var/lib/hpcbench-slurmbox")
LOCK = Path("/run/hpcbench-slurmbox.lock")

SLURM_CONF = STATE / "slurm.conf"
SLURMDBD_CONF = STATE / "slurmdbd.conf"
GRES_CONF = STATE / "gres.conf"
CGROUP_CONF = STATE / "cgroup.conf"
OPTIONS_FILE = STATE / "options.json"
BIN = STATE / "bin"
EPILOG = BIN / "epilog"
PIDS = STATE / "pid"
DEVICES = STATE / "dev"
MUNGE_SOCKET = STATE / "munge" / "munge.socket"
DB_SOCKET = STATE / "mariadb" / "mariadb.socket"

MUNGE_DATA = DATA / "munge"
DB_DATA = DATA / "db"
LOGS = DATA / "log"
CTLD_STATE = DATA / "slurmctld"
NODE_SPOOL = DATA / "spool"
HOMES = DATA / "home"
# SLURM of another release than the machine's; its programs name this folder.
RELEASE = DATA / "slurm"

BRIDGE = "slurmbox0"
NETNS_PREFIX = "slurmbox-"
NETNS_DIR = Path("/run/netns")
CGROUP = "hpcbench-slurmbox"
# The cgroup of munged, mariadbd, slurmdbd and slurmctld: no limits, it only says which processes are ours.
SERVICES = "services"

HOSTS_FILE = Path("/etc/hosts")
HOSTS_BEGIN = "# >>> hpcbench slurmbox (written by `up`, removed by `down`)"
HOSTS_END = "# <<< hpcbench slurmbox"

CONTROLLER_NAME = "slurmbox-controller"

USERS = ("boxuser1", "boxuser2", "boxuser3")
# Written to the comment field of /etc/passwd: only users that carry it are removed by `down`.
USER_MARK = "hpcbench slurmbox test user"


def netns(node: str) -> str:
    """Name of a node's network namespace."""
    return NETNS_PREFIX + node


def slurmd_group(node: str) -> str:
    """Control group of a node's slurmd: without limits, so that no job can starve it or have it killed."""
    return f"{node}-slurmd"


def log_file(name: str) -> Path:
    """Log of a daemon (`slurmctld`) or of a node's slurmd (`n1`)."""
    return LOGS / f"{name}.log"


def pid_file(name: str) -> Path:
    """File with the process id of a daemon or of a node's slurmd."""
    return PIDS / f"{name}.pid"
