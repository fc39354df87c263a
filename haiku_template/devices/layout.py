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


def check_host_batch(batch: Any, what: str = "the batch") -> int:
    """The rows of a batch in host memory; `what` is the subject of the message.

    Raises:
      PlacementError: a leaf is on a device already, where making it cost a copy that
        nobody asked for; or it has no rows, or not as many as another. The message
        names the leaf.
    """
    rows: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = f"{what}'s {jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array):
            raise PlacementError(
                f"{name} is a JAX array on {describe(leaf)}"
                f"{' and committed there' * leaf.committed}; batches come from the "
                "host: give NumPy arrays"
            )
        if not getattr(leaf, "ndim", 0):
            raise PlacementError(
                f"{name} is {leaf!r}, without rows; each leaf of a batch is a NumPy "
                "array [B, ...], not a number or a list of numbers"
            )
        rows[name] = len(leaf)
    if not rows:
        raise PlacementError(f"{what} is empty: it holds no array")
    first, size = next(iter(rows.items()))
    for name, others in rows.items():
        if others != size:
            raise PlacementError(
                f"{first} has {size} rows and {name} has "
                f"{others}; all leaves of a batch have one row for each example"
            )
    return size


def fill_up(batch: Any, rows: int, size: int) -> Any:
    """The arrays [rows, ...] of a batch with rows of zeros appended: [size, ...]."""
    if rows == size:
        return batch

    def longer(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((size - rows, *x.shape[1:]), x.dtype)])

    return jax.tree.map(longer, batch)


def check_per_row(results: Any, batch: Any) -> None:
    """Asserts that a step's results have one entry for each row of its share.

    Raises:
      PlacementError: a leaf has not; names it.
    """
    rows = np.shape(jax.tree.leaves(batch)[0])[:1]
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if np.shape(leaf)[:1] != rows:
            raise PlacementError(
                f"the step's result {jax.tree_util.keystr(path)} has shape "
                f"{list(np.shape(leaf))} for a share of {rows[0]} rows; out='split' is "
                "for results with one entry for each row"
            )


def fitting(tree: Any) -> Any:
    """The tree with NumPy arrays of the dtypes that JAX would make of theirs.

    Raises:
      PlacementError: a value does not fit, where JAX would cut off its high bits or
        make it infinite in silence; the message names the leaf.
    """
    return jax.tree_util.tree_map_with_path(_fitting, tree)


def _fitting(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf
    try:
        dtype = jax.typeof(leaf).dtype
    except TypeError as error:
        raise PlacementError(
            f"{jax.tree_util.keystr(path) or 'the array'} holds {leaf.dtype}, and "
            "devices compute with numbers alone"
        ) from error
    if dtype == leaf.dtype:
        return leaf
    with np.errstate(over="ignore"):
        cut = leaf.astype(dtype)
    lost = cut != leaf if leaf.dtype.kind in "iu" else np.isinf(cut) & ~np.isinf(leaf)
    if np.any(lost):
        value = np.asarray(leaf)[lost].flat[0]
        raise PlacementError(
            f"{jax.tree_util.keystr(path) or 'the array'} holds {value} as "
            f"{leaf.dtype}, which does not fit the {dtype} that JAX makes of it; "
            "scale or number it anew, or set jax_enable_x64"
        )
    return cut


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
