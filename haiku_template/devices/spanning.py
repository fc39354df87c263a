"""Global arrays, which span the processes of a run, of arrays of each one's device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haiku_template.devices.layout import AXIS_NAME


class Spanning:
    """Calls a jitted function of global arrays with arrays of this process's device.

    The batch is split over the devices; other arguments, and results, are replicated.
    Their global arrays are kept until the next call, which mostly has the same ones:
    making one takes longer than the call does for it.
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
        leaves, structure = jax.tree.flatten(trees)
        given = [self._known.get(id(leaf)) or self._joined(leaf) for leaf in leaves]
        trees = structure.unflatten([whole for _, whole in given])
        results = self._compiled(*trees, jax.tree.map(self._shares, batch))
        leaves, structure = jax.tree.flatten(results)
        made = [(whole.addressable_data(0), whole) for whole in leaves]
        self._known = {id(own): (own, whole) for own, whole in given + made}
        return structure.unflatten([own for own, _ in made])

    def _joined(self, leaf: Any) -> tuple[Any, Any]:
        own = self._whole.addressable_devices
        if not isinstance(leaf, jax.Array) or leaf.devices() != own:
            return leaf, leaf
        return leaf, _made(leaf.shape, self._whole, leaf)

    def _shares(self, leaf: jax.Array) -> jax.Array:
        shape = (self._split.num_devices, *leaf.shape[1:])
        return _made(shape, self._split, leaf)


def _made(shape: tuple, sharding: NamedSharding, leaf: jax.Array) -> jax.Array:
    own = [leaf.addressable_data(0)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own)
