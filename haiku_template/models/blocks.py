"""What GPT-2 is made of: blocks of causal attention and an MLP.

Shapes: B examples, T tokens, D width, H heads, S tokens of the context.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.models.attention import attend

DEVIATION = 0.02  # Of the initial parameters.
Kept = tuple[jax.Array, jax.Array]  # Keys and values: [B, S, H, D / H] each.


class Block(hk.Module):
    """Attention, then an MLP, each added to what it was given.

    Args:
      num_heads: H.
      num_layers: blocks of the model: the more, the less each adds at the start.
      dropout: share of what is added that is dropped.
      attention: see `attention.choose`.
      name: of the module.
    """

    def __init__(
        self, num_heads: int, num_layers: int, dropout: float, attention: str, name: str
    ) -> None:
        super().__init__(name=name)
        self.num_heads = num_heads
        self.residual = hk.initializers.RandomNormal(
            DEVIATION / (2 * num_layers) ** 0.5
        )
        self.dropout = dropout
        self.attention = attention

    def __call__(
        self,
        x: jax.Array,
        kept: Kept | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Kept | None]:
        """The new [B, T, D]; with `kept` and how many tokens it holds, the new one."""
        attention = Attention(self.num_heads, self.attention, self.residual)
        y, kept = attention(norm("norm_1")(x), kept, lengths)
        x = x + drop(self.dropout, y)
        y = MLP(self.residual)(norm("norm_2")(x))
        return x + drop(self.dropout, y), kept


class Attention(hk.Module):
    """Causal attention with several heads."""

    def __init__(
        self, num_heads: int, attention: str, residual: hk.initializers.Initializer
    ) -> None:
        super().__init__(name="attention")
        self.num_heads = num_heads
        self.attention = attention
        self.residual = residual

    def __call__(
        self, x: jax.Array, kept: Kept | None, lengths: jax.Array | None
    ) -> tuple[jax.Array, Kept | None]:
        """As `Block`: [B, T, D] to the same."""
        width = x.shape[-1]
        projected = linear(3 * width, "qkv")(x)
        query, key, value = (  # [B, T, H, D / H]
            part.reshape(*x.shape[:2], self.num_heads, -1)
            for part in jnp.split(projected, 3, axis=-1)
        )
        if kept is None:
            # First parameters come from shapes alone, and are traced in float32.
            attention = "xla" if hk.running_init() else self.attention
            y = attend(attention, query, key, value)
        else:
            kept = _append(kept[0], key, lengths), _append(kept[1], value, lengths)
            mask = _visible(lengths, x.shape[1], kept[0].shape[1])
            y = attend(self.attention, query, *kept, mask)
        return linear(width, "projection", self.residual)(y.reshape(x.shape)), kept


class MLP(hk.Module):
    """Two layers with GELU, in its tanh form, between."""

    def __init__(self, residual: hk.initializers.Initializer) -> None:
        super().__init__(name="mlp")
        self.residual = residual

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] to the same."""
        width = x.shape[-1]
        y = jax.nn.gelu(linear(4 * width, "up")(x), approximate=True)
        return linear(width, "down", self.residual)(y)


def places(lengths: jax.Array, num_tokens: int) -> jax.Array:
    """The positions [B, T] of T tokens that follow `lengths` [B] others."""
    return lengths[:, None] + jnp.arange(num_tokens)[None]


def _append(kept: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes [B, T, H, D / H] behind the first `lengths` of [B, S, H, D / H]."""
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    return write(kept, new.astype(kept.dtype), lengths, 0)


def _visible(lengths: jax.Array, num_tokens: int, context: int) -> jax.Array:
    """Which of S kept tokens each of T new ones may see: bool [B, 1, T, S]."""
    here = places(lengths, num_tokens)
    return (jnp.arange(context)[None, None] <= here[:, :, None])[:, None]


def linear(
    width: int, name: str, w_init: hk.initializers.Initializer | None = None
) -> hk.Linear:
    """A layer with bias: `w` [inputs, width], `b` [width]."""
    w_init = w_init or hk.initializers.RandomNormal(DEVIATION)
    return hk.Linear(width, w_init=w_init, name=name)


def norm(name: str) -> hk.LayerNorm:
    """Layer normalisation of each token: `scale` and `offset` [D]."""
    return hk.LayerNorm(
        axis=-1, create_scale=True, create_offset=True, eps=1e-5, name=name
    )


def table(rows: int, width: int, name: str) -> jax.Array:
    """`embeddings` [rows, width]."""
    init = hk.initializers.RandomNormal(DEVIATION)
    return hk.Embed(rows, width, w_init=init, name=name).embeddings


def look_up(embeddings: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [B, T, D] of a table; NaN for a row that it does not have.

    Looked up in float32, so that gradients of the same row add up in it.
    """
    rows = jnp.take(embeddings.astype(jnp.float32), ids, axis=0, mode="fill")
    return rows.astype(embeddings.dtype)


def drop(rate: float, x: jax.Array) -> jax.Array:
    """Dropout; none, and no randomness, at rate 0."""
    return hk.dropout(hk.next_rng_key(), rate, x) if rate else x
