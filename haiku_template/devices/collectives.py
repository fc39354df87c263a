"""What steps use to agree over devices: the identity on one device."""

from typing import Any

import jax


def mean_over(axis_name: str | None, tree: Any) -> Any:
    """Averages a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.pmean(tree, axis_name)


def sum_over(axis_name: str | None, tree: Any) -> Any:
    """Adds up a tree over a mesh axis; the identity when the axis is None."""
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)
