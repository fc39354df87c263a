"""Shares: what a device has of an array that is sharded over a mesh axis, in a step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from haiku_template.stored import Form


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Share(Form):
    """A device's share of an array: a pytree node, in the array's place.

    Its gradient is that of the share, added up over the mesh axis: the transpose of a
    gather is a reduce-scatter.
    """

    array: jax.Array
    axis_name: str = dataclasses.field(metadata={"static": True})
    # Sharded dimension from the last, since a loop over layers takes the first away.
    dimension: int = dataclasses.field(metadata={"static": True})

    def use(self, dtype: Any, zero: Any = 0) -> jax.Array:
        """Gathers the array, in a dtype; None is its own.

        It does not wait for the `zero`: XLA's scheduler hides the time of gathers.
        """
        del zero
        array = self.array if dtype is None else self.array.astype(dtype)
        dimension = array.ndim + self.dimension
        return jax.lax.all_gather(array, self.axis_name, axis=dimension, tiled=True)


def is_share(leaf: Any) -> bool:
    """Tests for a device's share of an array."""
    return isinstance(leaf, Share)


def on_shares(fn: Callable[..., Any], specs: Sequence[Any]) -> Callable[..., Any]:
    """Makes a function of a device's shares of its first arguments, by their `specs`.

    It gets them as `Share`s, and what it returns of them are arrays again.
    """

    def mark(leaf: jax.Array, spec: Any) -> Any:
        return Share(leaf, spec[-1], len(spec) - 1 - leaf.ndim) if spec else leaf

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        marked = map(functools.partial(jax.tree.map, mark), args, specs)
        results = fn(*marked, *args[len(specs) :])
        array = lambda x: x.array if is_share(x) else x  # noqa: E731
        return jax.tree.map(array, results, is_leaf=is_share)

    return run
