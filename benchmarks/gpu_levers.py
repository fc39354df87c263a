"""Options of XLA for GPUs, each off and on, in one process.

A program is lowered once and compiled with each option; all programs then train one
state, some steps at a time in turns. GPT-2 124M has 8 windows of 1,024 tokens,
ResNet-20 256 images of 32 x 32, both in bfloat16.
"""

import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.gpu_behaviour import random_tokens
from benchmarks.gpu_speed import Figures, Scale, build, spread
from configs import cifar10_resnet, gpt2_124m
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment, Trainer

OFF = "as it is"
# By platform: those of CPUs show that the check itself works.
LEVERS: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {
        OFF: {},
        "dots not merged": {"xla_gpu_dot_merger_threshold_mb": 0},
        "no Triton products": {"xla_gpu_enable_triton_gemm": False},
        "no excess precision": {"xla_allow_excess_precision": False},
    },
    "cpu": {OFF: {}, "no excess precision": {"xla_allow_excess_precision": False}},
}


class Extent(NamedTuple):
    """How much is measured; the defaults are for a card."""

    windows: int = 8
    num_layers: int | None = None  # None for GPT-2's.
    images: int = 256
    rounds: int = 12
    steps: int = 5  # Of a round.


SMALL = Extent(windows=1, num_layers=1, images=8, rounds=2, steps=1)


def levers(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Steps with each option of XLA, in turns with those without; losses are finite."""
    extent = SMALL if scale.channels else Extent()
    precision = scale.precisions[-1]
    resnet = build(
        devices, scale, cifar10_resnet, 10_000, precision, batch_size=extent.images
    )
    passed = True
    for name, trainer in {
        "resnet20": resnet,
        "gpt2_124m": _gpt2(devices, extent, precision),
    }.items():
        passed &= compare(name, trainer, LEVERS[devices.platform], extent, figures)
    return passed


def _gpt2(devices: DeviceManager, extent: Extent, precision: str) -> Trainer:
    config = gpt2_124m.get_config()
    config.batch_size, config.accumulate_steps = extent.windows, 1
    config.precision, config.model.num_layers = precision, extent.num_layers
    config.data = {"name": f"{random_tokens.__module__}:random_tokens"}
    if extent.num_layers:
        config.model.update({"width": 64, "num_heads": 1})
    return Experiment.from_config(config, devices).trainer(devices)


def compare(
    name: str,
    trainer: Trainer,
    options: dict[str, dict[str, Any]],
    extent: Extent,
    figures: Figures,
) -> bool:
    """Adds a column for each option; True if all losses are finite.

    The first one's times divide those of the same round of each other.
    """
    devices = trainer.devices
    lowered, compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower(), {}
    for lever, settings in options.items():
        begun = time.perf_counter()
        compiled[lever] = lowered.compile(compiler_options=settings)
        column = {"compile, s": time.perf_counter() - begun}
        figures[f"{name} {lever}"] = column
    with trainer.calls(0, 1, lambda step: True) as calls:
        ((_, batch),) = calls
    state = trainer.init()
    frozen, state = state.frozen, state.without_frozen()
    count = devices.replicate(np.int32(1))
    times, losses = {lever: [] for lever in compiled}, []
    for _ in range(extent.rounds + 1):
        for lever, step in compiled.items():
            begun = time.perf_counter()
            for _ in range(extent.steps):
                state, scalars = step(state, frozen, count, batch)
            jax.block_until_ready(state)
            seconds = (time.perf_counter() - begun) / extent.steps
            times[lever].append(seconds * 1e3)
            losses.append(scalars.first()["loss"])
    first = times[next(iter(times))][1:]  # The first round is warm-up.
    for lever, values in times.items():
        ratios = [a / b for a, b in zip(values[1:], first, strict=True)]
        figures[f"{name} {lever}"] |= {
            "step, ms": spread(values[1:]),
            f"time / {next(iter(times))}": statistics.median(ratios),
        }
    return bool(np.isfinite(devices.fetch(losses)).all())
