"""The mathematics of generation: pure functions for one device.

Shapes: B prompts, T tokens of the longest, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.models.precision import Precision
from haiku_text.models import Cache, LazyLogits


class Sampling(NamedTuple):
    """Sampling of the next token."""

    temperature: float = 1.0  # Divides the logits; 0 takes the most probable token.
    top_k: int | None = None  # Most probable tokens to choose among; None means all.
    vocabulary: int | None = None  # First tokens to choose among; None means all.
    seed: int = 0  # With the row and the number of the token, the source of randomness.


def sample(logits: jax.Array, count: jax.Array, sampling: Sampling) -> jax.Array:
    """Samples a token for each row: int32 [B].

    `logits` are float32 [B, V]; `count`, int32 [B], are the tokens written before.
    """
    logits = logits[:, : sampling.vocabulary]
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    best, tokens = jax.lax.top_k(logits, sampling.top_k or logits.shape[-1])

    def draw(row: jax.Array, count: jax.Array, logits: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.key(sampling.seed), row)
        rng = jax.random.fold_in(rng, count)
        return jax.random.categorical(rng, logits / sampling.temperature)

    drawn = jax.vmap(draw)(jnp.arange(len(best)), count, best)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)


def make_steps(
    model: hk.Transformed, precision: Precision, sampling: Sampling
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makes `prefill` and `decode`: both return a KV cache and the next tokens [B].

    `prefill(params, batch)` reads prompts: `batch["tokens"]` int32 [B, T], of which the
    first `batch["lengths"]` [B] count, with `batch["count"]` [B] written already.
    `decode(written, (params, tokens))` reads one token [B] more. `written` is the KV
    cache of all tokens but the last, and the number of tokens in it: int32 [B].

    `model` is `forward(tokens, is_training, cache)`; parameters have the compute dtype.
    """

    def forward(params: hk.Params, tokens: jax.Array, cache: Any) -> Any:
        with precision.norms_in_float32():
            return model.apply(params, None, tokens, False, cache)

    def choose(cache: Cache, logits: LazyLogits, count: jax.Array) -> Any:
        return (cache, count + 1), sample(logits.multiply_out()[:, 0], count, sampling)

    def prefill(params: hk.Params, batch: dict[str, jax.Array]) -> Any:
        logits, cache = forward(params, batch["tokens"], "new")
        lengths = batch["lengths"]
        last = lengths[:, None, None] - 1
        hidden = jnp.take_along_axis(logits.hidden, last, axis=1)  # [B, 1, D]
        # Padding behind a shorter prompt is overwritten before it is read.
        cache = cache._replace(lengths=lengths)
        return choose(cache, logits._replace(hidden=hidden), batch["count"])

    def decode(written: tuple[Cache, jax.Array], inputs: Any) -> Any:
        (cache, count), (params, tokens) = written, inputs
        logits, cache = forward(params, tokens[:, None], cache)
        return choose(cache, logits, count)

    return prefill, decode
