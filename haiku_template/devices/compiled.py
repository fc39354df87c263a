"""Compiled step: its arguments are checked, its call is timed, errors name the leaf."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from haiku_template.devices import checks, convolutions, transfer
from haiku_template.devices.checks import DELETED, describe, is_concrete, shaped
from haiku_template.devices.layout import (
    AXIS_NAME,
    REPLICATED,
    in_device_memory,
    sharding_on,
)
from haiku_template.devices.operations import operations
from haiku_template.devices.packing import Packing
from haiku_template.devices.shares import on_shares
from haiku_template.devices.transfer import own_part
from haiku_template.errors import PlacementError
from haiku_template.params import leaves_by_path

if TYPE_CHECKING:
    from haiku_template.devices.manager import DeviceManager

# JAX's words for an argument that is not where the computation runs.
MISPLACED = ("Disallowed", "ncompatible devices", "match the sharding")
# And for one that was donated, or is donated twice.
GONE = ("been deleted", "donate the same buffer")
convolutions.install()
LOCK = threading.RLock()
GPU = "gpu"  # Records a graph of kernels in a first call.
ROW_BYTES = 256  # Of the scalars of a step, in a call of several (jax issue 40101).
COPY = (
    "using it would be a copy that nobody asked for; give it with devices.replicate or "
    "devices.shard"
)
SHARES = "has not one share on each device; give batches with devices.shard"
FEW = 1.6e7  # Floating-point operations of a step that one thread makes sooner.
IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
SHORT, MANY = 0.0005, 32  # Seconds of a short step, of which so many may be in flight.


@dataclasses.dataclass(eq=False)
class Pace:
    """How many steps of a program and a shape, in a row, were seen to be short."""

    short: int = 0


class InFlight(deque[tuple[jax.Array, Pace | None]]):
    """Tokens of the whole process's unfinished steps, the oldest first.

    Simulated devices share its threads, and of two programs at once each may hold those
    that the other's collective needs.
    """

    last = 0.0  # When a step was seen to end.

    def make_room(self, devices: "DeviceManager", pace: Pace | None) -> None:
        """Waits until one more step may be in flight; only one with a pace is short."""
        most, is_cpu = devices.steps_in_flight, devices.platform == "cpu"
        # Those that ended while nobody looked are at most `most`, and no measure.
        are_short = is_cpu and most > 1 and pace is not None and pace.short > 2 * most
        if len(self) < (MANY if are_short else most):
            return
        left = MANY // 2 if are_short else most - 1  # Each wait wakes a thread.
        ended = [self.popleft() for _ in range(len(self) - left)]
        with devices.ledger.timed("compute"), devices.processes.waiting():
            for token, _ in reversed(ended):
                token.block_until_ready()
        now = time.perf_counter()
        if pace is not None:
            is_short = all(x is pace for _, x in ended)
            is_short &= now - self.last < SHORT * len(ended)
            pace.short = is_short * (pace.short + len(ended))
        self.last = now


IN_FLIGHT = InFlight()


def check_alive(tree: Any, subject: str = "", distinct: bool = False) -> None:
    """Raises `PlacementError` for a deleted leaf, with which several devices crash.

    `distinct` also refuses an array that is in the tree twice, and cannot be donated.
    """
    leaves = jax.tree.leaves(tree)
    once = not distinct or len(set(map(id, leaves))) == len(leaves)
    with contextlib.suppress(AttributeError, TypeError):
        if once and not any(leaf.is_deleted() for leaf in leaves):
            return
    # Names take longer than the step's own call.
    _check_alive_by_name(tree, subject, distinct)


def _check_alive_by_name(tree: Any, subject: str, distinct: bool) -> None:
    path_of: dict[int, str] = {}
    for path, leaf in leaves_by_path(tree).items():
        if not is_concrete(leaf):
            continue
        if leaf.is_deleted():
            raise PlacementError(f"{subject}{path} ({shaped(leaf)}) is {DELETED}")
        first = path_of.setdefault(id(leaf), path)
        if distinct and first != path:
            raise PlacementError(
                f"{subject}{path} ({shaped(leaf)}) is the same array as "
                f"{subject}{first}, and a step cannot take over its memory twice; make "
                "the state with devices.init, or a copy with jnp.copy"
            )


def check_placed(
    tree: Any, devices: Sequence[jax.Device], subject: str, sharded: bool = False
) -> None:
    """Raises `PlacementError` for leaves that are not on exactly these devices.

    With `sharded` each must also have one share on each device, as after `shard`:
    `pmap` would use fewer devices for another batch, in silence.
    """
    target, n = set(devices), len(devices)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        if isinstance(leaf, jax.core.Tracer):
            continue
        if not isinstance(leaf, jax.Array) or leaf.devices() != target:
            raise _misplaced(tree, i, subject, COPY)
        if sharded and n > 1 and (leaf.shape[:1] != (n,) or leaf.is_fully_replicated):
            raise _misplaced(tree, i, subject, SHARES)


def _misplaced(tree: Any, i: int, subject: str, fault: str) -> PlacementError:
    path, leaf = [*leaves_by_path(tree).items()][i]
    name = f"{subject}{path or 'array'} ({shaped(leaf)})"
    return PlacementError(f"{name} is on {describe(leaf)}, and {fault}")


class Program:
    """A `jax.jit` of a function that is traced once, and compiled by its operations."""

    # Why: docs/decisions/devices.md#in-order
    def __init__(self, run: Callable[..., Any], **options: Any) -> None:
        self.any_order = jax.jit(run, **options)
        self.in_order = jax.jit(run, **options, compiler_options=IN_ORDER)
        self._chosen: Any = None

    def __call__(self, *args: Any) -> Any:
        """Calls the program, which the first call compiles."""
        return (self._chosen or self._choose(*args))(*args)

    def trace(self, *args: Any) -> Any:
        """Traces the function for these shapes."""
        return self._choose(*args).trace(*args)

    def _cache_size(self) -> int:  # As that of a `jax.jit`, for tests.
        return self.any_order._cache_size() + self.in_order._cache_size()

    def _choose(self, *args: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if traced or jax.config.jax_disable_jit:
            return self.any_order  # Options are those of the program around it.
        if self._chosen is None:
            jaxpr = self.any_order.trace(*args).jaxpr.jaxpr
            self._chosen = self.in_order if operations(jaxpr) < FEW else self.any_order
        return self._chosen


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """Step whose calls are timed, bounded in number, and checked for placement."""

    devices: "DeviceManager"
    compiled: Any  # A `jax.jit`, or a `Program`.
    takes_state: bool  # Donates its first argument.
    local: bool = False  # Takes this process's part of arrays that span several.
    # Splits what it returns into results, and an array that is never donated.
    token: Callable[[Any], tuple[Any, jax.Array]] = lambda results: results
    has_pace: bool = True
    paces: dict[Any, Pace] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )
    # Shapes and dtypes of batches that it was called with, on a GPU.
    seen: set[Any] = dataclasses.field(default_factory=set, init=False, compare=False)

    def trace(self, *args: Any) -> Any:
        """Traces the step for these shapes; a leaked tracer is a `PlacementError`."""
        with checks.leaks_named():
            return self.compiled.trace(*args)

    def __call__(self, *args: Any) -> Any:
        """Dispatches the step, once fewer than `steps_in_flight` are unfinished.

        On one CPU these are `MANY`, if steps were seen to be short.
        `PlacementError` names a leaf that is on other devices or was donated before, or
        not from `shard`, or a tracer that the step leaks.
        """
        *trees, batch = args
        devices, ledger = self.devices.everyone, self.devices.ledger
        check_alive(batch, "the batch's ")
        if len(devices) > 1:  # One refuses what is deleted, and several crash.
            check_alive(trees[0], "the state's ", distinct=self.takes_state)
        check_placed(batch, devices, "the batch's ", sharded=True)
        try:
            with checks.leaks_named(), LOCK:
                pace = self._pace(batch)
                IN_FLIGHT.make_room(self.devices, pace)
                with ledger.timed("dispatch"):
                    if self.local:
                        args = own_part((*self.devices.gather(trees), batch))
                    call = self._record if devices[0].platform == GPU else self.compiled
                    results, token = self.token(call(*args))
                if not isinstance(token, jax.core.Tracer):  # Inside another program.
                    IN_FLIGHT.append((token, pace))
                return results
        except (ValueError, RuntimeError) as error:
            self._check_state(str(error), trees)
            raise

    def _pace(self, batch: Any) -> Pace | None:
        if not self.has_pace:
            return None
        shape = tuple(x.shape for x in jax.tree.leaves(batch))
        return self.paces.setdefault(shape, Pace())

    def _check_state(self, error: str, trees: list[Any]) -> None:
        """Names the leaf of which JAX's error is, as a `PlacementError`."""
        if any(phrase in error for phrase in GONE):
            check_alive(trees[0], "the state's ", distinct=self.takes_state)
        if any(phrase in error for phrase in MISPLACED):
            for tree in trees:
                check_placed(tree, self.devices.everyone, "the state's ")

    # Why: docs/decisions/devices.md#first-call
    def _record(self, *args: Any) -> Any:
        """Calls the program, the first time while nothing is copied to the devices."""
        batch = jax.tree.leaves(args[-1])
        kinds = tuple((x.shape, x.dtype) for x in batch)
        if kinds in self.seen or isinstance(batch[0], jax.core.Tracer):
            return self.compiled(*args)
        with transfer.COPYING:
            results = self.compiled(*args)
            with self.devices.processes.waiting():
                jax.block_until_ready(results)
        self.seen.add(kinds)
        return results


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scalars(Mapping[str, Any]):  # Why: docs/decisions/training.md#packed-scalars
    """Scalars by name: columns [steps] of one table [steps, names] for each dtype.

    A table may have further rows and columns.
    """

    tables: tuple[Any, ...]
    names: tuple[tuple[str, ...], ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Any:
        for table, names in zip(self.tables, self.names, strict=True):
            if name in names:
                return table[:, names.index(name)]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:  # Without an index on the devices.
        return any(name in names for names in self.names)

    @jax.jit
    def first(self) -> dict[str, jax.Array]:
        """Scalars of the call's first step, as arrays [] on the devices."""
        return {name: self[name][0] for name in self}

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self.names)

    def __len__(self) -> int:
        return sum(map(len, self.names))


