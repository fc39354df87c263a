"""The doctor's report, and the users of the cards' memory."""

from typing import Any

from jax_doctor.children import DriverResult
from jax_doctor.machine import Machine

Cards = list[dict[str, Any]]
# Nobody is listed for what the driver keeps for itself, so something always remains.
NOT_LISTED = "the driver itself, or processes that cannot be seen from here"
UNSEEN = "a process that cannot be seen from here"
IN_CONTAINER = (
    "processes outside this container are numbers without a name, or missing (docker "
    "run --pid=host shows them)"
)


def memory_in_use(machine: Machine, driver: DriverResult | None) -> Cards:
    """Memory of each card and its users, as in `DriverResult`, with programs' names.

    Names are "" inside a container, where the host's ids mean other processes.
    """

    def with_name(process: dict[str, Any]) -> dict[str, Any]:
        name = machine.program(process["pid"]) if machine.sees_all_processes() else ""
        return {"pid": process["pid"], "program": name, **process}

    cards = []
    for card in driver.memory if driver else ():
        users = card["processes"]
        users = users if users is None else [with_name(process) for process in users]
        cards.append({**card, "processes": users})
    return cards


def holders(machine: Machine, driver: DriverResult | None) -> str:
    """Describes who holds the cards: name, id, and bytes where they are known."""
    names = {pid: (program, None) for pid, program, _ in machine.holders()}
    for card in memory_in_use(machine, driver):
        for process in card["processes"] or ():
            pid, used = process["pid"], process["bytes_in_use"]
            program = process["program"] or "a process not seen here"
            total = (names.get(pid, ("", None))[1] or 0) + (used or 0)  # Of all cards.
            names[pid] = (program, total or None)
    return ", ".join(
        f"{program} ({pid}{f', {size(used)}' if used else ''})"
        for pid, (program, used) in names.items()
    )


def size(count: int | None) -> str:
    """Formats a number of bytes for a person."""
    if count is None:
        return "memory not known"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"


def memory_rows(cards: Cards, sees_all_processes: bool) -> list[tuple[str, str]]:
    """Formats the cards of `memory_in_use` as rows of a table."""
    rows = []
    for index, card in enumerate(cards):
        used = f"{size(card['bytes_in_use'])} of {size(card['bytes'])} in use by all"
        rows.append((f"card {index}", used if card["bytes"] else "not known"))
        remainder = card["bytes_in_use"]
        for process in card["processes"] or ():
            name, used = process["program"] or UNSEEN, process["bytes_in_use"]
            rows.append((f"  process {process['pid']}", f"{name}: {size(used)}"))
            remainder -= used or 0
        if card["processes"] is None:
            rows.append(("  others", "NVML does not tell which processes"))
        elif remainder > 0:
            rows.append(("  others", f"{NOT_LISTED}: {size(remainder)}"))
    if cards and not sees_all_processes:
        rows.append(("  (a container)", IN_CONTAINER))
    return rows


def lines(report: dict[str, Any]) -> list[str]:
    """Formats the report as a plain table."""
    rows = [(row["check"], row["result"]) for row in report["checks"]]
    for d in report["devices"]:
        memory = "memory not known"
        if d["bytes_in_use"] is not None:
            memory = f"{size(d['bytes_in_use'])} of {size(d['bytes_limit'])} in use"
        rows.append((f"device {d['backend']}:{d['id']}", f"{d['kind']}, {memory}"))
    rows += memory_rows(report["card_memory"], report["sees_all_processes"])
    for holder in report["holders"]:
        nodes = f"{holder['program']}: {', '.join(holder['nodes'])}"
        rows.append((f"held by process {holder['pid']}", nodes))
    text = [f"{label:<24}{value}" for label, value in rows]
    text.append("")
    for finding in report["findings"]:
        kind = "also" if finding["severity"] == "error" else "warning"
        kind = "CAUSE" if finding == report["cause"] else kind
        text.append(f"{kind} {finding['id']}: {finding['title']}")
        text.append(f"    found: {finding['found']}")
        text.append(f"    fix:   {finding['fix']}")
    verdict = "works" if report["works"] else "does not work"
    if report["works"] and report["card_unused"]:
        verdict = "works on the CPU, and this machine's GPU is not used"
    text.append(f"--device={report['asked']} {verdict} ({report['seconds']:.1f} s)")
    return text
