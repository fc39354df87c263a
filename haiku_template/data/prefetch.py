"""Prefetching: a background thread makes the next batches and puts them on devices."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

LEAVE_SECONDS = 5.0  # How long leaving waits for a batch that is being made.


class Prefetcher:
    """Iterates over `make(start), ..., make(stop - 1)`, `depth` of them ahead of time.

    `make` gives the batch of a step, in the background thread and in order; its error
    is raised at its step. Leaving this context manager stops the thread.
    """

    def __init__(
        self, make: Callable[[int], Any], start: int, stop: int, depth: int = 2
    ) -> None:
        self._make = make
        self._steps = range(start, stop)
        # Two queues in C, one of them of free places, are faster than a `queue.Queue`.
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._places: queue.SimpleQueue = queue.SimpleQueue()
        for _ in range(depth):
            self._places.put(None)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def __enter__(self) -> "Prefetcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._places.put(None)  # It may be waiting for one; or for storage, for ever.
        self._thread.join(LEAVE_SECONDS)

    def __iter__(self) -> Iterator[Any]:
        for _ in self._steps:
            batch, error = self._ready.get()
            self._places.put(None)
            if error is not None:
                raise error
            yield batch

    def _run(self) -> None:
        for step in self._steps:
            try:
                item = (self._make(step), None)
            except BaseException as error:  # Handed to the thread that iterates.
                item = (None, error)
            self._places.get()
            self._ready.put(item)
            if self._stopped.is_set() or item[1] is not None:
                return
