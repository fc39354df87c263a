"""What a select of old and new state costs, for steps that may be skipped.

    python -m benchmarks.skips

Two programs of a step, with `max_consecutive_nonfinite` of 1 and of 10, take turns in
one process, on one device: processor seconds of all threads, which other work of the
machine changes less than it does wall time, as the median ratio of neighbours, with
its 95 % interval; and the bytes that XLA says the program accesses. Each of digits,
digits_resnet and a small gpt_bytes.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

from configs import digits, digits_resnet, gpt_bytes
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment, Trainer

STEPS = {"digits": 20, "digits_resnet": 1, "gpt_bytes": 1}  # In a turn.


def configs() -> dict[str, Any]:
    """Configs by name; of gpt_bytes two blocks of width 64."""
    small = gpt_bytes.get_config()
    small.model.num_layers, small.model.width, small.model.num_heads = 2, 64, 2
    return {
        "digits": digits.get_config(),
        "digits_resnet": digits_resnet.get_config(),
        "gpt_bytes": small,
    }


class Turns:
    """Steps of one program, from one state on, on one batch."""

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer, self._count = trainer, STEPS[name]
        self._state = trainer.init()
        with trainer.calls(0, 2, lambda step: True) as calls:
            self._call = next(iter(calls))
        (lowered,) = [trainer.trace(x).lower() for x in trainer.feed.host_shapes()[:1]]
        self.bytes = lowered.compile().cost_analysis()["bytes accessed"]
        self.turn()

    def turn(self) -> float:
        """Processor seconds of a step."""
        begun = time.process_time()
        for _ in range(self._count):
            self._state, scalars = self._trainer.advance(self._state, *self._call)
            jax.block_until_ready(scalars)
        return (time.process_time() - begun) / self._count


def main() -> None:
    """Prints the ratio of each config's steps with the select to those without."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=301)
    pairs = parser.parse_args().pairs
    devices = DeviceManager.create("cpu", num_devices=1)
    for name, config in configs().items():
        config.steps_per_call, config.data.placement = 1, "host"
        plain = Experiment.from_config(config, devices).trainer(devices)
        programs = [Turns(plain.replace(skips=x), name) for x in (False, True)]
        seconds = np.empty((pairs, 2))
        for i in range(pairs):
            for j in (0, 1) if i % 2 else (1, 0):
                seconds[i, j] = programs[j].turn()
        ratios, away = np.sort(seconds[:, 1] / seconds[:, 0]), int(0.98 * pairs**0.5)
        low, middle, high = ratios[[pairs // 2 + x for x in (-away, 0, away)]]
        more = programs[1].bytes / programs[0].bytes - 1
        print(
            f"{name:>14}: {100 * middle - 100:+.1f} % ({100 * low - 100:+.1f} to "
            f"{100 * high - 100:+.1f}) of {1e3 * np.median(seconds[:, 0]):.2f} ms of "
            f"processor time, {100 * more:+.3f} % bytes accessed",
            flush=True,
        )


if __name__ == "__main__":
    main()
