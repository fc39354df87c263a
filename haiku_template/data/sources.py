"""Batches of other libraries: Grain's pipelines, generators, torch's DataLoaders."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from haiku_template.data.dataset import Batch, Dataset
from haiku_template.data.trees import leaves_by_path, map_leaves
from haiku_template.errors import ConfigError, counted

logger = logging.getLogger(__name__)

ENDLESS = 2**48  # No data set has so many batches; Grain's repeat() has more.


def _check(element: Any, source: str) -> None:
    is_dict = isinstance(element, Mapping)
    leaves = leaves_by_path(element)
    numbers = [path for path, leaf in leaves.items() if np.ndim(leaf) == 0]
    # Labels alone are no inputs, of which the model is made.
    if numbers or not leaves or (is_dict and set(element) == {"labels"}):
        kind = sorted(map(str, element)) if is_dict else type(element).__name__
        if any(numbers):
            kind = f"{kind}, and no array of rows at {numbers[0]}"
        raise ConfigError(
            f"each element of {source} must be one batch, a dictionary with inputs and "
            "labels (these only where the task needs them), or another tree of arrays "
            f"[B, ...], which the model takes whole; one is {kind}"
        )


@dataclasses.dataclass(frozen=True)
class GrainDataset:
    """Data set of a `grain.MapDataset` of batches, made with its `.batch(B)`.

    For training, shuffle and repeat it; to evaluate on, leave it as it is.
    """

    source: Any

    def __post_init__(self) -> None:
        if not hasattr(self.source, "__len__"):
            raise ConfigError(
                f"a {type(self.source).__name__} has no batches by number; "
                "from_iterator(lambda: dataset) reads it, to train on"
            )
        if len(self.source) == 0:
            raise ConfigError("the Grain data set has no elements; one is the least")
        _check(self.source[0], "the Grain data set")

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
        batch = self.source[step]
        return dict(batch) if isinstance(batch, Mapping) else batch


def from_iterator(make: Callable[[], Iterable[Batch]]) -> Dataset:
    """Makes a training set of an iterable of batches, such as a torch DataLoader.

    At its end a new one is made. Where a run resumes, or asks for an earlier batch, all
    batches before it are read once more, and a log line says so: that is what resuming
    costs here. It is exact only if `make()` gives the same batches each time.

    Args:
      make: returns a new iterable of batches, all of one size, as `Dataset` has them,
        of NumPy arrays or torch's CPU tensors.
    """
    if not callable(make):
        hint = "write lambda: before it"
        if isinstance(make, Iterator):  # A lambda would return it again.
            hint = "give the function that made it"
        raise ConfigError(
            "from_iterator takes a function that returns a new iterable, and not a "
            f"{type(make).__name__}: {hint}"
        )
    return _Forward(make)


class _Forward:
    once = True  # A batch is read again by reading all before it.

    def __init__(self, make: Callable[[], Iterable[Batch]]) -> None:
        self._make, self._lock = make, threading.Lock()
        # One iterator serves the run, the other requests for earlier batches.
        # Why: docs/decisions/data.md#iterators
        self._batches = [self._endless(), self._endless()]
        self._next = [0, 0]  # The step of the next batch of each.
        self._made: Iterable[Batch] | None = None
        self._first: Batch = None  # Checks before a run read it often.

    def batch(self, step: int) -> Batch:
        """Reads forward to the batch of `step`, from the beginning if it has passed.

        Two threads may ask: a run for the batch of a NaN, while the next are read.
        """
        if step == 0 and self._first is not None:
            return _copy(self._first)
        with self._lock:
            which = int(step < self._next[0])
            if step < self._next[which]:
                self._batches[which], self._next[which] = self._endless(), 0
            if count := step - self._next[which]:
                past = counted(count, "batches")
                logger.warning("reading past %s, to step %d", past, step)
            while (number := self._next[which]) <= step:
                self._next[which] = ENDLESS  # If it raises, it is at its end.
                batch = next(self._batches[which])
                self._next[which] = number + 1
            if step == 0:
                self._first = _copy(batch)
            return _copy(batch)

    def _endless(self) -> Iterator[Batch]:
        while True:
            batch, made = None, self._make()
            if made is self._made and isinstance(made, Iterator):
                raise ConfigError(
                    f"make() of from_iterator returned the same {type(made).__name__} "
                    "again; it must return a new iterable at each call"
                )
            self._made = made
            for batch in made:
                _check(batch, "make() of from_iterator")
                yield batch
            if batch is None:
                raise ConfigError(
                    "make() of from_iterator gave no batch; it must return a new "
                    "iterable at each call, with one batch at least"
                )


def _copy(batch: Batch) -> Batch:
    """Copies arrays to NumPy's, since a generator may reuse its own."""

    def copied(path: str, leaf: Any) -> Any:
        # A JAX array stays one, which devices refuse: no copy between them in silence.
        is_array = hasattr(leaf, "__array__") and not hasattr(leaf, "sharding")
        return np.asarray(leaf).copy() if is_array else leaf

    return map_leaves(copied, batch)
