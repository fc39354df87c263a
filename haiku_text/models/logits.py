"""Lazy logits, and their cross-entropy a tile of tokens at a time.

Shapes: B examples, T tokens, D width, V vocabulary; N tiles of R tokens each.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from haiku_template.models.losses import cross_entropy

# Why: docs/decisions/models.md#tiles
TILE = 8192  # Tokens of a tile, or more: of fewer a GPU multiplies slowly.
COLUMNS = 128  # Of logits, for the same reason: a multiple, if the vocabulary is LARGE.
LARGE = 1024


class LazyLogits(NamedTuple):
    """The two factors of a language model's logits, in the compute dtype.

    float32 logits of 8 x 1,024 tokens of GPT-2 take 1.5 GiB, their factors 90 MiB.
    """

    hidden: Array  # Activations of the last layer: [B, T, D].
    embedding: Array  # Of the vocabulary: [V, D].

    def multiply_out(self) -> Array:
        """Multiplies out the logits: float32 [B, T, V]."""
        return _product(self.hidden, self.embedding)


def multiply_out(outputs: Array | LazyLogits) -> Array:
    """Logits [B, T, V], multiplied out if they are lazy."""
    return outputs.multiply_out() if isinstance(outputs, LazyLogits) else outputs


def token_losses(
    outputs: Array | LazyLogits, labels: Array, chunk: int | None
) -> Array:
    """Cross-entropy of each token in nats: float32 [B, T]; NaN for one outside of V.

    Lazy logits are in the compute dtype, and in memory for a tile of tokens at a time:
    at most `chunk` of each example, or with None about `TILE` of all.
    """
    if not isinstance(outputs, LazyLogits):
        return cross_entropy(outputs.astype(jnp.float32), labels)
    size, rows = len(outputs.embedding), labels.size
    tiles = max(rows // TILE, 1) if chunk is None else -(-labels.shape[1] // chunk)

    def split(x: Array) -> Array:
        """Splits [B, T, ...] to [N, R, ...], filled up with zeros."""
        x = x.reshape(rows, *x.shape[2:])
        x = jnp.pad(x, [(0, -rows % tiles), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(tiles, -1, *x.shape[1:])

    columns = -size % COLUMNS if size > LARGE else 0
    embedding = jnp.pad(outputs.embedding, [(0, columns), (0, 0)])
    losses = _losses(size, split(outputs.hidden), embedding, split(labels))
    return losses.reshape(-1)[:rows].reshape(labels.shape)


_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _product(hidden: Array, embedding: Array) -> Array:
    """Product of [B, T, D] and [V, D], accumulated in float32: [B, T, V]."""
    return _einsum("btd,vd->btv", hidden, embedding)


def _backward(factors: tuple[Array, Array], grads: Array) -> tuple[Array, Array]:
    # JAX's own rule multiplies in float32. Why: docs/decisions/models.md#lazy-logits
    hidden, embedding = factors
    grads = grads.astype(hidden.dtype)
    for_hidden = _einsum("btv,vd->btd", grads, embedding)
    for_embedding = _einsum("btv,btd->vd", grads, hidden)
    return for_hidden.astype(hidden.dtype), for_embedding.astype(embedding.dtype)


_product.defvjp(lambda *factors: (_product(*factors), factors), _backward)


def _logits(size: int, hidden: Array, embedding: Array) -> Array:
    """Logits [R, V] of a tile, rounded to the compute dtype; -inf from `size` on."""
    logits = jnp.einsum("rd,vd->rv", hidden, embedding)
    in_vocabulary = jnp.arange(len(embedding)) < size
    return jnp.where(in_vocabulary, logits, -jnp.inf).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(size: int, hidden: Array, embedding: Array, labels: Array) -> Array:
    """Losses [N, R] of tiles [N, R, D], in a vocabulary of `size`."""
    return _losses_forward(size, hidden, embedding, labels)[0]


def _losses_forward(
    size: int, hidden: Array, embedding: Array, labels: Array
) -> tuple[Array, tuple[Array, ...]]:
    def tile_losses(tile: tuple[Array, Array]) -> tuple[Array, Array]:
        logits, labels = _logits(size, tile[0], embedding), tile[1]
        log_sums = jax.nn.logsumexp(logits, axis=1)
        # A label that the vocabulary lacks has no place, and gives NaN.
        places = jnp.where((labels >= 0) & (labels < size), labels, len(embedding))
        label_logits = jnp.take_along_axis(logits, places[:, None], axis=1, mode="fill")
        return log_sums - label_logits[:, 0], log_sums

    losses, log_sums = jax.lax.map(tile_losses, (hidden, labels))
    return losses, (hidden, embedding, labels, log_sums)


def _losses_backward(
    size: int, residuals: tuple[Array, ...], grads: Array
) -> tuple[Array, Array, None]:
    hidden, embedding, labels, log_sums = residuals

    def add_tile(total: Array, tile: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden, labels, log_sums, grads = tile
        # The compiler finds these logits computed if there is one tile.
        shares = jnp.exp(_logits(size, hidden, embedding) - log_sums[:, None])
        ones = jnp.arange(len(embedding)) == labels[:, None]
        slopes = ((shares - ones) * grads[:, None]).astype(hidden.dtype)
        for_hidden = _einsum("rv,vd->rd", slopes, embedding).astype(hidden.dtype)
        return total + _einsum("rv,rd->vd", slopes, hidden), for_hidden

    # The embedding's gradients are added up over the tiles in float32.
    total = jnp.zeros(embedding.shape, jnp.float32)
    total, for_hidden = jax.lax.scan(add_tile, total, (hidden, labels, log_sums, grads))
    return for_hidden, total.astype(embedding.dtype), None


_losses.defvjp(_losses_forward, _losses_backward)
