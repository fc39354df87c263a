"""Pseudo-random permutations that are computed entry by entry, and never stored."""

import math

import numpy as np

ROUNDS = 8  # Four of them already mix both halves; the rest is cheap.


def permute(indices: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Where a permutation of `range(size)` sends some indices.

    An index is written as two digits (left, right) of base `side`. Each round of this
    Feistel network adds to one digit a hash of the other, which can be undone, so that
    it permutes `range(side**2)`. What lands outside `range(size)` is sent on until it
    lands inside, which keeps it a permutation ("cycle walking"; Black and Rogaway,
    Ciphers with Arbitrary Finite Domains, 2002).

    Args:
      indices: int64 [B], each in `range(size)`.
      size: up to 2**62.
      seed: chooses the permutation.

    Returns:
      int64 [B], different for different indices, each in `range(size)`.
    """
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    side = np.uint64(math.isqrt(size - 1) + 1)
    result = _feistel(indices.astype(np.uint64), side, keys)
    while len(outside := np.flatnonzero(result >= size)):
        result[outside] = _feistel(result[outside], side, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, side: np.uint64, keys: np.ndarray) -> np.ndarray:
    """Permutes `range(side**2)`: uint64 [B] to uint64 [B]."""
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _hash(right ^ key) % side) % side
    return left * side + right


def _hash(x: np.ndarray) -> np.ndarray:
    """The mixing function of SplitMix64 (Steele, Lea and Flood, 2014): uint64 [B]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
