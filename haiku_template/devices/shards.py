"""Shards: leaves of a state of which each device keeps an equal part."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

AXIS_NAME = "data"


class Sharded(NamedTuple):
    """Part of a state whose leaves are split over the devices, on several of them.

    Each along its first dimension that gives equal shares; one without such a dimension
    is whole on each device. Shapes are of the whole leaf, on any number of devices.
    """

    tree: Any


def split_dimension(shape: tuple[int, ...], n: int) -> int | None:
    """First dimension that gives n equal shares; None for an array that stays whole."""
    return next((i for i, size in enumerate(shape) if size and size % n == 0), None)


def dimensions(tree: Any, n: int) -> list[int | None]:
    """Dimension of each leaf that is split over n devices; None for whole leaves."""
    found: list[int | None] = []
    for node in jax.tree.leaves(tree, is_leaf=_is_sharded):
        split = _is_sharded(node) and n > 1
        shapes = map(np.shape, jax.tree.leaves(node))
        found += [split_dimension(shape, n) if split else None for shape in shapes]
    return found


def has_shards(tree: Any) -> bool:
    """Tests for a `Sharded` part."""
    return any(map(_is_sharded, jax.tree.leaves(tree, is_leaf=_is_sharded)))


def _is_sharded(node: Any) -> bool:
    return isinstance(node, Sharded)


def specs(tree: Any, n: int) -> Any:
    """`PartitionSpec` of each leaf on n devices."""
    split = [
        PartitionSpec() if d is None else PartitionSpec(*(None,) * d, AXIS_NAME)
        for d in dimensions(tree, n)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), split)


def placed(tree: Any, replicated: jax.sharding.Sharding) -> Any:
    """Shapes with the sharding of each leaf, given that of whole ones."""
    if not has_shards(tree) or replicated.num_devices == 1:
        return tree
    mesh = replicated.mesh

    def place(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, tree, specs(tree, replicated.num_devices))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of their shapes, on each of their devices."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def num_shares() -> int:
    """Number of devices that the code being traced is split over; 1 outside a step."""
    try:
        return jax.lax.axis_size(AXIS_NAME)
    except NameError:  # On one device no axis is bound.
        return 1


def own_share(x: jax.Array, n: int) -> jax.Array:
    """Cuts this device's share of an array that each of n devices has."""
    d = split_dimension(x.shape, n)
    if d is None:
        return x
    size = x.shape[d] // n
    start = jax.lax.axis_index(AXIS_NAME) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, d)


def gathered(share: jax.Array, shape: tuple[int, ...], n: int) -> jax.Array:
    """Joins the shares of n devices to an array of this shape, on each of them."""
    d = split_dimension(shape, n)
    if d is None:
        return share
    return jax.lax.all_gather(share, AXIS_NAME, axis=d, tiled=True)
