"""Checks of placement: location of every array, donated memory, leaked tracers."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from haiku_template.errors import PlacementError

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
    """Location of an array: `cpu:0`, `gpu:0-3 whole on each`, `host (NumPy)`."""
    if not isinstance(leaf, jax.Array):
        return "host (NumPy)"
    if not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
        return "nowhere (deleted)"
    devices = sorted(leaf.devices(), key=device_index)
    ids = [device_index(device) for device in devices]
    if len(ids) == 1:
        return f"{devices[0].platform}:{ids[0]}"
    consecutive = ids == list(range(ids[0], ids[-1] + 1))
    names = f"{ids[0]}-{ids[-1]}" if consecutive else ",".join(map(str, ids))
    layout = "whole on each" if leaf.is_fully_replicated else "split"
    return f"{devices[0].platform}:{names} {layout}"


class Placement(NamedTuple):
    """Placement of one leaf of a tree, with a verdict.

    Attributes:
      path: as `jax.tree_util.keystr` writes it.
      bytes: on each device that holds a part.
      where: devices and layout, as `describe` gives them.
      committed: False for arrays that nobody placed; computations need not follow them.
      memory_kind: `device`, `pinned_host`, ...; empty unless it is a JAX array.
      verdict: empty when the leaf is replicated on the devices in use; else the fault
        and its remedy.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    where: str
    committed: bool
    memory_kind: str
    verdict: str


def audit(tree: Any, devices: Sequence[jax.Device]) -> list[Placement]:
    """Lists each leaf's placement in a tree that should be replicated on `devices`."""
    return [
        _placement(jax.tree_util.keystr(path), leaf, devices)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _placement(path: str, leaf: Any, devices: Sequence[jax.Device]) -> Placement:
    verdict = _verdict(leaf, devices)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        if leaf.is_deleted():
            facts = (leaf.shape, str(leaf.dtype), 0, describe(leaf), False, "")
            return Placement(path, *facts, verdict)
        size = max(shard.data.nbytes for shard in leaf.addressable_shards)
        kind = leaf.sharding.memory_kind or ""
        facts = (leaf.shape, str(leaf.dtype), size, describe(leaf), leaf.committed)
        return Placement(path, *facts, kind, verdict)
    shape, dtype = np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__))
    where = "nowhere (tracer)" if isinstance(leaf, jax.core.Tracer) else describe(leaf)
    size = 0 if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf).nbytes
    return Placement(path, shape, dtype, size, where, False, "", verdict)


def _verdict(leaf: Any, devices: Sequence[jax.Device]) -> str:
    """Fault of a leaf that should be replicated on the devices; "" for none."""
    if isinstance(leaf, jax.core.Tracer):
        return f"a tracer left by init: {REMEDY}"
    if not isinstance(leaf, jax.Array):
        return "in host memory (NumPy): put it on the devices with devices.replicate"
    if leaf.is_deleted():
        return DELETED
    where, wanted = leaf.devices(), set(devices)
    if where == wanted:
        if leaf.is_fully_replicated:
            return ""
        if leaf.ndim and leaf.shape[0] == len(devices):
            return (
                "a stacked copy, one entry a device: use devices.replicate, which adds "
                "no leading axis"
            )
        return "split over the devices: a state is whole on each; use devices.replicate"
    if where < wanted:
        return (
            f"on {len(where)} of the {len(devices)} devices: make it with "
            "devices.init, or use devices.replicate"
        )
    if not leaf.committed:
        return (
            "uncommitted, on a device that this run does not use: it was made under "
            "jax.default_device or devices.on_host, or outside them (they hold for "
            "their own thread alone), and each use moves all of it; use "
            "devices.replicate"
        )
    if {d.platform for d in where} == {"cpu"} and devices[0].platform != "cpu":
        return "committed to the CPU, as by from_dlpack: use devices.replicate"
    return "on devices that this run does not use: use devices.replicate"


def check(tree: Any, devices: Sequence[jax.Device]) -> None:
    """Raises `PlacementError` for leaves that are not replicated on the devices."""
    faults = [leaf for leaf in audit(tree, devices) if leaf.verdict]
    if faults:
        first = faults[0]
        others = ", ".join(leaf.path for leaf in faults[1:4])
        more = f"; so are {others}" * bool(others)
        more += f" and {len(faults) - 4} more" * (len(faults) > 4)
        raise PlacementError(
            f"{first.path} ({first.dtype}{list(first.shape)}, {first.where}) is "
            f"{first.verdict}{more}"
        )


