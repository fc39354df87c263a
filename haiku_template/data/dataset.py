"""Data sets as functions of the step: `batch(step)` always gives the same arrays.

Shapes: N examples in the set, B of them in one batch over all devices and processes.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from haiku_template.errors import ConfigError

Batch = dict[str, Any]
ENDLESS = 2**48  # No data set has so many batches; Grain's repeat() has more.


class Dataset(Protocol):
    """Training set: any object with this method."""

    def batch(self, step: int) -> Batch:
        """Makes the host arrays [B, ...] of one step, new at each call."""
        ...


class BatchSpec(NamedTuple):
    """Batch size, order, kind of labels, and share of this process.

    Attributes:
      batch_size: B, over all processes.
      seed: chooses the order of the examples and the augmentation.
      labels: kind that the task needs: `classes`, `numbers`, `tokens`, or `any`.
      process_index: share of each batch to read, of `process_count`, from 0.
    """

    batch_size: int
    seed: int = 0
    labels: str = "classes"
    process_index: int = 0
    process_count: int = 1


class Data(NamedTuple):
    """Training set, evaluation set, and facts that a model needs of them.

    Attributes:
      evaluation: gives `num_batches` batches that hold each example once; the last may
        be shorter. None when there is nothing to evaluate on.
      num_outputs: classes, or regression targets.
      preprocess: runs on the inputs on the device, so that bytes travel and not floats.
      text: `bytes` for UTF-8, or the path of the tokens' tokenizer.json; None if
        unknown.
      class_names: in the order of the classes; empty if they are only numbers.
      vocab_size: number of tokens in the vocabulary; 0 if inputs are no tokens.
    """

    train: Dataset
    evaluation: "EvaluationSet | None"
    num_outputs: int
    preprocess: Callable[[Any], Any] = lambda inputs: inputs
    text: str | None = None
    class_names: tuple[str, ...] = ()
    vocab_size: int = 0


def each_shape(dataset: Dataset) -> list[Batch]:
    """Makes a batch of each shape, the largest first: `dataset.each_shape`, if any."""
    several = getattr(dataset, "each_shape", None)
    return several() if several else [dataset.batch(0)]


def share(spec: BatchSpec) -> slice:
    """Rows of a batch that this process reads; all processes read as many."""
    if spec.batch_size % spec.process_count:
        raise ConfigError(
            f"a batch of {spec.batch_size} examples cannot be shared evenly by "
            f"{spec.process_count} processes"
        )
    size = spec.batch_size // spec.process_count
    return slice(spec.process_index * size, (spec.process_index + 1) * size)


def shuffle(places: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Maps places through a stored permutation of `range(size)`: int64."""
    return _permutation(size, seed)[places]


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: tuple[int, ...]) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(size)
    order.flags.writeable = False  # It is shared by the cache.
    return order


