"""Packing: a state's small arrays as one vector, since each array of a call takes time.

On CPUs the thread that calls a program shares the cores with it, and needs some 15 us
for each array that goes in and comes out: of a ResNet-18 a tenth of a step.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from haiku_template.devices.manager import DeviceManager

SMALL = 4096  # Bytes of the largest array that is packed.
FEW = 32  # Arrays for which it does not pay.
PAYS = 1000  # Calls that save the time to compile it, some 15 ms for each array.


class Packed(NamedTuple):
    """A train state whose small arrays are one vector, float32 [N]."""

    arrays: tuple[Any, ...]
    vector: Any
    frozen: Any

    def arguments(self) -> tuple["Packed", Any]:
        """First arguments of a call, as `TrainState.arguments`."""
        return self._replace(frozen={}), self.frozen


class Packing(NamedTuple):
    """Small leaves of a state, by number, and the tree of all but the frozen ones."""

    shapes: dict[int, tuple[int, ...]]
    structure: Any

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a traced call, whose values stay bit by bit what they are."""

        @functools.wraps(run)
        def packed_run(packed: Packed, *args: Any) -> tuple[Packed, Any]:
            parts = self._shaped(jax.lax.split(packed.vector, self._sizes()))
            # Without barriers XLA fuses other things, and packing with all updates.
            state = self._whole(packed, jax.lax.optimization_barrier(parts))
            state, scalars = run(state, *args)
            small = jax.lax.optimization_barrier(self._small(state))
            vector = jnp.concatenate([*map(jnp.ravel, small)])
            return self.with_vector(state, vector), scalars

        return packed_run

    def with_vector(self, tree: Any, vector: Any) -> Packed:
        """Puts `vector` in the place of the small leaves of a state, or of its like."""
        leaves = enumerate(self._leaves(tree))
        arrays = tuple(leaf for i, leaf in leaves if i not in self.shapes)
        return Packed(arrays, vector, tree.frozen)

    def abstract(self, devices: "DeviceManager", state: Any) -> Packed:
        """Maps the shapes of a state to those of it packed."""
        shape = jax.ShapeDtypeStruct
        vector = shape((sum(self._sizes()),), np.float32, sharding=devices.replicated)
        return self.with_vector(state, vector)

    # These two by the host: a program would be compiled for seconds.
    def pack(self, devices: "DeviceManager", state: Any) -> Packed:
        """Packs a state that is on its device."""
        vector = np.concatenate([*map(np.ravel, devices.fetch(self._small(state)))])
        return self.with_vector(state, devices.replicate(vector))

    def unpack(self, devices: "DeviceManager", packed: Packed) -> Any:
        """Unpacks a state that is on its device; the larger arrays are the same."""
        ends = np.cumsum(self._sizes())[:-1]
        parts = self._shaped(np.split(devices.fetch(packed.vector), ends))
        return self._whole(packed, devices.replicate(parts))

    def larger(self, packed: Packed) -> Any:
        """The state of the larger arrays alone, None in the place of the others."""
        return self._whole(packed, [None] * len(self.shapes))

    def _small(self, state: Any) -> list[Any]:
        leaves = self._leaves(state)
        return [leaves[i] for i in self.shapes]

    def _leaves(self, state: Any) -> list[Any]:
        """Leaves in order; raises `ValueError` for a tree of another structure."""
        return self.structure.flatten_up_to(state.without_frozen())

    def _sizes(self) -> list[int]:
        return [*map(math.prod, self.shapes.values())]

    def _shaped(self, parts: Iterable[Any]) -> list[Any]:
        shapes = self.shapes.values()
        return [x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)]

    def _whole(self, packed: Packed, small: Iterable[Any]) -> Any:
        arrays, parts = iter(packed.arrays), dict(zip(self.shapes, small, strict=True))
        numbers = range(self.structure.num_leaves)
        leaves = [parts[i] if i in parts else next(arrays) for i in numbers]
        return self.structure.unflatten(leaves)._replace(frozen=packed.frozen)


def packing_of(devices: "DeviceManager", abstract: Any) -> Packing | None:
    """Chooses the small leaves of a state; None if they are few, or not on one CPU."""
    leaves, structure = jax.tree.flatten(abstract.without_frozen())
    shapes = {
        i: leaf.shape
        for i, leaf in enumerate(leaves)
        if leaf.dtype == jnp.float32
        and math.prod(leaf.shape) * leaf.dtype.itemsize <= SMALL
        and leaf.sharding == devices.replicated
    }
    pays = devices.platform == "cpu" and devices.num_devices == 1 and len(shapes) > FEW
    return Packing(shapes, structure) if pays else None
