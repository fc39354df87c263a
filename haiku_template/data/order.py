"""Order of the examples: an endless row of epochs, each a permutation of the set."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from haiku_template.data.dataset import BatchSpec


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: tuple[int, ...]) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(size)
    order.flags.writeable = False  # It is shared by the cache.
    return order


def shuffle(places: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Maps places through a stored permutation of `range(size)`: int64."""
    return _permutation(size, seed)[places]


def epochs(
    size: int,
    spec: "BatchSpec",
    step: int,
    permute: Callable[[np.ndarray, int, tuple[int, ...]], np.ndarray] = shuffle,
) -> np.ndarray:
    """Indices of the examples in the whole batch of `step`: int64 [B].

    Epochs follow without a gap: a batch may hold the end of one and the next's start.
    """
    start, stop = step * spec.batch_size, (step + 1) * spec.batch_size
    parts = []
    for epoch in range(start // size, (stop - 1) // size + 1):
        begin = epoch * size
        places = np.arange(max(start - begin, 0), min(stop - begin, size))
        parts.append(permute(places, size, (spec.seed, 0, epoch)))
    return np.concatenate(parts)
