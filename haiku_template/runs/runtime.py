"""JAX's own handler of SIGTERM, in a run of several processes."""

import ctypes
import signal

BYTES = 512  # At least those of a `struct sigaction`, whose first field is the handler.


class RuntimeHandler:  # Why: docs/decisions/cluster.md#second-signal
    """Handler that JAX's runtime has in C, and that Python takes the place of."""

    def __init__(self) -> None:
        self._sigaction = ctypes.CDLL(None).sigaction
        self._action = ctypes.create_string_buffer(BYTES)
        self._sigaction(signal.SIGTERM, None, self._action)

    def tell(self) -> None:
        """Calls it, which sets a flag that JAX looks at once a second."""
        address = ctypes.c_void_p.from_buffer(self._action).value
        ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(signal.SIGTERM)

    def restore(self) -> None:
        """Puts it back."""
        self._sigaction(signal.SIGTERM, self._action, None)
