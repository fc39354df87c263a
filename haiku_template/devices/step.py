"""Compiled step: its call is timed, and its errors name the leaf."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from haiku_template.devices.checks import (
    astray,
    check_alive,
    describe,
    leak_error,
    leaks_named,
)
from haiku_template.devices.transfer import Ledger, check_per_row
from haiku_template.errors import PlacementError

# JAX's words for an argument that is not where the computation runs.
MISPLACED = ("Disallowed", "ncompatible devices", "match the sharding")


class InFlight:
    """Steps of this process that are dispatched and unfinished.

    One for the process, as simulated devices share its threads: steps of two programs
    that wait for each other in collectives would wait for ever.
    """

    def __init__(self) -> None:
        self.tokens: deque[jax.Array] = deque()
        self._lock = threading.RLock()

    def dispatch(self, run: Callable[[], Any], limit: int, ledger: Ledger) -> Any:
        """Calls `run`, for (results, token), once fewer than `limit` are unfinished."""
        with self._lock:
            with ledger.timed("compute"):
                while len(self.tokens) >= limit:
                    jax.block_until_ready(self.tokens.popleft())
            with ledger.timed("dispatch"):
                results, token = run()
            if not isinstance(token, jax.core.Tracer):  # Traced in another program.
                self.tokens.append(token)
            return results


IN_FLIGHT = InFlight()


class CompiledStep:
    """Compiled step: `jax.jit` on one device, `jax.pmap` on several.

    `limit` bounds the steps that are dispatched and unfinished, and `ledger` adds up
    the seconds of each call. The rest is as in `DeviceManager.compile`.

    Raises:
      PlacementError: another `out`.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        devices: Sequence[jax.Device],
        axis_name: str | None,
        ledger: Ledger,
        limit: int,
        donate_argnums: int | tuple,
        replicated: int,
        out: str,
    ) -> None:
        if out not in ("whole", "split"):
            raise PlacementError(f"out={out!r}; possible are whole and split")

        @functools.wraps(step)  # Profiles and JAX's logs show its name.
        def run(*arguments: Any) -> tuple[Any, jax.Array]:
            # The token is there when the program has ended, whatever of its results
            # the next step takes over.
            results = step(*arguments)
            if out == "split":
                check_per_row(results, arguments[-1])
            return results, jnp.zeros((), jnp.bool_)

        if axis_name is None:
            self._jitted = jax.jit(run, donate_argnums=donate_argnums)
        elif out == "whole":
            self._jitted = jax.pmap(
                run,
                axis_name,
                in_axes=(*(None,) * replicated, 0),
                out_axes=None,
                devices=devices,
                donate_argnums=donate_argnums,
            )
        else:
            whole, split = PartitionSpec(), PartitionSpec(axis_name)
            each = jax.shard_map(
                lambda *args: run(*args[:-1], jax.tree.map(lambda x: x[0], args[-1])),
                mesh=Mesh(np.array(devices), axis_name),
                in_specs=(*(whole,) * replicated, split),
                out_specs=(split, whole),
                check_vma=False,
            )
            self._jitted = jax.jit(each, donate_argnums=donate_argnums)
        self._devices = devices
        self._ledger = ledger
        self._limit = limit
        self._takes_state = 0 in np.atleast_1d(np.array(donate_argnums, int))

    def lower(self, *args: Any) -> Any:
        """Lowers the step for these shapes; a leaked tracer is a `PlacementError`."""
        with leaks_named():
            return self._jitted.lower(*args)

    def __call__(self, *args: Any) -> Any:
        """Dispatches the step; its results are there when the devices have finished.

        Waits first for earlier steps, of this one or another, until few enough run.

        Raises:
          PlacementError: an argument is on other devices or was donated before; the
            batch is not from `shard`; or the step leaks a tracer. The message names the
            leaf.
        """
        *whole, batch = args
        check_alive(whole[0], "the state's ", distinct=self._takes_state)
        check_alive(batch, "the batch's ")
        check_sharded(batch, self._devices)
        try:
            return IN_FLIGHT.dispatch(
                lambda: self._jitted(*args), self._limit, self._ledger
            )
        except jax.errors.UnexpectedTracerError as error:
            raise leak_error(error) from error
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if any(words in str(error) for words in MISPLACED):
                for tree in whole:
                    fault = astray(tree, self._devices)
                    if fault:
                        raise PlacementError(f"the state's {fault}") from error
            raise


def check_sharded(batch: Any, devices: Sequence[jax.Device]) -> None:
    """Raises `PlacementError` unless a batch is split over these devices by `shard`.

    With other batches `pmap` would use fewer devices in silence.
    """
    fault = astray(batch, devices)
    if fault:
        raise PlacementError(f"the batch's {fault}")
    if len(devices) == 1:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or len(leaf) != len(devices) or leaf.is_fully_replicated:
            raise PlacementError(
                f"the batch's {jax.tree_util.keystr(path)} "
                f"({leaf.dtype}{list(leaf.shape)}, {describe(leaf)}) has not one share "
                f"on each of the {len(devices)} devices; give batches with "
                "devices.shard"
            )


def mean_over(axis_name: str | None, tree: Any) -> Any:
    """Averages a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.pmean(tree, axis_name)


def sum_over(axis_name: str | None, tree: Any) -> Any:
    """Adds up a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def with_axis(fn: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """Binds the mesh axis in `fn`, with one device in it."""
    if axis_name is None:
        return fn
    # An axis of size one: averages over it are the identity.
    return jax.vmap(fn, in_axes=None, out_axes=None, axis_name=axis_name, axis_size=1)