def pack(scalars: Mapping[str, Any]) -> Scalars:
    """Packs the scalars of a step into tables of one row."""
    groups: dict[str, dict[str, jax.Array]] = {}
    for name, x in sorted(scalars.items()):
        groups.setdefault(str(jnp.result_type(x)), {})[name] = jnp.asarray(x)
    columns = [group for _, group in sorted(groups.items())]
    tables = (jnp.stack([*group.values()])[None] for group in columns)
    return Scalars(tuple(tables), tuple(map(tuple, columns)))


class Specs(NamedTuple):
    """Specs of what a step sees of its first arguments, as `Share`s, and its results.

    They are trees of `PartitionSpec`, or prefixes of them.
    """

    arguments: tuple[Any, ...] = ()
    results: Any = REPLICATED


def compile_step(
    devices: "DeviceManager",
    step: Callable[..., Any],
    donate_argnums: int | tuple = 0,
    update: Callable[[Any, Any], Any] = lambda _, results: results,
    out_shardings: Any = None,
    specs: Specs | None = None,
) -> CompiledStep:
    """Compiles `step(state, ..., batch)`, for one device's share of the batch.

    The step sees replicated trees, gathered if they are sharded, or its shares of them,
    by `specs`, and its share of a batch from `shard`. Its results must be the same on
    every device: average them with `mean_over`; `fetch` checks that they are.
    `update(state, results)` sees the arrays of all devices as one. `out_shardings` are
    of the results, or a prefix of their tree; None for replicated.
    """
    mapped = over_devices(step, devices, specs)

    @functools.wraps(step)  # Profiles and JAX's logs show its name.
    def run(*args: Any) -> tuple[Any, jax.Array]:
        args = in_device_memory(args)
        return update(args[0], mapped(*args)), _token()

    if out_shardings is not None or devices.axis_name is not None:
        out_shardings = out_shardings or devices.replicated, devices.replicated
    compiled = _program(
        devices, run, donate_argnums=donate_argnums, out_shardings=out_shardings
    )
    return CompiledStep(devices, compiled, 0 in np.atleast_1d(donate_argnums))


