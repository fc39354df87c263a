"""Child processes that ask the driver and JAX: each has a time limit and is killed.

A child keeps the driver's state, its crashes and its hangs out of this process.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from haiku_template.diagnosis import programs
from haiku_template.diagnosis.results import (
    CardMemory,
    Child,
    Device,
    DriverResult,
    JaxResult,
    OperationsResult,
    Stage,
)

ASK_DRIVER = Path(__file__).with_name("ask_driver.py")
# A process in the kernel's hands cannot be killed; it is then left behind.
SECONDS_TO_DIE = 2.0


def run_child(
    arguments: list[str], timeout: float, environ: Mapping[str, str] | None = None
) -> Child:
    """Runs this Python with arguments; kills its whole process group at the limit.

    Args:
      arguments: what follows the name of the interpreter.
      timeout: seconds.
      environ: the child's environment variables; this process's by default.
    """
    start = time.monotonic()
    # Files, not pipes: reading a pipe could wait for a grandchild that holds it open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=None if environ is None else dict(environ),
            start_new_session=True,
        )
        try:
            returncode = child.wait(timeout)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _kill_group(child)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Child(returncode, *texts, seconds=time.monotonic() - start)


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


def probe_driver(
    timeout: float, environ: Mapping[str, str] | None = None
) -> DriverResult:
    """Asks the NVIDIA driver: does it start, which version, how many devices.

    When it finds none and CUDA_VISIBLE_DEVICES is set, asks again without it.
    """
    environ = os.environ if environ is None else environ
    result = _ask(timeout, environ)
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return result
    if result.code == 100 or (result.code == 0 and not result.count):
        rest = {k: v for k, v in environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        result = result._replace(count_unmasked=_ask(timeout, rest).count)
    return result


def _ask(timeout: float, environ: Mapping[str, str]) -> DriverResult:
    child = run_child(["-I", "-S", str(ASK_DRIVER)], timeout, environ)
    answer = {}
    try:
        for line in child.output.splitlines():
            answer.update(json.loads(line))
    except ValueError:
        pass  # It was ended while it wrote.
    if "code" not in answer:
        problem = f"the child ended with code {child.returncode}: {child.last_words()}"
        if child.returncode is None:
            problem = f"no answer within {timeout:g} s"
        return DriverResult(None, problem=problem, seconds=child.seconds)
    answer["refused"] = tuple(answer["refused"].items())
    answer["capabilities"] = tuple(map(tuple, answer.get("capabilities", ())))
    answer["memory"] = tuple(_memory(*card) for card in answer.get("memory", ()))
    return DriverResult(**answer, seconds=child.seconds)


def _memory(used: int, total: int, users: list | None) -> CardMemory:
    return CardMemory(used, total, None if users is None else tuple(map(tuple, users)))


def _for_jax(environ: Mapping[str, str] | None, asked: str) -> dict[str, str]:
    """The environment of a child that starts JAX beside programs already running."""
    environ = dict(os.environ if environ is None else environ)
    # The card may be in use: take what is needed, not three quarters of it.
    environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if asked == "cpu":
        # As the commands do, so that a broken card does not keep a run off the CPU.
        environ["JAX_PLATFORMS"] = "cpu"
    return environ


def probe_jax(
    timeout: float, environ: Mapping[str, str] | None = None, asked: str = "auto"
) -> JaxResult:
    """Imports JAX in a child and asks for every backend's devices and memory."""
    child = run_child(["-c", programs.DEVICES], timeout, _for_jax(environ, asked))
    try:
        found, default, libraries = json.loads(child.output.splitlines()[-1])
    except (ValueError, IndexError):
        return JaxResult(child)
    devices = tuple(Device(*device) for device in found)
    return JaxResult(child, devices, default, tuple(libraries))


def probe_operations(
    timeout: float,
    platform: str,
    environ: Mapping[str, str] | None = None,
    indices: tuple[int, ...] = (),
) -> OperationsResult:
    """Computes on each device in a child, and compares every value.

    A round trip, a matrix product and a convolution on each device; copies between
    devices and one sum over all when there are several.

    Args:
      timeout: seconds.
      platform: `cpu`, `gpu`, `tpu`, or `auto` for the one JAX chooses.
      environ: the environment variables; this process's by default.
      indices: which devices of the platform; all by default.
    """
    chosen = ",".join(str(index) for index in indices)
    arguments = ["-c", programs.OPERATIONS, platform, chosen]
    child = run_child(arguments, timeout, _for_jax(environ, platform))
    stages, unfinished, count = [], "", 0
    for line in child.output.splitlines():
        try:
            kind, *words = json.loads(line)
        except ValueError:
            continue
        if kind == "devices":
            count = words[0]
        elif kind == "start":
            unfinished = words[0]
        else:
            unfinished = ""
            stages.append(Stage(*words))
    return OperationsResult(child, tuple(stages), unfinished, count)
