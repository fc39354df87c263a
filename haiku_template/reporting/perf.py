"""Throughput: steps a second, the parts of a step's time, model FLOPs utilization."""

import contextlib
import time
import timeit
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_template.devices import DeviceManager

Metrics = dict[str, float]
BYTES = "bytes_to_devices", "bytes_from_devices"


class Clock:
    """Measures the time between two reports, less evaluation and saving."""

    def __init__(self, devices: DeviceManager) -> None:
        self._devices = devices
        self.start(0)

    def start(self, step: int) -> None:
        """Starts to measure from `step`."""
        self._step, self._since = step, time.perf_counter()
        self._before = self._devices.ledger.totals()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count."""
        begun, before = time.perf_counter(), self._devices.ledger.totals()
        yield
        self._since += time.perf_counter() - begun
        self._before += self._devices.ledger.totals() - before

    def read(self, step: int) -> Metrics:
        """Metrics of an average step since the last reading.

        Splits the loop's wait for a batch into `data` and `to_devices` in the ratio of
        the prefetch thread's time, so that the seconds add up to the time of a step.
        """
        spent = self._devices.ledger.totals() - self._before
        steps, seconds = max(step - self._step, 1), time.perf_counter() - self._since
        self.start(step)
        thread = spent["data"] + spent["to_devices"]
        copying = spent["waiting"] * spent["to_devices"] / (thread or 1.0)
        phases = {"data": spent["waiting"] - copying, "to_devices": copying}
        phases |= {k: spent[k] for k in ("dispatch", "compute", "from_devices")}
        if self._devices.platform == "cpu":
            # CPUs may compute in the call. Why: docs/decisions/devices.md#ledger
            phases["compute"] += phases.pop("dispatch")
        phases["other"] = max(seconds - sum(phases.values()), 0.0)
        metrics = {f"perf/{k}_seconds": x / steps for k, x in phases.items()}
        metrics |= {f"perf/{name}": spent[name] / steps for name in BYTES}
        return {"perf/steps_per_second": steps / max(seconds, 1e-9)} | metrics


class Work(NamedTuple):
    """Size of one training example."""

    tokens: int = 0  # Learned from; 0 without tokens.
    flops: float = 0.0  # Of the model's forward and backward pass; 0 if not known.


def rates(work: Work, examples_per_second: float, peak: float | None) -> Metrics:
    """Throughput metrics, and of a measured `peak` in FLOP/s the utilization (MFU)."""
    flops = examples_per_second * work.flops
    metrics = {
        "perf/examples_per_second": examples_per_second,
        "perf/tokens_per_second": examples_per_second * work.tokens,
        "perf/model_flops_per_second": flops,
        "perf/utilisation": flops / peak if peak else 0.0,
    }
    return {name: value for name, value in metrics.items() if value}


ENOUGH_SECONDS = 2e-3  # A product of this length hides what starting it costs.
LARGEST, LARGEST_ON_CPU = 16384, 2048
REPEATS = 5


def matmul_bytes(devices: DeviceManager, dtype: Any, limit: int | None = None) -> int:
    """Largest memory that `matmul_peak` takes of a device, at most `limit`."""
    size = LARGEST_ON_CPU if devices.platform == "cpu" else LARGEST
    while limit is not None and _bytes(size, dtype) > limit and size > 1:
        size //= 2
    return _bytes(size, dtype)


def _bytes(size: int, dtype: Any) -> int:
    return 2 * size**2 * jnp.dtype(dtype).itemsize  # A matrix, and its square.


def matmul_peak(
    devices: DeviceManager, dtype: Any, most_bytes: int | None = None
) -> float:
    """Measures the FLOP/s of all devices together, in some tenths of a second.

    Square matrices grow until each product takes long enough; the best time counts.
    `most_bytes` bounds a device's memory; None means `matmul_bytes`.
    """
    most_bytes = most_bytes or matmul_bytes(devices, dtype)
    size = 512
    while _bytes(size, dtype) > most_bytes and size > 1:
        size //= 2
    while True:
        seconds = devices.processes.first(_matmul_seconds(devices, dtype, size))
        if seconds >= ENOUGH_SECONDS or _bytes(2 * size, dtype) > most_bytes:
            return 2 * size**3 * devices.num_devices / seconds
        size *= 2


def _matmul_seconds(devices: DeviceManager, dtype: Any, size: int) -> float:
    x = devices.init(lambda: jnp.ones((size, size), dtype))
    product = jax.jit(jnp.matmul).lower(x, x).compile()
    timer = timeit.Timer(lambda: jax.block_until_ready(product(x, x)))
    return min(timer.repeat(1 + REPEATS, number=1)[1:])
