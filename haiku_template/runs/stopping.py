"""Signals that stop a run once its state is saved."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from haiku_template import errors, signals
from haiku_template.errors import EvaluationError, Interrupted, StorageError
from haiku_template.runs.runtime import RuntimeHandler

logger = logging.getLogger(__name__)

PYTHONS = signal.default_int_handler
OBEYED = (signal.SIGTERM, signal.SIGINT)  # Whatever a script does with them.
# Seconds from a signal to a forced end: so many, or some of the longest calls so far,
# and those to write the state, and one before it, at so many bytes a second.
FORCE_SECONDS, CALLS, WRITTEN_BYTES = 20.0, 3.0, 20e6
LEAF_BYTES = 2e5  # Of which writing takes as long as an array, however small.
AGREED = 3  # Times as long until several processes have agreed on a step.
# Errors of a state, of saving it, and of one that is saved.
UNSAVED = errors.NonFiniteError, errors.ReplayError, errors.ReplicaError
UNSAVED += errors.UnequalError, StorageError, Interrupted
TWICE_SECONDS = 1.0  # Launchers send a signal twice, to a process and to its group.
TELL_SECONDS = 3.0  # That a signal goes without a word.
UNDER_WAY = (
    "the run saves and ends after the call that is under way; a second signal ends it "
    "now, and what is not saved is lost"
)
LATE = (
    "the run did not end within {:.0f} s: what was not saved by then is lost; the same "
    "command resumes the last checkpoint"
)
UNREADABLE = "the last state cannot be read from its devices, and is not saved: {}"
SAVED = "step {} is saved, and the same command resumes it"
TOO_LATE = "SIGINT received at the end of the run, which is done, and is saved"
LISTENING: dict[int, "StopSignals"] = {}  # By the thread that trains.
NOTHING_NEW = "and nothing new was saved; the same command resumes what was"


def _leave_to_the_run() -> None:
    """Resets signals in a forked data worker, which saves nothing.

    It ends at SIGTERM, and ignores others to make the batches of the run's last step.
    """
    for number in signals.EXIT_CODES:
        handler = signal.getsignal(number)
        if isinstance(getattr(handler, "__self__", None), StopSignals):
            ends = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if ends else signal.SIG_IGN)


# Why: docs/decisions/storage.md#forks
os.register_at_fork(after_in_child=_leave_to_the_run)


class StopSignals:
    """Context manager of signal handlers: `listen` installs them, the exit restores.

    SIGTERM and SIGINT are noted, to stop after a save; SIGHUP and SIGUSR1, too, unless
    they are ignored, as by nohup, or a script handles them. A second SIGINT is for the
    handler from before: a command ends at once, Python raises KeyboardInterrupt. So it
    does at the exit for one that came too late to stop the run: cells are to stop.
    Outside the main thread, where Python allows no handlers, all are left alone.

    Where the loop does not obey, as something blocks, a thread calls `save`, which
    returns the step that is saved, or None, and ends the process. It does not where
    `save` is None, at the end of a run. `lock` is held while the state changes or is
    saved; `writes` is True in a save, and once one ended the run. A second signal, and
    a deadline, end the process as it is.
    """

    def __init__(self, several: bool = False) -> None:
        self._several, self._noted, self.run = several, None, None
        self._runtime: RuntimeHandler | None = None
        self.received: signal.Signals | None = None
        self._calls, self._previous = 0, {}
        self.save: Callable[[], int | None] | None = lambda: None
        self.lock, self.bytes = threading.RLock(), 0.0  # Of the state.
        self.latest: Any = None  # Steps, state and scalars of the last call.
        self.evaluated: tuple[int, Any] = 0, None  # Step and metrics of the last.
        self.unlogged = contextlib.ExitStack()  # Lines of metrics that are to come.
        self._timers, self._is_open, self.writes = [], False, False
        # Seconds: of the first signal, the last call, and the longest one.
        self._first, self._called, self._longest = 0.0, math.inf, 0.0

    def __enter__(self) -> "StopSignals":
        if hasattr(sys, "last_value"):  # Why: docs/decisions/house.md#cells
            errors.clear_frames(sys.last_value)
        return self

    def listen(self) -> None:
        """Takes the signals; before, and after the context, they end a command."""
        if self._several:  # They stop after the same step, as JAX's runtime says.
            self._runtime = RuntimeHandler(self)
        # From here on others may note: without the runtime, this process stopped alone.
        LISTENING[threading.get_ident()] = self
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals.EXIT_CODES:
            if number in OBEYED or signals.is_free(number):
                self._previous[number] = signal.signal(number, self.note)
        signals.watch()
        self._is_open = True
        signals.HEARERS.append(self._hear)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        LISTENING.pop(threading.get_ident(), None)
        if self._is_open:
            signals.HEARERS.remove(self._hear)
        with self.lock:  # A thread that saves ends the process.
            self.save, self._is_open = None, False
            for timer in self._timers:
                timer.cancel()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._runtime is not None:
            return self._runtime.restore()
        self.run = self.latest = None  # Of a cycle, which would hold the state.
        is_late = kind is None and self._noted == signal.SIGINT
        if is_late and self._previous.get(signal.SIGINT) is PYTHONS:
            raise KeyboardInterrupt(TOO_LATE)

    @contextlib.contextmanager
    def saving(self, run: Any) -> Iterator[None]:
        """Context of the loop: the state is saved before an error, but not `UNSAVED`.

        So it is by the thread that obeys in place of the loop.
        """
        self.run, self.save = run, run.save_latest
        runtime = self._runtime
        try:
            with runtime.entering(run) if runtime else contextlib.nullcontext():
                yield
        except Exception as error:
            if isinstance(error, EvaluationError) or not isinstance(error, UNSAVED):
                _save_or_warn(runtime or self)
            raise
        finally:
            with self.lock:
                self.save = None

    def watched(self, run: Any, minutes: float) -> Any:
        """Context of the loop, whose work a watchdog times."""
        from haiku_template.runs.watchdog import watched

        return watched(run, minutes)

    # Why: docs/decisions/storage.md#watcher
    def _hear(self, number: int) -> None:
        """Starts the timers that end a run, or ends it for a second signal."""
        if self._previous.get(number) not in (signals.leave, signal.SIG_DFL):
            return  # A script's own handler, or Python's, is for the second one.
        now, code = time.monotonic(), signals.EXIT_CODES[number]
        if not self._first:
            self._first, reason = now, f"{signal.Signals(number).name} received"
            patience = signals.PATIENCE
            if self._runtime is not None:
                self._runtime.tell()  # The main thread may be in C.
                patience, reason = AGREED * patience, reason + self._runtime.place
            self.end_in_time(max(patience, CALLS * self._longest), reason, code)
            self._start_timer(TELL_SECONDS, _tell, reason)
        elif number == signal.SIGINT or now - self._first > TWICE_SECONDS:
            sentence = f"{signal.Signals(number).name} {signals.AGAIN}"
            self._start_timer(signals.SECOND_PATIENCE, self._force, sentence, code)

    def end_in_time(self, patience: float, reason: str, code: int) -> None:
        """Starts the timers that save in place of the loop, and that end the run."""
        self._start_timer(patience, self._rescue, reason, code)
        seconds = max(FORCE_SECONDS, 2 * CALLS * self._longest)
        writes = 4 if self.run and self.run.checkpoints.mirror else 2  # It has copies.
        seconds += writes * self.seconds
        sentence = f"{reason}, and {LATE.format(seconds)}"
        self._start_timer(seconds, self._force, sentence, code)

    def measure(self, state: Any) -> None:
        """Measures a state that is to be saved, by which saves have their time."""
        self.bytes = sum(x.nbytes + LEAF_BYTES for x in jax.tree.leaves(state))

    @property
    def seconds(self) -> float:
        """Those to write the state on a slow disk."""
        return self.bytes / WRITTEN_BYTES

    def _start_timer(self, seconds: float, call: Callable, *args: Any) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _rescue(self, reason: str, code: int) -> None:
        """Saves in place of the loop, which is blocked, and ends the process."""
        if self._runtime is not None:
            hangs = code == signals.STALLED  # The others hear of this one.
            step, why = self._runtime.rescue(reason, None if hangs else code)
            if hangs:
                signals.end_late(sentence(reason, step, why), code)
            return
        with self.lock:
            if self.save is None:
                return
            try:
                text = sentence(reason, self.save())
            except Exception as error:
                text = f"{reason}: {_why_unsaved(error)}"
                code = getattr(error, "exit_code", code)
            signals.end(text, code)

    def _force(self, sentence: str, code: int) -> None:
        if self._is_open:
            signals.end_late(sentence, code)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Notes a signal, or what is to end the run as if by one."""
        if self._noted is not None and number == signal.SIGINT:  # A second one.
            handler = self._previous[number]
            if handler is signals.leave:
                signals.leave(number, frame, signals.AGAIN)
            return (handler if callable(handler) else PYTHONS)(number, frame)
        self._noted = signal.Signals(number)
        if self._runtime is None:
            self.received = self._noted
        else:
            self._runtime.tell()  # It tells the others.

    def due(self) -> bool:
        """True once a signal came; in several processes, at a call common to all."""
        self._calls += 1  # Not steps, of which a resumed run has passed the first.
        now = time.monotonic()
        self._longest, self._called = max(self._longest, now - self._called), now
        if self._several and multihost_utils.reached_preemption_sync_point(self._calls):
            self.received = self._noted or signal.SIGTERM
        return self.received is not None

    def restart(self) -> None:
        """Begins a call, which the evaluation and the save before it are no part of."""
        self._called = time.monotonic()

    def error(self, step: int) -> Interrupted:
        """Makes the error to raise once `step` is saved."""
        return Interrupted(
            f"{self.received.name} received: {SAVED.format(step)}",
            signals.EXIT_CODES[self.received],
        )


def sentence(reason: str, step: int | None, why: str = "") -> str:
    """Sentence of a run that ends, with the step that is saved, if there is one."""
    if step is not None:
        return f"{reason}: {SAVED.format(step)}"
    return f"{reason}, {NOTHING_NEW}" + f" ({why})" * bool(why)


def _tell(reason: str) -> None:
    logger.warning("%s: %s", reason, UNDER_WAY)  # With this file's name before it.


def _save_or_warn(saves: Any) -> None:
    try:
        saves.save()
    except (StorageError, JaxRuntimeError) as error:
        logger.warning("%s", _why_unsaved(error))


def _why_unsaved(error: Exception) -> str:
    if isinstance(error, JaxRuntimeError):  # What failed on a device left no state.
        return UNREADABLE.format(str(error).split("\n")[0])
    return str(error)