def check_alive(tree: Any, what: str = "", distinct: bool = False) -> None:
    """Raises `PlacementError` if a leaf was deleted: several devices crash with it.

    `distinct` also refuses an array that is in the tree twice and cannot be donated
    twice; `what` begins the message.
    """
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    leaves = [x for x in leaves if not isinstance(x, jax.core.Tracer)]
    once = not distinct or len({id(leaf) for leaf in leaves}) == len(leaves)
    if once and not any(leaf.is_deleted() for leaf in leaves):
        return  # Without the names, which take longer than the step's own call.
    seen: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not any(leaf is known for known in leaves):
            continue
        name = f"{what}{jax.tree_util.keystr(path)}"
        facts = f"{name} ({leaf.dtype}{list(leaf.shape)}) is"
        if leaf.is_deleted():
            raise PlacementError(f"{facts} {DELETED}")
        if id(leaf) in seen:
            raise PlacementError(
                f"{facts} the same array as {seen[id(leaf)]}, and a step cannot take "
                "over its memory twice; make the state with devices.init, or a copy "
                "with jnp.copy"
            )
        seen[id(leaf)] = name


def astray(tree: Any, devices: Sequence[jax.Device]) -> str:
    """Description of the first leaf that is not on exactly these devices; "" if none.

    Unlike `check` it takes any layout: a batch is split, a state is whole.
    """
    wanted = set(devices)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer):
            continue
        if not isinstance(leaf, jax.Array) or leaf.devices() != wanted:
            dtype, shape = getattr(leaf, "dtype", type(leaf).__name__), np.shape(leaf)
            return (
                f"{jax.tree_util.keystr(path) or 'array'} ({dtype}{list(shape)}) is on "
                f"{describe(leaf)}, and using it would be a copy that nobody asked "
                "for; give it with devices.replicate or devices.shard"
            )
    return ""


def audit_table(rows: Sequence[Placement]) -> Group:
    """Table of what `audit` found, for `rich.print`; 80 columns are enough.

    Leaves with the same placement share a table under that placement. Faults come last,
    where a terminal still shows them.
    """
    alike: dict[Any, list[Placement]] = {}
    for row in rows:
        key = (row.verdict, row.where, row.committed, row.memory_kind)
        alike.setdefault(key, []).append(row)
    groups = sorted(alike.values(), key=lambda group: bool(group[0].verdict))
    parts = [part for group in groups for part in ("", *_tables(group))]
    return Group(*parts[1:])


def _tables(group: list[Placement]) -> tuple[Table, Table]:
    """Tables of the facts that the rows share, and of the leaves."""
    first = group[0]
    facts = [first.where]
    if first.memory_kind:
        facts += ["committed" if first.committed else "uncommitted"]
        facts += [f"memory kind {first.memory_kind}"]
    shared = Table.grid(padding=(0, 1))
    shared.add_row("where", "; ".join(facts))
    shared.add_row("verdict", first.verdict or "ok", style="bold" * bool(first.verdict))
    leaves = Table(box=None, padding=(0, 0, 0, 2))
    leaves.add_column("path", overflow="fold")
    leaves.add_column("shape", no_wrap=True)
    leaves.add_column("dtype", no_wrap=True)
    leaves.add_column("bytes", no_wrap=True, justify="right")
    for row in group:
        shape = "x".join(map(str, row.shape)) or "scalar"
        # As Text: brackets in a path are no markup.
        leaves.add_row(Text(row.path), shape, row.dtype, f"{row.bytes:,}")
    return shared, leaves


REMEDY = (
    "jax.jit or jax.lax.scan around Haiku modules inside hk.transform leaves tracers; "
    "use hk.scan or hk.remat, or jit outside the transform"
)
PLACE = re.compile(r"(\S+\.py:\d+)(?::\d+)? (?:\(|traced for)")


@contextlib.contextmanager
def leaks_named(make: Callable[[], Any] | None = None) -> Iterator[None]:
    """Turns JAX's page about a leaked tracer into a sentence.

    `make` is the traced function: called again, it tells which of its results are
    leaked tracers. `hk.transform`'s init returns such parameters in silence.

    Raises:
      PlacementError: names these results, and where the value was made.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise leak_error(error, make) from error


def leak_error(
    error: jax.errors.UnexpectedTracerError, make: Callable[[], Any] | None = None
) -> PlacementError:
    """Error for a leaked tracer, as `leaks_named` raises it."""
    places = [p for p in PLACE.findall(str(error)) if "site-packages" not in p]
    kind = re.search(r"with type (\S+)", str(error))
    leaves = _leaked_leaves(make) if make is not None else []
    return PlacementError(
        f"{', '.join(leaves[:4]) or 'a value'}{' and others' * (len(leaves) > 4)} "
        f"of type {kind[1] if kind else 'unknown'} made at "
        f"{places[-1] if places else 'an unknown place'} is a tracer that leaks "
        f"out of its trace: {REMEDY}, and keep no array of a model in a list, an "
        "attribute or a global"
    )


def _leaked_leaves(make: Callable[[], Any]) -> list[str]:
    """Paths of the results that are tracers outside any trace."""
    try:
        tree = make()
    except Exception:  # It fails for the same reason before it has results.
        return []
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.core.Tracer)
    ]
