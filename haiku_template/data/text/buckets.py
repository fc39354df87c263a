"""Bucketing: texts of different lengths, in batches of few lengths.

Shapes: N examples in the set, B of them in one batch over all processes, T tokens.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from haiku_template.data.dataset import Batch, BatchSpec
from haiku_template.data.order import epochs
from haiku_template.errors import ConfigError

MULTIPLE = 8  # Bucket lengths are multiples of this, for faster products.


class Tokens(NamedTuple):
    """Tokens of many texts, `flat`: one text after another, int32.

    `starts` are their first positions, and the end of the last: int64 [N + 1].
    """

    flat: np.ndarray
    starts: np.ndarray

    @classmethod
    def create(cls, texts: Sequence[Sequence[int]]) -> "Tokens":
        """Joins texts of one token or more each."""
        starts = np.cumsum([0, *map(len, texts)])
        return cls(np.fromiter(itertools.chain.from_iterable(texts), np.int32), starts)

    def padded(self, rows: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Pads the texts of `rows` with zeros, int32 [B, T]; masks are bool [B, T]."""
        sizes = self.starts[rows + 1] - self.starts[rows]
        mask = np.arange(length) < sizes[:, None]
        at = self.starts[rows][:, None] + np.arange(length)
        return np.where(mask, self.flat.take(at, mode="clip"), 0), mask


class Texts(NamedTuple):
    """Texts with a class each, int32 [N], for an encoder."""

    tokens: Tokens
    labels: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each text: int64 [N]."""
        return np.diff(self.tokens.starts)

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs `tokens` and `mask`, int32 [B, T]; labels int32 [B]."""
        tokens, mask = self.tokens.padded(rows, length)
        inputs = {"tokens": tokens, "mask": mask.astype(np.int32)}
        return {"inputs": inputs, "labels": self.labels[rows]}


class Completions(NamedTuple):
    """Prompts with their completions, for a language model.

    `tokens` are a prompt's and its completion's; `prompts` counts the former: int64
    [N].
    """

    tokens: Tokens
    prompts: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each input: all but the last, which is only predicted."""
        return np.diff(self.tokens.starts) - 1

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Inputs and labels int32 [B, T], one token apart; `loss_mask` bool [B, T]."""
        tokens, mask = self.tokens.padded(rows, length + 1)
        follows = np.arange(length + 1) >= self.prompts[rows][:, None]
        return {
            "inputs": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": (mask & follows)[:, 1:],
        }


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedDataset:
    """Shuffled batches, each padded to one of few lengths.

    A block has as many whole batches as fit an epoch. Its examples are sorted by bucket
    and cut into batches, and the batches are shuffled. So no example is dropped and
    every batch is full; one that a bucket does not fill is completed from the next
    longer one. `lengths` of the buckets rise; no example is longer than the last.
    """

    examples: Texts | Completions
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
    examples: Texts | Completions, lengths: tuple[int, ...], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorts examples by bucket; returns them and their buckets' lengths: int64 [N]."""
    buckets = np.searchsorted(lengths, examples.sizes[rows])
    order = np.argsort(buckets, kind="stable")
    return rows[order], np.array(lengths)[buckets[order]]


@functools.lru_cache(maxsize=2)
def _block(
    dataset: BucketedDataset, index: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a block's batches, int64 [count, B], and the length of each."""
    spec = dataset.spec
    whole = spec._replace(batch_size=count * spec.batch_size)
    rows = epochs(len(dataset.examples.sizes), whole, index)
    rows, lengths = _by_length(dataset.examples, dataset.lengths, rows)
    shuffled = np.random.default_rng((spec.seed, 2, index)).permutation(count)
    return (
        rows.reshape(count, -1)[shuffled],
        lengths.reshape(count, -1)[shuffled, -1],
    )


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedEvaluationSet:
    """Every example once, short ones first; only the last batch may have fewer rows."""

    examples: Texts | Completions
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
    """Chooses lengths of at most `count` buckets of about as many examples each.

    They rise, and are multiples of 8, or `most`. The last holds the `longest` of all
    examples; `sizes` are those of the training examples: int64 [N].
    """
    if count < 1:
        raise ConfigError(f"num_buckets={count}; possible is 1 or more")
    shares = np.arange(1, count) / count
    edges = [*np.quantile(sizes, shares, method="higher"), longest]
    return tuple(
        sorted({min(int(-(-edge // MULTIPLE) * MULTIPLE), most) for edge in edges})
    )
