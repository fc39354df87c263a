"""Tasks: per-example losses and metrics of a model's outputs.

`loss` is what training minimizes; other values are reported. Training averages them
over a batch, evaluation over a set, across micro-batches and devices; the value
`example_weight`, if there is one, weights the examples. Metrics that are no averages,
such as perplexity, are derived from averages on the host.

Shapes: B examples, K classes or targets; T tokens, D width, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template.errors import ConfigError
from haiku_template.models import LazyLogits

Values = dict[str, jax.Array]
WEIGHT = "example_weight"  # Of an example, 0 or more; by default all weigh the same.
LABELS = ("classes", "numbers", "tokens", "any")
MANY_CLASSES = 1000  # A matrix of 4 MB is no picture any more.


class Task(NamedTuple):
    """Loss and metrics of a model.

    Attributes:
      values: (outputs, batch) to per-example values [B], `loss` among them.
      labels: kind of labels that data must give: `classes`, `numbers`, `tokens`, `any`.
      count: (outputs, batch, mask) to integer arrays by name, summed over a set on the
        devices; the mask, bool [B], is False for padding.
      derive: (averages, counts) to derived metrics, on the host; training has no
        counts.
    """

    values: Callable[..., Values]
    labels: str = "any"
    count: Callable[[Any, Any, jax.Array], Values] = lambda outputs, batch, mask: {}
    derive: Callable[[dict[str, float], dict[str, np.ndarray]], dict[str, float]] = (
        lambda averages, counts: {}
    )

    def __call__(self, outputs: Any, batch: Any, **options: Any) -> Values:
        """Computes the per-example values of a batch."""
        return self.values(outputs, batch, **options)


def as_task(task: Task | Callable[..., Values]) -> Task:
    """Makes a task of a plain function or a partial task; a task stays as it is.

    Raises:
      ConfigError: it is neither, or a task of another kind of labels.
    """
    if not callable(task):
        raise ConfigError(f"the task is a {type(task).__name__}; it must be a function")
    if isinstance(task, functools.partial) and isinstance(task.func, Task):
        bound = functools.partial(task.func.values, *task.args, **task.keywords)
        task = task.func._replace(values=bound)
    task = task if isinstance(task, Task) else Task(task)
    if task.labels not in LABELS:
        raise ConfigError(
            f"the task's labels={task.labels!r}; possible are {', '.join(LABELS)}"
        )
    return task


def _classification(logits: jax.Array, batch: dict[str, Any]) -> Values:
    """Cross-entropy in nats, and accuracy.

    `logits` are float32 [B, K]; `labels`, int [B], are in [0, K).
    """
    labels = batch["labels"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"loss": loss, "accuracy": correct.astype(jnp.float32)}


def _regression(outputs: jax.Array, batch: dict[str, Any]) -> Values:
    """Squared and absolute error, averaged over the targets of each example.

    `outputs` are float32 [B, K]; `labels` are [B] or [B, ...], K for each example.
    """
    labels = batch["labels"].reshape(outputs.shape).astype(outputs.dtype)
    errors = (outputs - labels).reshape(len(outputs), -1)
    return {
        "loss": jnp.mean(jnp.square(errors), axis=1),
        "absolute_error": jnp.mean(jnp.abs(errors), axis=1),
    }


def _language_model(
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
    losses = _token_losses(outputs, labels, chunk)
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


def _token_losses(
    outputs: jax.Array | LazyLogits, labels: jax.Array, chunk: int | None
) -> jax.Array:
    """Cross-entropy of each token in nats: float32 [B, T]."""
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    if not isinstance(outputs, LazyLogits):
        return cross_entropy(outputs.astype(jnp.float32), labels)
    size, num_tokens = labels.shape
    if chunk is None or chunk >= num_tokens:
        return cross_entropy(outputs.multiply_out(), labels)
    # The embedding's gradients are added up over the chunks in float32.
    embedding = outputs.embedding.astype(jnp.float32)

    def part(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, labels = inputs
        logits = LazyLogits(hidden, embedding.astype(hidden.dtype)).multiply_out()
        return cross_entropy(logits, labels)

    def split(x: jax.Array) -> jax.Array:
        """Splits [B, T, ...] to [chunks, B, chunk, ...], padded with zeros."""
        padding = [(0, 0), (0, -num_tokens % chunk), *[(0, 0)] * (x.ndim - 2)]
        parts = jnp.pad(x, padding).reshape(size, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    # The backward pass keeps only a chunk's inputs.
    part = jax.checkpoint(part, prevent_cse=False)
    losses = jax.lax.map(part, (split(outputs.hidden), split(labels)))
    return jnp.moveaxis(losses, 0, 1).reshape(size, -1)[:, :num_tokens]


def perplexity(
    averages: dict[str, float], counts: dict[str, np.ndarray]
) -> dict[str, float]:
    """Exponential of the average loss; infinite where that overflows."""
    del counts
    try:
        return {"perplexity": math.exp(averages["loss"])}
    except OverflowError:
        return {"perplexity": math.inf}


def with_outputs(task: Task, num_outputs: int) -> Task:
    """Makes classification refuse logits of another number of classes.

    A label beyond the last logit would make its loss NaN.
    """
    values = task.values
    inner = values.func if isinstance(values, functools.partial) else values
    if inner is not _classification:
        return task

    def checked(outputs: Any, batch: dict[str, Any]) -> Values:
        shape = jnp.shape(outputs)
        if len(shape) != 2 or shape[1] != num_outputs:
            raise ConfigError(
                f"the model gives outputs of shape {list(shape)}, and the data has "
                f"{num_outputs} classes; classification takes logits [B, {num_outputs}]"
            )
        return values(outputs, batch)

    return task._replace(values=checked)


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


classification = Task(_classification, "classes", confusion, macro_f1)
language_model = Task(_language_model, "tokens", derive=perplexity)
regression = Task(_regression, "numbers")

TASKS: dict[str, Task] = {
    "classification": classification,
    "language_model": language_model,
    "regression": regression,
}
