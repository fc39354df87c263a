"""Data sets as functions of the step: `batch(step)` always gives equal arrays.

Shapes: N examples in the set, B of them in one batch over all devices and processes.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from haiku_template.data.trees import count_rows, described, leaves_by_path, map_leaves
from haiku_template.errors import ConfigError, counted

PLAIN = {np.ndarray, np.memmap}  # Arrays with rows by number, none masked.
Batch = Any  # A dict with `inputs`, or another tree of arrays.


def host_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(size: int, fact: str, advice: str) -> None:
    """Raises `ConfigError` unless `size` bytes, which `fact` states, fit in memory."""
    if size > (memory := host_memory()):
        raise ConfigError(
            f"{fact}, and this machine has {memory:,} bytes of memory; {advice}"
        )


class Dataset(Protocol):
    """Training set: any object with this method."""

    def batch(self, step: int) -> Batch:
        """Makes the host arrays [B, ...] of one step, new at each call.

        A dict of `inputs`, and `labels` for a task that takes them, each an array or a
        tree of arrays; or any other tree, which the model takes whole.
        """


class BatchSpec(NamedTuple):
    """Batch size, order, kind of labels, and share of this process."""

    batch_size: int  # B, over all processes.
    seed: int = 0  # Chooses the order of the examples and the augmentation.
    labels: str = "classes"  # Or `numbers`, `tokens`; `any`, or no labels.
    process_index: int = 0  # Share of each batch to read, of `process_count`, from 0.
    process_count: int = 1

    def share(self) -> slice:
        """Rows of a batch that this process reads; all processes read as many."""
        is_whole = isinstance(self.batch_size, int | np.integer)
        if not is_whole or self.batch_size < 1 or self.batch_size % self.process_count:
            raise _unshared(self.batch_size, self.process_count)
        size = self.batch_size // self.process_count
        return slice(self.process_index * size, (self.process_index + 1) * size)

    def check(self, example_bytes: int) -> None:
        """Raises `ConfigError` unless a batch can be shared, and fits this machine."""
        self.share()
        size = self.batch_size * example_bytes
        fact = f"a batch of {counted(self.batch_size, 'examples')} has {size:,} bytes"
        check_memory(size, fact, "use a smaller config.batch_size")


def _unshared(size: Any, count: int) -> ConfigError:
    return ConfigError(
        f"a batch of {size!r} examples cannot be shared evenly by {count} processes; "
        "possible is a whole number, 1 or more for each"
    )


class Data(NamedTuple):
    """Training set, evaluation set, and facts that a model needs of them."""

    train: Dataset
    # `num_batches` batches, with each example once; None without any.
    evaluation: "EvaluationSet | None"
    num_outputs: int = 0  # Classes, or regression targets.
    # Maps the inputs on the device, such as uint8 to float: only bytes are copied.
    preprocess: Callable[[Any], Any] = lambda inputs: inputs
    text: str | None = None  # `bytes`, or the path of a tokenizer.json; if known.
    class_names: tuple[str, ...] = ()  # In the order of the classes, if they have any.
    vocab_size: int = 0  # Of tokens; 0 for inputs that are no tokens.
    # Further sets by name; their metrics are `eval/NAME/...`.
    evaluations: Mapping[str, "EvaluationSet"] = MappingProxyType({})
    # Maps the path of a new file of this kind to an evaluation set, in its order.
    read: Callable[[Any], Any] | None = None

    def __repr__(self) -> str:
        usual = type(self)._field_defaults
        changed = {k: x for k, x in self._asdict().items() if x is not usual.get(k, "")}
        texts = [f"{name}={described(x)}" for name, x in changed.items()]
        return f"Data({', '.join(texts)})"


def each_shape(dataset: Dataset) -> list[Batch]:
    """Makes a batch of each shape, the largest first: `dataset.each_shape`, if any."""
    several = getattr(dataset, "each_shape", None)
    return several() if several else [dataset.batch(0)]


def class_numbers(data: Data) -> dict[str, int]:
    """Numbers of the classes by name; none if a label is not one whole number."""
    like = each_shape(data.train)[0]
    labels = like.get("labels") if isinstance(like, Mapping) else None
    if getattr(labels, "ndim", 0) != 1 or labels.dtype.kind not in "iu":
        return {}
    names = data.class_names or range(data.num_outputs or 0)
    return {str(name): i for i, name in enumerate(names)}


def ahead(dataset: Any, start: int, stop: int) -> AbstractContextManager:
    """Context that reads batches `start` to `stop - 1`, which workers make ahead."""
    enter = getattr(dataset, "read_ahead", None)
    return enter(start, stop) if enter and start < stop else contextlib.nullcontext()


def without_workers(dataset: Any) -> Any:
    """Data set whose batches this process makes itself."""
    return dataset.dataset if hasattr(dataset, "read_ahead") else dataset


def whole_batches(dataset: Dataset) -> Dataset:
    """Makes a data set that reads shares of batches, a dataclass, read whole ones."""
    dataset = without_workers(dataset)
    spec = getattr(dataset, "spec", None)
    if getattr(spec, "process_count", 1) == 1 or not dataclasses.is_dataclass(dataset):
        return dataset
    spec = spec._replace(process_index=0, process_count=1)
    return dataclasses.replace(dataset, spec=spec)


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


# Why: docs/decisions/data.md#permutations
def shuffle(places: range, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Maps places through a stored permutation of `range(size)`: int64."""
    return _permutation(size, seed)[places.start : places.stop]


