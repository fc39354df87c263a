"""Signals that stop a run once its state is saved."""

import os
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from haiku_template import signals
from haiku_template.errors import Interrupted

OBEYED = (signal.SIGTERM, signal.SIGINT)  # Whatever a script does with them.


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
    handler from before: a command ends at once, Python raises KeyboardInterrupt.
    Outside the main thread, where Python allows no handlers, all are left alone.
    """

    def __init__(self, several: bool = False) -> None:
        self._several = several  # Then JAX's runtime has the handler of SIGTERM.
        self.received: signal.Signals | None = None
        self._noted: signal.Signals | None = None
        self._calls = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        return self

    def listen(self) -> None:
        """Takes the signals; before, and after the context, they end a command."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signals.EXIT_CODES:
            is_jax = number == signal.SIGTERM and self._several
            is_free = number in OBEYED or signals.is_free(number)
            if is_free and not is_jax:
                self._previous[number] = signal.signal(number, self._note)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None and number == signal.SIGINT:
            return _hand_on(self._previous[number], number, frame)
        self._noted = signal.Signals(number)
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's runtime tells the others.
        else:
            self.received = self._noted

    def due(self) -> bool:
        """True once a signal came; in several processes, at a call common to all."""
        self._calls += 1  # Not steps, of which a resumed run has passed the first.
        if self._several and multihost_utils.reached_preemption_sync_point(self._calls):
            self.received = self._noted or signal.SIGTERM
        return self.received is not None

    def error(self, step: int) -> Interrupted:
        """Makes the error to raise once `step` is saved."""
        return Interrupted(
            f"{self.received.name} received: step {step} is saved, and the same "
            "command resumes it",
            signals.EXIT_CODES[self.received],
        )


def _hand_on(handler: Any, number: int, frame: FrameType | None) -> None:
    """Calls the previous handler, for a second SIGINT."""
    if handler is signals.leave:
        signals.leave(number, frame, signals.AGAIN)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
