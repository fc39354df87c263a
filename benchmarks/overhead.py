"""What the whole loop costs, next to a bare `jax.jit` loop, in one call.

    python -m benchmarks.overhead

Both train the digits MLP of configs/digits.py, step for step the same. The whole loop
has everything on: prefetch thread, transfer guard, metrics on disk, progress bar. The
bare loop makes each batch and calls the jitted step with it. A third loop has all its
batches on the device beforehand: what no loop with data can reach. Rounds are
interleaved; the ratio is of the medians.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
from ml_collections import config_dict

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment, train
from haiku_template.training.trainer import Program

NUM_STEPS = 3000
ROUNDS = 5


def whole_loop(trainer: Program, config: config_dict.ConfigDict) -> float:
    """Steps per second of `training.train`, from its first step to its last."""
    with tempfile.TemporaryDirectory() as workdir, open(os.devnull, "w") as null:
        times = []
        counted = trainer._replace(train_step=_timed(trainer.train_step, times))
        with contextlib.redirect_stdout(null):
            result = train(
                counted,
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

    call.lower = step.lower  # For the memory budget.
    return call


def bare_loop(trainer: Program, on_device: bool = False) -> float:
    """Steps per second of a loop that only makes batches and calls the step."""
    state = trainer.init()
    batches = [trainer.experiment.data.train.batch(n) for n in range(50)]
    if on_device:
        batches = [trainer.devices.shard(batch) for batch in batches]
    state, _ = trainer.step(state, batches[0])
    jax.block_until_ready(state)
    begun = time.perf_counter()
    for n in range(1, NUM_STEPS):
        batch = batches[n % 50] if on_device else trainer.experiment.data.train.batch(n)
        state, _ = trainer.step(state, batch)
    jax.block_until_ready(state)
    return (NUM_STEPS - 1) / (time.perf_counter() - begun)


def main() -> None:
    """Prints steps/s of the three loops and the ratios between them."""
    os.environ["FORCE_COLOR"] = "1"  # rich draws its bar although this is no terminal.
    config = digits.get_config()
    devices = DeviceManager.create("auto")
    trainer = Experiment.from_config(config, devices).trainer(devices)
    print(f"{devices.describe()}\n{NUM_STEPS} steps, {ROUNDS} rounds, interleaved")
    rates: dict[str, list[float]] = {"whole": [], "bare": [], "on device": []}
    for _ in range(ROUNDS):
        rates["whole"].append(whole_loop(trainer, config))
        rates["bare"].append(bare_loop(trainer))
        rates["on device"].append(bare_loop(trainer, on_device=True))
    for name, values in rates.items():
        middle = statistics.median(values)
        print(f"{name:>10} {middle:8.0f} steps/s ({min(values):.0f}-{max(values):.0f})")
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(f"whole / bare       {middle['whole'] / middle['bare']:.2f}")
    print(f"whole / on device  {middle['whole'] / middle['on device']:.2f}")


if __name__ == "__main__":
    main()