def compile_call(
    devices: "DeviceManager",
    step: Callable[..., Any],
    update: Callable[[Any, Any], Any],
    out_shardings: Any,
    most: int,
    specs: Specs | None = None,
    packing: Packing | None = None,
) -> CompiledStep:
    """Compiles up to `most` steps as one call, `call(state, ..., count, batch)`.

    It makes `count` of them, and returns the last state and their packed `Scalars`, as
    `update` returns a state and scalars; arguments are those of `compile_step`. By a
    `packing` the state that it takes and returns is packed, too.
    """
    mapped = over_devices(step, devices, specs)
    # Else XLA may gather a sharded state for the time of a loop.
    in_place = jax.tree.map(lambda x: x.with_memory_kind(None), out_shardings)

    def advance_in_place(state: Any, *args: Any) -> tuple[Any, Scalars]:
        state, scalars = update(state, mapped(state, *args))
        return jax.lax.with_sharding_constraint(state, in_place), pack(scalars)

    @functools.wraps(step)
    def run(state: Any, *args: Any) -> tuple[Any, Scalars]:
        state, *trees, count, batch = in_device_memory((state, *args))
        if most == 1:
            state, scalars = update(state, mapped(state, *trees, batch))
            return state, pack(scalars)
        return _repeat(advance_in_place, most, count, state, *trees, batch)

    if packing is not None:
        out_shardings = packing.with_vector(out_shardings, devices.replicated)
        run = packing.around(run)
    shardings = out_shardings, devices.replicated
    compiled = _program(devices, run, donate_argnums=0, out_shardings=shardings)
    token = lambda x: (x, x[1].tables[0])  # noqa: E731
    return CompiledStep(devices, compiled, True, token=token, has_pace=most == 1)


