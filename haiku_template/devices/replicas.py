"""Whether the copies of a leaf on several devices agree."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from haiku_template.devices.audit import describe
from haiku_template.devices.errors import PlacementError


def check_replicas(tree: Any) -> None:
    """Asserts that every replicated leaf is bitwise the same on all its devices.

    Each device reduces its own copy of each leaf to one 32-bit number; only those
    travel to the host, so the cost is one pass over the tree in device memory.

    Raises:
      PlacementError: a leaf differs; the message names it and its devices.
    """
    shared = [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1
        if leaf.is_fully_replicated
    ]
    if not shared:
        return
    devices = tuple(sorted(shared[0][1].devices(), key=lambda device: device.id))
    sums = _fingerprints(devices)([leaf for _, leaf in shared])
    differing = [
        f"{path} ({describe(leaf)})"
        for (path, leaf), values in zip(shared, jax.device_get(sums), strict=True)
        if len(set(values.tolist())) > 1
    ]
    if differing:
        raise PlacementError(
            f"{len(differing)} of {len(shared)} leaves differ between the devices that "
            f"should hold copies: {', '.join(differing[:3])}; something in the step is "
            "not averaged over devices (hk.BatchNorm needs "
            "cross_replica_axis=devices.axis_name)"
        )


@functools.cache
def _fingerprints(devices: tuple[jax.Device, ...]) -> Callable[[list], list]:
    """Maps a list of n leaves to n uint32 [devices]: one number from each copy."""
    mesh = Mesh(np.array(devices), "copy")
    return jax.jit(
        jax.shard_map(
            lambda leaves: [_fingerprint(x)[None] for x in leaves],
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec("copy"),
            check_vma=False,
        )
    )


def _fingerprint(x: jax.Array) -> jax.Array:
    """A 32-bit sum of the array's bits, weighted by position: uint32 []."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").reshape(-1)
    weights = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)
