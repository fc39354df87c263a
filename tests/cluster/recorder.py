"""Writes what a process does together with the others, and where in the code."""

import sys
from collections.abc import Callable
from typing import Any

from jax.experimental import multihost_utils

from haiku_template.devices import DeviceManager, processes, replicas
from haiku_template.devices.compiled import CompiledStep
from tests.runs import ROOT

PACKAGE = str(ROOT / "haiku_template")
THEMSELVES = (processes.__file__, __file__)


def record(path: str) -> None:
    """Appends a line `what FILE:FUNCTION` to a file before each collective."""
    lines = open(path, "a", buffering=1)  # noqa: SIM115
    for owner, name in (
        (multihost_utils, "process_allgather"),
        (multihost_utils, "reached_preemption_sync_point"),
        (replicas, "_all_fingerprints"),
        (CompiledStep, "__call__"),
        (DeviceManager, "gather"),
    ):
        setattr(owner, name, _recorded(getattr(owner, name), name, lines.write))


def _recorded(function: Callable, name: str, write: Callable[[str], Any]) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        write(f"{name} {_site(sys._getframe(1))}\n")
        return function(*args, **kwargs)

    return call


def _site(frame: Any) -> str:
    """Function of the package that called, other than those of `Processes`."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or code.co_filename in THEMSELVES:
        return _site(frame.f_back)
    file = code.co_filename.removeprefix(PACKAGE + "/")
    return f"{file}:{code.co_name}"
