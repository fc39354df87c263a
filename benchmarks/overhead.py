"""What the whole loop costs, next to a bare `jax.jit` loop, in one call.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --calls 1 10 100 1000

All train an MLP of 64-128-128-10 with Adam on batches of 64 digits, on one device. The
bare loop is Haiku, optax, a NumPy batch, `device_put` and `jax.jit`, and nothing of
this package. The whole loop has everything on: prefetch thread, transfer guard, metrics
on disk, progress bar. Between them stand loops that make each batch and call this
package's own step, and that have all batches on the device beforehand: what no loop
with data can reach. The whole loop runs as the config has it (`steps_per_call`), with
one step a call, and with 50, as many as `bare scan`, a `lax.scan` over batches by hand.
With `--calls` it runs with these numbers of steps a call, and logs nothing, which would
end a call. Rounds are interleaved, ratios are of the same round; medians and quartiles
go to build/bench/overhead.json and .png.
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import haiku as hk
import jax
import numpy as np
import optax

from benchmarks import rounds
from configs import digits
from haiku_template.data import BatchSpec
from haiku_template.data import digits as digits_of
from haiku_template.devices import DeviceManager
from haiku_template.preflight import settle
from haiku_template.runs import train
from haiku_template.training import Experiment, Trainer

NUM_STEPS = 3000
STEPS_PER_CALL = 50
BATCH_SIZE, WIDTH, LEARNING_RATE = 64, 128, 1e-3


def whole_loop(
    trainer: Trainer, log_every: int | None, num_steps: int = NUM_STEPS
) -> float:
    """Steps per second of `runs.train`, from its second step to `num_steps`.

    What it checks once, after the first step, is no part of them. The run is told of at
    least 1,000 steps, as a short one would not compile what pays in a long one.
    """
    with tempfile.TemporaryDirectory() as workdir, open(os.devnull, "w") as null:
        times = []
        advance = _timed(trainer.advance, times, num_steps)
        counted = mock.patch.object(trainer, "advance", advance)
        ended = contextlib.suppress(_EnoughSteps)
        with counted, contextlib.redirect_stdout(null), ended:
            train(
                trainer,
                num_steps=max(num_steps, 1000),
                workdir=Path(workdir) / "run",
                log_every=log_every,
            )
    return (num_steps - 1) / (times[-1] - times[0])


class _EnoughSteps(Exception):
    """Ends a run whose steps were timed."""


def _timed(step: Callable, times: list[float], num_steps: int) -> Callable:
    def call(state: object, steps: range, arrays: object) -> object:
        if len(times) == 1:
            times[0] = time.perf_counter()
        result = step(state, steps, arrays)
        if not times or steps[-1] == num_steps:
            jax.block_until_ready(result)  # Compilation is no step; all are at the end.
        times.append(time.perf_counter())
        if steps[-1] == num_steps:
            raise _EnoughSteps
        return result

    return call


def _bare(device: jax.Device, images: np.ndarray) -> tuple[Callable, Any, Any]:
    """Step, parameters and optimizer state without this package."""
    net = hk.without_apply_rng(
        hk.transform(lambda images: hk.nets.MLP([WIDTH, WIDTH, 10])(images))
    )
    optimizer = optax.adam(LEARNING_RATE)

    def loss(params: hk.Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = net.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(
        params: hk.Params, opt_state: optax.OptState, batch: tuple
    ) -> tuple[hk.Params, optax.OptState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.device_put(net.init(jax.random.key(0), images[:1]), device)
    return step, params, jax.device_put(optimizer.init(params), device)


def bare_loop(device: jax.Device, images: np.ndarray, labels: np.ndarray) -> float:
    """Steps per second without this package; images are [N, 64], labels [N]."""
    step, params, opt_state = _bare(device, images)
    step, order = jax.jit(step, donate_argnums=(0, 1)), _order(len(images))
    for n in range(NUM_STEPS):
        rows = next(order)
        batch = jax.device_put((images[rows], labels[rows]), device)
        params, opt_state, value = step(params, opt_state, batch)
        if n == 0:
            jax.block_until_ready(value)  # Its compilation is no step.
            begun = time.perf_counter()
    jax.block_until_ready(params)
    return (NUM_STEPS - 1) / (time.perf_counter() - begun)


def bare_scan(device: jax.Device, images: np.ndarray, labels: np.ndarray) -> float:
    """Steps per second of a `lax.scan` over stacked batches, without this package."""
    step, params, opt_state = _bare(device, images)

    @functools.partial(jax.jit, donate_argnums=0)
    def steps(carry: tuple, batches: tuple) -> tuple:
        def body(carry: tuple, batch: tuple) -> tuple:
            *carry, value = step(*carry, batch)
            return tuple(carry), value

        return jax.lax.scan(body, carry, batches)

    carry, order = (params, opt_state), _order(len(images))
    for n in range(0, NUM_STEPS, STEPS_PER_CALL):
        rows = np.stack([next(order) for _ in range(STEPS_PER_CALL)])
        batches = jax.device_put((images[rows], labels[rows]), device)
        carry, values = steps(carry, batches)
        if n == 0:
            jax.block_until_ready(values)  # Its compilation is no step.
            begun = time.perf_counter()
    jax.block_until_ready(carry)
    return (NUM_STEPS - STEPS_PER_CALL) / (time.perf_counter() - begun)


def copy_ratios(count: int = 60, repeats: int = 500) -> list[float]:
    """Times of `shard`, which waits for the copy, over those of JAX's own, in turns."""
    devices = DeviceManager.create("auto", num_devices=1)
    images, labels = arrays()
    batch = {"inputs": images[:BATCH_SIZE], "labels": labels[:BATCH_SIZE]}

    def seconds(copy: Callable) -> float:
        begun = time.perf_counter()
        for _ in range(repeats):
            copy(batch)
        return time.perf_counter() - begun

    def device_put(batch: dict) -> dict:
        return jax.block_until_ready(jax.device_put(batch, devices.devices[0]))

    return [seconds(devices.shard) / seconds(device_put) for _ in range(count)]


