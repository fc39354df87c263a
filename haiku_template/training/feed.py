"""Batches of a training set, on their way to the devices."""

import contextlib
import functools
import logging
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import numpy as np

from haiku_template.data import Data, ahead, each_shape, without_workers
from haiku_template.data.staging import RowBlocks, gathers
from haiku_template.devices import DeviceManager, canonical_shapes, check_host_batch
from haiku_template.devices.transfer import detached, fitting, host_buffer, own_rows
from haiku_template.errors import ConfigError, PlacementError
from haiku_template.models.forms import inputs_of
from haiku_template.params import leaves_by_path
from haiku_template.training.state import TrainState

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment

logger = logging.getLogger(__name__)
DEPTH = 2  # Batches that wait for the loop.
LEAVE_SECONDS = 5.0  # Of waiting for the thread, which may be making a batch.
# Of waiting for a thread in the data set, which may hang there, or wait for the loop:
# so many, or some of the median batch. The longest may have waited for a compilation.
BUSY_SECONDS, BUSY_TIMES, REMEMBERED = 10.0, 10.0, 100
BUSY = (
    "the batch of step %d takes more than %.0f s: it hangs, or waits for the loop; "
    "what is read beside it may be wrong, where it shares a buffer or a file's position"
)
# Seconds to make a step's batch and put it on the devices, below which a thread takes
# more from the loop (they share the interpreter's lock) than it hides.
CHEAP = 4e-4
TRIAL, SLOW = 8, 10.0
# Batches that travel at once with one step a call, and their bytes, at most.
STACK, STACK_BYTES = 50, 2**22  # Why: docs/decisions/training.md#stacks
Ends = Callable[[int], bool]  # Of a step: if a call ends with it.
Call = tuple[range, Any]  # Its steps, counted from 1, and arrays.


class StagedBatch(NamedTuple):  # Why: docs/decisions/house.md#staged-batch
    """Row numbers of a batch, and the staged training set to gather them from."""

    arrays: dict[str, jax.Array]
    rows: dict[str, jax.Array]