def _repeat(
    step: Callable[..., Any], most: int, count: Any, state: Any, *args: Any
) -> tuple[Any, Scalars]:
    """Makes `count` steps in a loop on the devices; scalars of each are rows of tables.

    Its body does not depend on `count`: steps have the same bits in any call.
    """
    # Why: docs/decisions/training.md#calls
    step = jax.jit(step, inline=True)  # Traced once, for its shapes and for the loop.
    _, row = jax.eval_shape(step, state, *args)
    # XLA's CPU compiler copies the whole of an array whose rows are smaller, each time.
    tables = tuple(
        jnp.zeros((most, max(x.shape[1], ROW_BYTES // x.dtype.itemsize)), x.dtype)
        for x in row.tables
    )

    def body(i: Any, carry: Any) -> Any:
        state, scalars = step(carry[0], *args)
        return state, tuple(
            jax.lax.dynamic_update_slice(table, row, (i, jnp.zeros_like(i)))
            for table, row in zip(carry[1], scalars.tables, strict=True)
        )

    state, tables = jax.lax.fori_loop(0, count, body, (state, tables))
    return state, Scalars(tables, row.names)


def compile_per_example(
    devices: "DeviceManager", step: Callable[..., Any], specs: Specs | None = None
) -> CompiledStep:
    """Compiles `step(state, ..., batch)`, whose results have one entry for each row.

    Results of the devices' shares are joined to arrays [B, ...], in the order of the
    batch; of several processes each has those of its own rows. Nothing is donated.
    """

    @functools.wraps(step)
    def share(*args: Any) -> Any:
        results, rows = step(*args), len(jax.tree.leaves(args[-1])[0])
        for path, leaf in leaves_by_path(results).items():
            if np.shape(leaf)[:1] != (rows,):
                raise PlacementError(
                    f"the step's result {path} has shape {list(np.shape(leaf))} for a "
                    f"share of {rows} rows; compile_per_example is for results with "
                    "one entry for each row"
                )
        return results

    mapped = over_devices(share, devices, specs, joined=True)
    run = functools.wraps(step)(lambda *args: (mapped(*args), _token()))
    sharded = sharding_on(devices.devices, AXIS_NAME)
    shardings = sharded, sharding_on(devices.devices)
    compiled = jax.jit(run, out_shardings=shardings if devices.axis_name else None)
    return CompiledStep(devices, compiled, False, local=devices.processes.count > 1)


def _program(devices: "DeviceManager", run: Callable[..., Any], **options: Any) -> Any:
    is_one_cpu = devices.platform == "cpu" and len(devices.everyone) == 1
    return (Program if is_one_cpu else jax.jit)(run, **options)


def _token() -> jax.Array:
    """Result that is ready when the program has ended, and never donated."""
    return jnp.zeros((), jnp.bool_)


def over_devices(
    fn: Callable, devices: "DeviceManager", specs: Specs | None, joined: bool = False
) -> Callable:
    """Maps a function over devices: the one switch between one and several of them.

    On one device it is called. On several it is `jax.pmap`ped over the first axis of
    its last argument, a batch [n, B / n, ...], and other arguments are replicated; with
    several processes, of whose rows `jax.pmap` would take its own alone, and for shares
    of arguments, by `jax.shard_map`. Results are replicated, shares, or `joined`
    [B, ...], of this process's devices alone.
    """
    if devices.axis_name is None:  # Why: docs/decisions/devices.md#switch
        return fn
    mesh_devices = devices.devices if joined else devices.everyone
    if devices.processes.count > 1 or specs is not None:
        return _shard_mapped(fn, mesh_devices, joined, specs or Specs())
    return _pmapped(fn, mesh_devices, joined)


# Why: docs/decisions/devices.md#device-axis
def _pmapped(fn: Callable[..., Any], mesh_devices: Any, joined: bool) -> Any:
    def mapped(*args: Any) -> Any:
        results = jax.pmap(
            fn,
            AXIS_NAME,
            in_axes=(*(None,) * (len(args) - 1), 0),
            out_axes=0 if joined else None,
            devices=mesh_devices,
        )(*args)
        if not joined:
            return results
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    return mapped


def _shard_mapped(
    fn: Callable, mesh_devices: Sequence[jax.Device], joined: bool, specs: Specs
) -> Callable:
    sharded = PartitionSpec(AXIS_NAME)
    fn = on_shares(fn, specs.arguments)

    def mapped(*args: Any) -> Any:
        return jax.shard_map(
            lambda *args: fn(*args[:-1], jax.tree.map(lambda x: x[0], args[-1])),
            mesh=Mesh(mesh_devices, AXIS_NAME),
            in_specs=(
                *specs.arguments,
                *(REPLICATED,) * (len(args) - 1 - len(specs.arguments)),
                sharded,
            ),
            out_specs=sharded if joined else specs.results,
            check_vma=False,
        )(*args)

    return mapped


def map_batches(
    devices: "DeviceManager", step: Callable, state: Any, batches: Iterable[Any]
) -> Iterator[Any]:
    """Maps `step` over host batches: per-example results on the host, in order.

    `step` is from `compile_per_example`; batches and results are pytrees of NumPy
    arrays [B, ...]. A batch that cannot be sharded evenly, or has fewer rows than one
    before it, is padded with rows of zeros, whose results are left out.
    """
    rows: deque[int] = deque()

    def dispatched() -> Iterator[Any]:
        size = 0
        for batch in batches:
            rows.append(transfer.check_host_batch(batch))
            size = max(size, -(-rows[-1] // devices.num_devices) * devices.num_devices)
            yield step(state, devices.shard(transfer.pad_rows(batch, size)))

    for results in devices.fetch_each(dispatched()):
        yield jax.tree.map(itemgetter(slice(rows.popleft())), results)
