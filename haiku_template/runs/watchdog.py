"""Watchdog of a run: it ends one that makes no progress, with the stacks that hang."""

import contextlib
import copy
import faulthandler
import functools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from haiku_template import signals
from haiku_template.devices.processes import waited
from haiku_template.storage.files import appended

STACKS = "stacks.txt"
TIMES = 10  # Of the median of a kind of work, beyond which it hangs.
FIRST_TIMES = 10  # Of the floor, for the first of a kind, which may compile.
REMEMBERED = 100  # Durations of each kind.
DATA, STEP, EVALUATION = "a wait for data", "a step", "an evaluation"
SAVE, WRITER, HOOK = "a save", "a writer of metrics", "a hook"


class Watchdog:
    """Clock of the loop's work, by kind, which the thread of signals looks at.

    `end(sentence)` is called once, when neither the loop nor `progress()` has changed
    for longer than `floor` seconds and `TIMES` the median of the work that it is in. A
    save, which waits for the one before, may take `saving` seconds more.
    """

    def __init__(
        self,
        floor: float,
        progress: Callable[[], Any],
        end: Callable[[str], None],
        saving: float = 0.0,
    ) -> None:
        self._saving = saving
        self._floor, self._progress, self._end = floor, progress, end
        self._seconds: dict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        self._kind, self._pieces = STEP, 0
        self._latest, self._idle = None, 0.0

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function of the loop: each call is a piece of such work."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._kind, begun = self._kind, kind, time.monotonic()
            self._pieces += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._seconds[kind].append(time.monotonic() - begun)
                self._kind, self._pieces = outer, self._pieces + 1

        return call

    def waits(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields what the loop makes steps of; what it does with each is a step."""
        take = self.timed(DATA, functools.partial(next, iter(items), None))
        while (item := take()) is not None:
            begun = time.monotonic()
            yield item
            self._seconds[STEP].append(time.monotonic() - begun)

    def limit(self, kind: str) -> float:
        """Seconds without progress after which such work hangs."""
        floor = self._floor + self._saving * (kind == SAVE)
        if not self._seconds[kind]:
            return max(FIRST_TIMES * self._floor, floor)
        return max(floor, TIMES * statistics.median(self._seconds[kind]))

    def look(self) -> None:
        """Adds a second of the thread that looks, or starts anew after progress.

        Its seconds, and not those of a clock: a process that was stopped has none.
        """
        kind, latest = self._kind, (self._pieces, self._progress())
        # The heartbeat has its own limit for a wait for other processes.
        if latest != self._latest or waited():
            self._latest, self._idle = latest, 0.0
            return
        self._idle += signals.LOOK_SECONDS
        if self._idle > self.limit(kind):
            signals.LOOKERS.remove(self.look)
            self._end(f"no progress for {self._idle:.0f} s in {kind}")


@contextlib.contextmanager
def watched(run: Any, minutes: float) -> Iterator[Any]:
    """Context of the loop: gives the run whose pieces of work a watchdog times."""

    def end(sentence: str) -> None:
        with contextlib.suppress(OSError), appended(run.workdir / STACKS) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n".encode())
            file.flush()
            faulthandler.dump_traceback(file)  # Of all threads.
            file.write(b"\n")
        fault = f"{sentence}, config.watchdog_minutes is {minutes:g}: the stacks of "
        fault += f"all threads are in {run.workdir / STACKS}"
        run.signals.end_in_time(0.0, fault, signals.STALLED)

    progress, saving = run.trainer.devices.ledger.totals, 2 * run.signals.seconds
    watchdog = Watchdog(60 * minutes, progress, end, saving)
    trainer, timed = copy.copy(run.trainer), watchdog.timed

    @contextlib.contextmanager
    def calls(*args: Any) -> Iterator[Iterator[Any]]:
        with run.trainer.calls(*args) as items:
            yield watchdog.waits(items)

    trainer.calls = calls
    trainer.evaluate = timed(EVALUATION, run.trainer.evaluate)
    # Those of this run alone, also where it ends.
    run.checkpoints.save = timed(SAVE, run.checkpoints.save)
    run.checkpoints.wait = timed(SAVE, run.checkpoints.wait)
    run.report.training = timed(WRITER, run.report.training)
    run.report.evaluation = timed(WRITER, run.report.evaluation)
    hooks = tuple(timed(HOOK, hook) for hook in run.hooks)
    signals.LOOKERS.append(watchdog.look)
    try:
        yield run._replace(trainer=trainer, hooks=hooks)
    finally:
        with contextlib.suppress(ValueError):
            signals.LOOKERS.remove(watchdog.look)
