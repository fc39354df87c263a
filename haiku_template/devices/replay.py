"""Replay: chosen steps are made twice, against devices that compute wrongly in silence.

Both runs of a step start from the same state and batch and are the program of any step,
so that a run's numbers stay the same; its results are compared by digests of their bits
before they are used. On several devices each share's gradients are computed on two
devices, too: what is summed over all no longer tells whose it was. Why:
docs/decisions/training.md#replay
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from haiku_template import xla_flags
from haiku_template.devices.checks import device_name
from haiku_template.devices.layout import (
    AXIS_NAME,
    device_bytes,
    in_device_memory,
    sharding_on,
)
from haiku_template.devices.processes import waiting
from haiku_template.devices.replicas import digest_leaves, part_digests
from haiku_template.devices.transfer import COPYING, first_copy
from haiku_template.errors import ConfigError, ReplayError, some
from haiku_template.params import leaves_by_path

Results = tuple[Any, Any]  # The new state and `Scalars` of a call.

SHARE = "share"  # Mesh axis of the shares, whose own axis has one device.
CHECKSUMS = "--xla_gpu_experimental_enable_checksum_tracing_on_thunks"
HINT = f"; XLA_FLAGS='{CHECKSUMS} --xla_dump_to=FOLDER' logs, on GPUs, sums of what "
HINT += "each kernel reads and writes"
DETERMINISTIC = "--xla_gpu_deterministic_ops"


def replaying(trainer: Any, is_chosen: Callable[[int], bool], budget: Any) -> Any:
    """Makes the `Trainer` whose `advance` makes chosen steps, counted from 1, twice.

    Raises `ConfigError` if a second state does not fit into the run's memory `budget`.
    """
    size = device_bytes(trainer.abstract.without_frozen())
    if budget and budget.limit is not None and budget.peak + size > budget.limit:
        raise ConfigError(
            f"config.sdc_replay keeps a second state of {size:,} bytes on each "
            f"device beside the {budget.peak:,} of the run, and there are "
            f"{budget.limit:,}; leave it out"
        )
    replay = Replay(trainer, is_chosen)
    replaying_trainer = copy.copy(trainer)
    replaying_trainer.calls = replay.calls
    replaying_trainer.advance = replay.advance
    return replaying_trainer


class Replay:
    """Replay of a trainer's chosen steps."""

    def __init__(self, trainer: Any, is_chosen: Callable[[int], bool]) -> None:
        self._trainer, self._is_chosen = trainer, is_chosen
        self._devices = trainer.devices
        self._agreed = 0  # The last step whose runs had the same bits.

    def calls(self, start: int, stop: int, ends: Callable[[int], bool]) -> Any:
        """Prefetches calls as `Trainer.calls`; each chosen step is one of its own."""
        chosen = self._is_chosen
        return self._trainer.calls(
            start, stop, lambda step: ends(step) or chosen(step) or chosen(step + 1)
        )

    def advance(self, state: Any, steps: range, arrays: Any) -> Results:
        """Makes the updates of a call as `Trainer.advance`; a chosen step's twice.

        Raises `ReplayError` if their bits differ.
        """
        if not self._is_chosen(steps[-1]):
            return self._trainer.advance(state, steps, arrays)
        n, state = self._devices.num_devices, self._trainer.unpacked(state)
        with self._devices.implicit_transfers():
            _, digests = self._run(state, steps, arrays)
            results, again = self._run(state, steps, arrays)
            shares = [(k, self._shares(state, arrays, k)) for k in range(2 * (n > 1))]
            agree = np.array_equal(digests, again)
            if not agree or (shares and not np.array_equal(*(x for _, x in shares))):
                third = self._run(state, steps, arrays)[1]
                shifts = range(n if n > 1 else 0)
                shares += [(k, self._shares(state, arrays, k)) for k in shifts]
                leaves = leaves_by_path(self._compared(results))
                raise self._error(steps[-1], leaves, [digests, again, third], shares)
        self._agreed = steps[-1]
        return results

    def _run(self, state: Any, steps: range, arrays: Any) -> tuple[Results, np.ndarray]:
        """Makes the step from a copy of the state; returns its results and digests."""
        trained = self._copy(state.without_frozen())._replace(frozen=state.frozen)
        results = self._trainer.advance(self._trainer.packed(trained), steps, arrays)
        return results, part_digests(self._devices.everyone, self._compared(results))

    def _compared(self, results: Results) -> Any:
        new, scalars = results
        return self._trainer.unpacked(new).without_frozen(), scalars.tables

    @functools.cached_property
    def _copy(self) -> Callable[[Any], Any]:
        state = self._trainer.abstract.without_frozen()
        return jax.jit(
            lambda tree: jax.tree.map(jnp.copy, in_device_memory(tree)),
            out_shardings=jax.tree.map(lambda x: x.sharding, state),
        )

    def _shares(self, state: Any, arrays: Any, shift: int) -> np.ndarray:
        """Digests of each share's results: uint32 [shares, leaves], on the host.

        Share i is computed by the device `shift` places behind its own.
        """
        is_staged = self._trainer.feed.staged is not None
        *staged, batch = arrays if is_staged else (arrays,)
        seed = self._trainer.initializer.seed_there
        trees = state.without_frozen(), state.frozen, seed, *staged
        with waiting(), COPYING:  # Why: docs/decisions/devices.md#first-call
            batch = jax.block_until_ready(self._roll(batch, shift))
            digests = jax.device_get(first_copy(self._digest_shares(*trees, batch)))
        return np.roll(digests, -shift, axis=0)

    @functools.cached_property
    def _roll(self) -> Callable[[Any, int], Any]:
        return jax.jit(
            lambda batch, n: jax.tree.map(lambda x: jnp.roll(x, n, axis=0), batch),
            static_argnums=1,
            out_shardings=sharding_on(self._devices.everyone, AXIS_NAME),
        )

    @functools.cached_property
    def _digest_shares(self) -> Callable[..., jax.Array]:
        """Compiles a map from arguments of a step to uint32 [shares, leaves].

        The step's axis has one device, so that no sum's order is in the bits.
        """
        trainer, everyone = self._trainer, self._devices.everyone
        gather = functools.partial(trainer.feed.gathering, of_calls=True)
        gradients = trainer.of_seed(lambda x: gather(x.gradients), AXIS_NAME)
        replicated, sharded = PartitionSpec(), PartitionSpec(SHARE)

        def digest(*args: Any) -> jax.Array:
            *trees, batch = args
            results = gradients(*trees, jax.tree.map(lambda x: x[0], batch))
            return digest_leaves(results)[None]

        def run(*args: Any) -> jax.Array:
            *trees, batch = args
            return jax.shard_map(
                digest,
                mesh=Mesh(np.reshape(everyone, (-1, 1)), (SHARE, AXIS_NAME)),
                in_specs=(*(replicated,) * len(trees), sharded),
                out_specs=sharded,
                check_vma=False,
            )(*in_device_memory(trees), batch)

        return jax.jit(run, out_shardings=sharding_on(everyone))

    def _error(
        self,
        step: int,
        leaves: dict[str, jax.Array],
        runs: list[np.ndarray],
        shares: list[tuple[int, np.ndarray]],
    ) -> ReplayError:
        """Makes the error that says what differed, where, and how often.

        `leaves` are of a run's results, by path; `shares` pairs of a shift and digests.
        """
        names = self._names()
        verdicts = (
            _verdict(_of_shares(shares), names, len(shares)),
            _verdict(_of_runs(leaves, runs), names, len(runs)),
        )
        differing = [
            path
            for path, *digests in zip(leaves, *runs, strict=True)
            if len({x.tobytes() for x in digests}) > 1
        ]
        subject = some(differing) or "gradients of a share"
        agreed = self._agreed or "none of this start"
        hint = HINT if xla_flags.known(CHECKSUMS) else ""
        return ReplayError(
            f"step {step} was made twice from one state and batch, and gave other bits "
            f"in {subject}: {next(filter(None, verdicts))}; nothing was saved since "
            f"the last checkpoint. The last step whose runs agreed: {agreed}; what was "
            f"saved after it may be wrong, too{hint}"
        )

    def _names(self) -> list[str]:
        """Names of all devices; those of CPUs elsewhere have no index of their own."""
        everyone, count = self._devices.everyone, self._devices.processes.count
        if count == 1:
            return [*map(device_name, everyone)]
        places = (divmod(i, len(everyone) // count) for i in range(len(everyone)))
        kind = everyone[0].platform
        return [f"{kind}:{index} in process {process}" for process, index in places]


Observation = tuple[int, int, bytes]  # Device's number, round, digest.


def _of_shares(shares: list[tuple[int, np.ndarray]]) -> list[list[Observation]]:
    """Groups observations of one share's results."""
    n = len(shares[0][1]) if shares else 0
    return [
        [
            ((share + shift) % n, i, digests[share].tobytes())
            for i, (shift, digests) in enumerate(shares)
        ]
        for share in range(n)
    ]


def _of_runs(
    leaves: dict[str, jax.Array], runs: list[np.ndarray]
) -> list[list[Observation]]:
    """Groups observations of one leaf: of all its copies, or of one device's shard."""
    groups = []
    for i, leaf in enumerate(leaves.values()):
        observations = [
            (device, run, digest.tobytes())
            for run, digests in enumerate(runs)
            for device, digest in enumerate(digests[i])
        ]
        if leaf.is_fully_replicated:
            groups.append(observations)
        else:
            devices = range(len(runs[0][i]))
            groups += [[x for x in observations if x[0] == d] for d in devices]
    return groups


def _verdict(groups: list[list[Observation]], names: list[str], rounds: int) -> str:
    """Describes who gave other digests than most of a group; "" if all are equal."""
    differing = [x for x in groups if len({digest for *_, digest in x}) > 1]
    if not differing:
        return ""
    odd = set()
    for group in differing:
        most, count = Counter(digest for *_, digest in group).most_common(1)[0]
        if 2 * count <= len(group):
            return _undecided(groups, names)
        odd |= {(device, i) for device, i, digest in group if digest != most}
    times = Counter(device for device, _ in odd)
    if len(times) == len(names) > 1:
        return (
            f"{len({i for _, i in odd})} of {rounds} runs differ on all devices alike "
            "(transient): a gradient was wrong before it was summed over them, and "
            "whose cannot be told"
        )
    return ", ".join(
        f"{names[device]} computed wrongly {count} of {rounds} times "
        f"({'persistent' if count == rounds else 'transient'})"
        for device, count in sorted(times.items())
    )


def _undecided(groups: list[list[Observation]], names: list[str]) -> str:
    by_device: dict[tuple[int, int], set[bytes]] = {}
    for i, group in enumerate(groups):
        for device, _, digest in group:
            by_device.setdefault((i, device), set()).add(digest)
    if len(names) > 1 and all(len(digests) == 1 for digests in by_device.values()):
        return f"{' and '.join(names)} differ, each alike each time (persistent)"
    return (
        "each run gives other bits, and no device stands out: the program is not "
        f"deterministic (on GPUs XLA_FLAGS={DETERMINISTIC}=true mends that), or a "
        "device is often wrong"
    )
