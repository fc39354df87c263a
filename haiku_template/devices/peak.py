"""How fast the devices multiply matrices: what a model's speed is measured against."""

import time
from typing import Any

import jax
import jax.numpy as jnp

from haiku_template.devices.manager import DeviceManager

ENOUGH_SECONDS = 2e-3  # A product of this length hides what starting it costs.
LARGEST = 16384
REPEATS = 5


def matmul_peak(devices: DeviceManager, dtype: Any) -> float:
    """Floating-point operations a second of all devices together, measured.

    The best of a few products of square matrices, on all devices at once, larger ones
    until each takes long enough. Takes some tenths of a second.

    Args:
      devices: those of the run.
      dtype: what the model computes in.
    """
    size = 512
    while True:
        x = devices.init(lambda size=size: jnp.ones((size, size), dtype))
        product = jax.jit(jnp.matmul).lower(x, x).compile()
        times = []
        for _ in range(1 + REPEATS):
            begun = time.perf_counter()
            jax.block_until_ready(product(x, x))
            times.append(time.perf_counter() - begun)
        best = min(times[1:])
        if best >= ENOUGH_SECONDS or size >= LARGEST:
            return 2 * size**3 * devices.num_devices / best
        size *= 2
