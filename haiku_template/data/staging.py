"""Staging: data put on the devices once, so that no bytes travel in a step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from haiku_template.errors import ConfigError

BLOCK_BYTES, BLOCK_STEPS = 2**20, 1024  # Of row numbers that travel at once.


def why_not_staged(dataset: Any) -> str:
    """Obstacle to staging a data set on devices; "" if there is none."""
    if (size := getattr(dataset, "staged_size", None)) is None:
        return "its batches are made on the host"
    if size[0] < 2**31:
        return ""
    return (
        f"it has {size[0]:,} rows ({size[1] / 2**30:.2f} GiB), and the 32-bit numbers "
        f"of devices count to {2**31 - 1:,}"
    )


def gathers(dataset: Any) -> bool:
    """Tests if batches are rows of arrays in memory, many steps a `row_block`.

    One class says so, with a `batch` of its own; that of a subclass may be another.
    """
    is_whole = {"batch", "row_block"} <= vars(type(dataset)).keys()
    return is_whole and not why_not_staged(dataset)


@dataclasses.dataclass(frozen=True, eq=False)
class RowBlocks:  # Why: docs/decisions/data.md#staged
    """Row indices of many steps at once, in place of the batches of B themselves.

    The data set has `staged_size`, `staged`, `rows` and `gather`, as `ArrayDataset`.
    A block is of a multiple of `steps_per_call` steps.
    """

    dataset: Any
    batch_size: int
    steps_per_call: int = 1

    def __post_init__(self) -> None:
        if reason := why_not_staged(self.dataset):
            raise ConfigError(
                f"data.placement=device cannot be had with this data set: {reason}; "
                "possible are host and auto"
            )

    @property
    def size(self) -> str:
        """Size of what is staged, in words."""
        return f"{self.dataset.staged_size[1]:,} bytes; batches are gathered there"

    @property
    def steps(self) -> int:
        """Number of steps in one block."""
        steps = min(BLOCK_BYTES // (4 * self.batch_size), BLOCK_STEPS)
        return max(steps // self.steps_per_call, 1) * self.steps_per_call

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`rows`, int32 [B, steps]: the same object for each step of a block."""
        return self._last_blocks(step // self.steps)

    def gather(self, arrays: dict[str, Any], block: Any, step: Any) -> dict[str, Any]:
        """Gathers a step's batch on the devices, each from its share of a block."""
        return self.dataset.gather(arrays, block["rows"][:, step % self.steps])

    @functools.cached_property
    def _last_blocks(self) -> Callable[[int], dict[str, np.ndarray]]:
        # Of the object: a cache of the module would hold its data set after the run.
        return functools.lru_cache(maxsize=2)(self._block)

    def _block(self, index: int) -> dict[str, np.ndarray]:
        first = index * self.steps
        columns = [self.dataset.rows(first + n) for n in range(self.steps)]
        return {"rows": np.stack(columns, axis=1).astype(np.int32)}
