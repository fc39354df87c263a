"""Lazy logits, which a loss may multiply out a part at a time.

Shapes: B examples, T tokens, D width, V vocabulary.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


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


def token_losses(
    outputs: jax.Array | LazyLogits, labels: jax.Array, chunk: int | None
) -> jax.Array:
    """Cross-entropy of each token in nats: float32 [B, T].

    At most `chunk` tokens of an example have their lazy logits at a time, computed
    again in the backward pass; None means all.
    """
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    if not isinstance(outputs, LazyLogits):
        return cross_entropy(outputs.astype(jnp.float32), labels)
    size, num_tokens = labels.shape
    if chunk is None or chunk >= num_tokens:
        return cross_entropy(outputs.multiply_out(), labels)
    # The embedding's gradients are added up over the chunks in float32.
    embedding = outputs.embedding.astype(jnp.float32)

    def part(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, labels = inputs
        logits = LazyLogits(hidden, embedding.astype(hidden.dtype)).multiply_out()
        return cross_entropy(logits, labels)

    def split(x: jax.Array) -> jax.Array:
        """Splits [B, T, ...] to [chunks, B, chunk, ...], padded with zeros."""
        padding = [(0, 0), (0, -num_tokens % chunk), *[(0, 0)] * (x.ndim - 2)]
        parts = jnp.pad(x, padding).reshape(size, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    # The backward pass keeps only a chunk's inputs.
    part = jax.checkpoint(part, prevent_cse=False)
    losses = jax.lax.map(part, (split(outputs.hidden), split(labels)))
    return jnp.moveaxis(losses, 0, 1).reshape(size, -1)[:, :num_tokens]


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
