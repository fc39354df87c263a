"""Table of causes: how a cause is written, and how all of them are looked for.

    cause = step("installed packages")

    @cause("A36", fix="pip uninstall -y jax-metal")
    def _metal(machine: Machine, facts: Facts) -> Signs:
        "The package jax-metal is no longer maintained and breaks JAX."
        if "jax-metal" in machine.distributions:
            yield "a version, value or path; the first counts"

Ids are those of the project's list of device failures; its own are A38, A39 and A59
(codes of the driver), A58 (a misspelled variable), A120 and A121 (a jaxlib that
miscomputes) and A00 (whatever no other cause explains). Not here, because only the
program itself can see them: A46 and A53 (`devices.selection`), A54 and A55 (the
verdicts of `devices.checks`).
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax_doctor import children
from jax_doctor.children import Child, DriverResult, JaxResult
from jax_doctor.machine import Machine


class Facts(NamedTuple):
    """Request, and answers of child processes; None: not asked yet."""

    spec: str = "gpu"  # Or `auto`, `cpu`, `tpu`, or chosen devices as in `gpu:0,2`.
    driver: DriverResult | None = None
    jax: JaxResult | None = None
    sums: JaxResult | None = None  # On the CPU, without the flag against wrong ones.

    @property
    def platform(self) -> str:
        """Platform of the request: `auto`, `cpu`, `gpu` or `tpu`."""
        return self.spec.partition(":")[0]

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the platform's devices that were asked for; empty for all."""
        return tuple(int(i) for i in self.spec.partition(":")[2].split(",") if i)

    def problems(self) -> str:
        """Errors and wrong values in computing, as one text."""
        if not self.jax or not self.jax.num_devices or self.jax.works():
            return ""
        errors = [stage.problem for stage in self.jax.failures()]
        return "\n".join([*errors, self.jax.child.errors])

    def on_gpu(self) -> bool:
        """True if JAX showed a GPU."""
        return bool(self.jax) and any(d.platform == "gpu" for d in self.jax.devices)

    def reached(self) -> bool:
        """True if JAX showed what was asked for."""
        devices = self.jax.devices if self.jax else ()
        return any(self.platform in ("auto", d.platform) for d in devices)

    def failed_start(self, machine: Machine) -> Child | None:
        """The child in which JAX did not show what was asked for.

        Where `auto` was asked beside an NVIDIA card, that is the card.
        """
        unused = self.platform == "auto" and machine.nodes() and not self.on_gpu()
        return self.jax.child if self.jax and (unused or not self.reached()) else None

    def said_at_start(self, machine: Machine, pattern: str) -> re.Match | None:
        """Searches that child's standard error for a pattern."""
        child = self.failed_start(machine)
        return re.search(pattern, child.errors) if child else None


class Sign(NamedTuple):
    """Sign of a cause on this machine, with a fix or a severity of its own."""

    text: str
    fix: str = ""
    severity: str = ""


def warning(text: str, fix: str = "") -> Sign:
    """Sign of a cause that does not keep the device from working."""
    return Sign(text, fix, "warning")


Signs = Iterator[str | Sign]
Detector = Callable[[Machine, Facts], Signs]
# The first sign that a detector yields, or None.
First = Callable[[Machine, Facts], str | Sign | None]


class Finding(NamedTuple):
    """A cause that was found on this machine; its fields are the keys of `--json`."""

    id: str
    severity: str  # `error`: what was asked for cannot work; `warning`: it can.
    title: str
    found: str  # The offending value, version or path.
    fix: str  # The command or the change that removes the cause.

    def __str__(self) -> str:
        return f"[{self.id}] {self.title}: {self.found}; fix: {self.fix}"


class Cause(NamedTuple):
    """A row of the table.

    Attributes:
      fix: the command or the change, or a function that knows it for the machine.
      scope: requests it concerns. `all`; `default`: all but the CPU, whose platform
        programs that ask for it set themselves; `gpu`; `tpu`.
    """

    id: str
    title: str  # What is wrong: the detector's docstring.
    detect: First
    fix: str | Callable[[Machine], str]
    severity: str = "error"
    scope: str = "gpu"

    def examine(self, machine: Machine, facts: Facts) -> Finding | None:
        """Examines a machine for this cause; None when this is not it."""
        unused = False
        if self.scope == "default" and facts.platform == "cpu":
            return None
        if self.scope in ("gpu", "tpu") and self.scope != facts.platform:
            if facts.platform != "auto" or not machine.has_card():
                return None
            # A card that nobody insists on, and that JAX does not use: not an error.
            unused = not (facts.jax and facts.jax.default == "gpu")
        sign = self.detect(machine, facts)
        if not sign:
            return None
        text, fix, severity = sign if isinstance(sign, Sign) else Sign(sign)
        severity = "warning" if unused else severity or self.severity
        fix = fix or (self.fix if isinstance(self.fix, str) else self.fix(machine))
        return Finding(self.id, severity, self.title, text, fix)


