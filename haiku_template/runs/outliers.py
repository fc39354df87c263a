"""Outliers: gradients far beyond the usual, and the values that cause them."""

import logging
import math
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from haiku_template.devices import device_name
from haiku_template.params import in_double, leaves_by_path
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

# Beyond it a square, as in Adam's second moment, overflows float32.
LARGEST = float(np.sqrt(np.finfo(np.float32).max))
# Of a usual norm, or value. Why: docs/decisions/training.md#outliers
FACTOR = 100.0
GROUP = 16  # Steps of which a median is taken.


def blame(
    trainer: Trainer, step: int, limits: Mapping[str, float] = MappingProxyType({})
) -> str:
    """Describes a non-finite or too large value in a step's batch; "" without one.

    Steps count from 1; the message names the device that has the row. `limits` are by
    the path of a leaf; without one it is `LARGEST`.
    """
    for path, sizes in _magnitudes(trainer, step).items():
        limit = limits.get(path, LARGEST)
        if len(rows := np.flatnonzero(~(sizes <= limit).all(axis=1))):
            row = int(rows[0])
            place, count = int(np.argmin(sizes[row] <= limit)), sizes.shape[1]
            return (
                f"the batch of step {step} has a value of magnitude "
                f"{sizes[row][place]:.3g} in its {path}, "
                f"{located(trainer, row, len(sizes))}"
                + f" (value {place} of 0 to {count - 1})"
                * (count > 1)
            )
    return ""


def located(trainer: Trainer, row: int, rows: int) -> str:
    """Describes a row of a batch of so many, and the device that has it."""
    devices, process = trainer.devices.devices, trainer.devices.processes.name
    if rows == trainer.feed.batch_size:  # Of all processes.
        devices = trainer.devices.everyone
    device = devices[row * len(devices) // rows]
    process = process and f" in process {device.process_index}"
    return f"row {row}, which is on {device_name(device)}{process}"


def oddity(trainer: Trainer, search: Callable[[], str]) -> str:
    """Describes what `search` finds in a batch, or why nothing is found there."""
    if getattr(trainer.experiment.data.train, "once", False):
        return "its batch cannot be read again"
    process = trainer.devices.processes.name
    return search() or f"no value of its batch{process} stands out"


def _magnitudes(trainer: Trainer, step: int) -> dict[str, np.ndarray]:
    """Magnitudes [rows, values] in each leaf of a step's batch but of whole numbers."""
    leaves = leaves_by_path(trainer.feed.read(step - 1)).items()
    arrays = {path: np.asarray(x) for path, x in leaves}
    return {
        path: np.abs(in_double(x)).reshape(len(x), -1)
        for path, x in arrays.items()
        if x.dtype.kind not in "biu" and x.size
    }


class GradientNorms:
    """Watches over the norms of all steps' gradients, also between two logs.

    The first that is more than `FACTOR` times a usual norm is a warning, the only one.
    Usual is the largest median of `GROUP` steps before, so that a model which has
    learned its data may still meet a hard example.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._usual, self._warned = trainer, 0.0, False
        self._group: list[tuple[int, float]] = []

    def read(self, step: int, norm: float) -> None:
        """Takes the norm of the next step; warns of an outlier."""
        if self._warned:
            return
        self._group.append((step, norm))
        if norm <= FACTOR * self._usual and len(self._group) < GROUP:
            return
        new, full = self._group[-1:], len(self._group) == GROUP
        finite = [x for _, x in self._group if math.isfinite(x)] if full else []
        median = statistics.median(finite) if finite else 0.0
        if not self._usual:  # The first group is measured by itself.
            self._usual, new = median, self._group
        for step, norm in new:
            if norm > FACTOR * self._usual > 0 and not self._warned:
                self._warn(step, norm)
        if full:
            self._usual, self._group = max(self._usual, median), []

    def _warn(self, step: int, norm: float) -> None:
        self._warned = True
        cause = oddity(self._trainer, lambda: self._blame(step))
        logger.warning(
            f"the gradient of step {step} has norm {norm:.3g}, and {self._usual:.3g} "
            f"is usual: {cause}; such a step may spoil a model, and clip_norm bounds "
            "what it does. Further ones are not named"
        )

    def _blame(self, step: int) -> str:
        usual: dict[str, float] = {}
        for number in {step, max(step - 1, 1)}:
            for path, sizes in _magnitudes(self._trainer, number).items():
                median = float(np.median(sizes.max(axis=1)))
                usual[path] = min(usual.get(path, np.inf), median)
        limits = {path: FACTOR * x or LARGEST for path, x in usual.items()}
        return blame(self._trainer, step, limits)
