"""Permutations that are stored nowhere, for the windows of large files."""

import math
from collections.abc import Sequence

import numpy as np

# Why: docs/decisions/data.md#feistel
ROUNDS = 8  # Four of them already mix both halves; the rest is cheap.


def permute(places: Sequence[int], size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Maps places through a permutation of `range(size)`, up to 2**62, stored nowhere.

    A Feistel network: a place is two digits of base `side`, and each round adds to one
    a hash of the other. Results outside `range(size)` go through it again (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    side = np.uint64(math.isqrt(size - 1) + 1)
    result = _feistel(np.array(places, np.uint64), side, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], side, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, side: np.uint64, keys: np.ndarray) -> np.ndarray:
    high, low = np.divmod(values, side)
    for key in keys:
        high, low = low, (high + _hash(low ^ key) % side) % side
    return high * side + low


def _hash(x: np.ndarray) -> np.ndarray:
    """Mixing function of SplitMix64 (Steele, Lea and Flood, 2014): uint64 [B]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
