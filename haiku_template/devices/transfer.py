"""Transfers: the two functions that JAX removed, checks of host trees, the ledger.

`jax.device_put_sharded` and `jax.device_put_replicated` left JAX in 0.10. Both give
arrays with a leading axis of one entry a device, as `pmap` takes them. Here every shard
goes straight to its own device, not through host stacks or device 0.
"""

import functools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haiku_template.devices.checks import describe, nearest_sizes
from haiku_template.devices.layout import AXIS_NAME as AXIS_NAME
from haiku_template.devices.layout import HOST, sharding_on
from haiku_template.devices.processes import Processes
from haiku_template.errors import PlacementError, counted
from haiku_template.params import leaves_by_path

# Held while arrays are copied to devices, and in a program's first call on a GPU.
COPYING = threading.RLock()


def device_put_sharded(shards: Sequence[Any], devices: Sequence[jax.Device]) -> Any:
    """Puts `shards[i]` on `devices[i]` and joins them along a new leading axis.

    Shards are pytrees of one structure; corresponding leaves (NumPy or JAX arrays, PRNG
    keys, scalars) have one shape S and one dtype, and become [len(devices), *S].

    Raises:
      PlacementError: not one shard for each of distinct devices, or shards that differ
        in structure, shape or dtype; the message names the leaf.
      TypeError: `shards` is no sequence, or a leaf no number or array of numbers.
    """
    devices = list(devices)
    if not devices or len(set(devices)) != len(devices):
        raise PlacementError(f"one or more distinct devices are needed, not {devices}")
    if not isinstance(shards, Sequence):
        raise TypeError(
            "device_put_sharded takes a sequence with one pytree for each device, and "
            f"got {type(shards).__name__}; of an array x [n, ...] it is list(x)"
        )
    if len(shards) != len(devices):
        raise PlacementError(
            f"device_put_sharded got {counted(len(shards), 'shards')} for "
            f"{counted(len(devices), 'devices')}; it takes one shard for each device"
        )
    first, *structures = map(jax.tree.structure, shards)
    for i, structure in enumerate(structures, 1):
        if structure != first:
            is_leaf = first == jax.tree.structure(0)  # None is no leaf.
            raise (TypeError if is_leaf else PlacementError)(
                f"the shards differ in structure: shard 0 is {first}, shard {i} is "
                f"{structure}"
            )
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: _join(jax.tree_util.keystr(path), leaves, devices),
        *shards,
    )


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Puts a copy of `tree` on every device, along a new leading axis.

    Leaves and errors are those of `device_put_sharded`.
    """
    return device_put_sharded([tree] * len(devices), devices)


def by_device(batch: Any, n: int) -> Any:
    """Reshapes arrays [B, ...] to [n, B / n, ...]."""
    return jax.tree.map(lambda x: np.reshape(x, (n, -1, *x.shape[1:])), batch)


def own_rows(processes: Processes, dataset: Any = None) -> Callable[[Any], Any]:
    """Makes the function that slices this process's rows of arrays [B, ...].

    It leaves batches of a data set that reads shares, as its `spec` says, as they are.
    """
    if processes.count == 1:
        return lambda batch: batch
    return functools.partial(_cut_rows, processes, getattr(dataset, "spec", None))


def _cut_rows(processes: Processes, spec: Any, batch: Any) -> Any:
    rows, n = len(jax.tree.leaves(batch)[0]), processes.count
    if getattr(spec, "process_count", 1) == n and rows == spec.batch_size // n:
        return batch
    if rows % n:
        raise PlacementError(
            f"a batch of {counted(rows, 'examples')} cannot be sharded evenly over {n} "
            "processes; "
            f"the nearest batch sizes that can are {nearest_sizes(rows, n)}"
        )
    return jax.tree.map(lambda x: np.split(x, n)[processes.index], batch)


def device_put_batch(
    batch: Any, devices: tuple[jax.Device, ...], everyone: tuple[jax.Device, ...]
) -> Any:
    """Puts row block i of n on device i: [n, B / n, ...]; [B, ...] where n is 1.

    With several processes these are rows of one, and the arrays span `everyone`.
    """
    if len(everyone) == 1:
        # Faster than with a sharding, and with what is the default if it is not given.
        return jax.device_put(batch, devices[0], may_alias=True)
    shards = _device_put_blocks(batch, devices)
    if len(devices) == len(everyone):
        return shards
    return _spanning(shards, sharding_on(everyone, AXIS_NAME))


def _device_put_blocks(batch: Any, devices: tuple[jax.Device, ...]) -> Any:
    n = len(devices)
    if n == 1:  # Why: docs/decisions/cluster.md#one-device
        return jax.device_put(by_device(batch, n), sharding_on(devices))
    blocks = [jax.tree.map(lambda x, i=i: np.split(x, n)[i], batch) for i in range(n)]
    return device_put_sharded(blocks, devices)


def device_put_everywhere(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Replicates a tree that all processes have, on the devices of all of them."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    devices = tuple(sharding.mesh.local_devices)
    return _spanning(jax.device_put(tree, sharding_on(devices)), sharding)


def device_put_shares(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts on each device its share, of a host array that all processes have."""
    if sharding.is_fully_replicated:
        return device_put_everywhere(array, sharding)
    return jax.make_array_from_callback(np.shape(array), sharding, array.__getitem__)


