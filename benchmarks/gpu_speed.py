"""The checks of `benchmarks.gpu_check` that take time and memory.

Each takes (devices, scale, figures) and writes what it measures into `figures` as it
goes, so that a failure keeps what came before it. It returns whether it passed; None
means that there was nothing to judge. Two things that are compared are measured in
turns, and every time ends with `jax.block_until_ready`.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import overhead
from configs import cifar10_resnet, digits, digits_resnet
from haiku_template.data import BatchSpec, Data, Split, from_split, images
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment, Trainer

NOT_ON_CPU = "not measured on cpu"
LEAST_COPY_SPEED = 0.5  # Of shard and fetch, as a share of device_put and device_get.

Figures = dict[str, Any]


class Scale(NamedTuple):
    """How much the checks do; the defaults are for a card."""

    precisions: Sequence[str] = ("float32", "bfloat16")
    mlp_steps: int = 500
    resnet_steps: int = 200
    least_accuracy: float = 0.95  # On digits, in either precision.
    chunk: int = 20  # Steps that are timed together.
    batch_sizes: Sequence[int] = (256, 1024)  # Of ResNet-20 on 32 x 32 images.
    throughput_steps: int = 140
    compared_steps: int = 20
    resumed_steps: int = 20
    resumed_resnet: bool = True  # And not the MLP alone.
    mebibytes: Sequence[int] = (1, 16, 256)
    repeats: int = 7
    overhead_steps: int = 3000
    overhead_rounds: int = 3
    least_loop_speed: float = 0.7  # Of the whole loop, as a share of bare steps.
    predicted_sizes: Sequence[int] = (8, 16)  # Windows of a GPT-2 of four layers.
    channels: Sequence[int] | None = None  # Of every ResNet; None leaves its config's.


FULL = Scale()
QUICK = Scale(
    precisions=("float32",),
    mlp_steps=10,
    resnet_steps=6,
    least_accuracy=0,
    chunk=2,
    batch_sizes=(8,),
    throughput_steps=6,
    compared_steps=3,
    resumed_steps=4,
    resumed_resnet=False,
    mebibytes=(1,),
    repeats=2,
    overhead_steps=60,
    overhead_rounds=1,
    least_loop_speed=0,
    channels=(4,),
)


def digits_training(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Both digits configs train to their accuracy, in both precisions."""
    passed = True
    for name, config_file, num_steps in (
        ("mlp", digits, scale.mlp_steps),
        ("resnet", digits_resnet, scale.resnet_steps),
    ):
        trainers = {
            f"{name} {precision}": build(
                devices, scale, config_file, num_steps, precision
            )
            for precision in scale.precisions
        }
        for label, run in race(trainers, num_steps, scale, figures).items():
            metrics = run.trainer.evaluate(run.state)
            figures[label]["accuracy"] = metrics["eval/accuracy"]
            passed &= metrics["eval/accuracy"] >= scale.least_accuracy
            passed &= figures[label]["finite"]
    return passed


