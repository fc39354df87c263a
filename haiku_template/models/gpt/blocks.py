"""Transformer blocks of GPT-2: causal attention with a KV cache, and an MLP.

Shapes: B examples, T tokens, D width, H heads, S tokens of the context.
"""

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.models.attention import attend
from haiku_template.models.layers import DEVIATION, drop, linear, norm

KeysValues = tuple[jax.Array, jax.Array]  # Keys and values: [B, S, H, D / H] each.


class Block(hk.Module):
    """Attention, then an MLP, each with a residual connection.

    `attention` is `auto`, `xla` or `cudnn`; `dropout` is the share of each residual
    branch that is dropped, in [0, 1). The more layers, the smaller the initial
    residuals.
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
        cache: KeysValues | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, KeysValues | None]:
        """Maps [B, T, D] to the same; appends keys and values to a given KV cache."""
        attention = Attention(self.num_heads, self.attention, self.residual)
        y, cache = attention(norm("norm_1")(x), cache, lengths)
        x = x + drop(self.dropout, y)
        y = MLP(self.residual)(norm("norm_2")(x))
        return x + drop(self.dropout, y), cache


class Attention(hk.Module):
    """Causal multi-head attention."""

    def __init__(
        self, num_heads: int, attention: str, residual: hk.initializers.Initializer
    ) -> None:
        super().__init__(name="attention")
        self.num_heads = num_heads
        self.attention = attention
        self.residual = residual

    def __call__(
        self, x: jax.Array, cache: KeysValues | None, lengths: jax.Array | None
    ) -> tuple[jax.Array, KeysValues | None]:
        """Maps [B, T, D] to the same; appends keys and values to a given KV cache."""
        width = x.shape[-1]
        projected = linear(3 * width, "qkv")(x)
        query, key, value = (  # [B, T, H, D / H]
            part.reshape(*x.shape[:2], self.num_heads, -1)
            for part in jnp.split(projected, 3, axis=-1)
        )
        if cache is None:
            # First parameters come from shapes alone, and are traced in float32.
            attention = "xla" if hk.running_init() else self.attention
            y = attend(attention, query, key, value)
        else:
            cache = _append(cache[0], key, lengths), _append(cache[1], value, lengths)
            mask = _visible(lengths, x.shape[1], cache[0].shape[1])
            y = attend(self.attention, query, *cache, mask)
        return linear(width, "projection", self.residual)(y.reshape(x.shape)), cache


class MLP(hk.Module):
    """Two linear layers with GELU, in its tanh form, between."""

    def __init__(self, residual: hk.initializers.Initializer) -> None:
        super().__init__(name="mlp")
        self.residual = residual

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to the same."""
        width = x.shape[-1]
        y = jax.nn.gelu(linear(4 * width, "up")(x), approximate=True)
        return linear(width, "down", self.residual)(y)


def places(lengths: jax.Array, num_tokens: int) -> jax.Array:
    """Positions [B, T] of T tokens that follow `lengths` [B] others."""
    return lengths[:, None] + jnp.arange(num_tokens)[None]


def _append(cache: jax.Array, new: jax.Array, lengths: jax.Array) -> jax.Array:
    """Writes [B, T, H, D / H] behind the first `lengths` of [B, S, H, D / H]."""
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    return write(cache, new.astype(cache.dtype), lengths, 0)


def _visible(lengths: jax.Array, num_tokens: int, context: int) -> jax.Array:
    """Mask of the S cache tokens that each of T new ones may see: bool [B, 1, T, S]."""
    here = places(lengths, num_tokens)
    return (jnp.arange(context)[None, None] <= here[:, :, None])[:, None]
