"""Order of the examples: an endless row of epochs, each a permutation of the set."""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from haiku_template.data.dataset import BatchSpec

ROUNDS = 8  # Four of them already mix both halves; the rest is cheap.


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


def permute(places: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Maps places through a permutation of `range(size)`, up to 2**62, stored nowhere.

    A Feistel network: a place is two digits of base `side`, and each round adds to one
    a hash of the other. Results outside `range(size)` go through it again (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    side = np.uint64(math.isqrt(size - 1) + 1)
    result = _feistel(places.astype(np.uint64), side, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], side, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, side: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _hash(right ^ key) % side) % side
    return left * side + right


def _hash(x: np.ndarray) -> np.ndarray:
    """Mixing function of SplitMix64 (Steele, Lea and Flood, 2014): uint64 [B]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
