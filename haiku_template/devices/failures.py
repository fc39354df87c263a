"""Why a device cannot be had: causes in the machine, and two in the program itself.

Ids are those of `haiku_template.doctor`, whose table holds the machine's causes.
"""

import logging

import jax
from jax.extend.backend import backends

from haiku_template.devices.errors import DeviceError
from haiku_template.doctor import GPU_NAMES, Machine, check_environment

logger = logging.getLogger(__name__)


def why_no_gpu() -> str:
    """The cause for which JAX has no GPU here, and its remedy, in one sentence.

    Asks the driver, in a child process, where there is a card.
    """
    for finding in check_environment("gpu"):
        if finding.severity == "error":
            return str(finding)
    if only_cpu():
        return (
            "this process had chosen jax_platforms='cpu', as DeviceManager.create"
            "('cpu') does, and JAX keeps the platforms that it started with; create "
            "the DeviceManager for the GPU first, or start another process"
        )
    return (
        "nothing is wrong outside JAX, whose own words are above; "
        "python -m haiku_template.doctor --device=gpu looks further"
    )


def only_cpu() -> bool:
    """Whether JAX was told to start the CPU and nothing else."""
    return jax.config.jax_platforms == "cpu"


def unused_card() -> str:
    """Logs, loudly, that a run is on the CPU beside a GPU; returns why, or nothing."""
    if not Machine.here().has_card():
        return ""
    why = why_no_gpu()
    logger.warning("THIS MACHINE'S GPU IS NOT USED; THE RUN IS ON THE CPU: %s", why)
    return why


def check_default_device() -> None:
    """Asserts that `jax.default_device` is still JAX's own.

    Raises:
      DeviceError: the program overwrote it (A53).
    """
    if not callable(jax.default_device):
        raise DeviceError(
            f"[A53] jax.default_device was overwritten with {jax.default_device!r}, "
            "which changes no device and breaks JAX; write `with "
            "jax.default_device(device):`, or leave it out: DeviceManager places arrays"
        )


def ignored_platforms() -> str:
    """Says that `jax_platforms` was changed after JAX had started (A46); else empty.

    JAX must have started. It keeps the platforms that it started with, in silence.
    """
    wanted = jax.config.jax_platforms
    words = ["gpu" if word in GPU_NAMES else word for word in (wanted or "").split(",")]
    used = jax.default_backend()
    if not wanted or words[0] == used:
        return ""
    # Without a card JAX passes over CUDA in silence: then it may have come in time.
    if words[0] == "gpu" and used in words and not Machine.here().has_card():
        return ""
    return (
        f"[A46] jax_platforms was changed to {wanted!r} after JAX had started on "
        f"{', '.join(backends())}, and JAX ignores that; change it, or create the "
        "DeviceManager, before the first JAX operation"
    )
