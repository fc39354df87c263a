"""What the whole loop costs, next to a bare `jax.jit` loop, in one call.

    python -m benchmarks.overhead

All train an MLP of 64-128-128-10 with Adam on batches of 64 digits, on one device. The
bare loop is Haiku, optax, a NumPy batch, `device_put` and `jax.jit`, and nothing of
this package. The whole loop has everything on: prefetch thread, transfer guard, metrics
on disk, progress bar. Between them stand loops that make each batch and call this
package's own step, and that have all batches on the device beforehand: what no loop
with data can reach. Once more the whole loop has 50 steps a call, and `bare scan` is a
`lax.scan` over 50 batches by hand. Rounds are interleaved; ratios are of the medians.
"""

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import haiku as hk
import jax
import numpy as np
import optax
from ml_collections import config_dict

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.training import Experiment, Trainer

NUM_STEPS = 3000
STEPS_PER_CALL = 50
BATCH_SIZE, WIDTH, LEARNING_RATE = 64, 128, 1e-3
ROUNDS = 5


def whole_loop(trainer: Trainer, config: config_dict.ConfigDict) -> float:
    """Steps per second of `training.train`, from its first step to its last."""
    with tempfile.TemporaryDirectory() as workdir, open(os.devnull, "w") as null:
        times = []
        counted = mock.patch.object(trainer, "advance", _timed(trainer.advance, times))
        with counted, contextlib.redirect_stdout(null):
            result = train(
                trainer,
                num_steps=NUM_STEPS,
                workdir=Path(workdir) / "run",
                log_every=config.log_every,
            )
        jax.block_until_ready(result.state)
    return (NUM_STEPS - 1) / (times[-1] - times[0])


def _timed(step: Callable, times: list[float]) -> Callable:
    def call(state: object, steps: range, arrays: object) -> object:
        result = step(state, steps, arrays)
        if not times or steps[-1] == NUM_STEPS:
            jax.block_until_ready(result)  # Compilation is no step; all are at the end.
        times.append(time.perf_counter())
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


def main() -> None:
    """Prints steps/s of the loops and the ratios between them."""
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    config = digits.get_config()
    config.batch_size, config.model.width = BATCH_SIZE, WIDTH
    plain = {"weight_decay": 0.0, "clip_norm": None, "learning_rate": LEARNING_RATE}
    config.optimizer.update(plain | {"schedule": "constant", "warmup_steps": 0})
    config.steps_per_call = 1
    devices = DeviceManager.create("auto", num_devices=1)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    config.steps_per_call = STEPS_PER_CALL
    several = Experiment.from_config(config, devices).trainer(devices)
    data = trainer.experiment.data.train
    split = [data.batch(n) for n in range(1437 // BATCH_SIZE)]
    images = np.concatenate([batch["inputs"].reshape(-1, 64) for batch in split])
    labels = np.concatenate([batch["labels"] for batch in split])
    print(f"{devices.describe()}\n{NUM_STEPS} steps, {ROUNDS} rounds, interleaved")
    names = ("whole", "50 a call", "bare", "bare scan", "own step", "on device")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        rates["whole"].append(whole_loop(trainer, config))
        rates["50 a call"].append(whole_loop(several, config))
        rates["bare"].append(bare_loop(devices.devices[0], images, labels))
        rates["bare scan"].append(bare_scan(devices.devices[0], images, labels))
        rates["own step"].append(step_loop(trainer))
        rates["on device"].append(step_loop(trainer, on_device=True))
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:>10} {middle:8.0f} steps/s ({min(values):.0f}-{max(values):.0f})")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for way, *others in (("whole", *names[2:]), names[1:4]):
        for name in others:
            print(f"{way:>9} / {name:9}  {middle[way] / middle[name]:.2f}")


if __name__ == "__main__":
    main()
