"""Child processes that ask the driver and JAX: each has a time limit and is killed.

A child keeps the driver's state, its crashes and its hangs out of this process.
"""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from jax_doctor.programs import ASK_JAX, ASK_SUMS, OPTION

# Why: docs/decisions/doctor.md#standard-library
ASK_DRIVER = Path(__file__).with_name("ask_driver.py")
logger = logging.getLogger(__name__)
# Why: docs/decisions/doctor.md#persistence
CHILD_SECONDS, SLOW_SECONDS = 300.0, 30.0  # Limit of a child; until a line says so.
SLOW = (
    "%s has not answered for %.0f s and is waited for up to %.0f: cards that are not "
    "kept ready (sudo nvidia-smi -pm 1 does) take a minute, and files on a slow disk"
)
# A process in the kernel's hands cannot be killed; it is then left behind.
SECONDS_TO_DIE = 2.0
_RUNNING: set[int] = set()  # Process groups of children.


class Child(NamedTuple):
    """Result of a child process: exit code, output, seconds."""

    # None when it was killed at the limit; negative: the signal.
    returncode: int | None
    output: str
    errors: str
    seconds: float

    def last_words(self) -> str:
        """Last line on standard error, and the signal that ended the child, if any."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        last = lines[-1] if lines else "it said nothing"
        if self.returncode is None or self.returncode >= 0:
            return last
        return f"ended by {signal.Signals(-self.returncode).name}: {last}"


class DriverResult(NamedTuple):
    """Answers of the NVIDIA driver; None where it gave none.

    Attributes:
      code: of cuInit; 303 when libcuda.so.1 could not be loaded, as JAX counts it; -1
        where JAX told the name alone; None when there was no answer.
      memory: of each card, as JSON holds it: `bytes`, `bytes_in_use`, and `processes`,
        each with `pid` and `bytes_in_use`.
    """

    code: int | None
    name: str = ""  # Of the code, as CUDA_ERROR_NO_DEVICE.
    problem: str = ""  # Why there was no answer, or what the loader said.
    version: int | None = None  # Of CUDA that the driver supports, as 12090.
    count: int | None = None  # Devices that a program may use.
    count_unmasked: int | None = None  # The same without CUDA_VISIBLE_DEVICES.
    library: str = ""  # The file that was loaded as libcuda.so.1.
    capabilities: tuple[tuple[int, int], ...] = ()  # Of each device, as (9, 0).
    refused: tuple[tuple[str, str], ...] = ()  # Nodes that cannot be opened, and why.
    nvml: int | None = None  # The code of nvmlInit_v2; None when there is no NVML.
    memory: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0

    @property
    def cuda(self) -> str:
        """CUDA that the driver supports, as 12.9; empty where it did not tell."""
        version = self.version or 0
        return f"{version // 1000}.{version % 1000 // 10}" if version else ""


class Device(NamedTuple):
    """One device as JAX sees it; memory in bytes, None where JAX cannot tell."""

    backend: str
    platform: str
    id: int
    kind: str
    bytes_in_use: int | None = None
    bytes_limit: int | None = None


class Stage(NamedTuple):
    """One operation on a device, and its problem, if any."""

    operation: str
    device: str
    problem: str = ""


class JaxResult(NamedTuple):
    """Findings of a child that imported JAX and computed on the devices asked for."""

    child: Child
    devices: tuple[Device, ...] = ()  # Of every backend; empty: JAX did not start.
    default: str = ""  # The platform that JAX would use.
    num_devices: int = 0  # How many were to be tried; 0 when none could be.
    stages: tuple[Stage, ...] = ()  # The operations that came to an end, in order.
    unfinished: str = ""  # The operation in which the child died or was killed.

    def failures(self) -> list[Stage]:
        """Operations whose results were wrong or that raised an error."""
        return [stage for stage in self.stages if stage.problem]

    def works(self) -> bool:
        """True if every operation gave the right values."""
        end = self.child.returncode == 0 and bool(self.stages)
        return end and not self.failures() and not self.unfinished


def run_child(
    arguments: list[str],
    timeout: float,
    environ: Mapping[str, str] | None = None,
    name: str = "JAX",
) -> Child:
    """Runs this Python for at most `timeout` seconds, then kills its process group."""
    start = time.monotonic()
    # Files, not pipes: reading a pipe could wait for a grandchild that holds it open.
    with _file() as output, _file() as errors:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
        _RUNNING.add(child.pid)
        try:
            returncode = _wait(child, timeout, name)
        finally:
            _kill_group(child)
            _RUNNING.discard(child.pid)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Child(returncode, *texts, seconds=time.monotonic() - start)


def _wait(child: subprocess.Popen, timeout: float, name: str) -> int | None:
    """Waits for a child, and says so if it is slow; None if it did not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(min(timeout, SLOW_SECONDS))
    if timeout <= SLOW_SECONDS:
        return None
    logger.warning(SLOW, name, SLOW_SECONDS, timeout)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(timeout - SLOW_SECONDS)
    return None


