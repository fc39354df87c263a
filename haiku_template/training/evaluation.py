"""Exact evaluation: each example counts once, on any number of devices."""

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from haiku_template.data.prefetch import Prefetcher
from haiku_template.devices import DeviceManager
from haiku_template.training.tasks import Derive, nothing_more


def pad(batch: dict[str, Any], size: int) -> dict[str, Any]:
    """Appends rows of zeros up to `size`, and `mask`: True for the examples."""
    rows = len(batch["labels"])

    def longer(x: np.ndarray) -> np.ndarray:
        x = np.asarray(x)
        if rows == size:
            return x
        return np.concatenate([x, np.zeros((size - rows, *x.shape[1:]), x.dtype)])

    return jax.tree.map(longer, batch) | {"mask": np.arange(size) < rows}


def add_up(
    devices: DeviceManager,
    eval_step: Callable[[Any], dict[str, Any]],
    dataset: Any,
) -> dict[str, np.ndarray]:
    """Adds up what `eval_step` returns over a whole set.

    Args:
      devices: where it runs.
      eval_step: of a batch on the devices; see `Trainer.eval_step`.
      dataset: gives `num_batches` batches; none has more rows than the first.

    Returns:
      float64; sums are float32 within a batch and float64 between batches, so that
      counts are exact.
    """
    rows = len(dataset.batch(0)["labels"])
    size = -(-rows // devices.num_devices) * devices.num_devices
    sums: dict[str, np.ndarray] = {}
    running: deque[dict[str, Any]] = deque()

    def finish_oldest() -> None:
        for name, value in devices.fetch(running.popleft()).items():
            sums[name] = sums.get(name, 0) + np.asarray(value, np.float64)

    def make(index: int) -> Any:
        return devices.shard(pad(dataset.batch(index), size))

    with Prefetcher(make, 0, dataset.num_batches) as batches:
        for batch in batches:
            running.append(eval_step(batch))
            if len(running) >= devices.steps_in_flight:
                finish_oldest()
    while running:
        finish_oldest()
    return sums


def summarise(
    sums: dict[str, np.ndarray],
    derive: Derive = nothing_more,
    derive_of_counts: Callable[[dict[str, np.ndarray]], dict[str, float]] | None = None,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of what `add_up` gives, and the counts among it.

    Args:
      sums: of single numbers, and counts, which have dimensions.
      derive: makes further metrics of the averages.
      derive_of_counts: makes further metrics of the counts.

    Returns:
      `eval/NAME` for each value of the task and for what is derived; counts by name.
    """
    counts = {name: value for name, value in sums.items() if np.ndim(value)}
    examples = float(sums["examples"])
    averages = {
        name: float(value) / examples
        for name, value in sums.items()
        if name not in counts and name != "examples"
    }
    averages |= derive(averages)
    if derive_of_counts is not None:
        averages |= derive_of_counts(counts)
    return {f"eval/{name}": value for name, value in averages.items()}, counts
