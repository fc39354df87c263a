"""Checks of placement: location of every array, donated memory, leaked tracers."""

import contextlib
import numbers
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from haiku_template.devices.layout import HOST, Layout
from haiku_template.errors import PlacementError, counted, some
from haiku_template.params import leaves_by_path

if TYPE_CHECKING:
    from haiku_template.devices.manager import DeviceManager

DELETED = (
    "deleted: a compiled step has taken over its memory, or that of the array that it "
    "was made from; use what that step returned"
)


def device_index(device: jax.Device) -> int:
    """Index that `--device` counts by: among this host's devices of the platform."""
    local = device.local_hardware_id
    return device.id if local is None else local


def device_name(device: jax.Device) -> str:
    """Name of a device as `--device` writes it: `cpu:0`."""
    return f"{device.platform}:{device_index(device)}"


def describe(leaf: Any) -> str:
    """Location of an array: `cpu:0`, `gpu:0-3 replicated`, `host (NumPy)`."""
    if not isinstance(leaf, jax.Array):
        return "host (NumPy)"
    if not is_concrete(leaf):
        return "nowhere (tracer)"
    if leaf.is_deleted():
        return "nowhere (deleted)"
    platform = next(iter(leaf.devices())).platform
    ids = sorted(map(device_index, leaf.devices()))
    if len(ids) == 1:
        return f"{platform}:{ids[0]}"
    consecutive = ids[-1] - ids[0] == len(ids) - 1
    names = f"{ids[0]}-{ids[-1]}" if consecutive else ",".join(map(str, ids))
    layout = "replicated" if leaf.is_fully_replicated else "sharded"
    return f"{platform}:{names} {layout}"


def is_concrete(leaf: Any) -> bool:
    """Tests for a JAX array that is no tracer."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def shaped(leaf: Any) -> str:
    """Dtype and shape of a leaf: `float32[3, 4]`."""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}"


class Placement(NamedTuple):
    """Placement of one leaf of a tree, with a verdict."""

    path: str  # As `jax.tree_util.keystr` writes it.
    shape: tuple[int, ...]
    dtype: str
    bytes: int  # On each device that holds a part.
    where: str  # Devices and layout, as `describe` gives them.
    committed: bool  # False if nobody placed it: computations need not follow it.
    memory_kind: str  # `device`, `pinned_host`, ...; empty unless it is a JAX array.
    verdict: str  # Fault and remedy; empty without a fault.


def audit(
    devices: "DeviceManager", tree: Any, layout: Layout | None = None
) -> list[Placement]:
    """Placement of each leaf of a state, with a verdict for each that is astray.

    Without a layout every leaf should be replicated.
    """
    return [_placement(*row) for row in _verdicts(devices, tree, layout)]


def _verdicts(
    devices: "DeviceManager", tree: Any, layout: Layout | None
) -> Iterator[tuple[str, Any, str]]:
    everyone, leaves = devices.everyone, leaves_by_path(tree).items()
    shardings = jax.tree.leaves((layout or Layout(everyone)).of(tree))
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        is_here = is_concrete(leaf) and not leaf.is_deleted()
        is_right = is_here and leaf.sharding == sharding
        yield path, leaf, "" if is_right else _verdict(leaf, everyone, sharding)


def _placement(path: str, leaf: Any, verdict: str) -> Placement:
    size, committed, kind = 0, False, ""
    if not isinstance(leaf, jax.Array):
        size = np.asarray(leaf).nbytes
    elif is_concrete(leaf) and not leaf.is_deleted():
        size = max(shard.data.nbytes for shard in leaf.addressable_shards)
        committed, kind = leaf.committed, leaf.sharding.memory_kind or ""
    return Placement(
        path,
        np.shape(leaf),
        str(getattr(leaf, "dtype", type(leaf).__name__)),
        size,
        describe(leaf),
        committed,
        kind,
        verdict,
    )


def _verdict(
    leaf: Any, devices: Sequence[jax.Device], sharding: jax.sharding.Sharding
) -> str:
    """Fault of a leaf that is to have a sharding on the devices; "" for none."""
    if not isinstance(leaf, jax.Array):
        return "in host memory (NumPy): put it on the devices with devices.replicate"
    if not is_concrete(leaf):
        return f"a tracer left by init: {REMEDY}"
    if leaf.is_deleted():
        return DELETED
    if leaf.devices() != set(devices):
        return _elsewhere(leaf, devices)
    kind = leaf.sharding.memory_kind  # Why: docs/decisions/devices.md#memory-kind
    if kind != sharding.memory_kind == HOST:
        return f"in {kind} memory, where the layout has it in {HOST}: use devices.init"
    if kind not in (None, sharding.memory_kind, devices[0].default_memory().kind):
        return f"in {kind} memory, and not the devices' own: use devices.replicate"
    if leaf.is_fully_replicated == sharding.is_fully_replicated:
        return ""
    if leaf.is_fully_replicated:
        return "replicated, where the layout shards it: use devices.init"
    if leaf.ndim and leaf.shape[0] == len(leaf.devices()):
        return (
            "a stacked copy, one entry a device: use devices.replicate, which adds "
            "no leading axis"
        )
    return "sharded, where the layout replicates it: use devices.replicate"


def _elsewhere(leaf: jax.Array, devices: Sequence[jax.Device]) -> str:
    locations = leaf.devices()
    if locations < set(devices):
        return (
            f"on {len(locations)} of the {len(devices)} devices: make it with "
            "devices.init, or use devices.replicate"
        )
    if not leaf.committed:
        return (
            "uncommitted, on a device that this run does not use: it was made under "
            "jax.default_device or devices.on_host, or outside them (they hold for "
            "their own thread alone), and each use moves all of it; use "
            "devices.replicate"
        )
    if {d.platform for d in locations} == {"cpu"} and devices[0].platform != "cpu":
        return "committed to the CPU, as by from_dlpack: use devices.replicate"
    return "on devices that this run does not use: use devices.replicate"


def check(devices: "DeviceManager", tree: Any, layout: Layout | None = None) -> None:
    """Raises `PlacementError` unless every leaf is where `audit` expects it."""
    faults = [_placement(*row) for row in _verdicts(devices, tree, layout) if row[-1]]
    if faults:
        raise _astray(*faults)


def _astray(first: Placement, *others: Placement) -> PlacementError:
    clause = f"; so are {some(row.path for row in others)}" * bool(others)
    return PlacementError(
        f"{first.path} ({first.dtype}{list(first.shape)}, {first.where}) is "
        f"{first.verdict}{clause}"
    )


def check_batch_size(
    devices: "DeviceManager", batch_size: int, accumulate_steps: int = 1
) -> int:
    """Rows of a device's share; `PlacementError` names the nearest possible sizes."""
    n = devices.num_devices
    is_whole = type(batch_size) is int or isinstance(batch_size, numbers.Integral)
    if not is_whole or batch_size < 1 or batch_size % (n * accumulate_steps):
        raise _uneven(batch_size, n, accumulate_steps)
    return batch_size // n


