"""The transfer ledger: bytes copied to and from devices, and seconds waited."""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax


class Ledger:
    """Adds up amounts by name, from any thread.

    The device manager enters what it does:

    * `bytes_to_devices`, `bytes_from_devices`: of copies that were asked for; one that
      puts an array whole on four devices counts four times.
    * `to_devices`, `from_devices`: seconds that these copies took.
    * `dispatch`: seconds in calls of compiled steps, until they returned.
    * `compute`: seconds waited for the devices to finish.

    and the loop `data` (seconds in which a batch was made) and `waiting` (seconds
    waited for one that was not there yet).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, name: str, amount: float) -> None:
        """Enters an amount: bytes or seconds."""
        with self._lock:
            self._totals[name] += amount

    def add_since(self, name: str, begun: float) -> None:
        """Enters the seconds since `begun`, a reading of `time.perf_counter()`."""
        self.add(name, time.perf_counter() - begun)

    def arrived(self, placed: Any, begun: float, copies: int = 1) -> Any:
        """Waits for a copy to the devices that was asked for at `begun`; enters it."""
        jax.block_until_ready(placed)
        self.add_since("to_devices", begun)
        self.add("bytes_to_devices", copies * tree_bytes(placed))
        return placed

    def totals(self) -> Counter[str]:
        """Everything entered so far; what never was, counts as 0."""
        with self._lock:
            return self._totals.copy()

    def waits(self, items: Iterable[Any]) -> Iterator[Any]:
        """The same items; the seconds until each is there are `waiting`."""
        iterator = iter(items)
        while True:
            begun = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self.add_since("waiting", begun)
            yield item


def tree_bytes(tree: Any) -> int:
    """The bytes of all leaves; PRNG keys are those of their key data."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
