"""Who uses the memory of the cards: what NVML lists, and who holds the device nodes."""

from typing import Any

from haiku_template.diagnosis.machine import Machine
from haiku_template.diagnosis.results import DriverResult

# Nobody is listed for what the driver keeps for itself, so something always remains.
NOT_LISTED = "the driver itself, or processes that cannot be seen from here"
IN_CONTAINER = (
    "processes outside this container are numbers without a name, or missing (docker "
    "run --pid=host shows them)"
)


def memory_in_use(
    machine: Machine, driver: DriverResult | None
) -> list[dict[str, Any]]:
    """The memory of each card and its users, as JSON holds it: bytes, None if unknown.

    A process has the name that this machine knows it by; "" inside a container, where
    the host's numbers mean other processes.
    """
    named = machine.sees_all_processes()
    return [
        {
            "bytes_in_use": card.used,
            "bytes": card.total,
            "processes": None
            if card.users is None
            else [
                {
                    "pid": pid,
                    "program": machine.program(pid) if named else "",
                    "bytes_in_use": used,
                }
                for pid, used in card.users
            ],
        }
        for card in (driver.memory if driver else ())
    ]


def lines(cards: list[dict[str, Any]], sees_all_processes: bool) -> list[str]:
    """What `memory_in_use` found, as lines of a table."""
    text = []
    for index, card in enumerate(cards):
        used = f"{size(card['bytes_in_use'])} of {size(card['bytes'])} in use by all"
        text.append(f"{f'card {index}':<24}{used if card['bytes'] else 'not known'}")
        for process in card["processes"] or ():
            label = f"  process {process['pid']}"
            name = process["program"] or "a process that cannot be seen from here"
            text.append(f"{label:<24}{name}: {size(process['bytes_in_use'])}")
        text += [f"{'  others':<24}{words}" for words in _others(card)]
    if cards and not sees_all_processes:
        text.append(f"{'  (a container)':<24}{IN_CONTAINER}")
    return text


def _others(card: dict[str, Any]) -> list[str]:
    if card["processes"] is None:
        return ["NVML does not tell which processes"]
    listed = sum(process["bytes_in_use"] or 0 for process in card["processes"])
    rest = card["bytes_in_use"] - listed
    return [f"{NOT_LISTED}: {size(rest)}"] if rest > 0 else []


def holders(machine: Machine, driver: DriverResult | None) -> str:
    """Who holds the cards, in words: name, id, and bytes where they are known."""
    names = {pid: (program, None) for pid, program, _ in machine.holders()}
    for card in memory_in_use(machine, driver):
        for process in card["processes"] or ():
            pid, used = process["pid"], process["bytes_in_use"]
            names[pid] = (process["program"] or "a process not seen here", used)
    return ", ".join(
        f"{program} ({pid}{f', {size(used)}' if used else ''})"
        for pid, (program, used) in names.items()
    )


def size(count: int | None) -> str:
    """A number of bytes as a person reads it."""
    if count is None:
        return "memory not known"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count >> 20} MiB"