def epochs(
    size: int, spec: BatchSpec, step: int, permute: Callable[..., Any] = shuffle
) -> np.ndarray:
    """Indices of the examples in the whole batch of `step`: int64 [B].

    A batch may hold the end of one epoch and the next's start.
    """
    start, stop = step * spec.batch_size, (step + 1) * spec.batch_size
    indices = []
    for epoch in range(start // size, (stop - 1) // size + 1):
        first = epoch * size
        places = range(max(start - first, 0), min(stop - first, size))
        indices.append(permute(places, size, (spec.seed, 0, epoch)))
    return np.concatenate(indices)


def arrays_by_name(inputs: Any, labels: Any) -> Batch:
    """Names the arrays of a set, which may have no labels (None)."""
    return {"inputs": inputs} | ({} if labels is None else {"labels": labels})


def check_arrays(arrays: Batch, where: str = "the data set") -> dict[str, Any]:
    """Leaves [N, ...] by path; `ConfigError` for an empty set, or a missing label."""
    leaves = leaves_by_path(arrays)
    counts = {getattr(array, "shape", ())[:1] for array in leaves.values()}
    fits = all(type(x) in PLAIN or _is_array(x) for x in leaves.values())
    if not fits or len(counts) != 1 or counts & {(), (0,)} or not _has_inputs(leaves):
        raise _fault(leaves, where)
    return leaves


def _has_inputs(paths: Iterable[str]) -> bool:
    return any(path.startswith("inputs") for path in paths)


def _is_array(leaf: Any) -> bool:
    # A pandas.Series gives rows by its index, and NumPy forgets which are masked.
    is_frame = hasattr(leaf, "to_numpy")
    return hasattr(leaf, "ndim") and not is_frame and not np.ma.is_masked(leaf)


def _fault(leaves: dict[str, Any], where: str) -> ConfigError:
    kinds = [(x, type(leaf).__name__) for x, leaf in leaves.items()]
    kinds = [(x, kind) for x, kind in kinds if not _is_array(leaves[x])]
    if kinds or not _has_inputs(leaves):
        path, kind = [*kinds, ("the inputs", "empty tree")][0]
        return ConfigError(
            f"{path} of {where} is a {kind}, and an array is needed; several are a "
            "dictionary or a tuple of arrays, one row an example, and examples of "
            "different lengths are for `bucketed`"
        )
    first, *further = leaves.items()
    odd = [item for item in further if item[1].shape[:1] != first[1].shape[:1]]
    shapes = [first, *(odd or further)[:3]]
    facts = " and ".join(f"{path} {list(x.shape)}" for path, x in shapes)
    if any(array.shape[:1] in ((), (0,)) for array in leaves.values()):
        return ConfigError(f"{where} has no examples: {facts}; one at least is needed")
    counts = " and ".join(f"{len(x)} {path}" for path, x in shapes)
    return ConfigError(f"{where} has {counts}; each array has one row an example")


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayDataset:
    """Shuffled batches from arrays [N, ...] in host memory or mapped from files.

    Every batch is full, and no example is dropped. `inputs` are an array or a tree of
    arrays, `labels`, too, or None. `augment` maps (inputs of a batch, generator) to new
    inputs, on the host.
    """

    inputs: Any
    labels: Any
    spec: BatchSpec
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None
    __repr__ = described

    def __post_init__(self) -> None:
        self.spec.check(sum(x[:1].nbytes for x in check_arrays(self.staged()).values()))

    @property
    def num_examples(self) -> int:
        """Examples in an epoch."""
        return count_rows(self.inputs)

    @property
    def staged_size(self) -> tuple[int, int] | None:
        """Rows and bytes to stage on the devices; None if the host augments them."""
        size = sum(array.nbytes for array in leaves_by_path(self.staged()).values())
        return None if self.augment else (self.num_examples, size)

    def staged(self) -> Batch:
        """Arrays to stage, which `gather` reads from."""
        return arrays_by_name(self.inputs, self.labels)

    def rows(self, step: int) -> np.ndarray:
        """Indices of the examples in this process's share: int64 [B / processes]."""
        return epochs(self.num_examples, self.spec, step)[self.spec.share()]

    def row_block(self, index: int, steps: int) -> np.ndarray:
        """Rows of a block of steps, side by side: int64 [B / processes, steps]."""
        spec = self.spec._replace(batch_size=steps * self.spec.batch_size)
        rows = epochs(self.num_examples, spec, index).reshape(steps, -1)
        return rows[:, self.spec.share()].T

    def gather(self, arrays: Batch, rows: Any) -> Batch:
        """Gathers a batch from rows of staged arrays; for NumPy and for JAX."""
        return map_leaves(lambda _, array: array[rows], arrays)

    def batch(self, step: int) -> Batch:
        """Makes this process's share of a batch: arrays [B / processes, ...]."""
        if self.augment is not None:
            return self._augmented(step)
        return self.gather(self.staged(), self.rows(step))

    def _augmented(self, step: int) -> Batch:
        # Drawn for the whole batch, so that shares do not change what is drawn.
        rng = np.random.default_rng((self.spec.seed, 1, step))
        batch = self.gather(self.staged(), epochs(self.num_examples, self.spec, step))
        batch["inputs"] = self.augment(batch["inputs"], rng)
        return self.gather(batch, self.spec.share())


class _InOrder:
    """Every row of `arrays` [N, ...] once, in batches of `batch_size`."""

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each row once."""
        return -(-count_rows(self.arrays) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Copies the arrays of one batch out of the set; the last may have fewer."""
        # A JAX array stays one, which devices refuse: no copy between them in silence.
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return map_leaves(lambda _, array: array[rows].copy(), self.arrays)


@dataclasses.dataclass(frozen=True)
class Rows(_InOrder):
    """Every row of a tree of arrays [N, ...] once, in order."""

    arrays: Batch
    batch_size: int


@dataclasses.dataclass(frozen=True, repr=False)
class EvaluationSet(_InOrder):
    """Every example once, in order; only the last batch may have fewer rows."""

    inputs: Any
    labels: Any
    batch_size: int
    __repr__ = described

    def __post_init__(self) -> None:
        check_arrays(self.arrays)
        BatchSpec(self.batch_size).share()  # Raises for what is no number of rows.

    @property
    def arrays(self) -> Batch:
        """Inputs, and labels if there are any, by name."""
        return arrays_by_name(self.inputs, self.labels)
