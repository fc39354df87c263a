"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters of frozen matrices.

They transform the tree of parameters, so that any Haiku model takes them as it is: it
is given W + (alpha / rank) A B where it asks for W. The sum is made in each step, once
for the whole batch, and lives through its forward and backward pass.

Shapes: W [I, O] (inputs, outputs), A [I, R], B [R, O], R the rank.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

A, B = "_lora_a", "_lora_b"  # Behind the name of W.


class Lora(NamedTuple):
    """What adapters there are.

    Attributes:
      rank: R; 0 makes none.
      alpha: what A B is multiplied by, times R.
      dropout: share of the rows of A that a step drops, in [0, 1): inputs that the
        adapter does not see, the same for each example of a device's batch. LoRA's own
        dropout draws them anew for each example, which a tree of parameters cannot.
      patterns: of the matrices that get one, among those of two dimensions.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    patterns: tuple[str, ...] = ("*/w",)

    @property
    def scale(self) -> float:
        """What A B is multiplied by."""
        return self.alpha / self.rank


def init_adapters(
    lora: Lora, shapes: dict[str, tuple[int, ...]], rng: jax.Array
) -> dict[str, jax.Array]:
    """A normal with variance 1 / I, B zero: at first W is what it was.

    Args:
      lora: the rank.
      shapes: of the matrices that get one, by path.
      rng: the source of A.

    Returns:
      float32, by path.
    """
    adapters = {}
    for i, (path, (inputs, outputs)) in enumerate(sorted(shapes.items())):
        a = jax.random.normal(jax.random.fold_in(rng, i), (inputs, lora.rank))
        adapters[path + A] = a * inputs**-0.5
        adapters[path + B] = jnp.zeros((lora.rank, outputs))
    return adapters


def adapt(
    lora: Lora,
    paths: Iterable[str],
    leaves: dict[str, Any],
    rng: jax.Array | None = None,
) -> dict[str, Any]:
    """Adds the adapters to their matrices, in the dtype that both have.

    Args:
      lora: rank, alpha, dropout.
      paths: of the matrices that have one.
      leaves: matrices, adapters and others, by path.
      rng: the source of dropout; None drops nothing.

    Returns:
      The leaves without adapters.
    """
    adapted = dict(leaves)
    for i, path in enumerate(sorted(paths)):
        a, b = adapted.pop(path + A), adapted.pop(path + B)
        if rng is not None and lora.dropout:
            kept = jax.random.bernoulli(
                jax.random.fold_in(rng, i), 1 - lora.dropout, (len(a), 1)
            )
            a = jnp.where(kept, a / (1 - lora.dropout), 0)
        # alpha / R belongs to the thin factor, where it costs least.
        adapted[path] = adapted[path] + a @ (lora.scale * b)
    return adapted


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter."""
    return name.endswith((A, B))


def is_adapted(leaf: Any) -> bool:
    """Whether a parameter can have an adapter."""
    return len(leaf.shape) == 2 and jnp.issubdtype(leaf.dtype, jnp.floating)
