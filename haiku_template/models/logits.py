"""Lazy logits, which a loss may multiply out a part at a time.

Shapes: B examples, T tokens, D width, V vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LazyLogits(NamedTuple):
    """The two factors of a language model's logits, in the compute dtype.

    float32 logits of 8 x 1,024 tokens of GPT-2 take 1.5 GiB, their factors 90 MiB.
    """

    hidden: jax.Array  # Activations of the last layer: [B, T, D].
    embedding: jax.Array  # Of the vocabulary: [V, D].

    def multiply_out(self) -> jax.Array:
        """Multiplies out the logits: float32 [B, T, V]."""
        return _product(self.hidden, self.embedding)


def multiply_out(outputs: jax.Array | LazyLogits) -> jax.Array:
    """Logits [B, T, V], multiplied out if they are lazy."""
    return outputs.multiply_out() if isinstance(outputs, LazyLogits) else outputs


def plain_outputs(outputs: Any) -> Any:
    """Multiplies out every `LazyLogits` in a pytree of outputs."""
    return jax.tree.map(
        multiply_out, outputs, is_leaf=lambda x: isinstance(x, LazyLogits)
    )


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _product(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """Product of [B, T, D] and [V, D], accumulated in float32: [B, T, V]."""
    return _einsum("btd,vd->btv", hidden, embedding)


def _backward(
    factors: tuple[jax.Array, jax.Array], grads: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # JAX's own rule would multiply in float32, because the logits' gradients are.
    hidden, embedding = factors
    grads = grads.astype(hidden.dtype)
    for_hidden = _einsum("btv,vd->btd", grads, embedding)
    for_embedding = _einsum("btv,btd->vd", grads, hidden)
    return for_hidden.astype(hidden.dtype), for_embedding.astype(embedding.dtype)


_product.defvjp(lambda *factors: (_product(*factors), factors), _backward)
