"""How fast the loop is, where each step's time goes, and what bounds the run."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from haiku_template.devices import DeviceManager

# Parts of a step's time, as the loop's own thread sees it; together they are all of it.
PARTS = {
    "perf/data_seconds": "data",
    "perf/to_devices_seconds": "host-to-device",
    "perf/dispatch_seconds": "dispatch",
    "perf/compute_seconds": "compute",
    "perf/from_devices_seconds": "device-to-host",
    "perf/other_seconds": "the loop",
}


class Clock:
    """Measures the loop between two reports, evaluation and saving left out."""

    def __init__(self, devices: DeviceManager) -> None:
        self._devices = devices

    def start(self, step: int) -> None:
        """Starts to measure from `step`."""
        self._step, self._since = step, time.perf_counter()
        self._before = self._devices.ledger.totals()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        begun, before = time.perf_counter(), self._devices.ledger.totals()
        yield
        self._since += time.perf_counter() - begun
        self._before += self._devices.ledger.totals() - before

    def read(self, step: int) -> dict[str, float]:
        """Metrics of an average step since the last reading, or since the start.

        The seconds add up to the time of a step. What overlaps costs nothing: batches
        are made and copied by another thread, and only waiting for them counts, as
        data or host-to-device by what that thread was doing. Bytes are those of copies
        that the loop asked for.
        """
        spent = self._devices.ledger.totals() - self._before
        steps = max(step - self._step, 1)
        seconds = (time.perf_counter() - self._since) / steps
        self.start(step)
        parts = {name: value / steps for name, value in _parts(spent).items()}
        if self._devices.platform == "cpu":
            # The calling thread may compute itself there.
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
    """What takes most of a step, and its share of the time in [0, 1]."""
    seconds = {name: metrics[key] for key, name in PARTS.items() if key in metrics}
    name = max(seconds, key=seconds.__getitem__)
    return name, seconds[name] / max(sum(seconds.values()), 1e-12)


def bound_text(metrics: dict[str, float]) -> str:
    """`bound by compute 93%`."""
    name, share = bound(metrics)
    return f"bound by {name} {share:.0%}"


class Work(NamedTuple):
    """What one example of a training batch amounts to.

    Attributes:
      tokens: that are learned from; 0 where examples have none.
      flops: floating-point operations of its forward and backward pass, by the
        model's formula; 0 where there is none.
    """

    tokens: int = 0
    flops: float = 0.0


UNKNOWN = Work()


def rates(
    work: Work, examples_per_second: float, peak: float | None
) -> dict[str, float]:
    """Metrics of a run's speed.

    Args:
      work: of one example.
      examples_per_second: over all devices.
      peak: FLOP/s of matrix products on all devices, as measured; None if not.
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
    """The same, and what is known of it: `1,234 tokens/s (31% of matmul peak)`."""
    text = speed_text(metrics)
    share = metrics.get("perf/utilisation")
    return text if share is None else f"{text} ({share:.0%} of matmul peak)"


ENOUGH_SECONDS = 2e-3  # A product of this length hides what starting it costs.
LARGEST, LARGEST_ON_CPU = 16384, 2048
REPEATS = 5


def matmul_bytes(devices: DeviceManager, dtype: Any, limit: int | None = None) -> int:
    """The most memory of a device that `matmul_peak` takes; no more than `limit`."""
    size = LARGEST_ON_CPU if devices.platform == "cpu" else LARGEST
    while limit is not None and _bytes(size, dtype) > limit and size > 1:
        size //= 2
    return _bytes(size, dtype)


def _bytes(size: int, dtype: Any) -> int:
    return 2 * size**2 * jnp.dtype(dtype).itemsize  # A matrix, and its square.


def matmul_peak(
    devices: DeviceManager, dtype: Any, most_bytes: int | None = None
) -> float:
    """Floating-point operations a second of all devices together, measured.

    The best of a few products of square matrices, on all devices at once, larger ones
    until each takes long enough. Takes some tenths of a second.

    Args:
      devices: those of the run.
      dtype: what the model computes in.
      most_bytes: of a device's memory; None for `matmul_bytes`.
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
