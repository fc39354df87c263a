"""Joining JAX's distributed runtime, once all processes are known to be there."""

import importlib.metadata
import logging
import platform
import sys

from haiku_template.cluster.rendezvous import SECONDS, meet
from haiku_template.errors import ConfigError, DeviceError

PACKAGES = ("jax", "jaxlib", "dm-haiku", "optax", "haiku_template")
# JAX's own limits only come into play when a process that was there is lost.
JOIN_SECONDS, SHUTDOWN_SECONDS = 60, 30
# Words of JAX's runtime and its collectives about a process that is gone.
LOST = ("Gloo", "NCCL", "coordination service", "Socket closed", "CoordinationService")


def join(address: str, count: int, index: int, seconds: float = SECONDS) -> None:
    """Makes this process number `index` of a run of `count`, and starts no backend.

    Raises:
      ConfigError: there are not so many processes.
      DeviceError: not all come to `address`, HOST:PORT of process 0, or they have
        different packages.
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
    meet(address, count, index, facts, seconds)
    import jax

    # For CPUs; GPUs have NCCL.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Orbax asks too, at each save, and tells.
    quiet = logging.getLogger("absl")
    quiet.addFilter(lambda record: "preemption sync point" not in record.getMessage())
    # Its handler of SIGTERM makes all processes stop after the same step.
    jax.config.update("jax_enable_preemption_service", True)
    jax.distributed.initialize(
        address,
        count,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=JOIN_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )


def lost(error: BaseException) -> DeviceError | None:
    """Makes the error to show for one of JAX's that means a lost process; or None."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    words = str(error).split("\n")[0]
    if not jax.distributed.is_initialized() or not any(w in words for w in LOST):
        return None
    return DeviceError(
        f"another process of this run is gone or cannot be reached ({words[:200]}); "
        "its own words say why, and the same command in all resumes the last checkpoint"
    )
