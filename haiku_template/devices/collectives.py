"""What steps use to agree over devices: the identity on one device."""

from collections.abc import Callable
from typing import Any

import jax


def mean_over(axis_name: str | None, tree: Any) -> Any:
    """Averages a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.pmean(tree, axis_name)


def sum_over(axis_name: str | None, tree: Any) -> Any:
    """Adds up a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def with_axis(fn: Callable[..., Any], axis_name: str | None) -> Callable[..., Any]:
    """`fn`, which sees the axis as steps do; with one device in it."""
    if axis_name is None:
        return fn
    # An axis of size one: averages over it are the identity.
    return jax.vmap(fn, in_axes=None, out_axes=None, axis_name=axis_name, axis_size=1)
