"""Device manager: the devices of a run, and every copy to and from them."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from haiku.data_structures import tree_bytes

from haiku_template.devices import checks, compiled, processes, selection, transfer
from haiku_template.devices.collectives import with_axis
from haiku_template.devices.layout import Layout, sharding_on, spans_processes
from haiku_template.devices.replicas import check_replicas
from haiku_template.devices.transfer import AXIS_NAME, Ledger
from haiku_template.errors import DeviceError

# For programs that run once, on CPUs. Why: docs/decisions/devices.md#compile-once
COMPILE_ONCE = {"xla_backend_optimization_level": 1}


class DeviceManager(NamedTuple):
    """Devices of a run, as a value: built once, passed explicitly."""

    devices: tuple[jax.Device, ...]  # Of this process.
    reason: str  # For these devices, in one sentence.
    ledger: Ledger  # Adds up bytes and seconds of what is done with them.
    memory: int | None = None  # Bytes for a run on each GPU of a `--target`.
    processes: "processes.Processes" = processes.Processes()
    unified: float | None = None  # Times a card's memory, with the host's beyond it.

    def __repr__(self) -> str:
        return f"DeviceManager({self.describe()})"

    @classmethod
    def create(
        cls,
        spec: str = "auto",
        *,
        num_devices: int | None = None,
        simulate_devices: int | None = None,
        fallback: str = "error",
        gpu_memory_fraction: float | None = None,
        gpu_preallocate: bool | None = None,
        gpu_memory: str | None = None,
    ) -> "DeviceManager":
        """Chooses devices and starts JAX on them; options are those of the flags.

        Args:
          spec: `auto` (all GPUs or TPUs, else the CPU), `cpu`, `gpu`, `tpu`, or chosen
            devices: `gpu:1`, `gpu:0,2`.

        Raises `DeviceError` if the request cannot be met; it names what exists.
        """
        request = selection.parse(
            spec,
            gpu_memory,
            num_devices=num_devices,
            simulate_devices=simulate_devices,
            memory_fraction=gpu_memory_fraction,
            preallocate=gpu_preallocate,
        )
        devices, reason = selection.choose(request, fallback)
        several = processes.of(devices)
        if jax.config.jax_disable_jit:
            _check_one(len(several.devices or devices))
        return cls(tuple(devices), reason, Ledger(), None, several, request.unified)

    @property
    def platform(self) -> str:
        """Platform of the devices: `cpu`, `gpu` or `tpu`."""
        return self.devices[0].platform

    @property
    def everyone(self) -> tuple[jax.Device, ...]:
        """Devices of all processes, over which each batch is sharded."""
        return self.processes.devices or self.devices

    @property
    def num_devices(self) -> int:
        """Number of devices of all processes."""
        return len(self.everyone)

    @property
    def axis_name(self) -> str | None:
        """Mesh axis that data-parallel steps average over; None on one device."""
        return AXIS_NAME if self.num_devices > 1 else None

    @property
    def steps_in_flight(self) -> int:
        """Number of dispatched steps that may be unfinished at once."""
        # Simulated devices, which share the host's cores, would wait for each other.
        # Why: docs/decisions/devices.md#steps-in-flight
        return 1 if self.platform == "cpu" and self.num_devices > 1 else 4

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of an array of which every device has a copy."""
        return sharding_on(self.everyone)

    def init(self, fn: Callable, *args: Any, layout: Layout | None = None) -> Any:
        """Runs `fn(*args)`; its results are born replicated, or as a layout has them.

        `fn` sees the mesh axis, as steps do: modules may average over it.
        """
        args = transfer.on_devices(args, self.replicated)
        program = self._once(fn, layout, *args)
        with checks.leaks_named(program.__wrapped__, *args):
            return program(*args)

    def lower_init(self, fn: Callable[..., Any], *args: Any, layout: Layout) -> Any:
        """Lowers `init(...)`; on one device `init` reuses the compiled result."""
        program = self._once(fn, layout, *args)
        with checks.leaks_named(program.__wrapped__, *args):
            return program.lower(*args)

    def abstract(self, fn: Callable, *args: Any, layout: Layout | None = None) -> Any:
        """Shapes, dtypes and shardings of `init(fn, *args)`, without running it."""
        transfer.check_numbers(args)
        layout = layout or Layout(self.everyone)
        return layout.place(jax.eval_shape(self._once(fn, None), *args))

    def _once(self, fn: Callable[..., Any], layout: Layout | None, *args: Any) -> Any:
        options = COMPILE_ONCE if self.platform == "cpu" else None
        fn, shardings = with_axis(fn, self.axis_name), self.replicated
        if layout is not None and layout.rules:
            shardings = layout.of(jax.eval_shape(fn, *args))
        return jax.jit(fn, out_shardings=shardings, compiler_options=options)

    def replicate(self, tree: Any) -> Any:
        """Replicates every leaf on every device, without a leading device axis.

        A result shares the memory of a leaf that is on one of the devices already: to
        donate it deletes both. `PlacementError`: values do not fit JAX's dtype.
        """
        tree = transfer.distinct(transfer.fitting(tree))
        with transfer.COPYING, self.ledger.timed("to_devices"):
            arrays = transfer.device_put_everywhere(tree, self.replicated)
            jax.block_until_ready(arrays)
        self.ledger.add({"bytes_to_devices": self.num_devices * tree_bytes(arrays)})
        return arrays

    def place(self, tree: Any, layout: Layout) -> Any:
        """Puts NumPy leaves where a layout has them: each device gets its share alone.

        Of several processes each has the whole tree. Raises as `replicate`.
        """
        tree = transfer.fitting(tree)
        with transfer.COPYING, self.ledger.timed("to_devices"):
            arrays = jax.tree.map(transfer.device_put_shares, tree, layout.of(tree))
            jax.block_until_ready(arrays)
        shares = [s.data for x in jax.tree.leaves(arrays) for s in x.addressable_shards]
        self.ledger.add({"bytes_to_devices": tree_bytes(shares)})
        return arrays

    def host_shapes(self, tree: Any) -> Any:
        """Shapes of a tree for JAX to read into the host's memory."""
        host = sharding_on(tuple(jax.local_devices(backend="cpu")[:1]))
        return transfer.canonical_shapes(tree, host)

    # Why: docs/decisions/devices.md#spanning-shards
    def gather(self, tree: Any) -> Any:
        """Replicates leaves that are sharded over processes; all of them call it."""
        return jax.tree.map(
            lambda x: jax.device_put(x, self.replicated) if spans_processes(x) else x,
            tree,
        )

    def shard(self, batch: Any) -> Any:
        """Puts a host batch on the devices, for a function from `compile`.

        NumPy arrays [B, ...] keep their shape on one device; on n they become [n, B /
        n, ...], with row block i on device i. Returns when they are there. The CPU uses
        their memory in place, so never write to it again. `PlacementError`: n does not
        divide B, or a leaf is on a device already, or does not fit JAX's dtype.
        """
        rows, size, batch = transfer.host_batch(batch)
        self.check_batch_size(rows * self.processes.count)
        with transfer.COPYING, self.ledger.timed("to_devices", bytes_to_devices=size):
            arrays = transfer.device_put_batch(batch, self.devices, self.everyone)
            for array in jax.tree.leaves(arrays):
                array.block_until_ready()  # Sooner than the tree at once.
        return arrays

    def abstract_batch(self, batch: Any) -> Any:
        """Shapes, dtypes and shardings of `shard(batch)`, without a copy."""
        self.check_batch_size(transfer.check_host_batch(batch) * self.processes.count)
        rows = None
        if self.axis_name is not None:
            batch, rows = transfer.by_device(batch, len(self.devices)), self.num_devices
        sharding = sharding_on(self.everyone, AXIS_NAME)
        return transfer.canonical_shapes(batch, sharding, rows=rows)

    # A `jax.jit` that donates the state; on several devices with `jax.pmap` inside.
    compile = compiled.compile_step
    compile_call = compiled.compile_call
    compile_per_example = compiled.compile_per_example
    map_batches = compiled.map_batches
    audit = checks.audit
    check = checks.check
    check_batch_size = checks.check_batch_size

    def wait(self, tree: Any) -> None:
        """Returns when the devices have computed every leaf."""
        with self.ledger.timed("compute"), self.processes.waiting():
            jax.block_until_ready(tree)

    def fetch(self, tree: Any) -> Any:
        """Copies a tree to NumPy arrays on the host; replicated leaves from one device.

        `PlacementError` names a leaf that is deleted, no number, or of unequal copies.
        """
        transfer.check_numbers(tree)
        compiled.check_alive(tree)
        replicas = self.gather(tree) if self.processes.count > 1 else tree
        copies = jax.tree.map(transfer.first_copy, replicas)
        self.wait((copies, tree))  # Why: docs/decisions/cluster.md#all-devices
        if self.num_devices > 1:
            check_replicas(tree)
        with self.ledger.timed("from_devices"):
            fetched = jax.tree.map(transfer.own, jax.device_get(copies), copies)
        arrays = [x for x in jax.tree.leaves(copies) if isinstance(x, jax.Array)]
        self.ledger.add({"bytes_from_devices": tree_bytes(arrays)})
        return fetched

    def fetch_each(self, results: Iterable[Any]) -> Iterator[Any]:
        """Fetches results of steps, in order, while the steps after them run."""
        running: deque[Any] = deque()
        for result in results:
            running.append(result)
            if len(running) >= self.steps_in_flight:
                yield self.fetch(running.popleft())
        yield from map(self.fetch, running)

    def on_host(self) -> AbstractContextManager:
        """Lets `jax.numpy` calls of others make arrays in host memory, uncommitted."""
        return jax.default_device(jax.local_devices(backend="cpu")[0])

    def explicit_transfers(self) -> AbstractContextManager:
        """Makes implicit copies to or from a device an error, for this thread alone.

        But where JAX_DISABLE_JIT has each operation run alone, with copies of its own.
        """
        is_eager = jax.config.jax_disable_jit
        return jax.transfer_guard("allow" if is_eager else "disallow")

    def implicit_transfers(self) -> AbstractContextManager:
        """Lets code of others copy as it likes, inside `explicit_transfers`."""
        return jax.transfer_guard("allow")

    def memory_in_use(self) -> int | None:
        """Largest number of bytes in use on a device; None where JAX cannot tell."""
        stats = [device.memory_stats() for device in self.devices]
        return max((s["bytes_in_use"] for s in stats if s), default=None)

    def memory_limit(self) -> int | None:
        """Fewest bytes that are free on a device; None where JAX cannot tell.

        Of the devices of all processes, which call it together: they decide alike.
        """
        if self.memory is not None:
            return self.memory
        stats = filter(None, (device.memory_stats() for device in self.devices))
        free = min((s["bytes_limit"] - s["bytes_in_use"] for s in stats), default=None)
        return free if self.processes.count == 1 else self.processes.least(free)

    def card_memory(self) -> int | None:
        """Bytes of a device's own memory, with unified; None where JAX cannot tell."""
        limit = self.memory_limit()
        return None if limit is None else int(limit / self.unified)

    def describe(self) -> str:
        """Describes the devices and the reason for them, in one line."""
        names = ", ".join(map(checks.device_name, self.devices)) + self.processes.name
        kind = self.devices[0].device_kind
        kind = "" if kind == self.platform else f" ({kind})"
        return f"{self.num_devices} x {self.platform}{kind}: {names}. {self.reason}"


def _check_one(num_devices: int) -> None:
    if num_devices > 1:
        raise DeviceError(
            "JAX_DISABLE_JIT has each operation run alone, and arrays are placed on "
            f"{num_devices} devices by what is compiled; unset it, or give "
            "--num_devices=1"
        )
