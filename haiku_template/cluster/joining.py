"""Joining JAX's distributed runtime, once all processes are known to be there."""

import atexit
import contextlib
import importlib.metadata
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from haiku_template import signals
from haiku_template.cluster import relay
from haiku_template.cluster.detection import Started, detect
from haiku_template.cluster.heartbeat import BEAT_SECONDS, Heartbeat
from haiku_template.cluster.rendezvous import SECONDS, meet
from haiku_template.errors import ConfigError, DeviceError

PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "haiku_template")
# Flags for `join`; all but the last are needed.
PARAMETERS = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
# Of JAX, which then aborts, also where one of its processes saves.
# Why: docs/decisions/cluster.md#join-timeout
PATIENCE_SECONDS = 86_400
# Words of errors: of JAX's runtime, of collectives, and of those about another process.
RUNTIME = ("coordination service", "Socket closed", "CoordinationService")
COLLECTIVES = ("Gloo", "NCCL")  # Why: docs/decisions/cluster.md#failed-collectives
PEER = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "remote process")
# Why: docs/decisions/cluster.md#initialize
START_SECONDS = 3600.0  # From the first process that has imported JAX to the last.
HEARTBEATS: list[Heartbeat] = []  # Of this process, once it has met the others.


def asked(
    mode: str, environ: Mapping[str, str], **flags: Any
) -> tuple[str, int, int, Sequence[int] | None] | None:
    """Arguments of `join`, from flags (None for those not given) and the launcher.

    Args:
      mode: `auto`, `on` or `off`.
      flags: of `PARAMETERS`.

    Returns:
      None for a process on its own.

    Raises `ConfigError` if something is missing: says what was found.
    """
    if mode == "off":
        return None
    told = {k: value for k, value in flags.items() if value is not None}
    launch = detect(environ, told) or Started("", None, None, None)
    arguments = dict(zip(PARAMETERS, launch[1:], strict=True)) | told
    if mode == "auto" and launch.by in ("", "Kubernetes") and not told:
        return None
    if missing := [f"--{name}" for name in PARAMETERS[:3] if arguments[name] is None]:
        launcher = (
            f"{launch.by}, which started this one," if launch.by else "this environment"
        )
        raise ConfigError(
            f"several processes need {', '.join(missing)}, which {launcher} does not "
            "tell; --coordinator_address (HOST:PORT of process 0) and --num_processes "
            "are the same in all, --process_id is another in each"
        )
    return tuple(arguments[name] for name in PARAMETERS)


def join(
    address: str,
    count: int,
    index: int,
    local_device_ids: Sequence[int] | None = None,
    seconds: float = SECONDS,
    workdir: str | Path | None = None,
) -> None:
    """Makes this process number `index` of a run of `count`, and starts no backend.

    Args:
      workdir: of the run, by which its processes know each other; without, they do by
        the variable HAIKU_TEMPLATE_RUN, if it is set.

    Raises:
      ConfigError: there are not so many processes, or they do not share the workdir.
      DeviceError: not all come to `address` of process 0, or their packages differ.
    """
    if count < 1 or not 0 <= index < count:
        raise ConfigError(
            f"--process_id={index} of --num_processes={count} is not possible; "
            "processes are numbered from 0"
        )
    if count == 1:
        return
    facts = {name: importlib.metadata.version(name) for name in PACKAGES}
    facts["the version of Python"] = platform.python_version()
    meeting = meet(address, count, index, facts, seconds, workdir)
    heartbeat = Heartbeat(meeting.peers, index)
    HEARTBEATS.append(heartbeat)
    signals.RESCUES.append(heartbeat.rescue)
    signals.CALLED.append(leave)
    service = relay.start(meeting, address, index, BEAT_SECONDS)
    import jax

    # It would warn of proxies: the service is a file of this host.
    jax.config.update("jax_check_proxy_envs", False)
    # For CPUs; GPUs have NCCL.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Orbax asks the service, too, at each save, and logs it.
    quiet = logging.getLogger("absl")
    quiet.addFilter(lambda record: "preemption sync point" not in record.getMessage())
    # All processes stop after the same step: docs/decisions/cluster.md#signals
    jax.config.update("jax_enable_preemption_service", True)
    with heartbeat.waiting(START_SECONDS, "{:g} s to start JAX"):
        jax.distributed.initialize(
            service,
            count,
            index,
            cluster_detection_method="deactivate",
            initialization_timeout=PATIENCE_SECONDS,
            shutdown_timeout_seconds=PATIENCE_SECONDS,
            coordinator_bind_address=service,
            local_device_ids=local_device_ids,
        )
    atexit.register(_leave_at_exit)  # Called before JAX's, which waits for all.


