"""Arrays that span the processes of a run, where each process has one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haiku_template.devices.shards import AXIS_NAME


class Spanning:
    """Calls a function of arrays that span processes with those of this process.

    The batch comes split over the devices, all else is whole, and so are the results.
    Most arguments are those of the call before, or its results: until the next call it
    is kept what they are a part of, since making an array takes longer than its call.
    """

    def __init__(
        self, compiled: Callable[..., Any], devices: Sequence[jax.Device]
    ) -> None:
        mesh = Mesh(devices, AXIS_NAME)
        self._compiled = compiled
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec(AXIS_NAME))
        self._known: dict[int, tuple[jax.Array, jax.Array]] = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the function; arrays that are elsewhere are given as they are."""
        *trees, batch = args
        before, self._known = self._known, {}

        def joined(leaf: Any) -> Any:
            known = before.get(id(leaf)) or (leaf, self._joined(leaf))
            self._known[id(leaf)] = known
            return known[1]

        def own(array: jax.Array) -> jax.Array:
            leaf = array.addressable_data(0)
            self._known[id(leaf)] = leaf, array
            return leaf

        trees, batch = jax.tree.map(joined, trees), jax.tree.map(self._shares, batch)
        return jax.tree.map(own, self._compiled(*trees, batch))

    def _joined(self, leaf: Any) -> Any:
        own = self._whole.addressable_devices
        if not isinstance(leaf, jax.Array) or leaf.devices() != own:
            return leaf
        return _made(leaf.shape, self._whole, leaf)

    def _shares(self, leaf: jax.Array) -> jax.Array:
        shape = (self._split.num_devices, *leaf.shape[1:])
        return _made(shape, self._split, leaf)


def _made(shape: tuple, sharding: NamedSharding, leaf: jax.Array) -> jax.Array:
    own = [leaf.addressable_data(0)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own)