class Batches(contextlib.AbstractContextManager):
    """Context of an iterator, which `make` makes; each loop over it has its own."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._make = make

    def __enter__(self) -> Iterator[Any]:
        self._context = self._make()
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        with self._make() as batches:
            yield from batches


class Feed:
    """Feed of a train step: this process's rows of each batch, put on its devices.

    Attributes:
      steps_per_call: steps of a call.
      stack: batches that travel to the devices at once, one of them at a step; 1 for
        staged data.
      batch_size: examples in a batch of all processes.
      example: shapes of a batch of all processes.
      staged: shapes and shardings of the staged set; None where it is on the host.
      reading: held while a batch is read: a data set may use its memory or file again.

    Raises:
      ConfigError: the data cannot be staged, or batches of several shapes stacked.
      PlacementError: devices and micro-batches do not divide the batch.
    """

    def __init__(self, experiment: "Experiment", devices: DeviceManager) -> None:
        self._devices, self._experiment = devices, experiment
        self.reading = threading.Lock()
        # The batch that is read, one that was not waited for, and seconds of others.
        self._step, self._passed, self._seconds = -1, None, deque([0.0], REMEMBERED)
        self._source, self.staged = experiment.data.train, None
        self._own = own_rows(devices.processes, self._source)
        self.steps_per_call = self.stack = experiment.steps_per_call or 1
        example, *further = each_shape(self._source)
        if further and self.steps_per_call > 1:
            raise _several_shapes(self.steps_per_call, 1 + len(further))
        rows = self._own(example)
        self.batch_size = check_host_batch(rows) * devices.processes.count
        self._example, self._kinds = rows, _kinds(rows)
        devices.check_batch_size(self.batch_size, experiment.accumulate_steps)
        self.example = canonical_shapes(example, rows=self.batch_size)
        if experiment.placement == "device":
            self._source = RowBlocks(self._source, self.batch_size, self.steps_per_call)
            arrays, self.stack = self._source.dataset.staged(), 1
            self.staged = devices.abstract(lambda x: x, canonical_shapes(arrays))
        elif self.steps_per_call == 1 and experiment.exact_elastic is None:
            size = STACK * sum(x.nbytes for x in jax.tree.leaves(rows))
            is_stacked = not further and gathers(self._source) and size <= STACK_BYTES
            self.stack = STACK if is_stacked else 1

    @property
    def placement(self) -> str:
        """Describes where the training data lives, and what inputs pass through."""
        if self.staged is not None:
            place = f"staged on each device, {self._source.size}"
        else:
            reason = self._experiment.why_on_host
            place = f"on the host, {reason or 'from where each batch travels'}"
        facts = [place, getattr(self._source, "note", "")]
        if name := self.preprocessing:
            inputs = jax.tree.leaves(inputs_of(self.example))
            dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in inputs))
            facts.append(f"{dtypes} inputs pass through {name} on the device")
        return "; ".join(filter(None, facts))

    @property
    def preprocessing(self) -> str:
        """Name of the function that inputs pass through on the device, if any."""
        preprocess = self._experiment.data.preprocess
        function = getattr(preprocess, "func", preprocess)  # Of functools.partial.
        name = getattr(function, "__name__", type(function).__name__)
        return "" if preprocess is Data._field_defaults["preprocess"] else name

    def host_shapes(self) -> list[Any]:
        """Host arrays of a call, one for each shape of batches, the largest first."""
        batches = [*map(self._own, each_shape(self._source))]
        if self.stack == 1:
            return batches
        n = self.stack
        repeat = lambda x: np.broadcast_to(x[:, None], (len(x), n, *x.shape[1:]))  # noqa: E731
        return jax.tree.map(repeat, batches)

    def abstract(self, batch: Any) -> tuple[Any, ...]:
        """Shapes and shardings of a step's last arguments, for such a host batch."""
        shapes = self._devices.abstract_batch(batch)
        return (shapes,) if self.staged is None else StagedBatch(self.staged, shapes)

    @contextlib.contextmanager
    def batches(self, start: int, stop: int) -> Iterator[Iterator[Any]]:
        """Prefetches the batches of steps `start` to `stop - 1` onto the devices."""
        make = self._put if self.staged is None else self._gather_from_staged()
        source = ahead(self._source, start, stop)
        with source, Prefetcher(make, range(start, stop)) as batches:
            yield self._devices.ledger.waits(batches)

    @contextlib.contextmanager
    def calls(self, start: int, stop: int, ends: Ends) -> Iterator[Iterator[Call]]:
        """Prefetches what each call takes: its steps, counted from 1, and arrays.

        A call ends with the last step of a stack of batches, and with each step for
        which `ends` is true; with `steps_per_call=1`, with each.
        """
        size = max(self.stack, self.steps_per_call)
        first = start - start % size  # Stacks begin at the same steps in a resumed run.
        make, errors = self._put, {}
        ends = ends if self.steps_per_call > 1 else (lambda step: True)
        if self.stack > 1:
            steps = range(start, stop)
            make = functools.partial(self._put_stack, steps=steps, errors=errors)
        elif self.staged is not None:
            make = self._gather_from_staged()
        if not gathers(self._source):
            # A data set of the user's may copy, also in the loop's thread.
            make = self._devices.implicit_transfers()(make)
        stacks = range(first, stop, size)
        # Other processes do not end their calls there.
        cuts = errors if self._devices.processes.count == 1 else ()
        cut = functools.partial(_cut, ends=ends, errors=errors, cuts=cuts)
        source = ahead(self._source, start, stop)
        # An iterator may wait for its source, which only a thread should.
        cheap = 0 if getattr(self._source, "once", False) else CHEAP * size
        with source, Prefetcher(make, stacks, cheap=cheap) as prefetched:
            arrays = self._devices.ledger.waits(prefetched)
            try:
                yield (
                    (steps, stack)
                    for n, stack in zip(stacks, arrays, strict=True)
                    for steps in cut(max(n, start), min(n + size, stop))
                )
            finally:
                errors[stop] = GeneratorExit()  # Ends a stack that is being made.

    def _next(self, step: int) -> Any:
        with self._devices.ledger.timed("data"):
            try:
                return self._source.batch(step)
            except Exception as error:
                error.add_note(f"The batch is that of step {step + 1}.")
                raise

    def _rows(self, step: int) -> Any:
        with self.reading:
            self._step, begun = step, time.monotonic()
            rows = self._own(self._next(step))
            if step != self._passed:  # Which may have waited for the loop.
                self._seconds.append(time.monotonic() - begun)
            if (kinds := _kinds(rows)) != self._kinds:
                _check_alike(self._example, rows, step)
                if self.stack > 1 and kinds[0] != self._kinds[0]:
                    raise _other_structure(kinds[0], self._kinds[0], step)
            return rows if gathers(self._source) else detached(rows)

    def read(self, step: int) -> Any:
        """Reads a step's batch again, for the loop's thread; steps count from 0."""
        with self.alone():
            return detached(without_workers(self._experiment.data.train).batch(step))

    def alone(self) -> contextlib.ExitStack:
        """Context in which no other thread reads data, unless one hangs there."""
        context = contextlib.ExitStack()
        waits = (step := self._step) != self._passed  # Once, for all of an evaluation.
        median = statistics.median(self._seconds.copy())
        seconds = max(BUSY_SECONDS, BUSY_TIMES * median) * waits
        # In two halves: a machine that was suspended wakes with one of them passed.
        if any(self.reading.acquire(timeout=seconds / 2) for _ in range(2)):
            context.callback(self.reading.release)
        elif waits:
            if self._passed is None:
                logger.warning(BUSY, step + 1, seconds)
            self._passed = step
        return context

    def _put(self, step: int) -> Any:
        return self._devices.shard(self._rows(step))

    def _put_stack(self, first: int, steps: range, errors: dict[int, Exception]) -> Any:
        """Puts a stack of batches on the devices: arrays [B, steps, ...]."""
        if gathers(self._source):
            with contextlib.suppress(PlacementError):  # Raised at its step, below.
                return self._devices.shard(self._gather(first))
        return self._devices.shard(self._read_stack(first, steps, errors))

    def _read_stack(self, first: int, steps: range, errors: dict[int, Any]) -> Any:
        """Stacks batches up to the first error, which `_cut` raises at its step."""
        for error in errors.values():
            raise error
        stack = jax.tree.map(self._buffer, self._example)
        for step in range(max(first, steps.start), min(first + self.stack, steps.stop)):
            try:
                self._fill(stack, first, step)
            except Exception as error:
                errors[step] = error
            if errors:
                break
        return stack

    def _fill(self, stack: Any, first: int, step: int) -> None:
        rows = fitting(self._rows(step))
        for buffer, leaf in zip(*map(jax.tree.leaves, (stack, rows)), strict=True):
            if leaf.shape[1:] != buffer.shape[2:]:
                raise _other_shape(rows, self._example, step)
            buffer[:, step - first] = leaf

    def _gather(self, first: int) -> Any:
        """Gathers the rows of a stack on the host: arrays [B, steps, ...]."""
        with self._devices.ledger.timed("data"):
            rows = self._own(self._source.row_block(first // self.stack, self.stack))
            batch = self._source.gather(self._source.staged(), rows.reshape(-1))
            return jax.tree.map(lambda x: x.reshape(*rows.shape, *x.shape[1:]), batch)

    def _buffer(self, x: np.ndarray) -> np.ndarray:
        buffer = host_buffer((len(x), self.stack, *x.shape[1:]), x.dtype)
        buffer.fill(0)  # Also for steps that are not of the run.
        return buffer

    def _gather_from_staged(self) -> Callable[[int], StagedBatch]:
        """Stages the set; makes the function that puts row numbers on the devices."""
        arrays = self._devices.replicate(self._experiment.data.train.staged())
        block, rows = None, None

        def make(step: int) -> StagedBatch:
            nonlocal block, rows
            # Why: docs/decisions/training.md#row-numbers
            if (latest := self._next(step)) is not block:
                block, rows = latest, self._devices.shard(self._own(latest))
            return StagedBatch(arrays, rows)

        return make

    def gathering(self, gradients: Callable, of_calls: bool = False) -> Callable:
        """Makes gradients of what `batches` gives, or `calls`: a stack of batches."""
        stacked = of_calls and self.stack > 1
        if self.staged is None and not stacked:
            return gradients

        @functools.wraps(gradients)
        def differentiate(state: TrainState, frozen: hk.Params, *arrays: Any) -> Any:
            if stacked:
                place = state.step % self.stack
                take = lambda x: jax.lax.dynamic_index_in_dim(x, place, 1, False)  # noqa: E731
                return gradients(state, frozen, jax.tree.map(take, *arrays))
            return gradients(state, frozen, self._source.gather(*arrays, state.step))

        return differentiate


def _cut(start: int, stop: int, ends: Ends, errors: Any, cuts: Any) -> Iterator[range]:
    """Cuts `start` to `stop - 1` into calls, of steps from 1, none with an error."""
    first = start + 1
    for step in range(start, stop):
        if step + 1 == stop or step + 1 in cuts or ends(step + 1):
            for error in filter(None, map(errors.get, range(first - 1, step + 1))):
                raise error
            yield range(first, step + 2)
            first = step + 2


def _several_shapes(steps: int, count: int) -> ConfigError:
    return ConfigError(
        f"config.steps_per_call={steps} needs batches of one shape, and these have "
        f"{count}; possible is 1"
    )


def _other_shape(batch: Any, first: Any, step: int) -> ConfigError:
    old, new = leaves_by_path(first), leaves_by_path(batch)
    path = next(path for path, leaf in new.items() if leaf.shape != old[path].shape)
    return ConfigError(
        f"{path} has shape {list(new[path].shape)} in the batch of step {step + 1} and "
        f"{list(old[path].shape)} in the first; with config.steps_per_call above 1 all "
        "batches have one shape"
    )


def _other_structure(new: Any, first: Any, step: int) -> ConfigError:
    return ConfigError(
        f"the batch of step {step + 1} is a {new}, and the first a {first}: what is no "
        "array differs, as a name; with config.steps_per_call above 1 all batches have "
        "one structure"
    )


def _kinds(batch: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(batch)
    kinds = ((type(x), getattr(x, "dtype", None), np.shape(x)[:1]) for x in leaves)
    return [structure, *kinds]


def _check_alike(first: Any, batch: Any, step: int) -> None:
    """Raises `ConfigError` for a batch of other leaves, rows or dtypes than the first.

    Its step would be compiled anew, and weigh as much as one with more rows.
    """
    check_host_batch(batch)
    expected, actual = (
        leaves_by_path(jax.tree.map(lambda x: f"{x.dtype} of {len(x)} rows", tree))
        for tree in (first, batch)
    )
    paths = (k for k in expected | actual if expected.get(k) != actual.get(k))
    if (path := next(paths, None)) is not None:
        raise ConfigError(
            f"{path} is {actual.get(path, 'absent')} in the batch of step {step + 1}, "
            f"and {expected.get(path, 'absent')} in the first; all batches of a run "
            "have as many examples and the same dtypes: leave out a last one that is "
            "shorter"
        )


class Prefetcher:
    """Iterates over `make(step)` of each of the steps, `DEPTH` of them ahead of time.

    `make` gives the batch of a step, or those of several from it on, in the background
    thread and in order; its error is raised at its step. Leaving this context manager
    stops the thread. Once `TRIAL` in turn took fewer seconds than `cheap`, each is made
    when it is asked for, until one takes `SLOW` times as long.
    """

    # Why: docs/decisions/training.md#prefetch-thread
    def __init__(
        self, make: Callable[[int], Any], steps: range, cheap: float = 0
    ) -> None:
        self._make, self._steps, self._cheap = make, steps, cheap
        self._left = iter(steps)
        # Two queues in C, one of them of free places, are faster than a `queue.Queue`.
        self._ready, self._places = queue.SimpleQueue(), queue.SimpleQueue()
        for _ in range(DEPTH):
            self._places.put(None)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Prefetcher":
        self._start()
        return self

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._places.put(None)  # The thread may wait for one, or for storage.
        if self._thread is not None:
            self._thread.join(LEAVE_SECONDS)

    def __iter__(self) -> Iterator[Any]:
        for _ in self._steps:
            if self._thread is None:
                begun = time.perf_counter()
                batch = self._make(next(self._left))
                if time.perf_counter() - begun > SLOW * self._cheap:
                    self._start()
                yield batch
                continue
            batch, error, is_last = self._ready.get()
            self._places.put(None)
            if error is not None:
                raise error
            if is_last:
                self._thread.join()
                self._thread = None
            yield batch

    def _run(self) -> None:
        cheap = 0
        for step in self._left:
            begun = time.perf_counter()
            try:
                batch, error = self._make(step), None
            except BaseException as raised:  # Raised by `__iter__`, at its step.
                batch, error = None, raised
            cheap = cheap + 1 if time.perf_counter() - begun < self._cheap else 0
            self._places.get()
            self._ready.put((batch, error, cheap == TRIAL))
            if self._stopped.is_set() or error is not None or cheap == TRIAL:
                return
