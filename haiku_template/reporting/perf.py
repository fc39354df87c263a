"""Throughput: steps a second, the parts of a step's time, model FLOPs utilization."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_template.devices import DeviceManager

# Parts of a step's time in the loop's thread, which add up to the whole.
PARTS = {
    "perf/data_seconds": "data",
    "perf/to_devices_seconds": "host-to-device",
    "perf/dispatch_seconds": "dispatch",
    "perf/compute_seconds": "compute",
    "perf/from_devices_seconds": "device-to-host",
    "perf/other_seconds": "the loop",
}


class Clock:
    """Measures the time between two reports, less evaluation and saving."""

    def __init__(self, devices: DeviceManager) -> None:
        self._devices = devices

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

    def read(self, step: int) -> dict[str, float]:
        """Metrics of an average step since the last reading.

        The seconds add up to the time of a step. Another thread makes and copies
        batches: only waiting for them counts, as data or as host-to-device, by its work
        in that time. Bytes are of copies that the loop asked for.
        """
        spent = self._devices.ledger.totals() - self._before
        steps = max(step - self._step, 1)
        seconds = (time.perf_counter() - self._since) / steps
        self.start(step)
        parts = {name: value / steps for name, value in _parts(spent).items()}
        if self._devices.platform == "cpu":
            # On the CPU the calling thread may compute itself.
            parts["perf/compute_seconds"] += parts.pop("perf/dispatch_seconds")
        return {
            "perf/steps_per_second": 1 / max(seconds, 1e-9),
            **parts,
            "perf/other_seconds": max(seconds - sum(parts.values()), 0.0),
            "perf/bytes_to_devices": spent["bytes_to_devices"] / steps,
            "perf/bytes_from_devices": spent["bytes_from_devices"] / steps,
        }


def _parts(spent: Counter[str]) -> dict[str, float]:
    making, copying = spent["data"], spent["to_devices"]
    share = copying / (making + copying) if copying else 0.0
    return {
        "perf/data_seconds": spent["waiting"] * (1 - share),
        "perf/to_devices_seconds": spent["waiting"] * share,
        "perf/dispatch_seconds": spent["dispatch"],
        "perf/compute_seconds": spent["compute"],
        "perf/from_devices_seconds": spent["from_devices"],
    }


def bound(metrics: dict[str, float]) -> tuple[str, float]:
    """Names the largest part of a step, and its share of the time in [0, 1]."""
    seconds = {name: metrics[key] for key, name in PARTS.items() if key in metrics}
    name = max(seconds, key=seconds.__getitem__)
    return name, seconds[name] / max(sum(seconds.values()), 1e-12)


def bound_text(metrics: dict[str, float]) -> str:
    """`bound by compute 93%`."""
    name, share = bound(metrics)
    return f"bound by {name} {share:.0%}"


class Work(NamedTuple):
    """Size of one training example.

    Attributes:
      tokens: tokens learned from; 0 without tokens.
      flops: model FLOPs of its forward and backward pass; 0 if not known.
    """

    tokens: int = 0
    flops: float = 0.0


UNKNOWN = Work()


def rates(
    work: Work, examples_per_second: float, peak: float | None
) -> dict[str, float]:
    """Throughput metrics, model FLOPs utilization (MFU) among them.

    `peak` is the FLOP/s of matrix products that was measured on all devices, not a data
    sheet's; None if it was not.
    """
    metrics = {"perf/examples_per_second": examples_per_second}
    if work.tokens:
        metrics["perf/tokens_per_second"] = examples_per_second * work.tokens
    if work.flops:
        metrics["perf/model_flops_per_second"] = examples_per_second * work.flops
        if peak:
            metrics["perf/utilisation"] = examples_per_second * work.flops / peak
    return metrics


def speed_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s`, or `1,234 examples/s`."""
    unit = "tokens" if "perf/tokens_per_second" in metrics else "examples"
    return f"{metrics[f'perf/{unit}_per_second']:,.0f} {unit}/s"


def rate_text(metrics: dict[str, float]) -> str:
    """`1,234 tokens/s (31% of matmul peak)`: throughput with its MFU, if known."""
    text = speed_text(metrics)
    share = metrics.get("perf/utilisation")
    return text if share is None else f"{text} ({share:.0%} of matmul peak)"


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

    It multiplies square matrices on all devices at once, larger ones until each product
    takes long enough, and returns the best time's rate. `most_bytes` bounds a device's
    memory; None means `matmul_bytes`.
    """
    most_bytes = most_bytes or matmul_bytes(devices, dtype)
    size = 512
    while _bytes(size, dtype) > most_bytes and size > 1:
        size //= 2
    while True:
        x = devices.init(lambda size=size: jnp.ones((size, size), dtype))
        product = jax.jit(jnp.matmul).lower(x, x).compile()
        times = []
        for _ in range(1 + REPEATS):
            begun = time.perf_counter()
            jax.block_until_ready(product(x, x))
            times.append(time.perf_counter() - begun)
        best = min(times[1:])
        if best >= ENOUGH_SECONDS or _bytes(2 * size, dtype) > most_bytes:
            return 2 * size**3 * devices.num_devices / best
        size *= 2
