"""Saves by the clock, `config.save_minutes`: due at the same step in all processes."""

import time
from typing import Any

from haiku_template.devices import DeviceManager
from haiku_template.storage import Checkpoints

ASK_SECONDS = 1.0  # Between agreements of several processes.
FAILED_SECONDS = 30.0  # After a save that failed, and as many more after each other.


class SaveTimer:
    """Clock of saves: one is due `minutes` after the last began, once it is on disk.

    With 0 minutes the next begins when the last is on disk.
    """

    # Why: docs/decisions/storage.md#save-minutes
    def __init__(
        self, minutes: float, checkpoints: Checkpoints, devices: DeviceManager
    ) -> None:
        self._seconds, self._checkpoints = 60 * minutes, checkpoints
        self._devices, self._asking = devices, 0  # The step to ask process 0 at.
        self._first: tuple[int, float] | None = None  # Step and second.

    def due(self, step: int, scalars: Any) -> bool:
        """Tests if a save is due after a step, whose scalars are on the devices."""
        now = time.monotonic()
        seconds = max(self._seconds, FAILED_SECONDS * self._checkpoints.failed)
        late = now - self._checkpoints.began >= seconds
        late = late and not self._checkpoints.is_saving
        if (processes := self._devices.processes).count > 1:
            self._first = self._first or (step, now)
            if step < self._asking:
                return False
            self._devices.wait(scalars)  # Of the step's own collectives.
            pace = (step - self._first[0]) / max(now - self._first[1], 1e-9)
            asking = step + max(1, int(ASK_SECONDS * pace))
            late, self._asking = processes.first([late, asking])
        return late
