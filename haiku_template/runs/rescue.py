"""This process's part in a rescue: what it has, and how it saves it.

No computation begins here: other processes may not take part in it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template import signals
from haiku_template.devices.layout import spans_processes
from haiku_template.devices.processes import waiting
from haiku_template.errors import NonFiniteError
from haiku_template.params import leaves_by_path
from haiku_template.runs import stopping
from haiku_template.storage import workdir as workdirs

LOCK_SECONDS, READY_SECONDS, LOOK_SECONDS = 2.0, 4.0, 0.05
ON_DISK_SECONDS = 10.0  # Of a save of process 0 that has begun.
ENDING = "the run is ending by itself"


class RescuedRun:
    """Run of several processes, whose loop may be blocked; `stop` is its signals'."""

    def __init__(self, stop: Any) -> None:
        self._stop = stop

    @contextlib.contextmanager
    def halted(self, entered: int | None) -> Iterator[tuple[int | None, str, bool]]:
        """Context in which no call begins, but that up to `entered`, which all begin.

        The step that is whole here or None, why none, and whether it is sharded.
        """
        if entered is not None:  # Its thread is on its way to the call.
            _wait(lambda: self._step >= entered, LOCK_SECONDS)
        has_lock = self._stop.lock.acquire(timeout=LOCK_SECONDS)
        try:
            yield *self._whole(has_lock, entered), entered is not None
        finally:
            if has_lock:
                self._stop.lock.release()

    @property
    def seconds(self) -> float:
        """Those to write the state on a slow disk."""
        return self._stop.seconds

    @property
    def _step(self) -> int:
        return self._stop.latest[0][-1] if self._stop.latest else 0

    def _whole(self, has_lock: bool, entered: int | None) -> tuple[int | None, str]:
        if self._stop.save is None:
            return None, ENDING
        if not has_lock and (self._stop.received or self._stop.writes):
            return None, ENDING  # It has its own time: `FORCE_SECONDS`.
        # Without the lock a save waits for others: it has given nothing away.
        is_held = has_lock or entered is not None and self._step >= entered
        if not is_held or self._stop.latest is None:
            return None, "a step or a save is under way"
        leaves = jax.tree.leaves(self._stop.latest[1])
        if not all(isinstance(x, jax.Array) and not x.is_deleted() for x in leaves):
            return None, "the state was given to a step that failed"
        if not _wait(lambda: all(x.is_ready() for x in leaves), READY_SECONDS):
            return None, "a step waits for other processes"
        return self._step, ""

    def is_saved(self, step: int) -> bool:
        """True for a step that is on disk, once a save that has begun has ended."""
        checkpoints = self._stop.run.checkpoints
        _wait(lambda: not checkpoints.is_saving, ON_DISK_SECONDS + self.seconds)
        return step in checkpoints.steps

    def has_waited(self) -> bool:
        """Waits for a save that needs no other process; False if there was none."""
        checkpoints = self._stop.run and self._stop.run.checkpoints
        if not checkpoints or checkpoints.is_joint or not checkpoints.is_saving:
            return False
        return _wait(lambda: not checkpoints.is_saving, self.seconds)

    def check(self, step: int) -> None:
        """Raises `NonFiniteError` unless what it has of the last state is finite."""
        guards = self._stop.run.guards
        for path, leaf in leaves_by_path(self._stop.latest[1]).items():
            shards = leaf.addressable_shards if spans_processes(leaf) else [leaf]
            for kind in {_fault(np.asarray(getattr(x, "data", x))) for x in shards}:
                if kind and not guards.is_old(path, kind):
                    raise NonFiniteError(f"{path} is {kind} after step {step}")

    def save(self, step: int) -> None:
        """Saves the state of the last call, or raises."""
        run, (_, state, _) = self._stop.run, self._stop.latest
        run.checkpoints.without_batches()
        if run.checkpoints.rescue(step, state.saved()):
            workdirs.mark_saved(run.checkpoints.directory.parent, step)

    def end(self, reason: str, step: int | None, why: str, code: int) -> None:
        """Ends the process, after the lines of metrics that it still has."""
        scalars = jax.tree.leaves(self._stop.latest[2]) if self._stop.latest else []
        if all(x.is_ready() for x in scalars):
            with contextlib.suppress(Exception):
                self._stop.unlogged.close()
        signals.end_late(stopping.sentence(reason, step, why), code)


def _fault(leaf: np.ndarray) -> str:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact) or np.isfinite(leaf).all():
        return ""
    return "NaN" if np.isnan(leaf).any() else "infinite"


def _wait(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits for a while until it is so; False if it never was."""
    deadline = time.monotonic() + seconds
    while not (ends := is_so()) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return ends


@contextlib.contextmanager
def entering(run: Any, rescues: Sequence[Any]) -> Iterator[None]:
    """Context in which all processes begin each call of a run, or none of them does.

    Where its state is sharded over them: no other has the shares that a call takes.
    """
    trainer, make = run.trainer, run.trainer.calls
    if not any(spans_processes(x.sharding) for x in jax.tree.leaves(trainer.abstract)):
        yield
        return
    for rescue in rescues:
        rescue.entered = 0

    @contextlib.contextmanager
    def calls(*args: Any) -> Iterator[Iterator[Any]]:
        with make(*args) as items:
            yield map(enter, items)

    def enter(call: tuple[range, Any]) -> tuple[range, Any]:
        with waiting():
            for rescue in rescues:
                rescue.enter(call[0][-1])
        return call

    trainer.calls = calls
    try:
        yield
    finally:
        trainer.calls = make
