"""What happens when a number is no longer finite."""

import math
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
import jmp

from haiku_template.devices import DeviceManager
from haiku_template.errors import Interrupted, NonFiniteError

_all_finite = jax.jit(jmp.all_finite)


def check_loss(values: dict[str, float], step: int, latest: int | None) -> None:
    """Asserts that the loss is finite.

    Args:
      values: scalars of the step, `loss` among them.
      step: named in the message.
      latest: the newest step that is saved; None without any.

    Raises:
      NonFiniteError: it is not.
    """
    if not math.isfinite(values["loss"]):
        raise _error("the loss of", step, latest)


def check_params(
    devices: DeviceManager, params: Any, step: int, latest: int | None
) -> None:
    """The same of the parameters, which are looked at on their devices."""
    if not devices.fetch(_all_finite(params)):
        raise _error("a parameter after", step, latest)


def _error(what: str, step: int, latest: int | None) -> NonFiniteError:
    kept = f"the newest is of step {latest}" if latest else "there is none"
    return NonFiniteError(
        f"{what} step {step} is infinite or NaN and was not saved as a checkpoint; "
        f"{kept}. Values in the data that are not finite do this, and learning "
        "rates too high for want of a warm-up or clip_norm"
    )


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
