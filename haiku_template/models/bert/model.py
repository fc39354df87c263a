"""BERT encoders (Devlin et al. 2018, arXiv:1810.04805), in Hugging Face's arithmetic.

Post-normalization, exact GELU, learned positions. MiniLM and the sentence encoders made
of it are BERT encoders of other sizes.

Shapes: B texts, T tokens, D width, K outputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.attention import attend
from haiku_template.models.layers import drop, linear, look_up, table


class Sizes(NamedTuple):
    """Sizes of the encoder, as `bert` takes them."""

    vocab_size: int
    context: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    token_types: int
    norm_eps: float


def bert(
    num_outputs: int | None,
    axis_name: str | None = None,
    *,
    pooling: str = "cls",
    vocab_size: int = 30522,
    context: int = 512,
    width: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    mlp_width: int = 3072,
    token_types: int = 2,
    dropout: float = 0.1,
    norm_eps: float = 1e-12,
    remat: bool = False,
) -> hk.Transformed:
    """A text classifier, or a sentence encoder: texts to [B, K] or to [B, D].

    Inputs are a dictionary of `tokens` (int [B, T]), `mask` (int or bool [B, T], 0 for
    padding) and, optionally, `token_types` (int [B, T]; 0 without).

    Args:
      num_outputs: K; None gives the pooled texts themselves, each of length 1.
      axis_name: not used; the model keeps no statistics of the batch.
      pooling: `cls` for the first token, through the pooler; `mean` over the tokens.
      vocab_size: number of tokens.
      context: longest text, in tokens.
      width: D.
      num_layers: blocks of attention and MLP.
      num_heads: attention heads of each block; they divide the width.
      mlp_width: units of the hidden layer of each MLP.
      token_types: number of token types (segments).
      dropout: share of units dropped in training, in [0, 1); none of the attention's.
      norm_eps: added to variances.
      remat: recompute each block in the backward pass: more work, much less memory.

    Raises:
      ValueError: an unknown pooling, or a value out of its range.
      ConfigError: when traced: a text of more tokens than `context`.
    """
    del axis_name
    sizes = Sizes(
        vocab_size,
        context,
        width,
        num_layers,
        num_heads,
        mlp_width,
        token_types,
        norm_eps,
    )
    if pooling not in POOLINGS:
        raise ValueError(
            f"pooling={pooling!r} is not known; possible are {', '.join(POOLINGS)}"
        )
    if min(sizes[:7]) < 1 or width % num_heads or not 0 <= dropout < 1:
        raise ValueError(
            f"{sizes} and dropout={dropout} are not all possible: sizes are 1 or more, "
            "num_heads divides width, and dropout is in [0, 1)"
        )

    def forward(inputs: dict[str, jax.Array], is_training: bool) -> jax.Array:
        with hk.name_scope("bert"):
            rate = dropout if is_training else 0.0
            hidden = encode(inputs, sizes, rate, remat)
            pooled = POOLINGS[pooling](hidden, inputs["mask"])
            if num_outputs is None:
                return _normalized(pooled)
            return linear(num_outputs, "head")(drop(rate, pooled))

    return hk.transform(forward)


def encode(
    inputs: dict[str, jax.Array], sizes: Sizes, rate: float = 0.0, remat: bool = False
) -> jax.Array:
    """Encodes `bert`'s inputs: last hidden states [B, T, D]; padding's mean nothing.

    Raises:
      ConfigError: a text of more tokens than `context`.
    """
    tokens = inputs["tokens"]
    length = tokens.shape[1]
    if length > sizes.context:
        raise ConfigError(
            f"a text of {length} tokens is longer than the {sizes.context} that the "
            "model has positions for (context): cut texts to that length, in a config "
            f"with data.context={sizes.context} and data.truncate=True"
        )
    types = inputs.get("token_types", jnp.zeros_like(tokens))
    x = look_up(table(sizes.vocab_size, sizes.width, "embed"), tokens)
    x += look_up(table(sizes.token_types, sizes.width, "token_types"), types)
    x += table(sizes.context, sizes.width, "positions")[None, :length]
    x = drop(rate, _norm(sizes, "norm")(x))

    def block(x: jax.Array, mask: jax.Array) -> jax.Array:
        change = drop(rate, _attention(x, mask, sizes))
        x = _norm(sizes, "norm_1")(x + change)
        return _norm(sizes, "norm_2")(x + drop(rate, _mlp(x, sizes)))

    block = hk.remat(block) if remat else block
    for i in range(sizes.num_layers):
        with hk.name_scope(f"block_{i}"):
            x = block(x, inputs["mask"])
    return x


def first(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """Pools the first token's state, through the pooler: [B, T, D] to [B, D]."""
    del mask
    return jnp.tanh(linear(hidden.shape[-1], "pooler")(hidden[:, 0]))


def mean(hidden: jax.Array, mask: jax.Array) -> jax.Array:
    """Averages the tokens that are no padding: [B, T, D] to [B, D]."""
    weights = mask[:, :, None].astype(jnp.float32)  # bfloat16 counts to 256.
    count = jnp.maximum(jnp.sum(weights, axis=1), 1)  # A row may be all padding.
    return (jnp.sum(hidden * weights, axis=1) / count).astype(hidden.dtype)


POOLINGS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cls": first,
    "mean": mean,
}


def _normalized(x: jax.Array) -> jax.Array:
    """Scales each row to length 1, in float32; a row of zeros stays."""
    x = x.astype(jnp.float32)
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, 1e-24))


def _attention(x: jax.Array, mask: jax.Array, sizes: Sizes) -> jax.Array:
    """Self-attention over the tokens that are no padding: [B, T, D]."""
    heads = (*x.shape[:2], sizes.num_heads, sizes.width // sizes.num_heads)
    with hk.name_scope("attention"):
        query, key, value = (
            linear(sizes.width, name)(x).reshape(heads)
            for name in ("query", "key", "value")
        )
        mask = mask[:, None, None, :].astype(bool)
        y = attend("xla", query, key, value, mask)
        return linear(sizes.width, "projection")(y.reshape(x.shape))


def _mlp(x: jax.Array, sizes: Sizes) -> jax.Array:
    with hk.name_scope("mlp"):
        x = jax.nn.gelu(linear(sizes.mlp_width, "up")(x), approximate=False)
        return linear(sizes.width, "down")(x)


def _norm(sizes: Sizes, name: str) -> hk.LayerNorm:
    return hk.LayerNorm(-1, True, True, eps=sizes.norm_eps, name=name)
