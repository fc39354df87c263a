"""Tasks: what a model's outputs are worth, example by example.

A task is a function of (outputs, batch) that returns a dictionary of per-example
values [B]. `loss` is what training minimises; the others are reported. Training
averages them over a batch, evaluation over a whole set.

Shapes: B examples, K classes or targets.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Values = dict[str, jax.Array]
Task = Callable[[jax.Array, dict[str, Any]], Values]


class TaskError(ValueError):
    """A task that does not return one number an example."""

    exit_code = 64


def classification(logits: jax.Array, batch: dict[str, Any]) -> Values:
    """Cross-entropy in nats, and accuracy.

    Args:
      logits: float32 [B, K].
      batch: `labels`, int [B], each in [0, K).
    """
    labels = batch["labels"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"loss": loss, "accuracy": correct.astype(jnp.float32)}


def regression(outputs: jax.Array, batch: dict[str, Any]) -> Values:
    """Squared and absolute error, averaged over the targets of each example.

    Args:
      outputs: float32 [B, K].
      batch: `labels`, numbers [B] or [B, ...] with K of them for each example.
    """
    labels = batch["labels"].reshape(outputs.shape).astype(outputs.dtype)
    errors = (outputs - labels).reshape(len(outputs), -1)
    return {
        "loss": jnp.mean(jnp.square(errors), axis=1),
        "absolute_error": jnp.mean(jnp.abs(errors), axis=1),
    }


TASKS: dict[str, Task] = {
    "classification": classification,
    "regression": regression,
}
