"""What the whole loop costs, next to a bare `jax.jit` loop, in one call.

    python -m benchmarks.overhead

All train an MLP of 64-128-128-10 with Adam on batches of 64 digits, on one device. The
bare loop is Haiku, optax, a NumPy batch, `device_put` and `jax.jit`, and nothing of
this package. The whole loop has everything on: prefetch thread, transfer guard, metrics
on disk, progress bar. Between them stand loops that make each batch and call this
package's own step, and that have all batches on the device beforehand: what no loop
with data can reach. Rounds are interleaved; ratios are of the medians.
"""

import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
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
BATCH_SIZE, WIDTH, LEARNING_RATE = 64, 128, 1e-3
ROUNDS = 5


def whole_loop(trainer: Trainer, config: config_dict.ConfigDict) -> float:
    """Steps per second of `training.train`, from its first step to its last."""
    with tempfile.TemporaryDirectory() as workdir, open(os.devnull, "w") as null:
        times = []
        counted = mock.patch.object(trainer, "step", _timed(trainer.step, times))
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
    def call(state: object, batch: object) -> object:
        result = step(state, batch)
        if not times:
            jax.block_until_ready(result)  # Its compilation is no step.
        times.append(time.perf_counter())
        return result

    return call


def bare_loop(device: jax.Device, images: np.ndarray, labels: np.ndarray) -> float:
    """Steps per second without this package; images are [N, 64], labels [N]."""
    net = hk.without_apply_rng(
        hk.transform(lambda images: hk.nets.MLP([WIDTH, WIDTH, 10])(images))
    )
    optimizer = optax.adam(LEARNING_RATE)

    def loss(params: hk.Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = net.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: hk.Params, opt_state: optax.OptState, batch: tuple
    ) -> tuple[hk.Params, optax.OptState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.device_put(net.init(jax.random.key(0), images[:1]), device)
    opt_state = jax.device_put(optimizer.init(params), device)
    rng, each = np.random.default_rng(0), len(images) // BATCH_SIZE
    for n in range(NUM_STEPS):
        if n % each == 0:
            order = rng.permutation(len(images))
        rows = order[n % each * BATCH_SIZE :][:BATCH_SIZE]
        batch = jax.device_put((images[rows], labels[rows]), device)
        params, opt_state, value = step(params, opt_state, batch)
        if n == 0:
            jax.block_until_ready(value)  # Its compilation is no step.
            begun = time.perf_counter()
    jax.block_until_ready(params)
    return (NUM_STEPS - 1) / (time.perf_counter() - begun)


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
    """Prints steps/s of the four loops and the ratios between them."""
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    config = digits.get_config()
    config.batch_size, config.model.width = BATCH_SIZE, WIDTH
    plain = {"weight_decay": 0.0, "clip_norm": None, "learning_rate": LEARNING_RATE}
    config.optimizer.update(plain | {"schedule": "constant", "warmup_steps": 0})
    devices = DeviceManager.create("auto", num_devices=1)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    data = trainer.experiment.data.train
    split = [data.batch(n) for n in range(1437 // BATCH_SIZE)]
    images = np.concatenate([batch["inputs"].reshape(-1, 64) for batch in split])
    labels = np.concatenate([batch["labels"] for batch in split])
    print(f"{devices.describe()}\n{NUM_STEPS} steps, {ROUNDS} rounds, interleaved")
    names = ("whole", "bare", "own step", "on device")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        rates["whole"].append(whole_loop(trainer, config))
        rates["bare"].append(bare_loop(devices.devices[0], images, labels))
        rates["own step"].append(step_loop(trainer))
        rates["on device"].append(step_loop(trainer, on_device=True))
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:>10} {middle:8.0f} steps/s ({min(values):.0f}-{max(values):.0f})")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    for name in names[1:]:
        print(f"whole / {name:9}  {middle['whole'] / middle[name]:.2f}")


if __name__ == "__main__":
    main()
