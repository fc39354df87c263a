"""A real Slurm on this host: one controller and two nodes, for tests that run as root.

Debian's slurm-wlm brings all of it. No systemd is needed.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scontrol")
START_SECONDS = 60
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
CGROUP = "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\nConstrainCores=no\n"


def missing():
    """What a cluster lacks here, in words; "" for nothing."""
    lacks = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if lacks:
        return f"no {', '.join(lacks)}: apt-get install slurm-wlm"
    return "" if os.geteuid() == 0 else "Slurm's daemons start as root alone"


PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"


def free_ports(count):
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]


@contextlib.contextmanager
def cluster(folder: Path):
    """Starts the daemons; yields the environment of commands for them."""
    for name in ("state", "spool_n1", "spool_n2"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = dict(zip(("controller", "n1", "n2"), free_ports(3), strict=True))
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, host=socket.gethostname(), **ports))
    (folder / "cgroup.conf").write_text(CGROUP)
    environ = os.environ | {"SLURM_CONF": str(conf), "PATH": PATH}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munge += [f"--{x}-file={folder}/munge.{x}" for x in ("pid", "log", "seed")]
    commands = [
        [*munge, f"--socket={folder}/munge.socket"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(
                command,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(daemon.wait, timeout=30)
            stack.callback(daemon.terminate)
            time.sleep(0.5)
        wait_for_nodes(environ)
        yield environ


def wait_for_nodes(environ):
    """Returns once both nodes take jobs."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        shown = subprocess.run(
            ["sinfo", "--noheader", "--format=%D %t"],
            env=environ,
            capture_output=True,
            text=True,
        )
        if shown.stdout.split() == ["2", "idle"]:
            return
        assert time.monotonic() < deadline, shown.stdout + shown.stderr
        time.sleep(0.5)