def throughput(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """How fast ResNet-20 is on random images; its losses stay finite."""
    num_steps = scale.throughput_steps
    for size in scale.batch_sizes:
        trainers = {
            f"batch {size} {precision}": build(
                devices, scale, cifar10_resnet, num_steps, precision, size
            )
            for precision in scale.precisions
        }
        race(trainers, num_steps, scale, figures)
    return all(column["finite"] for column in figures.values())


def bandwidth(devices: DeviceManager, scale: Scale, figures: Figures) -> bool | None:
    """Copies to the device and back, next to bare ones."""
    put = functools.partial(jax.device_put, device=devices.devices[0])
    ways = {"ours": (devices.shard, devices.fetch), "bare": (put, jax.device_get)}
    on_cpu = devices.platform == "cpu"  # Where a copy may be none.
    ratios = []
    for mebibytes in scale.mebibytes:
        host = np.ones(mebibytes * 2**18, np.float32)
        rates: dict[str, list[float]] = {f"{way} to device": [] for way in ways}
        rates |= {f"{way} to host": [] for way in ways}
        for _ in range(scale.repeats + 1):
            for way, (to_device, to_host) in ways.items():
                array, seconds = _timed(to_device, host)
                rates[f"{way} to device"].append(host.nbytes / seconds / 1e9)
                _, seconds = _timed(to_host, array)
                rates[f"{way} to host"].append(host.nbytes / seconds / 1e9)
        # The first of each is warm-up.
        found = {f"{way}, GB/s": spread(values[1:]) for way, values in rates.items()}
        for way in ("to device", "to host"):
            ours, bare = (found[f"{name} {way}, GB/s"]["median"] for name in ways)
            found[f"ours / bare {way}"] = ours / bare
            ratios.append(ours / bare)
        figures[f"{mebibytes} MiB"] = NOT_ON_CPU if on_cpu else found
    return None if on_cpu else min(ratios) >= LEAST_COPY_SPEED


def _timed(function: Callable[[Any], Any], x: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = jax.block_until_ready(function(x))
    return result, time.perf_counter() - begun


def memory(devices: DeviceManager, scale: Scale, figures: Figures) -> bool | None:
    """What the compiler says that a step takes, and what it takes."""
    trainers = {
        "mlp": build(devices, scale, digits, scale.mlp_steps),
        "resnet20": build(
            devices,
            scale,
            cifar10_resnet,
            scale.throughput_steps,
            batch_size=scale.batch_sizes[0],
        ),
    }
    ratios = []
    for name, trainer in trainers.items():
        with trainer.calls(0, 1, lambda step: True) as calls:
            (call,) = calls
        state = trainer.init()
        sizes = (
            trainer.trace(trainer.feed.host_shapes()[0])
            .lower()
            .compile()
            .memory_analysis()
        )
        kinds = ("argument", "output", "alias", "temp")
        found = {
            f"{kind}, bytes": getattr(sizes, f"{kind}_size_in_bytes") for kind in kinds
        }
        # The arguments are there already, and donated ones become results.
        growth = found["temp, bytes"] + found["output, bytes"] - found["alias, bytes"]
        state, _ = jax.block_until_ready(trainer.advance(state, *call))
        measured = _peak_growth(devices, trainer.advance, state, *call)
        found["predicted growth, bytes"] = growth
        found["measured growth, bytes"] = NOT_ON_CPU if measured is None else measured
        if measured is not None:
            found["measured / predicted"] = measured / growth
            ratios.append(measured / growth)
        figures[name] = found
    return all(0.5 <= ratio <= 2 for ratio in ratios) if ratios else None


def _peak_growth(
    devices: DeviceManager, step: Callable[..., Any], *args: Any
) -> int | None:
    """Bytes by which a step passes what is in use before it; None without figures."""
    device = devices.devices[0]
    stats = device.memory_stats()
    if not stats:
        return None
    # The peak is the process's. Memory is filled up to it, so that a new one shows.
    room = stats["peak_bytes_in_use"] - stats["bytes_in_use"]
    filler = devices.init(lambda: jnp.zeros(room // 4 + 1, jnp.float32))
    jax.block_until_ready(filler)
    before = device.memory_stats()["bytes_in_use"]
    jax.block_until_ready(step(*args))
    return device.memory_stats()["peak_bytes_in_use"] - before


def loop_overhead(devices: DeviceManager, scale: Scale, figures: Figures) -> bool:
    """Steps per second of the whole loop and of our step; see benchmarks.overhead."""
    config = digits.get_config()
    config.steps_per_call = 1
    trainer = Experiment.from_config(config, devices).trainer(devices)
    config.steps_per_call = overhead.STEPS_PER_CALL
    several = Experiment.from_config(config, devices).trainer(devices)
    on_device, every = Run(trainer), config.log_every
    steps = scale.overhead_steps
    names = ("whole", "50 a call", "own step", "on device")
    rates: dict[str, list[float]] = {name: [] for name in names}
    with (
        mock.patch.object(overhead, "NUM_STEPS", steps),
        mock.patch.dict(os.environ, {"FORCE_COLOR": "1"}),  # So that rich draws.
    ):
        for _ in range(scale.overhead_rounds):
            rates["whole"].append(overhead.whole_loop(trainer, every, steps))
            rates["50 a call"].append(overhead.whole_loop(several, every, steps))
            rates["own step"].append(overhead.step_loop(trainer))
            rates["on device"].append(1 / on_device.steps(steps // 10))
    figures |= {f"{name}, steps/s": spread(values) for name, values in rates.items()}
    middle = {name: statistics.median(values) for name, values in rates.items()}
    figures["whole / own step"] = middle["whole"] / middle["own step"]
    figures["50 a call / whole"] = middle["50 a call"] / middle["whole"]
    figures["whole / on device"] = middle["whole"] / middle["on device"]
    return figures["whole / own step"] >= scale.least_loop_speed


class Run:
    """A trainer that is under way: its state, and its losses on the device."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.state = trainer.init()
        self.step = 0
        self.losses: list[jax.Array] = []

    def steps(self, count: int) -> float:
        """Runs so many steps; returns seconds for each, without copying batches."""
        devices, data = self.trainer.devices, self.trainer.experiment.data.train
        batches = [devices.shard(data.batch(self.step + n)) for n in range(count)]
        jax.block_until_ready((self.state, batches))
        begun = time.perf_counter()
        for batch in batches:
            self.state, scalars = self.trainer.step(self.state, batch)
            self.losses.append(scalars["loss"])
        jax.block_until_ready(self.state)
        self.step += count
        return (time.perf_counter() - begun) / count


def race(
    trainers: dict[str, Trainer], num_steps: int, scale: Scale, figures: Figures
) -> dict[str, Run]:
    """Runs trainers in turns, a chunk of steps each, and adds a column for each."""
    runs = {label: Run(trainer) for label, trainer in trainers.items()}
    first = {label: run.steps(1) for label, run in runs.items()}
    for run in runs.values():
        run.steps(scale.chunk)  # Warm-up.
    alone: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(scale.chunk):
        for label, run in runs.items():
            alone[label].append(run.steps(1) * 1e3)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for done in range(2 * scale.chunk + 1, num_steps, scale.chunk):
        for label, run in runs.items():
            times[label].append(run.steps(min(scale.chunk, num_steps - done)) * 1e3)
    for label, run in runs.items():
        devices, step = run.trainer.devices, spread(times[label])
        losses = np.array(devices.fetch(run.losses))
        stats = devices.devices[0].memory_stats() or {}
        figures[label] = {
            "first step, s": first[label],
            "step, ms": step,
            "step alone, ms": spread(alone[label]),
            "examples/s": run.trainer.feed.batch_size / step["median"] * 1e3,
            "final loss": float(losses[-1]),
            "finite": bool(np.isfinite(losses).all()),
            "bytes_in_use": stats.get("bytes_in_use", NOT_ON_CPU),
            "peak_bytes_in_use": stats.get("peak_bytes_in_use", NOT_ON_CPU),
        }
    return runs


@functools.cache
def build(
    devices: DeviceManager,
    scale: Scale,
    config_file: ModuleType,
    num_steps: int,
    precision: str = "float32",
    batch_size: int | None = None,
) -> Trainer:
    """The trainer of a config file; compiled once for all checks that ask for it."""
    config = config_file.get_config()
    config.num_steps, config.precision = num_steps, precision
    config.batch_size = batch_size or config.batch_size
    config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, num_steps // 2)
    if config.data.name == "cifar10":  # Nothing is downloaded.
        config.data = {"name": f"{__name__}:random_images"}
    if scale.channels and config.model.name == "resnet":
        config.model.channels, config.model.blocks = scale.channels, 1
    return Experiment.from_config(config, devices).trainer(devices)


def random_images(spec: BatchSpec) -> Data:
    """Images of CIFAR-10's shape and type, from no file."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2048, 32, 32, 3), np.uint8)
    y = rng.integers(0, 10, 2048, np.int32)
    preprocess = images.standardize_cifar10
    return from_split(Split(x, y, x, y), spec, num_classes=10, preprocess=preprocess)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the range."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values)}
