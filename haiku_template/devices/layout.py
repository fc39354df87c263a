"""How batches are cut into shares, and what arrays will look like once placed."""

import math
from typing import Any

import jax
import numpy as np

from haiku_template.devices.audit import describe
from haiku_template.devices.errors import PlacementError

CPU_ALIGNMENT = 64  # Bytes; what JAX's CPU devices ask of memory that they take over.


def host_buffer(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that CPU devices take over in place, when it is put there.

    `np.empty` is rarely aligned as they need it, and is then held twice for a while.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + CPU_ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % CPU_ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def check_batch_size(
    batch_size: int, num_devices: int, accumulate_steps: int = 1
) -> int:
    """The rows of one device's share of a batch.

    Raises:
      PlacementError: the batch does not split evenly; names the nearest sizes.
    """
    parts = num_devices * accumulate_steps
    if batch_size % parts == 0 and batch_size > 0:
        return batch_size // num_devices
    below = batch_size // parts * parts
    nearest = f"{below} or {below + parts}" if below else f"{parts}"
    each = f" x {accumulate_steps} accumulation steps" if accumulate_steps > 1 else ""
    raise PlacementError(
        f"a batch of {batch_size} examples cannot be split evenly over "
        f"{num_devices} devices{each}; the nearest batch sizes that can are {nearest}"
    )


def check_host_batch(batch: Any, num_devices: int) -> None:
    """Asserts that a batch is in host memory, and splits over the devices.

    Raises:
      PlacementError: it does not; or a leaf is on a device already, where making it
        cost a copy that nobody asked for. The message names the leaf.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, jax.Array):
            raise PlacementError(
                f"the batch's {jax.tree_util.keystr(path)} is a JAX array on "
                f"{describe(leaf)}{' and committed there' * leaf.committed}; batches "
                "come from the host: give NumPy arrays"
            )
        if not getattr(leaf, "ndim", 0):
            raise PlacementError(
                f"the batch's {jax.tree_util.keystr(path)} is {leaf!r}, without rows; "
                "each leaf of a batch is a NumPy array [B, ...]"
            )
        check_batch_size(len(leaf), num_devices)


def shapes(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Shapes, shardings, and dtypes as JAX makes them of NumPy's.

    float64 becomes float32 unless `jax_enable_x64` is set; PRNG keys stay keys.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        dtype = x.dtype
        if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    return jax.tree.map(shape, tree)
