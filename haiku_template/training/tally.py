"""What is counted over a whole evaluation set, because no average of examples tells.

Shapes: B examples, K classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MANY_CLASSES = 1000  # Whose matrix, 4 MB for each batch, is no picture any more.


class Tally(NamedTuple):
    """Counts, and the metrics that they give.

    Attributes:
      count: (outputs, batch, mask) to integer arrays by name, added up over the
        examples of a batch; the mask, bool [B], says which rows are examples. Computed
        on the devices, as the task is.
      derive: metrics of the counts of the whole set, on the host.
    """

    count: Callable[[Any, dict[str, Any], jax.Array], dict[str, jax.Array]]
    derive: Callable[[dict[str, np.ndarray]], dict[str, float]]


def confusion(
    logits: jax.Array, batch: dict[str, Any], mask: jax.Array
) -> dict[str, jax.Array]:
    """How often each class was taken for each: `confusion`, int32 [K, K].

    Rows are labels, columns predictions. With more than 1,000 classes nothing.

    Args:
      logits: [B, K].
      batch: `labels`, int [B].
      mask: bool [B], what counts.
    """
    size = logits.shape[-1]
    if size > MANY_CLASSES:
        return {}
    places = batch["labels"], jnp.argmax(logits, axis=-1)
    ones = mask.astype(jnp.int32)
    return {"confusion": jnp.zeros((size, size), jnp.int32).at[places].add(ones)}


def macro_f1(counts: dict[str, np.ndarray]) -> dict[str, float]:
    """The F1 of each class, averaged over the classes that were there or predicted.

    Args:
      counts: `confusion`, [K, K].
    """
    matrix = counts.get("confusion")
    if matrix is None:
        return {}
    both = matrix.sum(axis=0) + matrix.sum(axis=1)
    there = both > 0
    return {"macro_f1": float(np.mean(2 * np.diag(matrix)[there] / both[there]))}


def nothing_counted(
    outputs: Any, batch: dict[str, Any], mask: jax.Array
) -> dict[str, jax.Array]:
    """Counts nothing."""
    del outputs, batch, mask
    return {}


NO_TALLY = Tally(nothing_counted, lambda counts: {})
# For the tasks that have one.
TALLIES: dict[str, Tally] = {"classification": Tally(confusion, macro_f1)}
