"""Data that is staged once on the devices, so that no bytes travel in a step."""

import dataclasses
import functools
from typing import Any

import numpy as np

from haiku_template.errors import ConfigError

BLOCK_BYTES, BLOCK_STEPS = 2**20, 1024  # Of row numbers that travel at once.


def why_not_staged(dataset: Any) -> str:
    """Why a data set cannot be staged on devices; "" if it can."""
    size = getattr(dataset, "staged_size", None)
    if size is None:
        return "its batches are made on the host"
    if size[0] >= 2**31:
        return (
            f"it has {size[0]:,} rows ({size[1] / 2**30:.2f} GiB), and the 32-bit "
            f"numbers that devices count with reach {2**31 - 1:,}"
        )
    return ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowBlocks:
    """The row numbers of many steps at once, in place of the batches themselves.

    Attributes:
      dataset: its batches are rows of arrays. It says how many rows and bytes they have
        (`staged_size`; None where batches need more than gathering), and gives them
        (`staged`), the row numbers of a step (`rows`), and the batch that some rows
        make, the same of NumPy and of JAX arrays (`gather`); see `ArrayDataset`.
      batch_size: B.
    """

    dataset: Any
    batch_size: int

    def __post_init__(self) -> None:
        reason = why_not_staged(self.dataset)
        if reason:
            raise ConfigError(
                f"data.placement=device cannot be had with this data set: {reason}; "
                "possible are host and auto"
            )

    @property
    def size(self) -> str:
        """What is staged, in words."""
        return f"{self.dataset.staged_size[1]:,} bytes; batches are gathered there"

    @property
    def steps(self) -> int:
        """How many steps one block is for."""
        return min(max(BLOCK_BYTES // (4 * self.batch_size), 1), BLOCK_STEPS)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`rows`, int32 [B, steps]: the same object for each step of a block."""
        return _block(self, step // self.steps)

    def gather(self, arrays: dict[str, Any], block: Any, step: Any) -> dict[str, Any]:
        """On the devices: the batch of a step, from one device's share of a block."""
        return self.dataset.gather(arrays, block["rows"][:, step % self.steps])


@functools.lru_cache(maxsize=2)
def _block(blocks: RowBlocks, index: int) -> dict[str, np.ndarray]:
    first = index * blocks.steps
    columns = [blocks.dataset.rows(first + n) for n in range(blocks.steps)]
    return {"rows": np.stack(columns, axis=1).astype(np.int32)}