def _uneven(batch_size: Any, n: int, accumulate_steps: int) -> PlacementError:
    if not isinstance(batch_size, numbers.Integral):
        return PlacementError(
            f"a batch size is a whole number of examples, not {batch_size!r}"
        )
    nearest = nearest_sizes(batch_size, n * accumulate_steps)
    times = f" x {accumulate_steps} accumulation steps" if accumulate_steps > 1 else ""
    return PlacementError(
        f"a batch of {counted(batch_size, 'examples')} cannot be sharded evenly over "
        f"{counted(n, 'devices')}{times}; the nearest batch sizes that can are "
        f"{nearest}"
    )


def nearest_sizes(rows: int, divisor: int) -> str:
    """Multiples of a divisor, but 0, next to a number of rows, in words."""
    below = rows // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def audit_table(rows: Sequence[Placement]) -> Group:
    """Table of what `audit` found, for `rich.print`; 80 columns are enough.

    Leaves with the same placement share a table under that placement. Faults come last,
    where a terminal still shows them.
    """
    alike: dict[Any, list[Placement]] = {}
    for row in rows:
        alike.setdefault(row[-4:], []).append(row)
    tables: list[Any] = []
    for facts, group in sorted(alike.items(), key=lambda item: bool(item[0][-1])):
        where, committed, kind, verdict = facts
        if kind:
            where += f"; {'un' * (not committed)}committed; memory kind {kind}"
        shared = Table.grid(padding=(0, 1))
        shared.add_row("where", where)
        shared.add_row("verdict", verdict or "ok", style="bold" * bool(verdict))
        leaves = Table(box=None, padding=(0, 0, 0, 2))
        leaves.add_column("path", overflow="fold")
        leaves.add_column("shape", no_wrap=True)
        leaves.add_column("dtype", no_wrap=True)
        leaves.add_column("bytes", no_wrap=True, justify="right")
        for row in group:
            shape = "x".join(map(str, row.shape)) or "scalar"
            # As Text: brackets in a path are no markup.
            leaves.add_row(Text(row.path), shape, row.dtype, f"{row.bytes:,}")
        tables += ["", shared, leaves]
    return Group(*tables[1:])


REMEDY = (
    "jax.jit or jax.lax.scan around Haiku modules inside hk.transform leaves tracers; "
    "use hk.scan or hk.remat, or jit outside the transform"
)
PLACE = re.compile(r"(\S+\.py:\d+)(?::\d+)? (?:\(|traced for)")


@contextlib.contextmanager
def leaks_named(make: Callable[..., Any] | None = None, *args: Any) -> Iterator[None]:
    """Turns JAX's page about a leaked tracer into a `PlacementError` of one sentence.

    `make(*args)` is called again to name the leaves.
    """  # Why: docs/decisions/devices.md#leaked-tracers
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise _leak(error, make, *args) from error


def _leak(error: Exception, make: Callable[..., Any] | None, *args: Any) -> Exception:
    places = [p for p in PLACE.findall(str(error)) if "site-packages" not in p]
    kind = re.search(r"with type (\S+)", str(error))
    results: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # `make` may leak before it returns.
        results = leaves_by_path(make(*args) if make else {})
    leaves = [k for k, x in results.items() if isinstance(x, jax.core.Tracer)]
    return PlacementError(
        f"{', '.join(leaves[:4]) or 'a value'}{' and others' * (len(leaves) > 4)} "
        f"of type {kind[1] if kind else 'unknown'} made at "
        f"{places[-1] if places else 'an unknown place'} is a tracer that leaks "
        f"out of its trace: {REMEDY}, and keep no array of a model in a list, an "
        "attribute or a global"
    )
