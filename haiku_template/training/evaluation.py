"""Exact evaluation: each example counts once, on any number of devices."""

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import numpy as np

from haiku_template.data.prefetch import Prefetcher
from haiku_template.devices import DeviceManager, check_host_batch
from haiku_template.training.state import TrainState
from haiku_template.training.tasks import Derive, nothing_more


def variables(state: TrainState) -> tuple[hk.Params, hk.State]:
    """What is evaluated: the averaged parameters where there are any."""
    params = state.params if state.ema_params is None else state.ema_params
    return params, state.net_state


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


def evaluate(
    devices: DeviceManager,
    eval_step: Callable[[Any, Any], dict[str, Any]],
    state: TrainState,
    dataset: Any,
    derive: Derive = nothing_more,
) -> dict[str, float]:
    """Averages the values of the task over a whole set; see `add_up`, `summarise`."""
    return summarise(add_up(devices, eval_step, state, dataset), derive)[0]


def add_up(
    devices: DeviceManager,
    eval_step: Callable[[Any, Any], dict[str, Any]],
    state: TrainState,
    dataset: Any,
) -> dict[str, Any]:
    """Adds up what `eval_step` returns over a whole set.

    Args:
      devices: where `state` is.
      eval_step: from `steps.make_eval_step`, compiled without donation.
      state: whole on every device.
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
            running.append(eval_step(variables(state), batch))
            if len(running) >= devices.steps_in_flight:
                finish_oldest()
    while running:
        finish_oldest()
    return sums


def padded_size(devices: DeviceManager, dataset: Any) -> int:
    """The rows of its batches when they are padded, a multiple of the devices."""
    rows = num_rows(dataset.batch(0))
    return -(-rows // devices.num_devices) * devices.num_devices


def summarise(
    sums: dict[str, Any],
    derive: Derive = nothing_more,
    derive_of_counts: Callable[[dict[str, np.ndarray]], dict[str, float]] | None = None,
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of what `add_up` gives, and the counts among it.

    Args:
      sums: `values`, `weight` and `counts`; see `steps.make_eval_step`.
      derive: makes further metrics of the averages.
      derive_of_counts: makes further metrics of the counts.

    Returns:
      `eval/NAME` for each value of the task and for what is derived, NaN where no
      example counts; and the counts by name.
    """
    counts, weight = sums["counts"], float(sums["weight"])
    averages = {
        name: float(value) / weight if weight else math.nan
        for name, value in sums["values"].items()
    }
    averages |= derive(averages)
    if derive_of_counts is not None:
        averages |= derive_of_counts(counts)
    return {f"eval/{name}": value for name, value in averages.items()}, counts
