"""Causes that show only when JAX starts, in a child process.

The wording of JAX changes between releases: a text alone is never the proof, only
together with the fact that JAX did not show the device that was asked for.
"""

import re

from haiku_template.diagnosis import libraries
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.results import Child, DriverResult, JaxResult
from haiku_template.diagnosis.rows import Cause, Facts

SEGMENTATION_FAULT, BUS_ERROR = (-11, 139), (-7, 135)
# The second is said, before the process is ended, where a part of cuDNN is missing.
NOT_LOADED = r"Unable to load (\w+)\. Is it installed\?|Cannot load symbol cudnn"

# The names by which the CUDA plugin tells what cuInit returned to it.
CODES = {
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_STUB_LIBRARY": 34,
    "CUDA_ERROR_DEVICE_UNAVAILABLE": 46,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_OPERATING_SYSTEM": 304,
    "CUDA_ERROR_SYSTEM_NOT_READY": 802,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": 803,
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": 804,
    "CUDA_ERROR_MPS_CONNECTION_FAILED": 805,
    "CUDA_ERROR_MPS_RPC_FAILURE": 806,
    "CUDA_ERROR_MPS_SERVER_NOT_READY": 807,
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": 808,
    "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED": 809,
    "Unknown CUDA error 303": 303,  # There is no libcuda.so.1.
}


def driver_of(jax: JaxResult | None) -> DriverResult | None:
    """What the driver answered to JAX itself, in its words; None if it did not fail."""
    said = jax.child.errors if jax else ""
    if "No visible GPU devices" in said:
        return DriverResult(0, count=0)
    name = re.search(r"cuInit\(0\) failed: (\w+(?: CUDA error \d+)?)", said)
    return DriverResult(CODES.get(name[1], 999), name[1]) if name else None


def plugin_words(child: Child) -> str:
    """The error that kept JAX's plugin from starting; empty if there was none.

    JAX logs it, and says after it, wrongly, that no CUDA-enabled jaxlib is installed.
    """
    _, failed, said = child.errors.rpartition("Jax plugin configuration error")
    errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", said, re.MULTILINE)
    return errors[-1] if failed and errors else ""


def on_gpu(facts: Facts) -> bool:
    """Whether JAX, asked for its devices, showed a GPU."""
    return bool(facts.jax) and any(d.platform == "gpu" for d in facts.jax.devices)


def reached(facts: Facts) -> bool:
    """Whether JAX, asked for its devices, showed what was asked for."""
    if not facts.jax or facts.jax.child.returncode != 0 or not facts.jax.devices:
        return False
    if facts.asked == "auto":
        return True
    return any(device.platform == facts.asked for device in facts.jax.devices)


def failed_start(machine: Machine, facts: Facts) -> Child | None:
    """How the child ended in which JAX did not show what was asked for.

    Where `auto` was asked beside an NVIDIA card, that is the card.
    """
    if not facts.jax:
        return None
    unused = facts.asked == "auto" and machine.nodes() and not on_gpu(facts)
    return facts.jax.child if unused or not reached(facts) else None


def _unknown_flag(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    flag = child and re.search(r"Unknown flags? in XLA_FLAGS: (\S+)", child.errors)
    if flag and flag[1].split("=")[0] in machine.environ.get("XLA_FLAGS", ""):
        return f"XLA_FLAGS holds {flag[1]}, and the process ends without a traceback"
    return None


def _crash(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    if not child or child.returncode not in SEGMENTATION_FAULT:
        return None
    return "starting JAX ended in a segmentation fault"


def _old_plugin_import(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    if child and re.search(r"Plugin module .* could not be loaded", child.errors):
        reason = re.findall(r"ImportError: .*", child.errors)
        return reason[-1] if reason else "a plugin of JAX cannot be imported"
    return None


def _interface(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    match = child and re.search(r"PJRT API version \(\S+\).*", child.errors)
    return match[0] if match else None


def _library_refused(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    if child and child.returncode in BUS_ERROR:
        return "loading it ended in a bus error: its file is shorter than it should be"
    match = child and re.search(NOT_LOADED, child.errors)
    if not match or _shadowed_at_start(machine, facts):
        return None
    return f"JAX's CUDA plugin cannot load {match[1] or 'all of cuDNN'}"


def _shadowed_at_start(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    if not child or not re.search(NOT_LOADED, child.errors):
        return None
    return libraries.foreign_library(machine)


def _outdated_at_start(machine: Machine, facts: Facts) -> str | None:
    child = failed_start(machine, facts)
    match = child and re.search(r"Outdated (\w+) installation found", child.errors)
    if not match:
        return None
    found = re.search(r"Installed version: (\d+)", child.errors)
    return f"{match[1]} {found[1] if found else ''} is older than JAX needs".strip()


ROWS = (
    Cause(
        "A50",
        "XLA_FLAGS holds a flag that this version does not know",
        _unknown_flag,
        "drop the flag from XLA_FLAGS",
        asked="all",
    ),
    Cause(
        "A13",
        "JAX crashes at its start",
        _crash,
        "align the versions of jax, jaxlib and the plugin, or uninstall the plugin",
        asked="all",
    ),
    Cause(
        "A12",
        "a plugin of JAX cannot be imported",
        _old_plugin_import,
        "align the versions of jax, jaxlib and the plugin",
    ),
    Cause(
        "A18",
        "a plugin speaks another version of JAX's interface",
        _interface,
        "align the versions; pip uninstall -y jax-metal",
    ),
    Cause(
        "A07",
        "LD_LIBRARY_PATH shadows pip's CUDA libraries",
        _shadowed_at_start,
        "unset LD_LIBRARY_PATH",
    ),
    Cause(
        "A08",
        "a CUDA library is older than JAX needs",
        _outdated_at_start,
        libraries.with_wheels,
    ),
    Cause(
        "A06",
        "a CUDA library that the plugin needs cannot be loaded",
        _library_refused,
        libraries.reinstall,
    ),
)
