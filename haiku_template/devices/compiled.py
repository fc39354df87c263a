"""A compiled step: its call is timed, and its errors name the leaf."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from haiku_template.devices.audit import astray
from haiku_template.devices.errors import PlacementError
from haiku_template.devices.leaks import leaks_named
from haiku_template.devices.ledger import Ledger

# What JAX says when an argument is not where the computation runs.
MISPLACED = ("Disallowed", "ncompatible devices", "match the sharding")


class CompiledStep:
    """`jax.jit` of a step on one device, `jax.pmap` of it on several.

    Args:
      step: pure function of (state, batch, *shared), for one device's share of the
        batch.
      devices: where it runs.
      axis_name: the mesh axis over several devices; None on one.
      ledger: where the time of each call is entered.
      donate_argnums: arguments whose memory the results may take over.
      shared: gives what every call gets, whole on each device.
      abstract_shared: its shapes, dtypes and shardings.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        devices: Sequence[jax.Device],
        axis_name: str | None,
        ledger: Ledger,
        donate_argnums: int | tuple,
        shared: Callable[[], tuple],
        abstract_shared: tuple,
    ) -> None:
        if axis_name is None:
            self._jitted = jax.jit(step, donate_argnums=donate_argnums)
        else:
            self._jitted = jax.pmap(
                step,
                axis_name,
                in_axes=(None, 0, *(None for _ in abstract_shared)),
                out_axes=None,
                devices=devices,
                donate_argnums=donate_argnums,
            )
        self._devices = devices
        self._ledger = ledger
        self._shared = shared
        self.abstract_shared = abstract_shared

    def lower(self, state: Any, batch: Any) -> Any:
        """What `jax.jit` would compile for arrays of these shapes.

        Raises:
          PlacementError: the step leaks a tracer.
        """
        with leaks_named():
            return self._jitted.lower(state, batch, *self.abstract_shared)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Starts the step; its results are there when the devices have finished.

        Raises:
          PlacementError: an argument is elsewhere, and using it would be a copy that
            nobody asked for; the message names the leaf. Or the step leaks a tracer.
        """
        shared = self._shared()
        begun = time.perf_counter()
        try:
            with leaks_named():
                return self._jitted(state, batch, *shared)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if any(words in str(error) for words in MISPLACED):
                self._name_leaf(error, state, batch)
            raise
        finally:
            self._ledger.add_since("dispatch", begun)

    def _name_leaf(self, error: Exception, state: Any, batch: Any) -> None:
        for name, tree in (("state", state), ("batch", batch)):
            fault = astray(tree, self._devices)
            if fault:
                raise PlacementError(f"the {name}'s {fault}") from error
