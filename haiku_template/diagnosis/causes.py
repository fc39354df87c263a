"""The table of causes, in the order in which they are looked for: cheap to dear.

Ids are those of the project's list of device failures; its own are A38, A39 and A59
(codes of the driver), A58 (a misspelt variable) and A00 (whatever no other row
explains). Not here, because only the program itself can see them: A46 and A53
(`devices.selection`), A54 and A55 (the verdicts of `devices.checks`).
"""

from haiku_template.diagnosis import (
    cards,
    driver,
    installation,
    libraries,
    outcomes,
    platforms,
    start,
    variables,
)
from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.probe import probe_driver
from haiku_template.diagnosis.results import DriverResult, JaxResult, OperationsResult
from haiku_template.diagnosis.rows import Cause, Facts, Finding

# What is checked, and with which rows; each step costs more than the one before.
STEPS: dict[str, tuple[Cause, ...]] = {
    "environment variables": variables.ROWS + platforms.ROWS,
    "installed packages": installation.ROWS + libraries.ROWS,
    "card and driver files": cards.ROWS,
    "the driver's answer": driver.ROWS,
    "JAX and its devices": start.ROWS,
    "test run": outcomes.ROWS,
}
TABLE = tuple(row for rows in STEPS.values() for row in rows)


def platform(asked: str) -> str:
    """The platform in a request such as `gpu:0,2`."""
    return asked.partition(":")[0]


def examine(rows: tuple[Cause, ...], machine: Machine, facts: Facts) -> list[Finding]:
    """The findings of these rows: errors first, each id once, in the rows' order."""
    found = [row.examine(machine, facts) for row in rows]
    unique = {}
    for finding in sorted(filter(None, found), key=lambda f: f.severity != "error"):
        unique.setdefault(finding.id, finding)
    return list(unique.values())


def diagnose(
    machine: Machine,
    probe: DriverResult | None = None,
    asked: str = "gpu",
    jax: JaxResult | None = None,
    operations: OperationsResult | None = None,
) -> list[Finding]:
    """Why the device that was asked for is not used, or would not be.

    Args:
      machine: what is to be read of the machine.
      probe: what the driver answered; None when it was not asked.
      asked: `auto`, `cpu`, `gpu`, `tpu`, or chosen devices such as `gpu:1`.
      jax: what JAX showed in a child process; None when it was not started.
      operations: what came of computing on the devices; None when nothing was.

    Returns:
      Errors before warnings, each in the order of the table: the first error is the
      one cause. Empty when nothing is wrong.
    """
    if probe is None or probe.code == 0:
        # A driver that answered to us may still have failed JAX.
        probe = start.driver_of(jax) or probe
    facts = Facts(platform(asked), probe, jax, operations)
    found = examine(TABLE, machine, facts)
    if any(finding.severity == "error" for finding in found):
        return found
    # Nothing so far keeps JAX from its device; if it failed, that comes first.
    rest = examine(outcomes.OTHERWISE, machine, facts)
    if any(finding.severity == "error" for finding in rest):
        return rest + found
    return found or rest


def driver_matters(machine: Machine, asked: str) -> bool:
    """Whether the NVIDIA driver is worth asking: a card is visible and may be used."""
    return platform(asked) in ("auto", "gpu") and bool(machine.nodes())


def check_environment(
    asked: str, machine: Machine | None = None, timeout: float = 20.0
) -> list[Finding]:
    """The cheap checks, to be made before JAX starts.

    Takes milliseconds without an NVIDIA card. With one, a child process asks the
    driver, unless an error was found already.

    Args:
      asked: as in `diagnose`.
      machine: this machine by default.
      timeout: seconds that the driver may take.

    Returns:
      As `diagnose`: an error ends a run that asked for a GPU. Where `auto` was asked,
      faults of a card are warnings.
    """
    machine = machine or Machine.here()
    found = diagnose(machine, None, asked)
    broken = any(finding.severity == "error" for finding in found)
    if broken or not driver_matters(machine, asked):
        return found
    return diagnose(machine, probe_driver(timeout, machine.environ), asked)
