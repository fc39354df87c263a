"""Losses and metrics of outputs: functions of (outputs, batch), as tasks have them.

Shapes: B examples, K classes or targets.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.errors import ConfigError
from haiku_template.params import flatten

Values = dict[str, jax.Array]
Averages = dict[str, float]
Counts = dict[str, np.ndarray]
WEIGHT = "example_weight"  # 0 or more; by default all examples weigh the same.
MANY_CLASSES = 1000  # A matrix of 4 MB is no picture any more.


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy in nats of logits [..., K]; NaN for labels outside of [0, K)."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(labels < 0, jnp.nan, losses)  # They would count from the end.


def classification(logits: jax.Array, batch: dict[str, Any]) -> Values:
    """Cross-entropy in nats and accuracy: logits [B, K], `labels` int [B] in [0, K)."""
    labels = batch["labels"]
    if labels.shape != logits.shape[:1] or labels.dtype.kind not in "iu":
        raise _unfit(labels, logits, "classification takes one whole number an example")
    loss = cross_entropy(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"loss": loss, "accuracy": correct.astype(jnp.float32)}


def _unfit(labels: jax.Array, outputs: jax.Array, advice: str) -> ConfigError:
    return ConfigError(
        f"labels are {labels.dtype}{list(labels.shape)} and the outputs "
        f"{list(outputs.shape)}; {advice}"
    )


def regression(outputs: jax.Array, batch: dict[str, Any]) -> Values:
    """Squared and absolute error, averaged over the targets of each example.

    `outputs` are float32 [B, K]; `labels` are [B] or [B, ...], K for each example.
    """
    labels = batch["labels"]
    if labels.size != outputs.size:
        raise _unfit(labels, outputs, "regression takes as many of both")
    labels = labels.reshape(outputs.shape).astype(outputs.dtype)
    errors = (outputs - labels).reshape(len(outputs), -1)
    return {
        "loss": jnp.mean(jnp.square(errors), axis=1),
        "absolute_error": jnp.mean(jnp.abs(errors), axis=1),
    }


# All outputs that they take are of examples, and none of a whole batch.
classification.of_examples = regression.of_examples = True


def own_loss(outputs: Any, mask: jax.Array, is_training: bool) -> Values:
    """A loss that the model returns, alone or as (loss, dictionary of scalars).

    Each is one number per example, [B], or for the whole batch, []: then a mean over
    its examples, as is the average over devices, micro-batches and a set. A scalar of
    a nested dictionary is named as `inner/name`; the loss itself is always `loss`.
    """
    pair = outputs if isinstance(outputs, tuple | list) else (outputs, {})
    loss, scalars = pair if len(pair) == 2 else (None, None)
    is_loss = isinstance(loss, jax.Array) and loss.ndim < 2
    if not is_loss or not isinstance(scalars, dict):
        shapes = jax.tree.map(lambda x: list(jnp.shape(x)), outputs)
        raise ConfigError(
            "the task own_loss takes the model's outputs as its loss, and they have "
            f"the shapes {shapes}; possible are a loss, [] or [B], and (loss, "
            "dictionary of scalars)"
        )
    values = flatten(scalars) | {"loss": loss}
    if is_training:
        return values
    # Evaluation pads no batch that has one loss; if others do, it is NaN.
    padded = jnp.logical_not(jnp.all(mask))
    return {
        name: jnp.where(padded, jnp.nan, x) if jnp.ndim(x) == 0 else x
        for name, x in values.items()
    }


def confusion(logits: jax.Array, batch: dict[str, Any], mask: jax.Array) -> Values:
    """Confusion matrix where `mask` is True, none if K > 1,000: int32 [K, K].

    Rows are labels [B], columns predictions of logits [B, K].
    """
    size = logits.shape[-1]  # Why: docs/decisions/training.md#confusion
    if size > MANY_CLASSES:
        return {}
    places = batch["labels"].astype(jnp.int32), jnp.argmax(logits, axis=-1)
    ones = (mask & (batch["labels"] >= 0)).astype(jnp.int32)
    return {"confusion": jnp.zeros((size, size), jnp.int32).at[places].add(ones)}


def macro_f1(averages: Averages, counts: Counts) -> Averages:
    """F1 of the confusion matrix, averaged over classes that occur or are predicted."""
    del averages
    if (matrix := counts.get("confusion")) is None:
        return {}
    sums = matrix.sum(axis=0) + matrix.sum(axis=1)
    scores = 2 * np.diag(matrix)[sums > 0] / sums[sums > 0]
    return {"macro_f1": float(np.mean(scores)) if len(scores) else np.nan}
