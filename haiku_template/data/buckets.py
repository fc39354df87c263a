"""Bucketing: examples of different lengths, in batches of few lengths.

Shapes: N examples in the set, B of them in one batch over all processes, L their
length in a batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from haiku_template.data.dataset import Batch, BatchSpec, Data, epochs
from haiku_template.data.trees import leaves_by_path, map_leaves
from haiku_template.errors import ConfigError, some


class Examples(Protocol):
    """Examples of different lengths, as a protocol."""

    @property
    def sizes(self) -> np.ndarray:
        """Length of each example: int64 [N]."""

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Makes a batch of the examples `rows`, padded to one length."""


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedDataset:
    """Shuffled full batches, each padded to the next of `lengths`, which rise.

    A block is as many batches as hold an epoch, its last rows the next one's first:
    examples sorted by bucket, then cut into batches, which are shuffled. A bucket's
    last batch ends with some of the next one.
    """

    # Why: docs/decisions/data.md#buckets

    examples: Examples
    lengths: tuple[int, ...]
    spec: BatchSpec

    def __post_init__(self) -> None:
        self.spec.share()  # Raises for a size of which there are no rows.
        one = self.examples.batch(self._shortest()[:1], self.lengths[-1])
        self.spec.check(sum(leaf.nbytes for leaf in leaves_by_path(one).values()))

    @property
    def num_examples(self) -> int:
        """Examples in an epoch."""
        return len(self.examples.sizes)

    @property
    def block_steps(self) -> int:
        """Steps of a block: fewer leave out examples of its epoch."""
        return -(-self.num_examples // self.spec.batch_size)

    def batch(self, step: int) -> Batch:
        """Makes this process's share of a batch: arrays [B / processes, ...]."""
        count = self.block_steps
        rows, lengths = self._last_blocks(step // count, count)
        share = rows[step % count][self.spec.share()]
        return self.examples.batch(share, lengths[step % count])

    def each_shape(self) -> list[Batch]:
        """Makes a batch of each length that holds an example, the longest first."""
        rows, least = self._shortest()[self.spec.share()], self.examples.sizes.min()
        return [self.examples.batch(rows, n) for n in self.lengths[::-1] if n >= least]

    def _shortest(self) -> np.ndarray:
        return np.full(self.spec.batch_size, self.examples.sizes.argmin())

    @functools.cached_property
    def _last_blocks(self) -> Callable[[int, int], tuple]:
        # Of the object: a cache of the module would hold its examples after the run.
        return functools.lru_cache(maxsize=2)(self._block)

    def _block(self, index: int, count: int) -> tuple:
        spec = self.spec
        block = spec._replace(batch_size=count * spec.batch_size)
        rows = epochs(len(self.examples.sizes), block, index)
        rows, lengths = _by_length(self.examples, self.lengths, rows)
        order = np.random.default_rng((spec.seed, 2, index)).permutation(count)
        return rows.reshape(count, -1)[order], lengths.reshape(count, -1)[order, -1]


def _by_length(
    examples: Examples, lengths: tuple[int, ...], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    buckets = np.searchsorted(lengths, examples.sizes[rows])
    order = np.argsort(buckets, kind="stable")
    return rows[order], np.array(lengths)[buckets[order]]


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
        places = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.examples.batch(rows[places], lengths[places][-1])

    def each_shape(self) -> list[Batch]:
        """Makes a batch of each length, the longest first."""
        rows, lengths = self._order
        ends = [*range(self.batch_size, len(rows), self.batch_size), len(rows)]
        longest = sorted({int(lengths[end - 1]) for end in ends}, reverse=True)
        return [self.examples.batch(rows[: self.batch_size], n) for n in longest]

    @functools.cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(self.examples.sizes))
        return _by_length(self.examples, self.lengths, rows)


class Trees:
    """Examples that are trees of arrays [L, ...], and of numbers [] without a length.

    Raises `ConfigError` if trees differ, or arrays of an example in their lengths.
    """

    def __init__(self, examples: Sequence[Any], mask: str | None, name: str) -> None:
        self._first, self._mask = examples[0], mask
        self._leaves = [leaves_by_path(example) for example in examples]
        shapes = {path: _described(x) for path, x in self._leaves[0].items()}
        lengths = []
        for i, leaves in enumerate(self._leaves):
            kinds = {path: _described(x) for path, x in leaves.items()}
            if kinds != shapes:
                path = min(dict(kinds.items() ^ shapes.items()))
                raise ConfigError(
                    f"{path or 'the array'} of {name} {i} is "
                    f"{kinds.get(path, 'not there')}, and of "
                    f"{name} 0 {shapes.get(path, 'not there')}; examples may differ in "
                    "length L alone"
                )
            sizes = {path: len(x) for path, x in leaves.items() if np.ndim(x)}
            if not sizes:
                there = some(filter(None, leaves), 4) or type(examples[i]).__name__
                raise ConfigError(
                    f"{name} {i} has no array [L, ...] but {there}; np.asarray makes "
                    "one of a list"
                )
            if len(set(sizes.values())) != 1 or 0 in sizes.values():
                raise ConfigError(
                    f"the arrays of {name} {i} have the lengths {sizes}; an example "
                    "has one length of 1 or more, the first dimension of its arrays"
                )
            lengths.append(next(iter(sizes.values())))
        self.sizes = np.array(lengths, np.int64)
        if mask is not None and not isinstance(self._first, dict):
            raise ConfigError(
                f"mask={mask!r} names an array of a dictionary, and {name} 0 is a "
                f"{type(self._first).__name__}"
            )
        if mask is not None and mask in self._first:
            raise ConfigError(
                f"mask={mask!r} is an array of the examples already; give a name that "
                "is free"
            )

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Pads with zeros: arrays [B, L, ...] and [B]; the mask is bool [B, L]."""

        def joined(path: str, leaf: Any) -> np.ndarray:
            leaves = [self._leaves[row][path] for row in rows]
            if np.ndim(leaf) == 0:
                return np.array(leaves)
            padded = np.zeros((len(rows), length, *leaf.shape[1:]), leaf.dtype)
            for row, values in zip(padded, leaves, strict=True):
                row[: len(values)] = values
            return padded

        batch = map_leaves(joined, self._first)
        if self._mask is not None:
            batch[self._mask] = np.arange(length) < self.sizes[rows][:, None]
        return batch


def _described(leaf: Any) -> str:
    """Type and shape of a leaf, but for its length."""
    if not isinstance(leaf, np.ndarray | np.generic | int | float):
        return f"of type {type(leaf).__name__}"
    array = np.asarray(leaf)
    shape = ", ".join(["L", *map(str, array.shape[1:])][: 1 + array.ndim])
    return f"{array.dtype}[{shape * (array.ndim > 0)}]"


def bucketed(
    examples: Sequence[Any],
    spec: BatchSpec,
    sizes: Sequence[int],
    *,
    evaluation: Sequence[Any] = (),
    mask: str | None = None,
    num_outputs: int = 0,
) -> Data:
    """Makes `Data` of trees of arrays that differ in length, padded to few lengths.

    The arrays of an example have its length as their first dimension; numbers have
    none. Batches have one length each, the least of `sizes` that holds their examples;
    the rest is zeros. Training is a function of the step, and each length is compiled
    once; evaluation has each example once, short ones first: a number in them, which
    the model returns with its outputs, tells predictions apart.

    Args:
      sizes: the lengths, which rise.
      evaluation: examples to evaluate on; none by default.
      mask: name of an array to add to each batch, bool [B, L], False for padding.

    Raises `ConfigError` for no examples, sizes that do not rise, one too small for an
    example, or examples that do not fit together; it names the example and its array.
    """
    lengths = tuple(sizes) if isinstance(sizes, Sequence | np.ndarray) else ()
    is_whole = lengths and all(isinstance(n, int | np.integer) for n in lengths)
    if not is_whole or [*lengths] != sorted({n for n in lengths if n > 0}):
        raise ConfigError(
            f"sizes={sizes}; possible are lengths of 1 or more that rise, such as "
            "(64, 128, 256)"
        )
    train = _trees("example", examples, mask, lengths[-1])
    held_out = None
    is_empty = hasattr(evaluation, "__len__") and not len(evaluation)
    if evaluation is not None and not is_empty:
        trees = _trees("evaluation example", evaluation, mask, lengths[-1])
        held_out = BucketedEvaluationSet(trees, lengths, spec.batch_size)
    return Data(BucketedDataset(train, lengths, spec), held_out, num_outputs)


def _trees(name: str, examples: Sequence[Any], mask: str | None, most: int) -> Trees:
    indexed = hasattr(examples, "__getitem__") and hasattr(examples, "__len__")
    if not indexed or isinstance(examples, Mapping | str):
        raise ConfigError(
            f"the {name}s are a {type(examples).__name__}; possible is a list of trees "
            "of arrays"
        )
    if not len(examples):
        raise ConfigError("there are no examples to train on; one at least is needed")
    trees = Trees(examples, mask, name)
    longest = trees.sizes.argmax()
    if trees.sizes[longest] > most:
        raise ConfigError(
            f"{name} {longest} has length {trees.sizes[longest]}, and the largest of "
            f"sizes is {most}; give a larger one, or leave it out"
        )
    return trees
