"""The two placement functions that JAX removed, with the semantics that they had.

`jax.device_put_sharded` and `jax.device_put_replicated` left JAX in 0.10. Both give
arrays with a leading axis of one entry a device, as `pmap` takes them. Here every
shard goes straight to its own device: nothing is stacked on the host, and nothing
passes through device 0.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haiku_template.devices.errors import PlacementError

AXIS_NAME = "data"


def device_put_sharded(shards: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """Puts `shards[i]` on `devices[i]` and joins them along a new leading axis.

    Args:
      shards: one pytree for each device, all of one structure; corresponding leaves
        (NumPy or JAX arrays, PRNG keys, scalars) have one shape and one dtype.
      devices: as many distinct devices.

    Returns:
      A pytree like one shard; a leaf of shape S becomes (len(devices), *S), with entry
      i on `devices[i]`.

    Raises:
      PlacementError: not one shard for each device, or shards that differ in
        structure, shape or dtype; the message names the leaf.
      TypeError: `shards` is no sequence, or a leaf no number or array of numbers, nor
        where the first shard is one.
    """
    devices = _distinct(devices)
    if not isinstance(shards, Sequence):
        raise TypeError(
            "device_put_sharded takes a sequence with one pytree for each device, and "
            f"got {type(shards).__name__}; of an array x [n, ...] it is list(x)"
        )
    if len(shards) != len(devices):
        raise PlacementError(
            f"device_put_sharded got {len(shards)} shards for {len(devices)} devices; "
            "it takes one shard for each device"
        )
    structure = jax.tree.structure(shards[0])
    for i, shard in enumerate(shards):
        if jax.tree.structure(shard) != structure:
            is_leaf = structure == jax.tree.structure(0)  # And not None.
            raise (TypeError if is_leaf else PlacementError)(
                f"the shards differ in structure: shard 0 is {structure}, shard {i} is "
                f"{jax.tree.structure(shard)}"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: _join(jax.tree_util.keystr(path), leaves, devices),
        *shards,
    )


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Puts a copy of `tree` on every device, along a new leading axis.

    Args:
      tree: a pytree of NumPy or JAX arrays, PRNG keys or scalars.
      devices: distinct devices, at least one.

    Returns:
      A pytree like `tree`; a leaf of shape S becomes (len(devices), *S).

    Raises:
      PlacementError: no devices, or one named twice.
      TypeError: a leaf is no number or array of numbers.
    """
    devices = _distinct(devices)
    return jax.tree.map(lambda leaf: _join("", [leaf] * len(devices), devices), tree)


def device_put_split(batch: Any, devices: Sequence[jax.Device]) -> Any:
    """Puts row block i of every leaf on device i.

    Args:
      batch: pytree of NumPy arrays [B, ...]; B is a multiple of the devices.
      devices: distinct devices, n of them.

    Returns:
      On one device a pytree of arrays [B, ...], on several [n, B / n, ...].
    """
    n = len(devices)
    if n == 1:
        return jax.tree.map(lambda x: jax.device_put(x, devices[0]), batch)
    shares = [jax.tree.map(lambda x, i=i: np.split(x, n)[i], batch) for i in range(n)]
    return device_put_sharded(shares, devices)


def _distinct(devices: Sequence[jax.Device]) -> list[jax.Device]:
    devices = list(devices)
    if not devices or len(set(devices)) != len(devices):
        raise PlacementError(f"one or more distinct devices are needed, not {devices}")
    return devices


def _join(path: str, leaves: Sequence[Any], devices: list[jax.Device]) -> jax.Array:
    # As JAX sees them: int64 is int32 unless jax_enable_x64 is set, and a Python number
    # is of a weak type, which gives way to others.
    types = [jax.typeof(leaf) for leaf in leaves]
    first = (types[0].shape, types[0].dtype, types[0].weak_type)
    for i, found in enumerate(types):
        if (found.shape, found.dtype, found.weak_type) != first:
            raise PlacementError(
                f"the shards differ at leaf {path or 'root'}: shard 0 has "
                f"{_named(types[0])}, shard {i} has {_named(found)}"
            )
    sharding = NamedSharding(Mesh(np.array(devices), AXIS_NAME), PartitionSpec("data"))
    if types[0].weak_type:
        # Only numbers are: joining arrays of single devices would make the type strong.
        numbers = jax.device_put(list(leaves), devices[0])
        return jax.device_put(jnp.stack(numbers), sharding)
    leaves = [x if isinstance(x, jax.Array) else np.asarray(x) for x in leaves]
    # NumPy gains its new axis as a view; a JAX array only once on its own device.
    shards = jax.device_put(
        [x if isinstance(x, jax.Array) else x[None] for x in leaves], devices
    )
    shards = [
        shard[None] if isinstance(x, jax.Array) else shard
        for x, shard in zip(leaves, shards, strict=True)
    ]
    shape = (len(devices), *types[0].shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _named(found: Any) -> str:
    return f"{found.dtype}{list(found.shape)}{' of a weak type' * found.weak_type}"
