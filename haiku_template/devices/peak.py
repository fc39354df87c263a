"""How fast the devices multiply matrices: what a model's speed is measured against."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from haiku_template.devices.manager import DeviceManager

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
