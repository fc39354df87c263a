"""A compiled step: its call is timed, and its errors name the leaf."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from haiku_template.devices.checks import astray, leak_error, leaks_named
from haiku_template.devices.transfer import Ledger
from haiku_template.errors import PlacementError

# What JAX says when an argument is not where the computation runs.
MISPLACED = ("Disallowed", "ncompatible devices", "match the sharding")


class CompiledStep:
    """`jax.jit` of a step on one device, `jax.pmap` of it on several.

    Args:
      step: pure function of `replicated` trees that are whole on each device, the state
        first, and of one device's share of the batch.
      devices: where it runs.
      axis_name: the mesh axis over several devices; None on one.
      ledger: where the time of each call is entered.
      donate_argnums: arguments whose memory the results may take over.
      replicated: arguments before the batch.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        devices: Sequence[jax.Device],
        axis_name: str | None,
        ledger: Ledger,
        donate_argnums: int | tuple,
        replicated: int,
    ) -> None:
        if axis_name is None:
            self._jitted = jax.jit(step, donate_argnums=donate_argnums)
        else:
            self._jitted = jax.pmap(
                step,
                axis_name,
                in_axes=(*(None,) * replicated, 0),
                out_axes=None,
                devices=devices,
                donate_argnums=donate_argnums,
            )
        self._devices = devices
        self._ledger = ledger

    def lower(self, *args: Any) -> Any:
        """What `jax.jit` would compile for arrays of these shapes.

        Raises:
          PlacementError: the step leaks a tracer.
        """
        with leaks_named():
            return self._jitted.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """Starts the step; its results are there when the devices have finished.

        Raises:
          PlacementError: an argument is elsewhere, and using it would be a copy that
            nobody asked for; the message names the leaf. Or the step leaks a tracer.
        """
        begun = time.perf_counter()
        try:
            return self._jitted(*args)
        except jax.errors.UnexpectedTracerError as error:
            raise leak_error(error) from error
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if any(words in str(error) for words in MISPLACED):
                self._name_leaf(error, args)
            raise
        finally:
            self._ledger.add_since("dispatch", begun)

    def _name_leaf(self, error: Exception, args: tuple[Any, ...]) -> None:
        names = ("state", *("frozen parameters",) * (len(args) - 2), "batch")
        for name, tree in zip(names, args, strict=True):
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
