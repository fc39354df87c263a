"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters of frozen matrices.

They transform the tree of parameters, so that any Haiku model can have them: instead of
W it gets W + (alpha / rank) A B, computed once a step for the whole batch, and kept for
the backward pass.

Shapes: W [I, O] (inputs, outputs), A [I, R], B [R, O], R the rank.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

A, B = "_lora_a", "_lora_b"  # Behind the name of W.


class Lora(NamedTuple):
    """Configuration of LoRA adapters."""

    rank: int  # R; 0 makes none.
    alpha: float = 16.0  # The LoRA scale times R.
    # Share of the rows of A that a step drops, in [0, 1), the same ones for all of a
    # device's examples: LoRA's own draws for each example, which a tree cannot.
    dropout: float = 0.0
    patterns: tuple[str, ...] = ("*/w",)  # Of matrices to adapt, by path.


def init_adapters(
    lora: Lora, shapes: dict[str, tuple[int, ...]], rng: jax.Array
) -> dict[str, jax.Array]:
    """Initializes A (normal, variance 1 / I) and B (zero), which leave W unchanged.

    `shapes` are of the adapted matrices by path; the adapters are float32, by path.
    """
    adapters = {}
    for i, (path, (inputs, outputs)) in enumerate(sorted(shapes.items())):
        a = jax.random.normal(jax.random.fold_in(rng, i), (inputs, lora.rank))
        adapters[path + A] = a * inputs**-0.5
        adapters[path + B] = jnp.zeros((lora.rank, outputs))
    return adapters


def adapt(
    lora: Lora, paths: Iterable[str], leaves: dict[str, Any], rng: jax.Array | None
) -> dict[str, Any]:
    """Adds adapters to the matrices of `paths`; returns the leaves without adapters.

    `leaves` by path have one dtype; `rng` is the source of dropout, None drops nothing.
    """
    adapted = dict(leaves)
    for i, path in enumerate(sorted(paths)):
        a, b = adapted.pop(path + A), adapted.pop(path + B)
        if rng is not None and lora.dropout:
            own = jax.random.fold_in(rng, i)
            kept = jax.random.bernoulli(own, 1 - lora.dropout, (len(a), 1))
            a = jnp.where(kept, a / (1 - lora.dropout), 0)
        # The LoRA scale belongs to the thin factor, where it costs least.
        adapted[path] = adapted[path] + a @ (lora.alpha / lora.rank * b)
    return adapted


def is_adapter(name: str) -> bool:
    """Tests if a parameter's name is an adapter's."""
    return name.endswith((A, B))
