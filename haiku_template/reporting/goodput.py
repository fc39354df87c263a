"""Goodput of a run: seconds of all its starts, of steps that count and of the rest."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from haiku_template import signals
from haiku_template.bounded import is_number, lines, parse
from haiku_template.devices import Ledger
from haiku_template.devices.transfer import COMPILED
from haiku_template.errors import MemoryFullError, is_exhausted
from haiku_template.storage.files import Note

GOODPUT, FULL = "goodput.jsonl", MemoryFullError.exit_code
# Seconds of the ledger, by the name that they have here; what is left is of steps.
PARTS = {"data": "waiting", "evaluation": "evaluation", "saving": "saving"}
PARTS |= {"compilation": "compilation"}  # In all of the above it is not counted.
ONCE = ("evaluation", "saving")  # At the step that the next start resumes from.


class Progress:  # Why: docs/decisions/storage.md#goodput
    """File of when a start of a run began, got on, and ended.

    A row has the seconds since the epoch, the step, and the seconds of `PARTS` so far.
    """

    # Told here: later the loop has other handlers. A command is charged to its first
    # run, and not to those of a sweep behind it; scripts may do other things.
    is_of_command = signals.are_installed()

    def __init__(self, workdir: Path, start: int, ledger: Ledger) -> None:
        self._note, self._ledger, self._step = Note(workdir / GOODPUT), ledger, start
        self._zero = time.time() - time.monotonic()  # A clock that is set is none.
        before = Counter() if self.is_of_command else COMPILED
        self._before = ledger.totals() + before
        self.add(start, began=_began() if self.is_of_command else time.time())
        Progress.is_of_command = False

    def add(self, step: int, **values: Any) -> None:
        """Appends a row of this step."""
        self._step, totals = step, self._ledger.totals() + COMPILED - self._before
        values |= {name: totals[key] for name, key in PARTS.items() if key in totals}
        row = {"time": self._zero + time.monotonic(), "step": step} | values
        self._note.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Appends the exit code of this start; one that is killed has none."""
        error = sys.exc_info()[1]  # On its way through the loop.
        code = getattr(error, "exit_code", 1) if error else 0
        self.add(self._step, code=FULL if error and is_exhausted(error) else code)
        self._note.close()


def _began() -> float:
    """Time at which this process began; now where that is not known."""
    with suppress(OSError, ValueError, IndexError):  # Linux alone has them.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time()


def goodput(workdir: str | Path) -> dict[str, float]:
    """Seconds of all starts of a run by what they were spent on.

    `steps` that the run is made of, its `data`, `evaluation` and `saving`; `starting`
    up to the first step; `compilation` by XLA at any time; `lost CODE` of steps that
    were done again, by the exit code of the start that lost them, or `lost killed`. {}
    without a file; `other` is what no step was made in, such as the report's drawing.
    The time between two starts is in none of them.
    """
    path, seconds = Path(workdir) / GOODPUT, Counter()
    with suppress(OSError):
        steps = [row["step"] for row in _rows(path) if "began" in row]
        for start, rows in groupby(_numbered(_rows(path)), itemgetter(0)):
            if start:  # Else the row that began it is damaged.
                later = min(steps[start:], default=None)
                seconds.update(_of_start(map(itemgetter(1), rows), later))
        return dict(seconds)
    return {}  # A part would look like all of it.


def _numbered(rows: Iterator[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbers each row by its start, from 1."""
    start = 0
    for row in rows:
        start += "began" in row
        yield start, row


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Iterates over a goodput.jsonl; a kill cuts off the last row."""
    for line in lines(path):
        with suppress(ValueError, KeyError):
            row = parse(line[line.rfind(b'{"time"') :], dict)
            if all(map(is_number, (row["time"], row["step"], *row.values()))):
                yield row


def _of_start(rows: Iterator[dict[str, Any]], resumed: int | None) -> Counter[str]:
    """Seconds of a start, up to the first step of those behind it; None: of none."""
    first = new = next(rows)
    compilation = first.get("compilation", 0.0)
    starting = first["time"] - first["began"] - compilation
    seconds, lost = Counter(starting=starting, compilation=compilation), 0.0
    for old, new in pairwise(chain([first], rows)):
        parts = {k: new.get(k, 0.0) - old.get(k, 0.0) for k in PARTS}
        remainder = "steps" if new["step"] > old["step"] else "other"
        parts[remainder] = new["time"] - old["time"] - sum(parts.values())
        share = _share(old["step"], new["step"], resumed)
        for name, value in parts.items():
            # What was done after the step that was resumed counts, too.
            counts = name in ONCE and old["step"] == resumed
            seconds[name] += value if counts else share * value
            lost += 0.0 if counts else (1 - share) * value
    seconds[f"lost {new.get('code', 'killed')}"] = lost
    return Counter({name: value for name, value in seconds.items() if value > 0})


def _share(old: int, new: int, resumed: int | None) -> float:
    """Share of the steps after `old`, up to `new`, that were not done again."""
    if resumed is None or new <= resumed:
        return 1.0
    return 0.0 if old >= resumed else (resumed - old) / (new - old)


def described(seconds: dict[str, float]) -> str:
    """Line of a goodput: the share of steps that count, and all of the parts."""
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    text = ", ".join(f"{name} {value:.1f} s" for name, value in parts)
    share = 100 * seconds.get("steps", 0.0) / (total or 1.0)
    return f"goodput   {share:.0f} % of {total:.1f} s in all starts: {text}"
