"""A compiled step: its call is timed, and its errors name the leaf."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from haiku_template.devices.checks import astray, leak_error, leaks_named
from haiku_template.devices.transfer import Ledger
from haiku_template.errors import PlacementError

# What JAX says when an argument is not where the computation runs.
MISPLACED = ("Disallowed", "ncompatible devices", "match the sharding")


class Shared(NamedTuple):
    """Arrays that every call of a step gets; several steps may share them.

    Attributes:
      abstract: pytree of their shapes, dtypes and shardings.
      arrays: gives them, whole on each device; makes them at its first call.
    """

    abstract: Any
    arrays: Callable[[], Any]

    @classmethod
    def create(cls, abstract: Any, make: Callable[[], Any]) -> "Shared":
        """What `make()` gives, which is called once, and only when it is needed."""
        return cls(abstract, functools.cache(make))


class CompiledStep:
    """`jax.jit` of a step on one device, `jax.pmap` of it on several.

    Args:
      step: pure function of (state, batch, *shared), for one device's share of the
        batch.
      devices: where it runs.
      axis_name: the mesh axis over several devices; None on one.
      ledger: where the time of each call is entered.
      donate_argnums: arguments whose memory the results may take over.
      shared: what every call gets besides.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        devices: Sequence[jax.Device],
        axis_name: str | None,
        ledger: Ledger,
        donate_argnums: int | tuple,
        shared: Sequence[Shared],
    ) -> None:
        if axis_name is None:
            self._jitted = jax.jit(step, donate_argnums=donate_argnums)
        else:
            self._jitted = jax.pmap(
                step,
                axis_name,
                in_axes=(None, 0, *(None for _ in shared)),
                out_axes=None,
                devices=devices,
                donate_argnums=donate_argnums,
            )
        self._devices = devices
        self._ledger = ledger
        self._shared = tuple(shared)

    def lower(self, state: Any, batch: Any) -> Any:
        """What `jax.jit` would compile for arrays of these shapes.

        Raises:
          PlacementError: the step leaks a tracer.
        """
        with leaks_named():
            more = (shared.abstract for shared in self._shared)
            return self._jitted.lower(state, batch, *more)

    def __call__(self, state: Any, batch: Any) -> Any:
        """Starts the step; its results are there when the devices have finished.

        Raises:
          PlacementError: an argument is elsewhere, and using it would be a copy that
            nobody asked for; the message names the leaf. Or the step leaks a tracer.
        """
        more = [shared.arrays() for shared in self._shared]
        begun = time.perf_counter()
        try:
            return self._jitted(state, batch, *more)
        except jax.errors.UnexpectedTracerError as error:
            raise leak_error(error) from error
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


def mean_over(axis_name: str | None, tree: Any) -> Any:
    """Averages a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.pmean(tree, axis_name)


def sum_over(axis_name: str | None, tree: Any) -> Any:
    """Adds up a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def with_axis(fn: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """`fn`, which sees the axis as steps do; with one device in it."""
    if axis_name is None:
        return fn
    # An axis of size one: averages over it are the identity.
    return jax.vmap(fn, in_axes=None, out_axes=None, axis_name=axis_name, axis_size=1)
