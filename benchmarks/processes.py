"""What the whole loop of two processes costs, next to `jit(shard_map)` loops by hand.

    python -m benchmarks.processes

Starts itself twice on this machine, each process with one CPU device (gloo), to train
an MLP of digits with Adam. The whole loop is `training.train` with everything on, as in
`benchmarks/overhead.py`. The bare one is Haiku, optax, each process's rows of a NumPy
batch, `make_array_from_process_local_data` and `jit(shard_map)`, and nothing of this
package but that the same two processes run it. They take turns every few steps, for
which a hook of the whole loop lets the bare one go; the first turn, in which programs
are compiled, does not count.

First each process has a share of this machine's cores to itself, as on two machines and
as Slurm and MPI bind processes. Then both have all cores, where the threads of one are
in the way of the other's, the more the shorter a step is.
"""

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax
from absl import flags
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import digits
from haiku_template import cli
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment

TURNS, LEARNING_RATE = 12, 1e-3
PROCESSES = 2
LOOPS = "whole", "bare", "bucketed"


class Size(NamedTuple):
    """Size of a model, of its batches, and of a turn."""

    width: int
    batch_size: int
    num_steps: int


# A step of the last is as small as they come: all that is not its own is to be seen.
SIZES = (
    Size(2048, 1024, 20),
    Size(1024, 512, 60),
    Size(512, 256, 150),
    Size(128, 64, 300),
)
flags.DEFINE_string("workdir", None, "Folder of the runs; made by the first process.")
flags.DEFINE_bool("own_cores", False, "Binds each process to its share of the cores.")


def mean_of_each(tree: Any) -> Any:
    """Averages each array by itself, as most do by hand."""
    return jax.lax.pmean(tree, "data")


def mean_in_buckets(tree: Any) -> Any:
    """Averages arrays of at most 64 KiB as one."""
    leaves, structure = jax.tree.flatten(tree)
    small = [i for i, leaf in enumerate(leaves) if leaf.size <= 2**14]
    flat, unravel = ravel_pytree([leaves[i] for i in small])
    large = {i: leaf for i, leaf in enumerate(leaves) if i not in small}
    flat, means = jax.lax.pmean((flat, large), "data")
    means.update(zip(small, unravel(flat), strict=True))
    return structure.unflatten([means[i] for i in range(len(leaves))])


def bare_loop(
    size: Size, images: np.ndarray, labels: np.ndarray, average: Callable[[Any], Any]
) -> Iterator[None]:
    """Makes turns without this package; images are [N, 64], labels [N]."""
    net = hk.without_apply_rng(
        hk.transform(lambda images: hk.nets.MLP([size.width, size.width, 10])(images))
    )
    optimizer = optax.adam(LEARNING_RATE)
    mesh = Mesh(jax.devices(), "data")
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))

    def loss(params: hk.Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = net.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def step(
        params: hk.Params, opt_state: optax.OptState, batch: tuple
    ) -> tuple[hk.Params, optax.OptState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        value, grads = average((value, grads))
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    def first() -> tuple[hk.Params, optax.OptState]:
        params = net.init(jax.random.key(0), images[:1])
        return params, optimizer.init(params)

    params, opt_state = jax.jit(first, out_shardings=whole)()
    rng, each = np.random.default_rng(0), len(images) // size.batch_size
    share, index = size.batch_size // PROCESSES, jax.process_index()
    for n in range(size.num_steps * TURNS):
        if n % each == 0:
            order = rng.permutation(len(images))
        rows = order[n % each * size.batch_size + index * share :][:share]
        batch = jax.tree.map(
            functools.partial(jax.make_array_from_process_local_data, split),
            (images[rows], labels[rows]),
        )
        params, opt_state, value = step(params, opt_state, batch)
        if (n + 1) % size.num_steps == 0:
            yield jax.block_until_ready((params, value))


def take_turns(size: Size, devices: DeviceManager, workdir: Path) -> dict[str, list]:
    """Seconds of a step in each turn, of the whole loop and of the bare ones."""
    config = digits.get_config()
    config.batch_size, config.model.width = size.batch_size, size.width
    plain = {"weight_decay": 0.0, "clip_norm": None, "learning_rate": LEARNING_RATE}
    config.optimizer.update(plain | {"schedule": "constant", "warmup_steps": 0})
    trainer = Experiment.from_config(config, devices).trainer(devices)
    data = trainer.experiment.data.train
    images = np.asarray(data.inputs, np.float32).reshape(-1, 64)
    arrays = images, np.asarray(data.labels)
    by_hand = [bare_loop(size, *arrays, how) for how in (mean_of_each, mean_in_buckets)]
    times = [time.perf_counter()]

    def hook(event: NamedTuple) -> None:
        if event.what == "step" and event.step % size.num_steps == 0:
            jax.block_until_ready((event.state, event.values))
            times.append(time.perf_counter())
            for bare in by_hand:
                with devices.implicit_transfers():  # It has no guard, as nobody has.
                    next(bare)
                times.append(time.perf_counter())

    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        options = {"num_steps": size.num_steps * TURNS, "hooks": [hook]}
        train(trainer, workdir=workdir, log_every=config.log_every, **options)
    each = np.diff(times).reshape(-1, len(LOOPS))[1:] / size.num_steps
    return dict(zip(LOOPS, each.T.tolist(), strict=True))


def measure(size: Size, devices: DeviceManager) -> None:
    """Prints milliseconds a step of each loop, and the whole one's ratios to others."""
    workdir = Path(flags.FLAGS.workdir) / str(size.width)
    seconds = take_turns(size, devices, workdir)
    if devices.processes.index:
        return
    print(
        f"MLP of width {size.width}, batches of {size.batch_size}, {TURNS - 1} turns "
        f"of {size.num_steps} steps; milliseconds a step, median and quartiles"
    )
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(1e3 * np.array(values), n=4)
        print(f"{name:>10} {middle:8.2f} ({low:.2f}-{high:.2f})")
    whole = seconds.pop("whole")
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(whole, values, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(whole) / statistics.median(values)
        each = f"of a turn {middle:.2f} ({low:.2f}-{high:.2f})"
        print(f"whole / {name:<8} {ratio:.2f}; {each}", flush=True)


def start(*more: str) -> None:
    """Starts the processes with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.processes", "--device=cpu"]
        local = [sys.executable, "launch/local.py", f"--processes={PROCESSES}"]
        command = [*local, "--", *command, f"--workdir={folder}", *more]
        subprocess.run(command, check=True)


def main() -> None:
    """Measures each size; the first process of all starts the two."""
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    cores = sorted(os.sched_getaffinity(0))
    if flags.FLAGS.num_processes is None:
        print(
            f"{len(cores) // PROCESSES} of {len(cores)} cores for each process",
            flush=True,
        )
        start("--own_cores")
        print(f"all {len(cores)} cores for each process", flush=True)
        start()
        return
    if flags.FLAGS.own_cores:  # Before JAX makes its threads.
        os.sched_setaffinity(0, cores[flags.FLAGS.process_id :: PROCESSES])
    devices = cli.device_manager()
    for size in SIZES:
        measure(size, devices)


flags.adopt_module_key_flags(cli)
if __name__ == "__main__":
    cli.run(main)
