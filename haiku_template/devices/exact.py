"""Exact elastic mode: a batch's logical shares, bitwise the same on any devices.

The number of shares does not depend on that of the devices. Each share is computed by
the same program of one device, all of them are copied to all devices, and each device
updates its copy of the state by the same program. Between programs bits are only moved.
Why: docs/decisions/training.md#exact-elastic
"""

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from haiku_template.devices.layout import AXIS_NAME, sharding_on
from haiku_template.errors import ConfigError

if TYPE_CHECKING:
    from haiku_template.devices.manager import DeviceManager

logger = logging.getLogger(__name__)

AXIS = (
    "config.exact_elastic computes each logical share of a batch on its own, and the "
    f"model or the task averages over the mesh axis {AXIS_NAME!r}: make it without an "
    "axis (None), so that statistics of a batch are those of a share"
)


class Shares:
    """Logical shares of a batch on the devices of all processes.

    Raises `ConfigError` if the number of devices does not divide theirs.
    """

    def __init__(self, devices: "DeviceManager", count: int) -> None:
        if count % devices.num_devices:
            possible = [n for n in range(1, count + 1) if count % n == 0]
            raise ConfigError(
                f"config.exact_elastic={count} shares cannot be computed evenly on "
                f"{devices.num_devices} devices; possible are "
                f"{', '.join(map(str, possible))} devices"
            )
        self.count, self._devices = count, devices
        self.devices = devices.devices  # Of this process.
        self._each = count // devices.num_devices
        self._first = devices.processes.index * len(self.devices) * self._each
        self._axes = 1 if devices.axis_name is None else 2  # Of a batch's rows.
        self._cut = jax.jit(self._cut_rows)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a share's rows, given that of an array of the whole batch."""
        return (math.prod(shape[: self._axes]) // self.count, *shape[self._axes :])

    def _cut_rows(self, batch: Any) -> list[Any]:
        """Cuts the rows of a device into those of its shares."""
        leaves, structure = jax.tree.flatten(batch)
        leaves = [x.reshape(self._each, -1, *x.shape[self._axes :]) for x in leaves]
        return [structure.unflatten([x[i] for x in leaves]) for i in range(self._each)]

    @functools.cached_property
    def _numbers(self) -> list[jax.Array]:
        """Number of each share of this process, on its device."""
        return [
            jax.device_put(np.int32(self._first + i), self.devices[i // self._each])
            for i in range(self._each * len(self.devices))
        ]

    def on_each(self, tree: Any) -> list[Any]:
        """Parts of global arrays on each device of this process, as its own arrays."""
        if self._devices.axis_name is None:
            return [tree]
        leaves, structure = jax.tree.flatten(tree)
        parts = [{s.device: s.data for s in x.addressable_shards} for x in leaves]
        return [
            structure.unflatten([part[device] for part in parts])
            for device in self.devices
        ]

    def joined(self, trees: list[Any], *spec: Any) -> Any:
        """Joins arrays of the devices to global ones: copies, or shards by `spec`."""
        if self._devices.axis_name is None:
            return trees[0]
        sharding = sharding_on(self._devices.everyone, *spec)

        def join(*arrays: jax.Array) -> jax.Array:
            shape = arrays[0].shape
            if spec:
                shape = (self._devices.num_devices * shape[0], *shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, [*arrays])

        return jax.tree.map(join, *trees)

    def map(self, program: Callable[..., Any], trees: Any, batch: Any) -> list[Any]:
        """Runs `program(share, *trees, rows)`, of results [1, ...], for each share.

        Returns the results in the order of the shares, on all devices.
        """
        rows = [self._cut(part) for part in self.on_each(batch)]
        parts = self.on_each(trees)
        results = [
            [
                program(self._numbers[i * self._each + j], *part, rows[i][j])
                for i, part in enumerate(parts)
            ]
            for j in range(self._each)
        ]
        if self._devices.axis_name is None:
            return [x for (x,) in results]
        if self._devices.steps_in_flight == 1:
            jax.block_until_ready(results)  # No program runs beside a collective.
        return self._everywhere([self.joined(x, AXIS_NAME) for x in results])

    @functools.cached_property
    def _everywhere(self) -> Callable[[list[Any]], list[Any]]:
        """Compiles the copy of arrays [n, ...] to all devices, as n of [1, ...]."""
        n = self._devices.num_devices
        self._devices.processes.first(None)  # Gloo waits 30 s for who still compiles.

        def order(results: list[Any]) -> list[Any]:
            return [
                jax.tree.map(lambda x, i=i: x[i : i + 1], results[j])
                for i in range(n)
                for j in range(self._each)
            ]

        return jax.jit(order, out_shardings=self._devices.replicated)


class ExactStep:
    """Step of logical shares, in the place of a `jax.jit`: `step(state, ..., batch)`.

    `gradients(share, state, ..., rows)` gives results [1, ...] of a share, and
    `update(state, results)` takes those of all shares in a list. The state is donated.
    """

    def __init__(
        self,
        shares: Shares,
        gradients: Callable[..., Any],
        update: Callable[[Any, list[Any]], Any],
    ) -> None:
        self._shares, self._gradients = shares, jax.jit(gradients)
        self._update = jax.jit(update, donate_argnums=0)

    def __call__(self, state: Any, *args: Any) -> Any:
        """Makes a step; returns what `update` does, replicated."""
        *trees, _, batch = args
        shares = self._shares
        results = shares.map(self._gradients, (state, *trees), batch)
        pairs = zip(shares.on_each(state), shares.on_each(results), strict=True)
        return shares.joined([self._update(*pair) for pair in pairs])

    def trace(self, *args: Any) -> Any:
        """Traces the gradients of a share for such shapes of a step's arguments.

        Raises `ConfigError` for a model or task with the mesh axis.
        """
        *trees, _, batch = args
        shares, first = self._shares, sharding_on(self._shares.devices[:1])
        _warn_of_threads(shares.devices[0].platform, shares.count)
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=first)
        trees = jax.tree.map(lambda x: shape(x.shape, x.dtype), trees)
        rows = jax.tree.map(lambda x: shape(shares.shape(x.shape), x.dtype), batch)
        try:
            return self._gradients.trace(shape((), np.int32), *trees, rows)
        except NameError as error:
            raise ConfigError(AXIS) from error


@functools.cache  # Once.
def _warn_of_threads(platform: str, shares: int) -> None:
    """Warns if the threads of CPU devices are as many as the machine has cores."""
    # Why: docs/decisions/training.md#threads
    if platform == "cpu" and "PJRT_NPROC" not in os.environ:
        logger.warning(
            "convolutions on CPUs have other last bits with another number of threads, "
            f"which goes by cores and devices: write export PJRT_NPROC={shares} before "
            f"a run of exact_elastic={shares}, wherever it goes on"
        )


def exact_evaluation(shares: Shares, sums: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `step(variables, frozen, batch)`: a batch's sums, on the first device.

    `sums(variables, frozen, rows)` are those of a share.
    """
    total = jax.jit(in_order)

    @jax.jit
    def of_share(share: jax.Array, *args: Any) -> Any:
        del share
        return jax.tree.map(lambda x: x[None], sums(*args))

    def step(*args: Any) -> Any:
        *trees, batch = args
        results = shares.map(of_share, tuple(trees), batch)
        return total(shares.on_each(results)[0])

    return step


def in_order(trees: list[Any]) -> Any:
    """Adds up results [1, ...] of the shares, one after another."""
    total = functools.reduce(lambda x, y: jax.tree.map(lambda a, b: a + b, x, y), trees)
    return jax.tree.map(lambda x: x[0], total)