def _file() -> IO[bytes]:
    # In memory where Linux allows it: no folder may be there for a temporary file.
    create = getattr(os, "memfd_create", None)
    return os.fdopen(create("child"), "w+b") if create else tempfile.TemporaryFile()


def end_children() -> None:
    """Kills the children that still run: their time limit ends with this process."""
    for group in list(_RUNNING):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _kill_group(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        child.wait(SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        # Python would warn of a child that is not waited for; nobody can wait for it.
        child.returncode = -signal.SIGKILL


def _values(child: Child, kind: type) -> list[Any]:
    """Parses the lines of JSON that a child wrote, without an unfinished one."""
    values = []
    for line in child.output.splitlines():
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, kind)]


def probe_driver(timeout: float, environ: Mapping[str, str]) -> DriverResult:
    """Asks the NVIDIA driver: does it start, which version, how many devices.

    When it finds none and CUDA_VISIBLE_DEVICES is set, asks again without it.
    """
    result = _ask_driver(timeout, environ)
    none = result.code == 100 or (result.code == 0 and not result.count)
    if none and "CUDA_VISIBLE_DEVICES" in environ:
        unmasked = {k: v for k, v in environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        result = result._replace(count_unmasked=_ask_driver(timeout, unmasked).count)
    return result


def _ask_driver(timeout: float, environ: Mapping[str, str]) -> DriverResult:
    arguments = ["-I", "-S", str(ASK_DRIVER)]
    child = run_child(arguments, timeout, environ, "the NVIDIA driver")
    answer = dict(ChainMap(*_values(child, dict)))
    if "code" not in answer:
        problem = f"the child ended with code {child.returncode}: {child.last_words()}"
        if child.returncode is None:
            problem = f"no answer within {timeout:g} s"
        return DriverResult(None, problem=problem, seconds=child.seconds)
    answer["refused"] = tuple(answer["refused"].items())
    answer["capabilities"] = tuple(map(tuple, answer.get("capabilities", ())))
    answer["memory"] = tuple(answer.get("memory", ()))
    return DriverResult(**answer, seconds=child.seconds)


def probe_jax(
    timeout: float,
    environ: Mapping[str, str],
    platform: str = "auto",
    indices: tuple[int, ...] = (),
) -> JaxResult:
    """Imports JAX in a child, asks for all its devices, and computes on some of them.

    A round trip and the operations of `programs` on each device; with several, copies
    between them and one sum over all. Every value is compared.
    """
    # The card may be in use: take what is needed, not three quarters of it.
    environ = {**environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if platform == "cpu":
        # As the commands do, so that a broken card does not keep a run off the CPU.
        environ["JAX_PLATFORMS"] = "cpu"
    devices = ",".join(map(str, indices))
    # Why: docs/decisions/doctor.md#one-child
    return _read(run_child(["-c", ASK_JAX, platform, devices], timeout, environ))


def probe_sums(timeout: float, environ: Mapping[str, str]) -> JaxResult:
    """Computes the sums that jaxlib gets wrong on CPUs, without the flag against it."""
    flags = re.sub(rf"{OPTION}\S*", "", environ.get("XLA_FLAGS", ""))
    environ = {**environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return _read(run_child(["-c", ASK_SUMS], timeout, environ))


def _read(child: Child) -> JaxResult:
    """Findings of a child, from the lines that it wrote."""
    result = JaxResult(child)
    for kind, *values in _values(child, list):
        if kind == "shown":
            devices = tuple(Device(*device) for device in values[0])
            result = result._replace(devices=devices, default=values[1])
        elif kind == "devices":
            result = result._replace(num_devices=values[0])
        elif kind == "start":
            result = result._replace(unfinished=values[0])
        else:
            stages = (*result.stages, Stage(*values))
            result = result._replace(stages=stages, unfinished="")
    return result


def driver_of(jax: JaxResult | None) -> DriverResult | None:
    """Answer of the driver to JAX itself, from JAX's error; None if it did not fail."""
    errors = jax.child.errors if jax else ""
    if "No visible GPU devices" in errors:
        return DriverResult(0, count=0)
    name = re.search(r"cuInit\(0\) failed: (\w+(?: CUDA error \d+)?)", errors)
    return DriverResult(-1, name[1]) if name else None
