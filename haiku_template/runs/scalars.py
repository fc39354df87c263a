"""Scalars of all steps, which stay on their devices until they are read."""

import functools
from collections.abc import Callable
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.devices import DeviceManager
from haiku_template.devices.compiled import Scalars
from haiku_template.devices.transfer import first_copy
from haiku_template.training.state import SKIPPED

NORM, LOSS, SCALE = "grad_norm", "loss", "loss_scale"
NAMES = (NORM, LOSS, SCALE, SKIPPED)
GROUP = 16  # Calls whose scalars are read at once, or a multiple of it.
PENDING = 256  # Steps whose scalars stay on their devices, unread.


@functools.partial(jax.jit, static_argnames="names")
def _stacked(calls: list[Scalars], names: tuple[str, ...]) -> jax.Array:
    """Stacks columns: float32 [calls, steps, names]."""
    columns = [[x[name].astype(jnp.float32) for name in names] for x in calls]
    return jnp.stack([jnp.stack(x, axis=1) for x in columns])


class StepScalars:
    """Hands columns of the scalars of `NAMES` that there are to `read(steps, columns)`.

    They stay on their devices until `look`, or `PENDING` steps later: no step waits.
    """

    def __init__(self, devices: DeviceManager, read: Callable[..., None]) -> None:
        self._devices, self._hand = devices, read
        self.pending: list[tuple[range, Scalars]] = []
        self.stacks: list[tuple[list[range], tuple[str, ...], jax.Array]] = []

    def note(self, steps: range, scalars: Scalars) -> None:
        """Keeps the scalars of a call's steps, unread."""
        self.pending.append((steps, scalars))
        first = self.pending[0][0][0]
        if steps[-1] - first >= PENDING:
            self.look(first - 1)
            self.collect()

    def collect(self) -> None:
        """Stacks the scalars so far on their devices, in front of the steps to come.

        A copy to the host for each would take longer than a small step.
        """
        if not self.pending:
            return
        calls, scalars = zip(*self.pending, strict=True)
        names = tuple(name for name in NAMES if name in scalars[0])
        tables = jax.tree.map(first_copy, list(scalars))
        tables += tables[-1:] * (-len(tables) % GROUP)  # Few shapes, few programs.
        self.stacks.append((list(calls), names, _stacked(tables, names)))
        self.pending = []

    def look(self, last: int) -> None:
        """Reads the scalars of calls up to that of step `last`."""
        if self.pending and self.pending[0][0][-1] <= last:
            self.collect()
        while self.stacks and self.stacks[0][0][-1][-1] <= last:
            calls, names, stack = self.stacks.pop(0)
            tables = zip(calls, self._devices.fetch(stack), strict=False)
            table = np.concatenate([rows[: len(steps)] for steps, rows in tables])
            self._hand([*chain(*calls)], dict(zip(names, table.T, strict=True)))
