"""Finds out why the GPU is not used, and prints the fix.

    python -m jax_doctor --device=gpu
    python -m jax_doctor --code=DIR

The first checks from cheap to expensive and stops at the first broken link. It never
imports JAX; children with a time limit do. The second reads the code in a folder, and
lists the names in it that JAX removed. Exit codes: 0 the device that was asked for
works, or no name was removed; 64 a mistyped flag; 69 it does not work, or names were.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from jax_doctor import children, table
from jax_doctor.children import DriverResult, JaxResult
from jax_doctor.code import files
from jax_doctor.machine import Machine
from jax_doctor.programs import OPTION
from jax_doctor.report import lines, memory_in_use
from jax_doctor.table import Facts

WORKS, USAGE, UNAVAILABLE = 0, 64, 69
SPEC = re.compile(r"auto|(?:cpu|gpu|tpu)(?::\d+(?:,\d+)*)?")
PACKAGES = ("jax", "jaxlib", "dm-haiku", "libtpu")
Checks = list[tuple[str, str]]


class Parser(argparse.ArgumentParser):
    """Answers a mistyped flag with one sentence and the exit code of the commands."""

    def error(self, message: str) -> NoReturn:
        """Prints one sentence on standard error and exits."""
        self.exit(USAGE, f"error: {message}; --help shows all flags\n")


def parse(
    argv: list[str] | None = None, program: str = "python -m jax_doctor"
) -> argparse.Namespace:
    """Parses the flags; exits with code 64 when they cannot be understood."""
    description = "Says why the GPU is not used, and what to do about it."
    parser = Parser(prog=program, description=description, allow_abbrev=False)
    add = parser.add_argument
    choices = "auto, cpu, gpu, tpu, or chosen devices such as gpu:0,2"
    add("--device", default="auto", metavar="SPEC", help=choices)
    add("--json", action="store_true", help="print JSON, no table")
    code = "list the names in DIR, or a file, that JAX, Haiku and optax removed"
    add("--code", type=Path, metavar="DIR", help=code)
    seconds = children.CHILD_SECONDS
    limit = f"limit of each child process (default {seconds:g})"
    add("--timeout", type=float, default=seconds, metavar="SECONDS", help=limit)
    flags = parser.parse_args(argv)
    if not SPEC.fullmatch(flags.device):
        parser.error(
            f"--device={flags.device} is not understood; possible are auto, "
            "cpu, gpu, tpu, and chosen devices such as gpu:1 or gpu:0,2"
        )
    if flags.code is not None and not os.access(flags.code, os.R_OK):
        parser.error(f"--code={flags.code} does not exist, or may not be read")
    if not 0 < flags.timeout < 86400:
        parser.error(f"--timeout={flags.timeout:g} is not a number of seconds")
    return flags


def walk(machine: Machine, facts: Facts, timeout: float) -> tuple[Facts, Checks]:
    """Checks link after link until one is broken: the facts so far, and each result."""
    checks = []
    for step, healthy in CHEAP.items():
        findings = table.examine(machine, facts, step)
        ids = "; ".join(f"{finding.id} {finding.title}" for finding in findings)
        checks.append((step, ids or healthy(machine)))
    if table.has_error(table.diagnose(machine, facts)):
        return facts, checks
    if table.driver_matters(machine, facts):
        driver = children.probe_driver(timeout, machine.environ)
        facts = facts._replace(driver=driver)
        checks.append(("the driver's answer", _answer(driver)))
        if table.has_error(table.diagnose(machine, facts)):
            return facts, checks
    jax = children.probe_jax(timeout, machine.environ, facts.platform, facts.indices)
    facts, checks = facts._replace(jax=jax), checks + _jax_checks(jax)
    # Without the flag, the sums were among what this child computed.
    flags = machine.environ.get("XLA_FLAGS", "")
    if jax.default == "cpu" and jax.works() and OPTION in flags:
        facts = facts._replace(sums=children.probe_sums(timeout, machine.environ))
    return facts, checks


def _variables(machine: Machine) -> str:
    names = [n for n in machine.environ if re.match(r"(JAX|XLA|CUDA|NVIDIA)_", n)]
    return ", ".join(f"{n}={machine.environ[n]}" for n in sorted(names)) or "none set"


def _packages(machine: Machine) -> str:
    versions = machine.distributions
    plugins = [n for n in versions if re.fullmatch(r"jax-\w+-(plugin|pjrt)", n)]
    names = [name for name in (*PACKAGES, *plugins) if name in versions]
    return ", ".join(f"{name} {versions[name]}" for name in names)


def _libraries(machine: Machine) -> str:
    count = sum(name.startswith("nvidia-") for name in machine.distributions)
    return f"{count} packages of NVIDIA"


def _files(machine: Machine) -> str:
    files = machine.cards() or machine.nodes()
    if driver := machine.kernel_driver():
        files.append(f"driver {driver}")
    return ", ".join(files) or "no NVIDIA card"


# Each step, and what to say where nothing is found in it.
CHEAP = {
    "environment variables": _variables,
    "installed packages": _packages,
    "CUDA libraries": _libraries,
    "card and driver files": _files,
}


def _answer(driver: DriverResult) -> str:
    if driver.code is None:
        return driver.problem
    if driver.code != 0:
        return f"cuInit(0) returned {driver.code}, {driver.name or driver.problem}"
    return f"CUDA {driver.cuda}, {_devices(driver.count)} ({driver.seconds:.2f} s)"


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _jax_checks(jax: JaxResult) -> Checks:
    names = ", ".join(f"{device.backend}:{device.id}" for device in jax.devices)
    seconds = f"({jax.child.seconds:.1f} s)"
    if not jax.num_devices:
        return [("JAX and its devices", f"{names or jax.child.last_words()} {seconds}")]
    right = len(jax.stages) - len(jax.failures())
    text = f"{right} operations on {_devices(jax.num_devices)} gave the right values"
    return [("JAX and its devices", names), ("test run", f"{text} {seconds}")]


def report(machine: Machine, spec: str, timeout: float) -> dict[str, Any]:
    """Report of all checks and findings, for JSON. Memory in bytes, time in seconds."""
    start = time.monotonic()
    facts, checks = walk(machine, Facts(spec), timeout)
    findings = table.diagnose(machine, facts)
    errors = [finding for finding in findings if finding.severity == "error"]
    jax = facts.jax
    on_cpu = facts.platform == "auto" and bool(jax) and jax.default == "cpu"
    return {
        "asked": spec,
        "works": bool(jax) and jax.works() and not errors,
        "card_unused": on_cpu and machine.has_card(),
        "cause": errors[0]._asdict() if errors else None,
        "findings": [finding._asdict() for finding in findings],
        "checks": [{"check": check, "result": result} for check, result in checks],
        "devices": [device._asdict() for device in (jax.devices if jax else ())],
        "card_memory": memory_in_use(machine, facts.driver),
        "sees_all_processes": machine.sees_all_processes(),
        "holders": [holder._asdict() for holder in machine.holders()],
        "seconds": round(time.monotonic() - start, 3),
    }


def main(
    argv: list[str] | None = None,
    program: str = "python -m jax_doctor",
    advice: Mapping[str, str] | None = None,
) -> int:
    """Examines this machine, or code; prints a report and returns the exit code.

    Of a package's own command: `program` is its name, and `advice` what the package has
    in place of a general advice.
    """
    if sys.stdout is None:  # As `>&-` leaves it.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until this process ends
    try:
        flags = parse(argv, program)
    finally:
        _print("")  # With the help that argparse may have printed.
    sys.stdout.reconfigure(errors="backslashreplace")  # Names of files may be bytes.
    if flags.code is not None:
        result, format_ = files.report(flags.code), files.lines
    else:
        result, format_ = report(Machine.here(), flags.device, flags.timeout), lines
    text = json.dumps(result, indent=1) if flags.json else "\n".join(format_(result))
    for general, special in (advice or {}).items():
        text = text.replace(general, special)
    _print(f"{text}\n")
    return WORKS if result["works"] else UNAVAILABLE


def _print(text: str) -> None:
    """Prints, unless nobody reads it: `head` does not, when it has read enough."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # As a full disk.
            sys.exit(f"error: standard output: {error.strerror}")


def _end(number: int, _: Any) -> NoReturn:
    """Handler that kills the children, whose time limit ends with this process."""
    children.end_children()
    os._exit(128 + number)  # Why: docs/decisions/doctor.md#signals


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    sys.exit(main())
