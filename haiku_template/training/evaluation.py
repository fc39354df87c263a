"""Exact evaluation: each example counts once, on any number of devices."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from haiku_template.data.prefetch import Prefetcher
from haiku_template.devices import DeviceManager, check_host_batch


def pad(batch: Any, size: int, first: int = 0) -> tuple[Any, np.ndarray]:
    """Appends rows of zeros up to `size`, and says which rows are examples.

    Beside the batch and not in it, where every name is the user's.

    Args:
      batch: pytree of arrays [rows, ...].
      size: B, the rows wanted.
      first: the place in the set of the first row.

    Returns:
      The batch with B rows, and the place of each, int32 [B]: of padding it is below 0.
    """
    rows = num_rows(batch)

    def longer(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if rows == size:
            return x
        return np.concatenate([x, np.zeros((size - rows, *x.shape[1:]), x.dtype)])

    places = np.arange(first, first + size, dtype=np.int32)
    places[rows:] = ~places[rows:]
    return jax.tree.map(longer, batch), places


def num_rows(batch: Any) -> int:
    """The rows of a batch, whatever it is made of."""
    return len(jax.tree.leaves(batch)[0])


def add_up(
    devices: DeviceManager,
    eval_step: Callable[[Any], dict[str, Any]],
    dataset: Any,
) -> dict[str, Any]:
    """Adds up what `eval_step` returns over a whole set.

    Args:
      devices: where it runs.
      eval_step: of a batch on the devices; see `Trainer.eval_step`.
      dataset: gives `num_batches` batches; none has more rows than the first.

    Returns:
      float64; sums are float32 within a batch and float64 between batches, so that
      counts are exact.
    """
    size = padded_size(devices, dataset)
    sums: Any = None
    running: deque[dict[str, Any]] = deque()

    def finish_oldest() -> None:
        nonlocal sums
        fetched = devices.fetch(running.popleft())
        new = jax.tree.map(lambda x: np.asarray(x, np.float64), fetched)
        sums = new if sums is None else jax.tree.map(np.add, sums, new)

    def make(index: int) -> Any:
        batch = dataset.batch(index)
        check_host_batch(batch, f"evaluation batch {index}")
        return devices.shard(pad(batch, size, index * size))

    with Prefetcher(make, 0, dataset.num_batches) as batches:
        for batch in batches:
            running.append(eval_step(batch))
            if len(running) >= devices.steps_in_flight:
                finish_oldest()
    while running:
        finish_oldest()
    return sums


def placed_inputs(dataset: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Inputs of each batch of a set, and the places of its rows: int32 [B]."""
    first = 0
    for index in range(dataset.num_batches):
        batch = dataset.batch(index)
        last = first + num_rows(batch)
        yield batch["inputs"], np.arange(first, last, dtype=np.int32)
        first = last


def padded_size(devices: DeviceManager, dataset: Any) -> int:
    """The rows of its batches when they are padded, a multiple of the devices."""
    rows = num_rows(dataset.batch(0))
    return -(-rows // devices.num_devices) * devices.num_devices


def summarize(
    sums: dict[str, Any],
    derive: Callable[[dict[str, float], dict[str, np.ndarray]], dict[str, float]],
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of what `add_up` gives, and the counts among it.

    Args:
      sums: `values`, `weight` and `counts`; see `step.make_eval_step`.
      derive: the task's; see `Task`.

    Returns:
      `eval/NAME` for each value of the task and for each derived one, NaN where no
      example counts; and the counts by name.
    """
    counts, weight = sums["counts"], float(sums["weight"])
    averages = {
        name: float(value) / weight if weight else math.nan
        for name, value in sums["values"].items()
    }
    averages |= derive(averages, counts)
    return {f"eval/{name}": value for name, value in averages.items()}, counts
