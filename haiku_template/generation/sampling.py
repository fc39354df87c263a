"""The mathematics of generation: pure functions for one device.

Shapes: B prompts, T tokens of the longest, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.models import Cache, LazyLogits
from haiku_template.training.precision import Precision


class Sampling(NamedTuple):
    """How the next token is chosen.

    Attributes:
      temperature: what logits are divided by; 0 takes the most probable token.
      top_k: choose among so many of the most probable; None means all.
      vocabulary: choose among the first so many tokens; None means all.
      seed: of the choice, with the row of the prompt and the number of the token.
    """

    temperature: float = 1.0
    top_k: int | None = None
    vocabulary: int | None = None
    seed: int = 0


class Written(NamedTuple):
    """What the model has read and written so far, on the device.

    Attributes:
      cache: of all tokens but the last.
      count: tokens written: int32 [B].
    """

    cache: Cache
    count: jax.Array


def sample(logits: jax.Array, count: jax.Array, sampling: Sampling) -> jax.Array:
    """One token for each row: int32 [B].

    Args:
      logits: float32 [B, V].
      count: which token of its text each row's will be: int32 [B].
      sampling: how to choose.
    """
    logits = logits[:, : sampling.vocabulary]
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    choices = sampling.top_k or logits.shape[-1]
    best, tokens = jax.lax.top_k(logits, choices)

    def draw(row: jax.Array, count: jax.Array, logits: jax.Array) -> jax.Array:
        rng = jax.random.fold_in(jax.random.key(sampling.seed), row)
        rng = jax.random.fold_in(rng, count)
        return jax.random.categorical(rng, logits / sampling.temperature)

    drawn = jax.vmap(draw)(jnp.arange(len(best)), count, best)
    return jnp.take_along_axis(tokens, drawn[:, None], axis=1)[:, 0].astype(jnp.int32)


def make_steps(
    model: hk.Transformed, precision: Precision, sampling: Sampling
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makes `prefill` and `decode`, which return (`Written`, tokens [B]).

    `prefill(params, batch)` reads prompts: `batch["tokens"]` int32 [B, T], of which
    the first `batch["lengths"]` [B] count, with `batch["count"]` [B] written already.
    `decode(written, (params, tokens))` reads one token [B] more.

    Args:
      model: `forward(tokens, is_training, cache)`, as `models.gpt`.
      precision: of the computation; the parameters have its dtype.
      sampling: how to choose tokens.
    """

    def forward(params: hk.Params, tokens: jax.Array, cache: Any) -> Any:
        with precision.norms_in_float32():
            return model.apply(params, None, tokens, False, cache)

    def choose(written: Written, logits: LazyLogits) -> tuple[Written, jax.Array]:
        tokens = sample(logits.multiply_out()[:, 0], written.count, sampling)
        return written._replace(count=written.count + 1), tokens

    def prefill(
        params: hk.Params, batch: dict[str, jax.Array]
    ) -> tuple[Written, jax.Array]:
        logits, cache = forward(params, batch["tokens"], "new")
        lengths = batch["lengths"]
        # What stands behind a shorter prompt is overwritten before it is read.
        cache = cache._replace(lengths=lengths)
        last = lengths[:, None, None] - 1
        hidden = jnp.take_along_axis(logits.hidden, last, axis=1)  # [B, 1, D]
        return choose(Written(cache, batch["count"]), logits._replace(hidden=hidden))

    def decode(
        written: Written, inputs: tuple[hk.Params, jax.Array]
    ) -> tuple[Written, jax.Array]:
        params, tokens = inputs
        logits, cache = forward(params, tokens[:, None], written.cache)
        return choose(written._replace(cache=cache), logits)

    return prefill, decode
