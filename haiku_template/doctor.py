"""Says why the GPU is not used, and what to do about it.

    python -m haiku_template.doctor --device=gpu

Checks from cheap to dear and stops at the first broken link. This process never
imports JAX; children with a time limit do. Exit codes: 0 what was asked for works,
64 a mistyped flag, 69 it does not work.
"""

import argparse
import json
import re
import sys
import time
from typing import Any, NoReturn

from haiku_template.diagnosis import causes, probe, usage
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.results import Device, DriverResult
from haiku_template.diagnosis.rows import Facts, Finding, has_card

WORKS, USAGE, UNAVAILABLE = 0, 64, 69
SPEC = re.compile(r"auto|(?:cpu|gpu|tpu)(?::\d+(?:,\d+)*)?")
CHEAP = ("environment variables", "installed packages", "card and driver files")
SHOWN = ("jax", "jaxlib", "dm-haiku", "libtpu")


class Parser(argparse.ArgumentParser):
    """Answers a mistyped flag with one sentence and the exit code of the commands."""

    def error(self, message: str) -> NoReturn:
        """Prints one sentence on standard error and exits."""
        self.exit(USAGE, f"error: {message}; --help shows all flags\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the flags; exits with code 64 when they cannot be understood."""
    parser = Parser(
        prog="python -m haiku_template.doctor",
        description="Says why the GPU is not used, and what to do about it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="SPEC",
        help="auto, cpu, gpu, tpu, or chosen devices such as gpu:0,2",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="limit of each child process (default 60)",
    )
    flags = parser.parse_args(argv)
    if not SPEC.fullmatch(flags.device):
        parser.error(
            f"--device={flags.device} is not understood; possible are auto, "
            "cpu, gpu, tpu, and chosen devices such as gpu:1 or gpu:0,2"
        )
    if not 0 < flags.timeout < 86400:
        parser.error(f"--timeout={flags.timeout:g} is not a number of seconds")
    return flags


class Examination:
    """One walk from the variables to a computation on the devices.

    Attributes:
      checks: what was checked, and its result, in order.
      findings: errors first; the first error is the one cause.
      devices: every device that JAX showed.
      works: whether what was asked for computed the right values.
    """

    def __init__(self, machine: Machine, asked: str, timeout: float) -> None:
        self.machine = machine
        self.platform, _, chosen = asked.partition(":")
        self.indices = tuple(int(i) for i in chosen.split(",") if i)
        self.timeout = timeout
        self.facts = Facts(self.platform)
        self.checks: list[tuple[str, str]] = []
        self.findings: list[Finding] = []
        self.devices: tuple[Device, ...] = ()
        self.works = False

    def walk(self) -> None:
        """Checks link after link, until one is broken."""
        for step in CHEAP:
            found = causes.examine(causes.STEPS[step], self.machine, self.facts)
            self.checks.append((step, _ids(found) or self._healthy(step)))
        if self._broken():
            return
        if causes.driver_matters(self.machine, self.platform):
            driver = probe.probe_driver(self.timeout, self.machine.environ)
            self.facts = self.facts._replace(driver=driver)
            self.checks.append(("the driver's answer", _driver_words(driver)))
            if self._broken():
                return
        environ = self.machine.environ
        jax = probe.probe_jax(self.timeout, environ, self.platform)
        self.facts = self.facts._replace(jax=jax)
        self.devices = jax.devices
        names = [f"{d.backend}:{d.id}" for d in jax.devices]
        words = ", ".join(names) or jax.child.last_words()
        self.checks.append(
            ("JAX and its devices", f"{words} ({jax.child.seconds:.1f} s)")
        )
        if not self._broken() and not self._absent_index():
            self._compute()

    def _compute(self) -> None:
        run = probe.probe_operations(
            self.timeout, self.platform, self.machine.environ, self.indices
        )
        self.facts = self.facts._replace(operations=run)
        good = len(run.stages) - len(run.failures())
        words = f"{good} operations on {run.num_devices} devices gave the right values"
        self.checks.append(("test run", f"{words} ({run.child.seconds:.1f} s)"))
        self.works = not self._broken() and run.works()

    def card_unused(self) -> bool:
        """Whether JAX chose the CPU beside a GPU, which `auto` allows it to."""
        if self.platform != "auto" or not has_card(self.machine):
            return False
        return bool(self.facts.jax) and self.facts.jax.default == "cpu"

    def _broken(self) -> bool:
        facts = self.facts
        self.findings = causes.diagnose(
            self.machine, facts.driver, facts.asked, facts.jax, facts.operations
        )
        return any(finding.severity == "error" for finding in self.findings)

    def _absent_index(self) -> bool:
        there = [d for d in self.devices if d.platform == self.platform]
        if not self.indices or max(self.indices) < len(there):
            return False
        names = ", ".join(f"{self.platform}:{i}" for i in range(len(there)))
        most = max(self.indices)
        asked = f"{self.platform}:{most} was asked for"
        simulated = f", or, in a run, --simulate_devices={most + 1}"
        absent = Finding(
            "A00",
            "error",
            "a device that was asked for does not exist",
            f"{asked}, and there are {names}",
            "ask for one of these" + (simulated if self.platform == "cpu" else ""),
        )
        self.findings.insert(0, absent)
        return True

    def _healthy(self, step: str) -> str:
        if step == "installed packages":
            known = self.machine.distributions
            extra = [n for n in known if re.fullmatch(r"jax-\w+-(plugin|pjrt)", n)]
            return ", ".join(f"{n} {known[n]}" for n in (*SHOWN, *extra) if n in known)
        if step == "card and driver files":
            driver = self.machine.kernel_driver()
            nodes = self.machine.cards() or self.machine.nodes()
            words = [*nodes, f"driver {driver}"] if driver else nodes
            return ", ".join(words) or "no NVIDIA card"
        names = [
            n
            for n in sorted(self.machine.environ)
            if re.match(r"(JAX|XLA|CUDA|NVIDIA)_", n)
        ]
        return ", ".join(f"{n}={self.machine.environ[n]}" for n in names) or "none set"


def _ids(findings: list[Finding]) -> str:
    return "; ".join(f"{f.id} {f.title}" for f in findings)


def _driver_words(driver: DriverResult) -> str:
    if driver.code is None:
        return driver.problem
    if driver.code != 0:
        return f"cuInit(0) returned {driver.code}, {driver.name or driver.problem}"
    version = driver.version or 0
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    return f"CUDA {cuda}, {driver.count} devices ({driver.seconds:.2f} s)"


def report(examination: Examination, asked: str, seconds: float) -> dict[str, Any]:
    """Everything that was found, as JSON holds it. Memory in bytes, time in seconds."""
    driver = examination.facts.driver
    errors = [f for f in examination.findings if f.severity == "error"]
    return {
        "asked": asked,
        "works": examination.works,
        "card_unused": examination.card_unused(),
        "cause": errors[0]._asdict() if errors else None,
        "findings": [finding._asdict() for finding in examination.findings],
        "checks": [{"check": c, "result": r} for c, r in examination.checks],
        "devices": [device._asdict() for device in examination.devices],
        "card_memory": usage.memory_in_use(examination.machine, driver),
        "sees_all_processes": examination.machine.sees_all_processes(),
        "holders": [
            {"pid": pid, "program": program, "nodes": nodes}
            for pid, program, nodes in examination.machine.holders()
        ],
        "seconds": round(seconds, 3),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The report as a plain table."""
    text = [f"{row['check']:<24}{row['result']}" for row in found["checks"]]
    for d in found["devices"]:
        name = f"{d['backend']}:{d['id']}"
        memory = "memory not known"
        if d["bytes_in_use"] is not None:
            limit = usage.size(d["bytes_limit"])
            memory = f"{usage.size(d['bytes_in_use'])} of {limit} in use"
        text.append(f"{'device ' + name:<24}{d['kind']}, {memory}")
    text += usage.lines(found["card_memory"], found["sees_all_processes"])
    for holder in found["holders"]:
        label = f"held by process {holder['pid']}"
        text.append(f"{label:<24}{holder['program']}: {', '.join(holder['nodes'])}")
    text.append("")
    for finding in found["findings"]:
        kind = "also" if finding["severity"] == "error" else "warning"
        kind = "CAUSE" if finding == found["cause"] else kind
        text.append(f"{kind} {finding['id']}: {finding['title']}")
        text.append(f"    found: {finding['found']}")
        text.append(f"    fix:   {finding['fix']}")
    verdict = "works" if found["works"] else "does not work"
    if found["works"] and found["card_unused"]:
        verdict = "works on the CPU, and this machine's GPU is not used"
    text.append(f"--device={found['asked']} {verdict} ({found['seconds']:.1f} s)")
    return text


def main(argv: list[str] | None = None) -> int:
    """Examines this machine, prints what was found, and returns the exit code."""
    flags = parse(argv)
    start = time.monotonic()
    examination = Examination(Machine.here(), flags.device, flags.timeout)
    examination.walk()
    found = report(examination, flags.device, time.monotonic() - start)
    print(json.dumps(found, indent=1) if flags.json else "\n".join(lines(found)))
    return WORKS if found["works"] else UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