def epochs(
    size: int,
    seed: int,
    turns: range,
    permute: Callable[[np.ndarray, int, tuple[int, ...]], np.ndarray] = shuffle,
) -> np.ndarray:
    """Indices of the examples for `turns` in an endless row of epochs: int64 [turns].

    Each epoch is a permutation of all `size` examples, made by `permute`, and the next
    one follows without a gap. Turns count from the first epoch's first example.
    """
    parts = []
    for epoch in range(turns[0] // size, turns[-1] // size + 1):
        begin = epoch * size
        now = np.arange(max(turns[0] - begin, 0), min(turns.stop - begin, size))
        parts.append(permute(now, size, (seed, 0, epoch)))
    return np.concatenate(parts)


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_batch(spec: BatchSpec, example_bytes: int) -> None:
    """Raises `ConfigError` unless a batch can be shared and would fit this machine."""
    share(spec)
    size, memory = spec.batch_size * example_bytes, host_memory()
    if size > memory:
        raise ConfigError(
            f"a batch of {spec.batch_size} examples has {size:,} bytes, and this "
            f"machine has {memory:,} bytes of memory; use a smaller config.batch_size"
        )


def check_examples(
    inputs: np.ndarray, labels: np.ndarray, where: str = "the data set"
) -> None:
    """Raises `ConfigError` unless there are examples, each with its label."""
    if inputs.ndim == 0 or labels.ndim == 0 or len(inputs) == 0:
        raise ConfigError(
            f"{where} is empty: inputs have shape {list(inputs.shape)} and labels "
            f"{list(labels.shape)}; at least one example is needed"
        )
    if len(inputs) != len(labels):
        raise ConfigError(
            f"{where} has {len(inputs)} inputs and {len(labels)} labels; each input "
            "needs one label"
        )


@dataclasses.dataclass(frozen=True)
class ArrayDataset:
    """Shuffled batches from arrays in host memory or mapped from files.

    A batch may hold the end of one epoch and the start of the next, so no example is
    dropped and every batch is full.

    Attributes:
      inputs: array [N, ...].
      labels: array [N] or [N, targets].
      augment: maps (inputs of a batch, generator) to new inputs, on the host.

    Raises:
      ConfigError: no examples, or a batch size that the processes cannot share.
    """

    inputs: np.ndarray
    labels: np.ndarray
    spec: BatchSpec
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None

    def __post_init__(self) -> None:
        check_examples(self.inputs, self.labels)
        example_bytes = (self.inputs.nbytes + self.labels.nbytes) // len(self.inputs)
        check_batch(self.spec, example_bytes)

    @property
    def staged_size(self) -> tuple[int, int] | None:
        """Rows and bytes to stage on the devices; None if the host augments them."""
        if self.augment is not None:
            return None
        return len(self.inputs), self.inputs.nbytes + self.labels.nbytes

    def staged(self) -> Batch:
        """Arrays to stage, which `gather` reads from."""
        return {"inputs": self.inputs, "labels": self.labels}

    def rows(self, step: int) -> np.ndarray:
        """Indices of the examples in this process's share: int64 [B / processes]."""
        return self._rows(step)[share(self.spec)]

    def _rows(self, step: int) -> np.ndarray:
        """Indices of the examples in the batch of `step`: int64 [B]."""
        size, seed = self.spec.batch_size, self.spec.seed
        return epochs(len(self.inputs), seed, range(step * size, (step + 1) * size))

    def gather(self, arrays: Batch, rows: Any) -> Batch:
        """Gathers a batch from rows of staged arrays; for NumPy and for JAX."""
        return {name: array[rows] for name, array in arrays.items()}

    def batch(self, step: int) -> Batch:
        """Makes this process's share of a batch: arrays [B / processes, ...]."""
        if self.augment is None:
            return self.gather(self.staged(), self.rows(step))
        # Drawn for the whole batch, so that shares do not change what is drawn.
        rng = np.random.default_rng((self.spec.seed, 1, step))
        inputs = self.augment(self.inputs[self._rows(step)], rng)[share(self.spec)]
        return {"inputs": inputs, "labels": self.labels[self.rows(step)]}


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Every example once, in order; only the last batch may have fewer rows."""

    inputs: np.ndarray
    labels: np.ndarray
    batch_size: int

    def __post_init__(self) -> None:
        check_examples(self.inputs, self.labels)

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each example once."""
        return -(-len(self.inputs) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Copies the arrays of one batch out of the set."""
        # A JAX array stays one, which devices refuse: no copy between them in silence.
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        arrays = {"inputs": self.inputs, "labels": self.labels}
        return {name: array[rows].copy() for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True)
class GrainDataset:
    """A `grain.MapDataset` whose elements are batches: {"inputs": ..., "labels": ...}.

    Grain costs microseconds for each element, so let one element be one batch
    (`.batch(B)`). For training, shuffle and repeat it; as an evaluation set it gives
    its elements once, in order.
    """

    source: Any

    def __post_init__(self) -> None:
        if len(self.source) == 0:
            raise ConfigError("the Grain data set has no elements; one is the least")
        first = self.source[0]
        if not isinstance(first, dict) or not {"inputs", "labels"} <= set(first):
            keys = sorted(first) if isinstance(first, dict) else type(first).__name__
            raise ConfigError(
                "each element of the Grain data set must be one batch, a dictionary "
                f"with inputs and labels; its first element is {keys}"
            )

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each example once; a pipeline may not repeat."""
        if len(self.source) > ENDLESS:
            raise ConfigError(
                "the Grain data set to evaluate on repeats without end; leave out "
                ".repeat()"
            )
        return len(self.source)

    def batch(self, step: int) -> Batch:
        """Reads the batch of `step`."""
        return dict(self.source[step])