def _order(num_images: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    while True:
        order = rng.permutation(num_images)
        for n in range(num_images // BATCH_SIZE):
            yield order[n * BATCH_SIZE :][:BATCH_SIZE]


def step_loop(trainer: Trainer, on_device: bool = False) -> float:
    """Steps per second of a loop that only makes batches and calls our step."""
    data, shard = trainer.experiment.data.train, trainer.devices.shard
    state, batches = trainer.init(), [shard(data.batch(n)) for n in range(50)]
    state, _ = trainer.step(state, batches[0])
    jax.block_until_ready(state)
    begun = time.perf_counter()
    for n in range(1, NUM_STEPS):
        batch = batches[n % 50] if on_device else shard(data.batch(n))
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state)
    return (NUM_STEPS - 1) / (time.perf_counter() - begun)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 64] and labels [N] of an epoch, which all loops train on."""
    data = digits_of(BatchSpec(BATCH_SIZE)).train
    split = [data.batch(n) for n in range(1437 // BATCH_SIZE)]
    images = [batch["inputs"].reshape(-1, 64) for batch in split]
    return np.concatenate(images), np.concatenate([x["labels"] for x in split])


def make_loops(calls: Sequence[int] = ()) -> tuple[dict[str, rounds.Loop], str]:
    """Makes all loops, or those of so many steps a call; says where they run."""
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    config = digits.get_config()
    config.batch_size, config.model.width = BATCH_SIZE, WIDTH
    plain = {"weight_decay": 0.0, "clip_norm": None, "learning_rate": LEARNING_RATE}
    config.optimizer.update(plain | {"schedule": "constant", "warmup_steps": 0})
    devices = DeviceManager.create("auto", num_devices=1)
    experiment = Experiment.from_config(config, devices)
    configured = settle(experiment.trainer(devices), Path("of a new run"))
    trainer = dataclasses.replace(experiment, steps_per_call=1).trainer(devices)
    count = configured.experiment.steps_per_call or 1
    device, (images, labels) = devices.devices[0], arrays()
    if calls:
        trainers = {n: trainer.with_steps_per_call(n) for n in calls}
        loops = {
            f"whole, {n} a call": functools.partial(whole_loop, trainers[n], None)
            for n in calls
        }
        return loops, devices.describe()
    several = trainer.with_steps_per_call(STEPS_PER_CALL)
    log_every = config.log_every
    loops = {
        "whole as configured": lambda: whole_loop(configured, log_every),
        "whole, 1 a call": lambda: whole_loop(trainer, log_every),
        f"whole, {STEPS_PER_CALL} a call": lambda: whole_loop(several, log_every),
        "bare": lambda: bare_loop(device, images, labels),
        "bare scan": lambda: bare_scan(device, images, labels),
        "own step": lambda: step_loop(trainer),
        "on device": lambda: step_loop(trainer, on_device=True),
    }
    return loops, f"{devices.describe()}; as configured: {count} a call"


def main() -> None:
    """Runs the loops in turns, or with --serve=NAME one of them for another process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, nargs="+", default=())
    parser.add_argument("--serve", metavar="NAME", help="a loop of the table")
    arguments = parser.parse_args()
    if arguments.serve:
        return rounds.serve(lambda: _one(arguments.serve))
    loops, description = make_loops(arguments.calls)
    print(f"{description}\n{NUM_STEPS} steps, {arguments.rounds} rounds, interleaved")
    for loop in loops.values():
        loop()  # Compiles, and warms up.
    rates = rounds.alternate(loops, arguments.rounds)
    facts = {"description": description, "versions": rounds.versions()}
    rounds.report("overhead", rates, "bare" if "bare" in loops else [*loops][-1], facts)
    for name in loops:
        if name.startswith("whole") and "bare scan" in loops:
            rounds.compare(rates, name, "bare scan")
    low, middle, high = statistics.quantiles(copy_ratios(), n=4)
    print(f"time of shard / device_put  {middle:.2f} ({low:.2f}-{high:.2f})")


def _one(name: str) -> tuple[rounds.Loop, str]:
    loops, description = make_loops()
    return loops[name], description


if __name__ == "__main__":
    main()
