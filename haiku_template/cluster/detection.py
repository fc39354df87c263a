"""Detection of a run's processes, by the variables of their launcher."""

import re
import socket
import subprocess
import zlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from haiku_template.errors import ConfigError, counted

SECONDS = 300.0  # For Slurm: all processes of a job ask at once, and it tries again.
PORTS = range(61_440, 65_536)  # Of the jobs of one machine; as JAX's own.


class Started(NamedTuple):
    """Place of a process as its launcher tells it; None for what it does not tell."""

    by: str
    address: str | None  # HOST:PORT of process 0.
    count: int | None
    index: int
    local_device_ids: tuple[int, ...] | None = None  # None for all that it sees.


def detect(environ: Mapping[str, str], flags: Collection[str] = ()) -> Started | None:
    """Reads the launcher's variables; None for a process on its own.

    What `flags`, by name, tell is not asked of it. Raises `ConfigError` if a node's
    cards cannot be shared evenly, its address is not known, or the variables are not
    as a launcher sets them.
    """
    # Why: docs/decisions/cluster.md#launchers
    innermost = next((name for name in READERS if name in environ), "MASTER_ADDR")
    for name in (innermost, "MASTER_ADDR"):  # PyTorch's may be set in a lone task.
        try:
            if started := READERS[name](environ, flags):
                return started
        except ConfigError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            fault = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(
                f"{name} is set, and what its launcher sets beside it is not as it "
                f"should be: {fault}; unset it, or give --distributed=off"
            ) from error
    return None


# Why: docs/decisions/cluster.md#slurm
def _slurm(environ: Mapping[str, str], flags: Collection[str]) -> Started | None:
    """Reads a task of `srun`; a batch script that did not call it is on its own."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    if count == 1:
        return None
    host = first_host(environ["SLURM_STEP_NODELIST"])
    host = host if "coordinator_address" in flags else _address_of(host)
    port = _port(f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}")
    ids = None
    # With --gpus-per-task each task sees its own cards alone. Newer Slurms set
    # the second by --cpus-per-task, too: cpu=4.
    of_task = environ.get("SLURM_TRES_PER_TASK", "")
    if "SLURM_GPUS_PER_TASK" not in environ and "gpu" not in of_task:
        nodes = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
        tasks = nodes[int(environ.get("SLURM_NODEID", 0))]
        ids = own_cards(environ, int(environ["SLURM_LOCALID"]), tasks, flags)
    return Started("Slurm", f"{host}:{port}", count, int(environ["SLURM_PROCID"]), ids)


def first_host(nodes: str) -> str:
    """First of a list of Slurm's: `n1` of `n[1-2,5],m3`."""
    head = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)
    if head is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes} names no node")
    return "".join(head.groups(""))


def _tasks_per_node(text: str) -> list[int]:
    """Tasks of each node: [2, 2, 1] of `2(x2),1`."""
    counts: list[int] = []
    for item in text.split(","):
        tasks, _, times = item.partition("(x")
        counts += [int(tasks)] * int(times.rstrip(")") or 1)
    return counts


def _address_of(host: str) -> str:
    """Name of a node that others can look up, or its address by Slurm."""
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        command = ["scontrol", "--oneliner", "show", "node", host]
        try:
            description = subprocess.check_output(command, text=True, timeout=SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"the name of node {host} cannot be looked up, nor can scontrol tell "
                f"its address ({error}); give --coordinator_address=HOST:PORT"
            ) from error
        return re.search(r"NodeAddr=(\S+)", description)[1]


def _torch(environ: Mapping[str, str], flags: Collection[str]) -> Started | None:
    """Reads PyTorch's names: of torchrun, Kubeflow, SageMaker, or set by a user."""
    if not {"MASTER_ADDR", "RANK", "WORLD_SIZE"} <= environ.keys():
        return None
    host, count = environ["MASTER_ADDR"], int(environ["WORLD_SIZE"])
    if count == 1:
        return None
    port = int(environ.get("MASTER_PORT", 29_500))
    if run := environ.get("TORCHELASTIC_RUN_ID"):  # torchrun itself listens there.
        port = _port(f"{run}.{host}.{port}")
    local = int(environ.get("LOCAL_RANK", 0))
    tasks = int(environ.get("LOCAL_WORLD_SIZE", 1))
    ids = own_cards(environ, local, tasks, flags)
    if tasks > 1 and "CUDA_VISIBLE_DEVICES" not in environ:
        ids = (local,)  # PyTorch's custom.
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Started("torchrun", address, count, int(environ["RANK"]), ids)


def _open_mpi(environ: Mapping[str, str], flags: Collection[str]) -> Started | None:
    count = int(environ.get("OMPI_COMM_WORLD_SIZE", 1))
    if count == 1:
        return None
    local = int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    together = int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # Open MPI up to 4 says where mpirun runs, and 5 says nothing.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = uri.partition(".")[0] or environ.get("PMIX_NAMESPACE", "")
    match = re.search(r"tcp://([^,:]+)", uri)
    host = "127.0.0.1" if together == count else match and match[1]
    address = f"{host}:{_port(job)}" if host and job else None
    index = int(environ["OMPI_COMM_WORLD_RANK"])
    ids = own_cards(environ, local, together, flags)
    return Started("Open MPI", address, count, index, ids)


def _kubernetes(environ: Mapping[str, str], flags: Collection[str]) -> Started | None:
    """Reads a pod of an indexed Job, which tells its index alone."""
    index = environ.get("JOB_COMPLETION_INDEX")
    return None if index is None else Started("Kubernetes", None, None, int(index))


def own_cards(
    environ: Mapping[str, str], local: int, tasks: int, flags: Collection[str] = ()
) -> tuple[int, ...] | None:
    """A task's share of the cards of its node, by index; None where it sees its own."""
    visible = [x for x in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    if tasks == 1 or len(visible) < tasks or "local_device_ids" in flags:
        return None
    if local not in range(tasks):
        raise ValueError(f"it is process {local} of {tasks} on its node")
    if len(visible) % tasks:
        raise ConfigError(
            f"{tasks} processes on this node see "
            f"{counted(len(visible), 'cards')} (CUDA_VISIBLE_DEVICES="
            f"{','.join(visible)}), which cannot be shared evenly; give each its "
            "own, as by srun --gpus-per-task"
        )
    size = len(visible) // tasks
    return tuple(range(local * size, (local + 1) * size))


def _port(job: str) -> int:
    """Port for a job, the same in each of its processes."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


# An inner launcher's processes have the variables of the outer's, too: torchrun's those
# of srun, and mpirun's those of the daemon that srun started for it.
READERS = {
    "TORCHELASTIC_RUN_ID": _torch,
    "OMPI_COMM_WORLD_SIZE": _open_mpi,
    "SLURM_STEP_ID": _slurm,
    "MASTER_ADDR": _torch,
    "JOB_COMPLETION_INDEX": _kubernetes,
}
LAUNCHERS = READERS.keys()  # Variables that a process on its own has none of.
