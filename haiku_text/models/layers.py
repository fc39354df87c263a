"""Layers that the transformers share: GPT-2's initialization, float32 embeddings.

On CPUs linear and normalization layers are Haiku's in another form, whose gradients are
products. Why: docs/decisions/models.md#cpus

Shapes: B examples, T tokens, D width, N rows.
"""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from haiku_template.models.attention import Hardware

DEVIATION = 0.02  # Of the initial parameters.
Initializer = hk.initializers.Initializer


def linear(width: int, name: str, w_init: Initializer | None = None) -> hk.Linear:
    """Linear layer with bias: `w` [inputs, width], `b` [width]."""
    w_init = w_init or hk.initializers.RandomNormal(DEVIATION)
    return (FastLinear if _on_cpu() else hk.Linear)(width, w_init=w_init, name=name)


def feed_forward(
    x: jax.Array, hidden: int, approximate: bool, w_init: Initializer | None = None
) -> jax.Array:
    """MLP with GELU, exact or in its tanh form: [B, T, D] to the same."""
    with hk.name_scope("mlp"):
        gelu = functools.partial(jax.nn.gelu, approximate=approximate)
        # Its inner values are computed again. Why: docs/decisions/models.md#gelu
        y = jax.checkpoint(gelu)(linear(hidden, "up")(x))
        return linear(x.shape[-1], "down", w_init)(y)


def norm(name: str, eps: float = 1e-5) -> hk.LayerNorm:
    """Layer normalization of each token: `scale` and `offset` [D]."""
    module = FastLayerNorm if _on_cpu() else hk.LayerNorm
    return module(-1, create_scale=True, create_offset=True, eps=eps, name=name)


def _on_cpu() -> bool:
    return Hardware.current().platform == "cpu"


class FastLinear(hk.Linear):
    """`hk.Linear` in the form that is fast on CPUs."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiplies [..., inputs] by `w` and adds `b`: [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        shape = [rows.shape[1], self.output_size]
        w = hk.get_parameter("w", shape, x.dtype, self.w_init)
        b = hk.get_parameter("b", shape[1:], x.dtype, jnp.zeros)
        if shape[0] > shape[1]:  # XLA multiplies to a tall gradient at half the speed.
            w = jax.lax.optimization_barrier(w.T).T
        return (rows @ w + repeat_rows(b, len(rows))).reshape(*x.shape[:-1], -1)


class FastLayerNorm(hk.LayerNorm):
    """`hk.LayerNorm` of the last dimension, in the form that is fast on CPUs."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes [..., D], then multiplies by `scale` and adds `offset`."""
        shape, size = x.shape[-1:], x.size // x.shape[-1]
        scale = hk.get_parameter("scale", shape, x.dtype, jnp.ones)
        offset = hk.get_parameter("offset", shape, x.dtype, jnp.zeros)
        deviations = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.var(x, axis=-1, keepdims=True)
        y = repeat_rows(scale, size).reshape(x.shape)
        y = y * jax.lax.rsqrt(variance + self.eps) * deviations
        return y + repeat_rows(offset, size).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat_rows(row: jax.Array, size: int) -> jax.Array:
    """Repeats a row [D] for each of `size` tokens, on CPUs: [N, D]."""
    return jnp.broadcast_to(row, (size, *row.shape))


def _rows_backward(size: int, _: None, grads: jax.Array) -> tuple[jax.Array]:
    # XLA takes 26 times as long for a sum of 2,048 rows.
    return (jnp.ones(size, grads.dtype) @ grads,)


repeat_rows.defvjp(lambda row, size: (repeat_rows(row, size), None), _rows_backward)


def table(rows: int, width: int, name: str) -> jax.Array:
    """Embedding table: `embeddings` [rows, width]."""
    init = hk.initializers.RandomNormal(DEVIATION)
    return hk.Embed(rows, width, w_init=init, name=name).embeddings


def look_up(embeddings: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [B, T, D] of an embedding table; NaN for a row that it does not have.

    Gradients of a row add up in float32. Why: docs/decisions/models.md#embeddings
    """
    rows = jnp.asarray(embeddings, jnp.float32).at[ids]
    rows = rows.get(mode="fill", wrap_negative_indices=False)
    return rows.astype(embeddings.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def repeat(positions: jax.Array, size: int) -> jax.Array:
    """Repeats positions [T, D] for each of `size` examples: [B, T, D]."""
    return jnp.broadcast_to(positions, (size, *positions.shape))


def _repeat_backward(size: int, _: None, grads: jax.Array) -> tuple[jax.Array]:
    # XLA would have the batch last in all activations on GPUs, and transpose them for
    # each product. Why: docs/decisions/models.md#positions
    return (jnp.sum(with_layout_constraint(grads, Layout((0, 1, 2))), axis=0),)


repeat.defvjp(lambda positions, size: (repeat(positions, size), None), _repeat_backward)


def drop(rate: float, x: jax.Array) -> jax.Array:
    """Dropout; none, and no randomness, at rate 0."""
    return hk.dropout(hk.next_rng_key(), rate, x) if rate else x