def _leave_at_exit() -> None:
    """Leaves, if `cli.run` did not; without an error it then waits for the others."""
    if (error := getattr(sys, "last_value", None)) is None:
        leave()
        return _shut_down()
    leave(f"{type(error).__name__}: {error}")
    fault = lost(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if fault:
        signals.say(f"error: {fault}")
        os._exit(fault.exit_code)
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _shut_down() -> None:
    """Waits for all processes in JAX's shutdown, and ends the watch."""
    import jax
    from jax._src.distributed import global_state as state

    # After a signal the manager's destructor waits for the other processes', so it is
    # kept in the heartbeat, with the client that it uses.
    # Why: docs/decisions/patches.md#preemption
    references = state.preemption_sync_manager, state.client
    state.preemption_sync_manager = None
    for heartbeat in HEARTBEATS:
        heartbeat.references = references
    jax.distributed.shutdown()
    for heartbeat in HEARTBEATS:
        heartbeat.parted.set()


def watch(
    waited: Callable[[], float],
    seconds: float,
    resumes: Callable[[], bool] = lambda: True,
) -> None:
    """Ends the run when this process has waited more than `seconds` for the others.

    `waited` gives the seconds for which it has waited by now; 0 when it does not wait.
    `resumes` is True once there is a checkpoint; then errors say how to resume.
    """
    for heartbeat in HEARTBEATS:
        heartbeat.stall_seconds, heartbeat.resumes = seconds, resumes
        heartbeat.waited = waited


def is_joined() -> bool:
    """True in a process of several, as soon as JAX's runtime knows."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def leave(error: str = "", exit_code: int = 0) -> None:
    """Tells the others that this process ends: in order, or by an error.

    `exit_code` is then its own, even if another process is lost meanwhile.
    """
    for heartbeat in HEARTBEATS:
        heartbeat.exit_code = exit_code or heartbeat.exit_code
        heartbeat.leave(error)


def ended(error: SystemExit) -> None:
    """Ends a process of several that called `sys.exit`; returns in one on its own.

    Why: docs/decisions/cluster.md#no-atexit
    """
    if not is_joined():
        return
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    leave(f"SystemExit: {error.code}", code)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if not isinstance(error.code, int | None):  # Python prints what is no number.
        signals.say(str(error.code))
    os._exit(code & 0xFF)


def lost(error: BaseException) -> DeviceError | None:
    """Translates an error of JAX's that means a lost process; None for others.

    Collectives may fail with all processes there, for want of /dev/shm, say. A restart
    mends that not, and it has the exit code of a bad configuration.
    """
    message = str(error).split("\n")[0][:300]
    # JAX raises its runtime's errors as a ValueError when a result is fetched.
    of_jax = isinstance(error, RuntimeError | ValueError) and is_joined()
    of_peers = any(name in message for name in RUNTIME + COLLECTIVES)
    if not of_jax or hasattr(error, "exit_code") or not of_peers:
        return None
    for heartbeat in HEARTBEATS:
        if heartbeat.wait_for_fault():
            error = DeviceError(heartbeat.sentence())
            error.exit_code = heartbeat.fault_code
            return error
    if any(name in message for name in RUNTIME + PEER):
        gone = "another process of this run is gone or cannot be reached"
        return DeviceError(f"{gone} ({message})")
    error = DeviceError(
        f"the collectives failed here, and no process is lost: {message}; on GPUs "
        "NCCL_DEBUG=INFO says why: mostly the size of /dev/shm, ulimit -l, the driver, "
        "or the interface (NCCL_SOCKET_IFNAME)"
    )
    error.exit_code = ConfigError.exit_code
    return error
