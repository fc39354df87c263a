"""What `check_replicas` costs, next to the steps between two checkpoints.

    python -m benchmarks.replicas --simulate_devices=4

For each config: the time of one check, and of as many train steps as lie between two
checkpoints; a few of them are timed, and multiplied. Both in rounds, interleaved.
"""

import statistics
import time
from types import ModuleType

import jax
from absl import flags

from configs import digits, digits_resnet
from haiku_template import cli
from haiku_template.devices import DeviceManager, check_replicas
from haiku_template.training import Experiment

ROUNDS, STEPS = 7, 5


def measure(module: ModuleType, devices: DeviceManager) -> None:
    """Prints the share of an interval that its check takes."""
    config = module.get_config()
    trainer = Experiment.from_config(config, devices).trainer(devices)
    state = trainer.init()
    batch = devices.shard(trainer.experiment.data.train.batch(0))
    begun = time.perf_counter()
    check_replicas(state)
    first = time.perf_counter() - begun
    checks, steps = [], []
    for n in range(ROUNDS + 1):
        begun = time.perf_counter()
        for _ in range(STEPS):
            state, scalars = trainer.step(state, batch)
            jax.block_until_ready(scalars)
        jax.block_until_ready(state)
        middle = time.perf_counter()
        check_replicas(state)
        if n:  # The first round compiles.
            steps.append((middle - begun) / STEPS)
            checks.append(time.perf_counter() - middle)
    check, step = statistics.median(checks), statistics.median(steps)
    interval = config.save_every or config.num_steps
    print(
        f"{module.__name__}: a check {1e3 * check:.2f} ms "
        f"({1e3 * min(checks):.2f}-{1e3 * max(checks):.2f}), the first {first:.2f} s; "
        f"a step {1e3 * step:.2f} ms ({1e3 * min(steps):.2f}-{1e3 * max(steps):.2f}); "
        f"{check / (interval * step):.3%} of {interval} steps"
    )


def main() -> None:
    """Measures the configs that come with their data."""
    devices = cli.device_manager()
    print(devices.describe())
    for module in (digits, digits_resnet):
        measure(module, devices)


flags.adopt_module_key_flags(cli)
if __name__ == "__main__":
    cli.run(main)
