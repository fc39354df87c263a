"""What a row of the table is: one cause, how to see it, and what to do about it."""

from collections.abc import Callable
from typing import NamedTuple

from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.results import DriverResult, JaxResult, OperationsResult

GPU_NAMES = ("gpu", "cuda", "rocm", "oneapi")


class Facts(NamedTuple):
    """What was asked for, and what child processes found; None: not asked yet.

    Attributes:
      asked: `auto`, `cpu`, `gpu` or `tpu`.
    """

    asked: str = "gpu"
    driver: DriverResult | None = None
    jax: JaxResult | None = None
    operations: OperationsResult | None = None


class Finding(NamedTuple):
    """A cause that was found on this machine.

    Attributes:
      severity: `error`: what was asked for cannot work; `warning`: it can.
      found: the offending value, version or path.
      fix: the command or the change that removes the cause.
    """

    id: str
    severity: str
    title: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"[{self.id}] {self.title}: {self.found}; fix: {self.fix}"


# Returns what was found, or None when this is not the cause.
Detect = Callable[[Machine, Facts], str | None]


class Cause(NamedTuple):
    """A row of the table.

    Attributes:
      detect: returns what was found, or None when this is not the cause.
      fix: the exact command, or a function that knows it for this machine.
      severity: as in `Finding`.
      asked: which requests it concerns. `all`; `default`: all but the CPU, whose
        platform the commands set themselves; `gpu`; `tpu`.
    """

    id: str
    title: str
    detect: Detect
    fix: str | Callable[[Machine], str]
    severity: str = "error"
    asked: str = "gpu"

    def examine(self, machine: Machine, facts: Facts) -> Finding | None:
        """The finding on this machine; None when this is not the cause."""
        severity = self.severity
        if self.asked == "default" and facts.asked == "cpu":
            return None
        if self.asked in ("gpu", "tpu") and self.asked != facts.asked:
            if facts.asked != "auto" or not has_card(machine):
                return None
            # A card that nobody insists on, and that JAX does not use: not an error.
            if not (facts.jax and facts.jax.default == "gpu"):
                severity = "warning"
        found = self.detect(machine, facts)
        if found is None:
            return None
        fix = self.fix if isinstance(self.fix, str) else self.fix(machine)
        return Finding(self.id, severity, self.title, found, fix)


def has_card(machine: Machine) -> bool:
    """Whether anything speaks for a GPU in this machine."""
    return bool(machine.nodes() or machine.nvidia_on_pci() or machine.amd_gpus())


def platforms(machine: Machine) -> list[str]:
    """The words of JAX_PLATFORMS without the spaces around them."""
    value = machine.environ.get("JAX_PLATFORMS", "")
    return [word.strip() for word in value.split(",")] if value else []


def cuda_families(machine: Machine) -> list[str]:
    """The CUDA plugin families of which a part is installed: `12`, `13`."""
    return [
        family
        for family in ("12", "13")
        if f"jax-cuda{family}-plugin" in machine.distributions
        or f"jax-cuda{family}-pjrt" in machine.distributions
    ]


def has_cuda(machine: Machine) -> bool:
    """Whether JAX was installed with CUDA, by pip or by conda."""
    return bool(cuda_families(machine)) or "cuda" in machine.conda_build("jaxlib")


def install_command(machine: Machine) -> str:
    """The pip command that installs JAX with the CUDA its driver can run."""
    driver = machine.kernel_driver()
    if driver and int(driver.split(".")[0]) < 580:
        return 'pip install -U "jax[cuda12]"'
    if driver:
        return 'pip install -U "jax[cuda13]"'
    return 'pip install -U "jax[cuda13]" (driver 580 or newer) or "jax[cuda12]" (525)'