OTHERWISE = "anything else"
# Of what JAX said in a child; the last only if no other cause explains it.
AFTER_JAX = ("JAX and its devices", OTHERWISE)
BEFORE_JAX = (
    "environment variables",
    "installed packages",
    "CUDA libraries",
    "card and driver files",
)
# Causes by what is checked, in this order: each step costs more than the one before.
STEPS: dict[str, list[Cause]] = {step: [] for step in (*BEFORE_JAX, *AFTER_JAX)}


def step(name: str) -> Callable[..., Callable[[Detector], First]]:
    """Decorator of the causes of a step, which takes an id and fields of `Cause`."""

    def cause(id_: str, **options: Any) -> Callable[[Detector], First]:
        def add(detector: Detector) -> First:
            def first(machine: Machine, facts: Facts) -> str | Sign | None:
                return next(filter(None, detector(machine, facts)), None)

            title = (detector.__doc__ or "").removesuffix(".")  # None by `python -OO`.
            # Why: docs/decisions/doctor.md#causes
            STEPS[name].append(Cause(id_, title, first, **options))
            return first

        return add

    return cause


def examine(machine: Machine, facts: Facts, *steps: str) -> list[Finding]:
    """Examines these steps: errors first, each id once, in the table's order."""
    causes = [cause for step in steps for cause in STEPS[step]]
    findings = filter(None, (cause.examine(machine, facts) for cause in causes))
    unique = {}
    for finding in sorted(findings, key=lambda f: f.severity != "error"):
        unique.setdefault(finding.id, finding)
    return list(unique.values())


def diagnose(machine: Machine, facts: Facts | None = None) -> list[Finding]:
    """Diagnoses why the device asked for, by default a GPU, cannot be used.

    Returns:
      Errors before warnings, each in the order of the table: the first error is the one
        cause. Empty when nothing is wrong.
    """
    facts = facts or Facts()
    # Why: docs/decisions/doctor.md#before-jax
    if facts.jax is None:
        return examine(machine, facts, *BEFORE_JAX)
    if facts.driver is None or facts.driver.code == 0:
        # A driver that answered to us may still have failed JAX.
        driver = children.driver_of(facts.jax) or facts.driver
        facts = facts._replace(driver=driver)
    findings = examine(machine, facts, *BEFORE_JAX, AFTER_JAX[0])
    if has_error(findings):
        return findings
    # Nothing so far keeps JAX from its device; if it failed, that comes first.
    unexplained = examine(machine, facts, OTHERWISE)
    if has_error(unexplained):
        return unexplained + findings
    return findings or unexplained


def has_error(findings: list[Finding]) -> bool:
    """True if one of these keeps the device that was asked for from working."""
    return any(finding.severity == "error" for finding in findings)


def driver_matters(machine: Machine, facts: Facts) -> bool:
    """True if the NVIDIA driver is worth asking: a card is visible and may be used."""
    return facts.platform in ("auto", "gpu") and bool(machine.nodes())


def check_environment(
    spec: str,
    machine: Machine | None = None,
    timeout: float = children.CHILD_SECONDS,
) -> list[Finding]:
    """Diagnoses, cheaply, before JAX starts; the findings as in `diagnose`.

    Takes milliseconds without an NVIDIA card. With one, a child process asks the
    driver, for at most `timeout` seconds, unless an error was found already. Where
    `auto` was asked, faults of a card are warnings.
    """
    machine, facts = machine or Machine.here(), Facts(spec)
    findings = examine(machine, facts, *BEFORE_JAX)
    if has_error(findings) or not driver_matters(machine, facts):
        return findings
    driver = children.probe_driver(timeout, machine.environ)
    return examine(machine, facts._replace(driver=driver), *BEFORE_JAX)
