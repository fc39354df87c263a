"""Rescue: where the processes of a run cannot go on together, one saves their state.

Process 0, which is connected to all others, leads: it lets all halt, hears of which
step each has the whole state, lets the one with the latest save it, and tells all. A
state that is sharded over processes all save together. Its shares are given away with
each call, so none begins one before all are there (`enter`), and all have the same.

Why: docs/decisions/cluster.md#rescue
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from haiku_template.cluster import identity
from haiku_template.cluster.rendezvous import Peer

LOOK_SECONDS = 0.1
HALT_SECONDS, SAVE_SECONDS = 8.0, 60.0  # To halt, and to save what is small.
ENDING = "the run is ending by itself"
HAVE, SAVED = "have", "saved"  # Answers to process 0.


class Rescue:
    """Part of one process in a rescue; `run` is what `runs/rescue.py` makes of it."""

    def __init__(self, heartbeat: Any) -> None:
        self.run: Any = None
        self.idle = "nothing was being trained"  # Without a run.
        self._heartbeat, self._outcome = heartbeat, (None, "process 0 did not answer")
        self._answers: queue.SimpleQueue = queue.SimpleQueue()
        self._begun, self._ended = threading.Lock(), threading.Event()
        self.entered: int | None = None  # Last step that all may make, where they ask.
        self._entry, self._is_shut = threading.Condition(), False
        self.there: dict[Peer | None, int] = {}  # Steps at which they are.

    @property
    def seconds(self) -> float:
        """Those to write the state on a slow disk; 0 without a run."""
        return getattr(self.run, "seconds", 0.0)  # It may end now.

    @property
    def _seconds(self) -> float:
        """In which one saves, and in which it looks whether it can."""
        return SAVE_SECONDS + self.seconds

    def ask(self, reason: str = "", code: int | None = None) -> tuple[int | None, str]:
        """Asks all; the step that is saved then, or None and why there is none.

        With an exit code all end with it and the reason.
        """
        if self._ended.is_set():  # Of a process that ended: it is told already.
            return None, ""
        self._tell_first("ask", reason, code)
        deadline = time.monotonic() + HALT_SECONDS + 3 * self._seconds
        while not self._ended.wait(LOOK_SECONDS) and time.monotonic() < deadline:
            if self._heartbeat.fault:
                return None, ""
        return self._outcome

    def heed(self, sender: Peer | None, kind: str, *values: Any) -> None:
        """Does what another process, or this one (None), says."""
        if kind == "ask":
            if self._begun.acquire(blocking=False):
                identity.run(self._lead, *values)
        elif kind == "there":
            self._admit(sender, *values)
        elif kind == "enter":
            with self._entry:
                (self.entered,) = values
                self._entry.notify_all()
        elif kind in (HAVE, SAVED):
            self._answers.put((kind, sender, *values))
        else:
            work = {"halt": self._halt, "save": self._save, "done": self._end}[kind]
            identity.run(work, *values)

    def enter(self, step: int) -> None:
        """Waits until all processes are to begin the call whose last step it is.

        It does not where one is lost: the call then fails.
        """
        self._tell_first("there", step)
        with self._entry:
            while (self.entered or 0) < step and not self._heartbeat.fault:
                self._entry.wait(LOOK_SECONDS)

    def leave(self) -> None:
        """Forgets the run, which is ending or has ended."""
        self.run, self.idle = None, ENDING
        self.there.clear()

    def has_waited(self) -> bool:
        """Waits for a save that this process makes alone; False if there was none."""
        return getattr(self.run, "has_waited", lambda: False)()

    def _admit(self, sender: Peer | None, step: int) -> None:
        """Tells all, from process 0, that all are at a step, but not in a rescue."""
        with self._entry:
            self.there[sender] = step
            least, everyone = min(self.there.values()), (None, *self._heartbeat.peers)
            is_new = least > (self.entered or 0)
            if len(self.there) == len(everyone) and is_new and not self._is_shut:
                self._tell(everyone[::-1], "enter", least)

    def _lead(self, reason: str, code: int | None) -> None:
        everyone = (None, *self._heartbeat.peers)
        with self._entry:  # What all may enter all have heard of before this.
            self._is_shut = True
        self._tell(everyone, "halt")
        step, why = self._saved(self._gather(HAVE, len(everyone), HALT_SECONDS))
        self._tell(everyone[::-1], "done", step, why, reason, code)
        self._is_shut = False  # For a run that goes on to its end.
        if None in self.there:
            self._admit(None, self.there[None])

    def _saved(self, answers: list[tuple]) -> tuple[int | None, str]:
        """Lets one save, or all; the step, or None and why there is none."""
        reasons = [why for _, _, why, _ in answers if why]
        if ENDING in reasons:
            return None, ENDING
        steps = {sender: step for sender, step, *_ in answers if step is not None}
        is_joint = any(x for *_, x in answers)
        silent = len(self._heartbeat.peers) + 1 - len(answers)
        if is_joint and silent:
            reasons += [f"{silent} of the processes, which have shares of it, are mute"]
        if not steps or is_joint and (reasons or len({*steps.values()}) > 1):
            return None, "; ".join(dict.fromkeys(reasons)) or "no process answered"
        best = max(steps.values())
        if self.run.is_saved(best):
            return best, ""
        first = None if steps.get(None) == best else max(steps, key=steps.get)
        savers = [*steps] if is_joint else [first]
        for part in ("check", "write"):
            self._tell(savers, "save", part, best)
            results = self._gather(SAVED, len(savers), self._seconds)
            if why := next((why for _, _, why in results if why), ""):
                return None, why
            if len(results) < len(savers):
                return None, f"a save took more than {self._seconds:.0f} s"
        return best, ""

    def _gather(self, kind: str, count: int, seconds: float) -> list[tuple]:
        """Waits for so many answers of a kind, or fewer."""
        answers, deadline = [], time.monotonic() + seconds
        with contextlib.suppress(queue.Empty):
            while len(answers) < count:
                remaining = max(deadline - time.monotonic(), 0.0)
                answer = self._answers.get(timeout=remaining)
                answers += [answer[1:]] * (answer[0] == kind)
        return answers

    def _halt(self) -> None:
        """Keeps the loop from the next call until the rescue has ended."""
        if self.run is None:
            return self._tell_first(HAVE, None, self.idle, False)
        with self.run.halted(self.entered) as answer:
            self._tell_first(HAVE, *answer)
            self._ended.wait(HALT_SECONDS + 3 * self._seconds)

    def _save(self, part: str, step: int) -> None:
        try:
            {"check": self.run.check, "write": self.run.save}[part](step)
            self._tell_first(SAVED, step, "")
        except Exception as error:  # Of the disk, the device, or the numbers.
            why = str(error).split("\n")[0][: identity.LONGEST // 4]
            self._tell_first(SAVED, None, why)

    def _end(self, step: int | None, why: str, reason: str, code: int | None) -> None:
        self._outcome = step, why
        self._ended.set()
        if code is not None and why != ENDING and self.run is not None:
            self.run.end(reason, step, why, code)

    def _tell_first(self, *message: Any) -> None:
        first = None if self._heartbeat.index == 0 else self._heartbeat.peers[0]
        self._tell([first], *message)

    def _tell(self, receivers: Sequence[Peer | None], *message: Any) -> None:
        for receiver in receivers:
            if receiver is None:
                self.heed(None, *message)
            else:
                self._heartbeat.send({"rescue": message}, [receiver])
