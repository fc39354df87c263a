"""Layout: where each leaf of a train state lives on the devices, as a value."""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from haiku_template.errors import ConfigError, near
from haiku_template.params import flatten, matching

AXIS_NAME, HOST = "data", "pinned_host"
REPLICATED = PartitionSpec()
USED = ("params/", "ema_params/", "frozen/")  # What models ask for, leaf by leaf.
GATHERED = 2**14  # Bytes from which a leaf is gathered at its use, not before it.


class Layout(NamedTuple):  # Why: docs/decisions/devices.md#layout
    """Rules that map the leaves of a state to shardings on the devices of a mesh.

    A rule is a shell pattern of paths, `opt_state/*`, and the mesh axis to shard along,
    or None; the first rule that fits a leaf holds. The largest dimension that the
    number of devices divides is sharded, but the first only if there is no other: in a
    stack of layers it is the loop's. Without one, or a rule, a leaf is replicated.
    A third item, `pinned_host`, keeps moments in the host's memory between steps; it
    leaves numbers [] on the devices.
    """

    devices: tuple[jax.Device, ...]
    rules: tuple[tuple[str | None, ...], ...] = ()

    def of(self, tree: Any) -> Any:
        """Maps each leaf of a tree, or its shape, to its sharding."""
        if self.rules:
            return self._by_rules(tree)
        return jax.tree.map(lambda _: sharding_on(self.devices), tree)

    def _by_rules(self, tree: Any) -> Any:
        n, leaves = len(self.devices), flatten(tree)
        rules, shardings = self._matches(leaves), []
        for path, leaf in leaves.items():
            axis, *kinds = rules.get(path, (None,))
            spec = spec_of(np.shape(leaf), n, axis if n > 1 else None)
            kind = HOST if kinds and np.shape(leaf) else None
            shardings.append(sharding_on(self.devices, *spec, kind=kind))
        return jax.tree.unflatten(jax.tree.structure(tree), shardings)

    def unsplit(self, tree: Any) -> list[str]:
        """Paths and shapes of large leaves that a rule fits, and that stay whole."""
        rules, shardings = self._matches(flatten(tree)), jax.tree.leaves(self.of(tree))
        return [
            f"{path} {[*leaf.shape]}"
            for (path, leaf), x in zip(flatten(tree).items(), shardings, strict=True)
            if rules.get(path, (None,))[0] is not None
            and x.is_fully_replicated
            and math.prod(leaf.shape) * leaf.dtype.itemsize >= GATHERED
        ]

    # Why: docs/decisions/devices.md#shares
    def shares(self, tree: Any) -> Any:
        """Maps each leaf to the `PartitionSpec` of what a step sees of it.

        These are devices' shares of large sharded parameters; all else it sees whole.
        None if there is no such share.
        """

        def spec(path: str, leaf: Any, sharding: Any) -> PartitionSpec:
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            is_share = path.startswith(USED) and size >= GATHERED
            return getattr(sharding, "spec", None) if is_share else REPLICATED

        shardings = jax.tree.leaves(self.of(tree))
        specs = [*map(spec, *zip(*flatten(tree).items(), strict=True), shardings)]
        return jax.tree.structure(tree).unflatten(specs) if any(specs) else None

    def place(self, shapes: Any) -> Any:
        """Adds its sharding to each shape of a tree."""
        form = jax.ShapeDtypeStruct
        place = lambda x, sharding: form(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        return jax.tree.map(place, shapes, self.of(shapes))

    def check(self, tree: Any) -> None:
        """Raises `ConfigError` for a rule of an unknown axis, or that fits no leaf."""
        paths = flatten(tree)
        for pattern, axis, *kinds in self.rules:
            if axis not in (AXIS_NAME, None):
                raise ConfigError(
                    f"config.sharding: {pattern!r} is to be sharded along the mesh "
                    f"axis {axis!r}; the mesh has the axis {AXIS_NAME!r} alone"
                )
            leaves = matching(pattern, paths)
            of_moments = all(x.startswith("opt_state/") for x in leaves)
            if kinds and not (kinds == [HOST] and of_moments):
                raise ConfigError(
                    f"config.sharding: {pattern!r} is to be kept in {kinds[0]!r}; "
                    f"possible is {HOST!r}, for leaves of opt_state/ alone"
                )
            if not leaves:
                raise ConfigError(
                    f"config.sharding: no leaf of the state fits {pattern!r}"
                    f"{near(pattern, paths)}; patterns are of paths such as "
                    "'opt_state/*' or 'params/*'"
                )

    def _matches(self, paths: Any) -> dict[str, list[str | None]]:
        """Axis and memory of each path that a rule fits; the first rule holds."""
        return {
            path: place
            for pattern, *place in reversed(self.rules)
            for path in matching(pattern, paths)
        }


def spec_of(shape: tuple[int, ...], n: int, axis: str | None) -> tuple[Any, ...]:
    """Entries of the `PartitionSpec` of an array; () if it is replicated."""
    even = [i for i, size in enumerate(shape) if size and size % n == 0]
    if axis is None or not even:
        return ()
    dimension = max([i for i in even if i] or even, key=lambda i: shape[i])
    return (*(None,) * dimension, axis)


@functools.cache  # Once, not each step: JAX computes facts of each object.
def sharding_on(
    devices: tuple[jax.Device, ...], *spec: Any, kind: str | None = None
) -> jax.sharding.Sharding:
    """Sharding of arrays by a `PartitionSpec`'s entries; replicated without any."""
    if len(devices) == 1 and kind is None:  # With a kind `lower` would not see it.
        return SingleDeviceSharding(devices[0])
    mesh = Mesh(devices, AXIS_NAME)
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)


def spans_processes(leaf: Any) -> bool:
    """Tests for an array of which no single process has all values."""
    return not (getattr(leaf, "is_fully_addressable", True) or leaf.is_fully_replicated)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of their shapes, on each of their devices."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
        if x.sharding.memory_kind != HOST
    )


def in_device_memory(tree: Any) -> Any:
    """Copies traced arrays to the devices' own memory, with which they compute."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def put(x: Any) -> Any:
        return jax.device_put(x, device) if jax.typeof(x).memory_space == host else x

    return jax.tree.map(put, tree)