def own_part(tree: Any) -> Any:
    """Local part of arrays that span processes; others as they are."""

    def local(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        devices = tuple(shard.device for shard in x.addressable_shards)
        spec = () if x.is_fully_replicated else (AXIS_NAME,)
        kind = HOST if x.sharding.memory_kind == HOST else None
        return _spanning(x, sharding_on(devices, *spec, kind=kind))

    return jax.tree.map(local, tree)


# Why: docs/decisions/cluster.md#spanning-arrays
def _spanning(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Joins this process's shards of arrays into arrays of another sharding."""

    def join(x: jax.Array) -> jax.Array:
        shards = [shard.data for shard in x.addressable_shards]
        shape = x.shape
        if not (x.is_fully_replicated and sharding.is_fully_replicated):
            here, there = len(x.sharding.device_set), len(sharding.device_set)
            shape = (x.shape[0] * there // here, *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return jax.tree.map(join, tree)


def _join(path: str, leaves: Sequence[Any], devices: list[jax.Device]) -> jax.Array:
    # As JAX sees them: int64 is int32 unless jax_enable_x64 is set, and a Python number
    # is of a weak type, which gives way to others.
    first = jax.typeof(leaves[0])
    names = [
        f"{x.dtype}{list(x.shape)}{' of a weak type' * x.weak_type}"
        for x in map(jax.typeof, leaves)
    ]
    for i, name in enumerate(names):
        if name != names[0]:
            raise PlacementError(
                f"the shards differ at leaf {path or 'root'}: shard 0 has {names[0]}, "
                f"shard {i} has {name}"
            )
    sharding = NamedSharding(Mesh(devices, AXIS_NAME), PartitionSpec(AXIS_NAME))
    if first.weak_type:
        # Only numbers are: joining arrays of single devices would make the type strong.
        numbers = jax.device_put(list(leaves), devices[0])
        return jax.device_put(jnp.stack(numbers), sharding)
    # NumPy gains its new axis as a view; a JAX array only once on its own device.
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x)[None] for x in leaves]
    shards = jax.device_put(arrays, devices)
    shards = [x if x.ndim > first.ndim else x[None] for x in shards]
    shape = (len(devices), *first.shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


CPU_ALIGNMENT = 64  # Bytes; what JAX's CPU devices ask of memory that they take over.
ARRAYS = jax.Array, jax.ShapeDtypeStruct
SAME_IN_JAX = frozenset(map(np.dtype, "?bBhHiIef"))  # Whatever jax_enable_x64 says.


def host_buffer(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialized array that CPU devices take over in place.

    `np.empty` is rarely aligned as they need it, and is then copied.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + CPU_ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % CPU_ALIGNMENT
    return memory[first : first + size].view(dtype).reshape(shape)


def host_batch(batch: Any) -> tuple[int, int, Any]:
    """Rows and bytes of a batch in host memory, and the batch in JAX's dtypes.

    Raises as `check_host_batch` and `fitting`.
    """
    rows, size = set(), 0
    for x in jax.tree.leaves(batch):
        if type(x) is not np.ndarray or x.dtype not in SAME_IN_JAX:
            break
        rows.add(x.shape[:1])
        size += x.nbytes
    else:
        if len(rows) == 1 and rows != {()}:
            return rows.pop()[0], size, batch
    count, batch = check_host_batch(batch), fitting(batch)
    return count, sum(np.asarray(x).nbytes for x in jax.tree.leaves(batch)), batch


def check_host_batch(batch: Any, subject: str = "the batch") -> int:
    """Rows of a batch in host memory; `subject` begins the message.

    `PlacementError` names a leaf on a device, without rows, or with other rows.
    """
    shapes = {type(x) is np.ndarray and x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(shapes) == 1 and (rows := shapes.pop()):
        return rows[0]
    return _check_host_leaves(batch, subject)  # With the names, which take longer.


def _check_host_leaves(batch: Any, subject: str) -> int:
    rows: dict[str, int] = {}
    for path, leaf in leaves_by_path(batch).items():
        name = f"{subject}'s {path}"
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
        raise PlacementError(f"{subject} is empty: it holds no array")
    first, size = next(iter(rows.items()))
    for name, count in rows.items():
        if count != size:
            raise PlacementError(
                f"{first} has {counted(size, 'rows')} and {name} has {count}; all "
                "leaves of a batch have one row for each example"
            )
    return size


def pad_rows(batch: Any, size: int) -> Any:
    """Pads arrays [B, ...] with rows of zeros: [size, ...]."""

    def longer(x: np.ndarray) -> np.ndarray:
        padding = np.zeros((size - len(x), *x.shape[1:]), x.dtype)
        return np.concatenate([x, padding]) if len(padding) else x

    return jax.tree.map(longer, batch)


def detached(batch: Any) -> Any:  # Why: docs/decisions/data.md#buffers
    """Copies a batch out of memory that its data set may use again."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def fitting(tree: Any) -> Any:  # Why: docs/decisions/devices.md#host-values
    """Casts NumPy leaves to JAX's dtypes; `PlacementError` if a value does not fit.

    JAX would cut off its high bits, or make it infinite, in silence.
    """
    if all(getattr(x, "dtype", None) in SAME_IN_JAX for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree_util.tree_map_with_path(_fitting, tree)


def _fitting(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | np.generic):
        _check_number(path, leaf)
        return leaf
    dtype = _dtype(path, leaf)
    if dtype == leaf.dtype:
        return leaf
    with np.errstate(over="ignore"):
        cut = leaf.astype(dtype)
    lost = cut != leaf if leaf.dtype.kind in "iu" else np.isinf(cut) & ~np.isinf(leaf)
    if np.any(lost):
        raise PlacementError(
            f"{_holds(path)} {np.asarray(leaf)[lost].flat[0]} as {leaf.dtype}, which "
            f"does not fit the {dtype} that JAX makes of it; scale or number it anew, "
            "or set jax_enable_x64"
        )
    return cut


def check_numbers(tree: Any) -> None:
    """Raises `PlacementError` for a leaf that is no number and no array."""
    if not all(isinstance(x, ARRAYS) for x in jax.tree.leaves(tree)):
        jax.tree_util.tree_map_with_path(_check_number, tree)


def _check_number(path: Any, leaf: Any) -> None:
    if isinstance(leaf, np.ndarray | np.generic):
        _dtype(path, leaf)
    is_array = hasattr(leaf, "dtype") or hasattr(leaf, "__jax_array__")
    if not is_array and not isinstance(leaf, bool | int | float | complex):
        raise PlacementError(
            f"{_holds(path)} {leaf!r}, a {type(leaf).__name__}, and devices compute "
            "with numbers alone"
        )


def on_devices(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Puts leaves on the host, or of one process's devices, where `sharding` says."""
    spans = not sharding.is_fully_addressable

    def put(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (spans and x.is_fully_addressable):
            return x
        return device_put_everywhere(x, sharding)

    return jax.tree.map(put, fitting(tree))


def _holds(path: Any) -> str:
    return f"{jax.tree_util.keystr(path) or 'the array'} holds"


def _dtype(path: Any, leaf: Any) -> np.dtype:
    """JAX's dtype for a leaf, in this machine's byte order."""
    try:
        return jax.typeof(np.empty(0, leaf.dtype.newbyteorder("="))).dtype
    except (AttributeError, TypeError) as error:
        hint = "; jax.random.key_data has its numbers" * ("key<" in str(leaf.dtype))
        raise PlacementError(
            f"{_holds(path)} {leaf.dtype}, and devices compute with numbers alone{hint}"
        ) from error


def distinct(tree: Any) -> Any:
    """Copies a JAX array that is in a tree twice, so that a step can donate both."""
    ids: set[int] = set()

    def once(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in ids:
            return jnp.copy(leaf)
        ids.add(id(leaf))
        return leaf

    return jax.tree.map(once, tree)


def first_copy(leaf: Any) -> Any:
    """A replicated leaf's copy on its first device; other leaves as they are."""
    is_replicated = isinstance(leaf, jax.Array) and leaf.is_fully_replicated
    return leaf.addressable_data(0) if is_replicated else leaf


def own(array: Any, leaf: Any) -> Any:  # Why: docs/decisions/storage.md#host-arrays
    """NumPy's array of a leaf, copied if it is a view of the host's memory."""
    on_host = isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == HOST
    return array.copy() if on_host and leaf.is_fully_replicated else array


def canonical_shapes(
    tree: Any, sharding: jax.sharding.Sharding | None = None, rows: int | None = None
) -> Any:
    """Shapes of a tree of arrays, with JAX's dtypes: float64 becomes float32.

    With `rows`, those of a batch that has so many. Raises as `fitting`.
    """

    def canonical_shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        shape = np.shape(x) if rows is None else (rows, *np.shape(x)[1:])
        return jax.ShapeDtypeStruct(shape, _dtype(path, x), sharding=sharding)

    return jax.tree_util.tree_map_with_path(canonical_shape, tree)


COMPILES = "/jax/core/compile/backend_compile_duration"
COMPILED: Counter[str] = Counter()  # Seconds of `compilation` in this process.
jax.monitoring.register_event_duration_secs_listener(
    lambda event, s, **_: COMPILED.update(compilation=s * (event == COMPILES))
)


class _Timed:
    """Context of `Ledger.timed`; one of contextlib takes twice as long."""

    __slots__ = "amounts", "ledger", "name"

    def __init__(self, ledger: "Ledger", name: str, amounts: dict[str, float]) -> None:
        self.ledger, self.name, self.amounts = ledger, name, amounts

    def __enter__(self) -> None:
        self.amounts[self.name] = COMPILED["compilation"] - time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.amounts[self.name] += time.perf_counter() - COMPILED["compilation"]
        self.ledger.add(self.amounts)


class Ledger:  # Why: docs/decisions/devices.md#ledger
    """Ledger: adds up amounts by name, from any thread.

    * `bytes_to_devices`, `bytes_from_devices`: of explicit copies; replicating an array
      on four devices counts it four times.
    * Seconds: `to_devices` and `from_devices` in these copies; `dispatch` in calls of
      compiled steps; `compute` waited for the devices; and of the loop `data` to make
      batches, and `waiting` for them. None of them counts what XLA compiles meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def add(self, amounts: dict[str, float]) -> None:
        """Adds amounts by name: bytes or seconds."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def timed(self, name: str, **amounts: float) -> "_Timed":
        """Adds the seconds that a block takes, and other amounts of it by name."""
        return _Timed(self, name, amounts)

    def totals(self) -> Counter[str]:
        """Totals by name; one that was never entered counts as 0."""
        with self._lock:
            return self._totals.copy()

    def waits(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items; seconds until each arrives count as `waiting`."""
        start = time.perf_counter()
        for item in items:
            self.add({"waiting": time.perf_counter() - start})
            yield item
            start = time.perf_counter()
