"""Replicas of a state: equal on all devices, compared by their bits."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from haiku_template.devices.checks import describe, device_name
from haiku_template.devices.compiled import check_alive
from haiku_template.devices.layout import AXIS_NAME, in_device_memory, sharding_on
from haiku_template.devices.processes import Processes, waiting
from haiku_template.devices.transfer import first_copy, own_part
from haiku_template.errors import ReplicaError, UnequalError
from haiku_template.params import leaves_by_path


def check_replicas(tree: Any, agreed: bool = False) -> None:
    """Asserts that every replicated leaf is bitwise the same on all its devices.

    Each device reduces its own copy of each leaf to one 32-bit number; only those
    travel to the host. `agreed` tells that the same step left all copies equal before,
    so that a device and not the step is to blame.

    Raises:
      ReplicaError: a leaf differs, and `agreed`; names the device, where most agree.
      UnequalError: a leaf differs; names it and its devices.
      PlacementError: a leaf was deleted.
    """
    check_alive(tree)
    # One program runs on one set of devices; a tree may have leaves on several.
    groups: dict[frozenset, dict[str, jax.Array]] = {}
    for path, leaf in leaves_by_path(tree).items():
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated:
            leaf = own_part(leaf)
            groups.setdefault(frozenset(leaf.devices()), {})[path] = leaf
    differing, total = [], 0
    for where, leaves in groups.items():
        if len(where) > 1:
            devices = tuple(sorted(where, key=lambda device: device.id))
            with waiting():
                digest = _part_digests(devices, (PartitionSpec(),) * len(leaves))
                sums = jax.device_get(digest(list(leaves.values())))
            total += len(leaves)
            for (path, leaf), values in zip(leaves.items(), sums, strict=True):
                if len(set(values.tolist())) > 1:
                    odd = _odd_ones(devices, values.tolist())
                    differing.append(f"{path} ({describe(leaf)}{odd})")
    if not differing:
        return
    listed = f"{len(differing)} of {total} leaves differ between the devices that "
    if agreed:
        raise ReplicaError(
            f"{listed}hold copies, and agreed before: {', '.join(differing[:3])}; a "
            "device computed or kept something wrong, and nothing of it was saved: run "
            "the same command again, without that device if it comes back"
        )
    raise UnequalError(
        f"{listed}should hold copies: {', '.join(differing[:3])}; something in the "
        "step is not averaged over devices (a step of your own averages gradients and "
        "scalars by mean_over(axis_name, ...), hk.BatchNorm needs cross_replica_axis="
        "devices.axis_name), or gives results of each example without "
        "devices.compile_per_example"
    )


def check_processes(processes: Processes, tree: Any, agreed: bool = False) -> None:
    """Asserts that all processes' copies of replicated leaves are bitwise the same.

    Within a process they are, after `check_replicas`: each sends one number of a leaf.

    Raises:
      ReplicaError: a leaf differs, and `agreed` before; names it, and the process.
      UnequalError: a leaf differs.
    """
    if processes.count == 1:
        return
    leaves = {k: x for k, x in leaves_by_path(tree).items() if x.is_fully_replicated}
    with waiting():
        sums = jax.device_get(_all_fingerprints(list(map(first_copy, leaves.values()))))
    hashes = dict(zip(leaves, map(int, sums), strict=True))
    kind, advice = (
        (ReplicaError, "nothing of it was saved: run the same command again")
        if agreed
        else (UnequalError, "the step averages it not over axis_name, or not at all")
    )
    processes.agree({f"the bits of {k}": x for k, x in hashes.items()}, kind, advice)


@jax.jit
def _all_fingerprints(leaves: list[jax.Array]) -> list[jax.Array]:
    return list(map(_fingerprint, in_device_memory(leaves)))


def _odd_ones(devices: tuple[jax.Device, ...], values: list[int]) -> str:
    """Names the devices whose copy is not the majority's; "" without a majority."""
    most, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return ""
    odd = [d for d, value in zip(devices, values, strict=True) if value != most]
    return f", another on {', '.join(map(device_name, odd))}"


def part_digests(devices: tuple[jax.Device, ...], tree: Any) -> np.ndarray:
    """Digests each device's part of each leaf: uint32 [leaves, devices], on the host.

    Leaves are replicated on these devices, or sharded along the mesh axis.
    """
    leaves = jax.tree.leaves(tree)
    specs = tuple(
        PartitionSpec() if x.is_fully_replicated else x.sharding.spec for x in leaves
    )
    with waiting():
        digest = _part_digests(devices, specs, sharding_on(devices))
        return jax.device_get(first_copy(digest(leaves)))


@functools.cache
def _part_digests(
    devices: tuple[jax.Device, ...],
    specs: tuple[PartitionSpec, ...],
    sharding: jax.sharding.Sharding | None = None,
) -> Callable[[list], jax.Array]:
    """Compiles `part_digests` of leaves with these specs; by default each stays."""
    mapped = jax.shard_map(
        lambda leaves: digest_leaves(leaves)[:, None],
        mesh=Mesh(np.array(devices), AXIS_NAME),
        in_specs=([*specs],),
        out_specs=PartitionSpec(None, AXIS_NAME),
        check_vma=False,
    )
    return jax.jit(
        lambda leaves: mapped(in_device_memory(leaves)), out_shardings=sharding
    )


def digest_leaves(tree: Any) -> jax.Array:
    """Digests each leaf of a tree: uint32 [leaves]."""
    return jnp.stack([*map(_fingerprint, jax.tree.leaves(tree))])


def _fingerprint(x: jax.Array) -> jax.Array:
    """Hashes an array's bits to 32, each word mixed with its place: uint32 [].

    Unmixed, a sum modulo 2^32 loses what only moves high bits: signs, powers of two.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    info = jnp.iinfo if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo
    # One word an element, and two for 64 bits: uint32 [n].
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(info(x.dtype).bits, 32)}")
    bits = bits.astype(jnp.uint32).reshape(-1)
    bits = bits + jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(0x9E3779B9)
    # murmur3's finalizer: each bit of the result depends on each bit of the word.
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(bits ^ (bits >> 16), dtype=jnp.uint32)
