"""JAX's own handler of SIGTERM, in a run of several processes."""

import ctypes
import logging
import signal
from contextlib import AbstractContextManager
from typing import Any

import jax

from haiku_template import signals

logger = logging.getLogger(__name__)

BYTES = 512  # At least those of a `struct sigaction`, whose first field is the handler.


class RuntimeHandler:  # Why: docs/decisions/cluster.md#second-signal
    """Handler that JAX's runtime has in C, and that Python takes the place of.

    `stop` are the signals of the run, which takes part in its processes' rescues.
    """

    def __init__(self, stop: Any) -> None:
        from haiku_template.runs.rescue import RescuedRun

        self._sigaction = ctypes.CDLL(None).sigaction
        self._action = ctypes.create_string_buffer(BYTES)
        self._sigaction(signal.SIGTERM, None, self._action)
        self.place = f" in process {jax.process_index()} of {jax.process_count()}"
        for rescue in signals.RESCUES:
            rescue.run, rescue.entered = RescuedRun(stop), None

    def tell(self) -> None:
        """Calls it, which sets a flag that JAX looks at once a second."""
        address = ctypes.c_void_p.from_buffer(self._action).value
        ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(signal.SIGTERM)

    def entering(self, run: Any) -> AbstractContextManager:
        """Context of the loop of a run, in which processes begin calls together."""
        from haiku_template.runs.rescue import entering

        return entering(run, signals.RESCUES)

    def rescue(
        self, reason: str = "", code: int | None = None
    ) -> tuple[int | None, str]:
        """Lets one process save the state of all, as `cluster/rescue.py` says."""
        step, why = None, "its processes were not joined by this package"
        for rescue in signals.RESCUES:
            step, why = rescue.ask(reason, code)
        return step, why

    def save(self) -> None:
        """Lets one save before an error of this process, or says why none can."""
        step, why = self.rescue()
        if step is None and why:
            logger.error("nothing new was saved: %s", why)  # Of each process.

    def restore(self) -> None:
        """Puts it back."""
        self._sigaction(signal.SIGTERM, self._action, None)
        for rescue in signals.RESCUES:
            rescue.leave()
