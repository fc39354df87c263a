"""Being told to stop: a signal ends a run after its step, with a checkpoint."""

import os
import signal
import threading
from types import FrameType


class Interrupted(RuntimeError):
    """A signal stopped the run; its state is saved, and the same command goes on."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


EXIT_CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}


def _leave_to_the_run() -> None:
    """In a forked process: a data set's worker does not save, and must end when told.

    Ctrl-C reaches it too, and it has to make the batches of the run's last step.
    """
    if isinstance(
        getattr(signal.getsignal(signal.SIGTERM), "__self__", None), StopSignals
    ):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


os.register_at_fork(after_in_child=_leave_to_the_run)


class StopSignals:
    """Notes SIGTERM and the first SIGINT instead of dying. Use as a context manager.

    A second SIGINT raises KeyboardInterrupt at once. Outside the main thread, where
    Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in EXIT_CODES:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def error(self, step: int) -> Interrupted:
        """What to raise once the state of `step` is saved."""
        return Interrupted(
            f"{self.received.name} received: step {step} is saved, and the same "
            "command goes on from there",
            EXIT_CODES[self.received],
        )
