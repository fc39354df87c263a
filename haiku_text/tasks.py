"""Language modeling: the cross-entropy of tokens, as a task.

Shapes: B examples, T tokens, V vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.losses import WEIGHT, Averages, Counts, Values
from haiku_template.training.tasks import Task
from haiku_text.models.logits import LazyLogits, token_losses


def token_values(
    outputs: jax.Array | LazyLogits,
    batch: dict[str, Any],
    *,
    chunk: int | None = None,
    bytes_per_token: float | None = None,
) -> Values:
    """Cross-entropy in nats for each token, averaged over an example's tokens.

    With a mask an example counts by its tokens, so that a batch's loss is the average
    over all tokens that count.

    Args:
      outputs: logits [B, T, V], or `LazyLogits` of them.
      batch: `labels`, int [B, T], each in [0, V); and perhaps `loss_mask`, bool [B, T],
        with the tokens that count.
      chunk: tokens of an example whose lazy logits exist at a time, at most; None
        means about 8,192 tokens of the batch.
      bytes_per_token: bytes of text behind a token; None reports no `bits_per_byte`.

    Raises:
      ConfigError: outputs and labels of different shapes, or a value out of its range.
    """
    labels = batch["labels"].astype(jnp.int32)
    first = jax.tree.leaves(outputs)[0]
    if first.ndim != 3 or first.shape[:2] != labels.shape:
        raise ConfigError(
            f"language_model takes outputs [B, T, ...] and labels [B, T]; these are "
            f"{list(first.shape)} and {list(labels.shape)}"
        )
    for name, value in (("chunk", chunk), ("bytes_per_token", bytes_per_token)):
        if value is not None and value <= 0:
            raise ConfigError(f"{name}={value}; possible are None and more than 0")
    losses = token_losses(outputs, labels, chunk)
    values = {"loss": (loss := jnp.mean(losses, axis=1))}
    if (mask := batch.get("loss_mask")) is not None:
        count = jnp.sum(mask.astype(jnp.float32), axis=1)
        loss = jnp.sum(jnp.where(mask, losses, 0), axis=1) / jnp.maximum(count, 1)
        values = {"loss": loss, WEIGHT: count}
    if bytes_per_token is not None:
        values["bits_per_byte"] = loss / (math.log(2) * bytes_per_token)
    return values


def perplexity(averages: Averages, counts: Counts) -> Averages:
    """Exponential of the average loss; infinite where that overflows."""
    del counts
    try:
        return {"perplexity": math.exp(averages["loss"])}
    except OverflowError:
        return {"perplexity": math.inf}


token_values.of_examples = True  # Its outputs.
language_model = Task(token_values, "tokens", derive=perplexity)
