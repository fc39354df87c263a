"""Bucketing: texts of different lengths, in batches of few lengths.

Shapes: N examples in the set, B of them in one batch over all processes, T tokens.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from haiku_template.data.dataset import Batch, BatchSpec, epochs
from haiku_template.errors import ConfigError

MULTIPLE = 8  # Bucket lengths are multiples of this, for faster products.


class Tokens(NamedTuple):
    """Tokens of texts in a row, int32; the first of each, and an end: int64 [N + 1]."""

    flat: np.ndarray
    starts: np.ndarray

    @classmethod
    def create(cls, texts: Sequence[Sequence[int]]) -> "Tokens":
        """Joins texts of one token or more each."""
        starts = np.cumsum([0, *map(len, texts)])
        return cls(np.fromiter(itertools.chain.from_iterable(texts), np.int32), starts)

    def padded(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads the texts of `rows` with zeros, int32 [B, T]; masks are bool [B, T]."""
        at = self.starts[rows][:, None] + np.arange(length)
        mask = at < self.starts[rows + 1][:, None]
        return np.where(mask, self.flat.take(at, mode="clip"), 0), mask


class Texts(NamedTuple):
    """Texts with a class each, int32 [N], for an encoder."""

    tokens: Tokens
    labels: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each text: int64 [N]."""
        return np.diff(self.tokens.starts)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs `tokens` and `mask`, int32 [B, T]; labels int32 [B]."""
        tokens, mask = self.tokens.padded(rows, length)
        inputs = {"tokens": tokens, "mask": mask.astype(np.int32)}
        return {"inputs": inputs, "labels": self.labels[rows]}


class Completions(NamedTuple):
    """Prompts with their completions; `prompts` counts a prompt's tokens: int64 [N]."""

    tokens: Tokens
    prompts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each input: all but the last, which is only predicted."""
        return np.diff(self.tokens.starts) - 1

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs and labels int32 [B, T], one token apart; `loss_mask` bool [B, T]."""
        tokens, mask = self.tokens.padded(rows, length + 1)
        mask &= np.arange(length + 1) >= self.prompts[rows][:, None]
        names = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
        return names | {"loss_mask": mask[:, 1:]}


Examples = Texts | Completions


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedDataset:
    """Shuffled batches, all full, each padded to one of few lengths, which rise.

    A block is as many batches as fit an epoch: examples sorted by bucket, then cut into
    batches, which are shuffled. A bucket's last batch ends with some of the next one.
    """

    examples: Examples
    lengths: tuple[int, ...]
    spec: BatchSpec

    def __post_init__(self) -> None:
        self.spec.check(4 * self.lengths[-1])

    def batch(self, step: int) -> Batch:
        """Makes this process's share of a batch: arrays [B / processes, ...]."""
        count = max(len(self.examples.sizes) // self.spec.batch_size, 1)
        rows, lengths = _block(self, step // count, count)
        own = rows[step % count][self.spec.share()]
        return self.examples.batch(own, lengths[step % count])

    def each_shape(self) -> list[Batch]:
        """Makes a batch of each length, the longest first."""
        shortest = np.full(self.spec.batch_size, self.examples.sizes.argmin())
        rows = shortest[self.spec.share()]  # It fits all lengths.
        return [self.examples.batch(rows, n) for n in reversed(self.lengths)]


def _by_length(
    examples: Examples, lengths: tuple[int, ...], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    buckets = np.searchsorted(lengths, examples.sizes[rows])
    order = np.argsort(buckets, kind="stable")
    return rows[order], np.array(lengths)[buckets[order]]


@functools.lru_cache(maxsize=2)
def _block(dataset: BucketedDataset, index: int, count: int) -> tuple:
    spec = dataset.spec
    whole = spec._replace(batch_size=count * spec.batch_size)
    rows = epochs(len(dataset.examples.sizes), whole, index)
    rows, lengths = _by_length(dataset.examples, dataset.lengths, rows)
    order = np.random.default_rng((spec.seed, 2, index)).permutation(count)
    return rows.reshape(count, -1)[order], lengths.reshape(count, -1)[order, -1]


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedEvaluationSet:
    """Every example once, short ones first; only the last batch may have fewer rows."""

    examples: Examples
    lengths: tuple[int, ...]
    batch_size: int

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each example once."""
        return -(-len(self.examples.sizes) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Makes one batch, padded to the bucket of its longest example."""
        rows, lengths = self._order
        own = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.examples.batch(rows[own], lengths[own][-1])

    @functools.cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(self.examples.sizes))
        return _by_length(self.examples, self.lengths, rows)


def choose_lengths(
    sizes: np.ndarray, count: int, most: int, longest: int
) -> tuple[int, ...]:
    """Chooses lengths of `count` buckets or fewer, of about as many examples each.

    They rise, to that of the `longest`; all are multiples of 8, or `most`.
    """
    if count < 1:
        raise ConfigError(f"num_buckets={count}; possible is 1 or more")
    shares = np.arange(1, count) / count
    edges = [*np.quantile(sizes, shares, method="higher"), longest]
    rounded = {int(-(-edge // MULTIPLE) * MULTIPLE) for edge in edges}
    return tuple(sorted({min(length, most) for length in rounded}))
