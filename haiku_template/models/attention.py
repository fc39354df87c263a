"""Causal attention, by the implementation that a device has.

Shapes: B examples, T tokens, H heads of size C, S tokens that may be seen.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.errors import ConfigError

IMPLEMENTATIONS = ("auto", "xla", "cudnn")
# What jax.nn.dot_product_attention takes to cuDNN's flash attention on every GPU that
# has it; heads of up to 256 would do from compute capability 9.0 on.
LEAST_CAPABILITY = (8, 0)
HEAD_MULTIPLE, LARGEST_HEAD = 8, 128


class Hardware(NamedTuple):
    """The device that computes.

    Attributes:
      runtime: what drives it, as XLA words it; contains `cuda` on NVIDIA's GPUs.
      capability: the compute capability, such as `8.0`; empty where there is none.
    """

    runtime: str
    capability: str

    @classmethod
    def current(cls) -> "Hardware":
        """That of the devices in use, which JAX puts first."""
        device = jax.devices()[0]
        capability = getattr(device, "compute_capability", "")
        return cls(device.client.platform_version, str(capability))

    @property
    def is_gpu(self) -> bool:
        """Whether it is NVIDIA's or AMD's."""
        return "cuda" in self.runtime or "rocm" in self.runtime


def attend(
    attention: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Attention with softmax in float32: [B, T, H, C].

    Args:
      attention: see `choose`.
      query: [B, T, H, C].
      key: [B, S, H, C].
      value: [B, S, H, C].
      mask: which tokens each may see: bool [B, 1, T, S], computed by XLA; None means
        those up to its own.

    Raises:
      ConfigError: see `choose`.
    """
    hardware, dtype = Hardware.current(), query.dtype
    chosen = "xla"
    if mask is None:
        chosen = choose(attention, hardware, dtype, query.shape[-1])
    if dtype == jnp.float16 and not hardware.is_gpu:
        # JAX would ask for float16 products added up in float32, which GPUs alone have.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    outputs = jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=mask is None, implementation=chosen
    )
    return outputs.astype(dtype)


def choose(attention: str, hardware: Hardware, dtype: jnp.dtype, head_size: int) -> str:
    """The implementation to use: `xla` or `cudnn`.

    Args:
      attention: `auto` (cuDNN's flash attention where it exists), `xla` or `cudnn`.
      hardware: where it will run.
      dtype: of queries, keys and values.
      head_size: the size of each head.

    Raises:
      ConfigError: `cudnn` was asked for and cannot be had; says why.
    """
    obstacle = _obstacle(hardware, jnp.dtype(dtype), head_size)
    if attention == "cudnn" and obstacle:
        raise ConfigError(
            f"attention=cudnn was asked for and cannot be had: {obstacle}; "
            "attention=auto uses it where it exists"
        )
    return "xla" if attention == "xla" or obstacle else "cudnn"


def _obstacle(hardware: Hardware, dtype: np.dtype, head_size: int) -> str:
    """What keeps cuDNN's flash attention from being used; "" for nothing."""
    number = re.fullmatch(r"(\d+)\.(\d+)", hardware.capability)
    if "cuda" not in hardware.runtime or not number:
        return "there is no NVIDIA GPU"
    if (int(number[1]), int(number[2])) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"the GPU has compute capability {hardware.capability}, below {least}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the model in {dtype}"
    if head_size % HEAD_MULTIPLE or head_size > LARGEST_HEAD:
        return (
            f"heads of size {head_size} are not a multiple of {HEAD_MULTIPLE} up to "
            f"{LARGEST_HEAD}"
        )
    return ""
