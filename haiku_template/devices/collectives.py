"""Sums and averages over the devices, small leaves in buckets."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from haiku_template.devices.shares import is_share

SMALL = 2**13  # Bytes of a leaf whose square is not worth a kernel of its own.
ROWS = 4  # Of a leaf whose squares are added up as vectors first.
# Why: docs/decisions/cluster.md#buckets
BUCKETED = 2**16  # Bytes of a leaf that travels with others.


def mean_over(axis_name: str | None, tree: Any, dtype: str | None = None) -> Any:
    """Averages a tree over a mesh axis, as `sum_over` adds it up."""
    if axis_name is None:
        return tree
    size = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda x: x / size, sum_over(axis_name, tree, dtype))


def sum_over(axis_name: str | None, tree: Any, dtype: str | None = None) -> Any:
    """Adds up a tree over a mesh axis; the identity when the axis is None.

    Real arrays, but not numbers [], travel as `dtype`, if any; a `Share` is summed up.
    """
    return tree if axis_name is None else _sum(axis_name, tree, dtype)


def _sum(axis_name: str, tree: Any, dtype: str | None) -> Any:
    def cast(x: Any, like: Any, to: Any) -> Any:
        real = np.ndim(like) and jnp.issubdtype(like.dtype, jnp.floating)
        return x.astype(to or like.dtype) if dtype and real else x

    leaves, structure = jax.tree.flatten(tree, is_leaf=is_share)
    arrays = {i: x for i, x in enumerate(leaves) if not is_share(x)}
    sums = _psum(jax.tree.map(lambda x: cast(x, x, dtype), arrays), axis_name)
    sums = jax.tree.map(lambda x, like: cast(x, like, None), sums, arrays)
    return structure.unflatten([sums.get(i, x) for i, x in enumerate(leaves)])


def _psum(tree: Any, axis_name: str) -> Any:
    """Adds up a tree over a mesh axis, small leaves in buckets, as Horovod and DDP do.

    gloo sends a message for each array, which takes longer than the bytes of a bias.
    """
    if jax.lax.axis_size(axis_name) == 1:  # Its program is to be that of one device.
        return jax.lax.psum(tree, axis_name)
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, dict[int, Any]] = {}
    for i, kind in enumerate(map(jax.typeof, leaves)):
        is_small = kind.size * kind.dtype.itemsize <= BUCKETED
        key = (kind.dtype.name, kind.weak_type) if is_small else i
        groups.setdefault(key, {})[i] = leaves[i]
    buckets = [
        ravel_pytree(group) if len(group) > 1 else (group, lambda x: x)
        for group in groups.values()
    ]
    sums = jax.lax.psum([bucket for bucket, _ in buckets], axis_name)
    totals: dict[int, Any] = {}
    for (_, unravel), total in zip(buckets, sums, strict=True):
        totals |= unravel(total)
    return structure.unflatten([totals[i] for i in range(len(leaves))])


def norm_over(axis_name: str | None, tree: Any) -> jax.Array:
    """Global norm of a tree, of which each device has all, or its own shares."""
    leaves = jax.tree.leaves(jax.tree.map(_wide, tree), is_leaf=is_share)
    shares = [x for x in leaves if is_share(x)]
    arrays = [x for x in leaves if not is_share(x)]
    # As one vector: a sum for each takes a fifth of the step of a small MLP on a CPU.
    small = [x.ravel() for x in arrays if x.size * x.dtype.itemsize <= SMALL]
    large = [x for x in arrays if x.size * x.dtype.itemsize > SMALL]
    square = _square([jnp.concatenate(small), *large] if small else large)
    if shares:
        square += jax.lax.psum(_square([x.array for x in shares]), axis_name)
    return jnp.sqrt(square)


def _wide(x: jax.Array) -> jax.Array:
    """Casts half precision to float32: float16 ends at the square of 256."""
    is_half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if is_half else x


# Why: docs/decisions/training.md#gradient-norm
def _square(leaves: list[jax.Array]) -> jax.Array:
    """Sum of squares, the rows of each leaf first: XLA's CPUs add up one by one."""
    total = jnp.zeros(())
    for leaf in leaves:
        count = math.gcd(leaf.size, ROWS)
        # Not jnp.split: a size of a mistake is beyond int64.
        rows = jax.lax.split(leaf.ravel(), [leaf.size // count] * count)
        first, *others = ((x.conj() * x).real for x in rows)
        total += jnp.sum(sum(others, first))
    return total


def with_axis(fn: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """Binds the mesh axis in `fn`, with one device in it."""
    if axis_name is None:
        return fn
    # Averages are the identity. Why: docs/decisions/devices.md#init-axis
    return functools.update_wrapper(functools.partial(_on_one, fn, axis_name), fn)


def _on_one(fn: Callable, axis_name: str, *args: Any, **kwargs: Any) -> Any:
    call = lambda args, kwargs: fn(*args, **kwargs)  # noqa: E731
    bound = functools.partial(jax.vmap, call, None, axis_name=axis_name, axis_size=1)
    try:
        return bound(out_axes=None)(args, kwargs)
    except ValueError as error:
        if "out_axes is None" not in str(error):
            raise
    # The function asks which device it is on, as by `jax.lax.axis_index`.
    return jax.tree.map(lambda x: x[0], bound()(args, kwargs))
