"""The text of slurm.conf, slurmdbd.conf, gres.conf and cgroup.conf: pure functions of the options."""

from __future__ import annotations

from . import paths
from .options import MIB, Options

CTLD_PORT, SLURMD_PORT, DBD_PORT = 16817, 16818, 16819
KILL_WAIT = 5
SLURMD_TIMEOUT = 30

# AuthInfo: the box has a munged of its own, whatever the machine runs. `cred_expire` is also how long a requeued
# job waits before it may start again, 120 s by default.
_AUTH = f"socket={paths.MUNGE_SOCKET}"
_CRED_EXPIRE = 10

_SLURM_CONF = """\
ClusterName={cluster}
SlurmctldHost={host}({controller})
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo={auth},cred_expire={cred_expire}
MailProg=/bin/true
MpiDefault=none
{plugins}
StateSaveLocation={ctld_state}
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={pids}/slurmctld.own.pid
SlurmdPidFile={pids}/%n.own.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/%n.log
SlurmctldDebug=info
SlurmdDebug=info
Epilog={epilog}

# Ends are quick here: 5 s from SIGTERM to SIGKILL, 30 s until a silent node is down.
KillWait={kill_wait}
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=30
MessageTimeout=20
TCPTimeout=5
ReturnToService=2
MinJobAge=60
JobRequeue=1
MaxJobCount=200000
MaxArraySize={max_array_size}

# A node has more CPUs for SLURM than the machine can give it: config_overrides makes slurmctld believe the lines
# below. Memory is a resource that jobs share; a job that asks for none gets a share per CPU. CR_LLN: a job goes to the
# nodes with the fewest CPUs in use, since the jobs of one node share its quota while other nodes have nothing to do.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory,CR_LLN
DefMemPerCPU={mem_per_cpu}

SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=1,bf_interval=2,bf_continue
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={controller}
AccountingStoragePort={dbd_port}
# Not a password: the socket of munged for messages to slurmdbd, for which AuthInfo is not asked.
AccountingStoragePass={munge_socket}
AccountingStorageEnforce=associations,limits,qos
{account_gpus}JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=10

{gres_types}{nodes}
# `high` preempts `low`: a job there gets SIGTERM, {grace_time} s later SIGKILL, and goes back to the queue.
# `normal` neither preempts nor is preempted.
PartitionName=DEFAULT Nodes=ALL State=UP DefaultTime=10 MaxTime=1-0 OverSubscribe=NO PreemptMode=OFF
PartitionName=normal Default=YES PriorityTier=1
PartitionName=high PriorityTier=2
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_time}
"""


def slurm_conf(options: Options, host: str) -> str:
    """slurm.conf for a controller on the machine `host`."""
    mem_mib = options.mem // MIB
    return _SLURM_CONF.format(
        cluster=paths.CLUSTER,
        host=host,
        controller=options.controller_address,
        ctld_port=CTLD_PORT,
        slurmd_port=SLURMD_PORT,
        dbd_port=DBD_PORT,
        auth=_AUTH,
        munge_socket=paths.MUNGE_SOCKET,
        cred_expire=_CRED_EXPIRE,
        ctld_state=paths.CTLD_STATE,
        spool=paths.NODE_SPOOL,
        pids=paths.PIDS,
        logs=paths.LOGS,
        epilog=paths.EPILOG,
        kill_wait=KILL_WAIT,
        slurmd_timeout=SLURMD_TIMEOUT,
        max_array_size=options.max_array_size,
        mem_per_cpu=max(mem_mib // options.slots, 1),
        account_gpus="AccountingStorageTRES=gres/gpu\n" if options.gpus else "",
        gres_types="GresTypes=gpu\n" if options.gpus else "",
        plugins=_plugins(options),
        nodes="".join(_node_line(options, node) for node in options.names),
        grace_time=options.grace_time,
    )


def _plugins(options: Options) -> str:
    return f"PluginDir={paths.RELEASE}/lib/slurm-wlm\n" if options.slurm else ""


def _node_line(options: Options, node: str) -> str:
    kind = f"{options.gpu_type}:" if options.gpu_type else ""
    gres = f" Gres=gpu:{kind}{options.gpus}" if options.gpus else ""
    return (
        f"NodeName={node} NodeAddr={options.address(node)} CPUs={options.slots} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={options.slots} ThreadsPerCore=1 RealMemory={options.mem // MIB}{gres} State=UNKNOWN\n"
    )


def gres_conf(options: Options) -> str:
    """Pretend GPUs need device files: a bare `Count=4` is reported as 0 and the nodes become invalid."""
    if not options.gpus:
        return ""
    numbers = "0" if options.gpus == 1 else f"[0-{options.gpus - 1}]"
    nodes = "n1" if options.nodes == 1 else f"n[1-{options.nodes}]"
    kind = f" Type={options.gpu_type}" if options.gpu_type else ""
    return f"NodeName={nodes} Name=gpu{kind} File={paths.DEVICES}/nvidia{numbers}\n"


def slurmdbd_conf(options: Options) -> str:
    """slurmdbd.conf; slurmdbd finds it in the folder of $SLURM_CONF and wants it to be readable by root only."""
    return f"""\
AuthType=auth/munge
AuthInfo={_AUTH}
DbdHost=localhost
DbdAddr={options.controller_address}
DbdPort={DBD_PORT}
SlurmUser=root
LogFile={paths.log_file("slurmdbd")}
PidFile={paths.PIDS}/slurmdbd.own.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
{_plugins(options)}"""


def cgroup_conf(slurm_version: tuple[int, int]) -> str:
    """The box limits nodes itself, so SLURM's own use of cgroups is turned off where a version has the switch."""
    return "CgroupPlugin=disabled\n" if slurm_version >= (23, 2) else ""


def epilog(group: str) -> str:
    """Script that slurmd runs after a job: it ends what the job left behind.

    proctrack/linuxproc follows parents only and loses a process that broke away from them; where cgroups track jobs,
    as on most clusters, nothing is lost. Here such a process is known by its environment. `group` is the folder with
    the nodes' control groups. A failing epilog would drain the node, so this one always succeeds.
    """
    return f"""\
#!/bin/sh
cd "{group}/$(uname -n)" || exit 0
files=$(sed 's|.*|/proc/&/environ|' cgroup.procs)
for file in $(grep -lzxs "SLURM_JOB_ID=$SLURM_JOB_ID" $files /dev/null); do
    pid=${{file#/proc/}}
    kill -9 "${{pid%/environ}}"
done
exit 0
"""
