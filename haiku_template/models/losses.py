"""Losses and metrics of outputs: functions of (outputs, batch), as tasks have them.

Shapes: B examples, K classes or targets; T tokens, D width, V vocabulary.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.errors import ConfigError
from haiku_template.models.logits import LazyLogits, token_losses

Values = dict[str, jax.Array]
WEIGHT = "example_weight"  # 0 or more; by default all examples weigh the same.
MANY_CLASSES = 1000  # A matrix of 4 MB is no picture any more.


def classification(logits: jax.Array, batch: dict[str, Any]) -> Values:
    """Cross-entropy in nats, and accuracy.

    `logits` are float32 [B, K]; `labels`, int [B], are in [0, K).
    """
    labels = batch["labels"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"loss": loss, "accuracy": correct.astype(jnp.float32)}


def regression(outputs: jax.Array, batch: dict[str, Any]) -> Values:
    """Squared and absolute error, averaged over the targets of each example.

    `outputs` are float32 [B, K]; `labels` are [B] or [B, ...], K for each example.
    """
    labels = batch["labels"].reshape(outputs.shape).astype(outputs.dtype)
    errors = (outputs - labels).reshape(len(outputs), -1)
    return {
        "loss": jnp.mean(jnp.square(errors), axis=1),
        "absolute_error": jnp.mean(jnp.abs(errors), axis=1),
    }


def language_model(
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
      chunk: tokens of an example whose lazy logits exist at a time, computed again in
        the backward pass; None means all.
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
    mask = batch.get("loss_mask")
    loss = jnp.mean(losses, axis=1)
    values = {"loss": loss}
    if mask is not None:
        count = jnp.sum(mask.astype(jnp.float32), axis=1)
        loss = jnp.sum(jnp.where(mask, losses, 0), axis=1) / jnp.maximum(count, 1)
        values = {"loss": loss, WEIGHT: count}
    if bytes_per_token is not None:
        values["bits_per_byte"] = loss / (math.log(2) * bytes_per_token)
    return values


def perplexity(
    averages: dict[str, float], counts: dict[str, np.ndarray]
) -> dict[str, float]:
    """Exponential of the average loss; infinite where that overflows."""
    del counts
    try:
        return {"perplexity": math.exp(averages["loss"])}
    except OverflowError:
        return {"perplexity": math.inf}


def confusion(
    logits: jax.Array, batch: dict[str, Any], mask: jax.Array
) -> dict[str, jax.Array]:
    """Confusion matrix: rows are labels, columns predictions; int32 [K, K].

    It counts logits [B, K] and labels [B] where `mask` is True; none if K > 1,000.
    """
    size = logits.shape[-1]
    if size > MANY_CLASSES:
        return {}
    places = batch["labels"], jnp.argmax(logits, axis=-1)
    ones = mask.astype(jnp.int32)
    return {"confusion": jnp.zeros((size, size), jnp.int32).at[places].add(ones)}


def macro_f1(
    averages: dict[str, float], counts: dict[str, np.ndarray]
) -> dict[str, float]:
    """F1 of the confusion matrix, averaged over classes that occur or are predicted."""
    del averages
    matrix = counts.get("confusion")
    if matrix is None:
        return {}
    both = matrix.sum(axis=0) + matrix.sum(axis=1)
    there = both > 0
    return {"macro_f1": float(np.mean(2 * np.diag(matrix)[there] / both[there]))}
