"""Attention, by the implementation that a device has.

Shapes: B examples, T tokens, H heads of size C, S tokens that may be seen.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from haiku_template.errors import ConfigError

Model = hk.TransformedWithState
IMPLEMENTATIONS = ("auto", "xla", "cudnn")
# Limits of cuDNN's flash attention in jax.nn.dot_product_attention.
LEAST_CAPABILITY = (8, 0)
HEAD_MULTIPLE = 8
LARGEST_HEADS = {(9, 0): 256, LEAST_CAPABILITY: 128}  # From this capability on.
# With a bias some versions give NaN gradients where 64 tokens fill half of a tile.
SEGMENTS_MULTIPLE = 128
# Why: docs/decisions/models.md#segments
BLOCK, MOST_BLOCKS = 128, 8  # Queries at a time, of segments computed by XLA.


class Hardware(NamedTuple):
    """Platform and compute capability (`8.0`, `gfx90a`; "" for none) of devices."""

    platform: str
    capability: str

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Hardware":
        """Hardware of devices that compute together: the least capable counts."""
        capabilities = [str(getattr(d, "compute_capability", "")) for d in devices]
        least = min(capabilities, key=lambda text: _number(text) or (0, 0))
        return cls(devices[0].platform, least)

    @classmethod
    def current(cls) -> "Hardware":
        """Hardware compiled for: that of `for_devices`, or JAX's first device."""
        devices = _COMPILED_FOR.get(())
        # Why: docs/decisions/house.md#default-device
        return ANY if devices is None else cls.of(devices or jax.devices()[:1])


ANY = Hardware("any", "")  # What XLA alone computes.
_COMPILED_FOR = ContextVar[Sequence[jax.Device] | None]("compiled_for")


def for_devices(model: Model, devices: Sequence[jax.Device] | None) -> Model:
    """Binds a model to the devices it is traced for; None for those of any platform."""

    @contextlib.contextmanager
    def compiled() -> Iterator[None]:
        token = _COMPILED_FOR.set(devices)
        try:
            yield
        finally:
            _COMPILED_FOR.reset(token)

    return model._replace(init=compiled()(model.init), apply=compiled()(model.apply))


def attend(
    attention: str,
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    *,
    lengths: Array | None = None,
    segments: Array | None = None,
) -> Array:
    """Attention with softmax in float32: [B, T, H, C].

    Args:
      attention: as in `choose`, whose errors this raises.
      query: [B, T, H, C]; `key` and `value` are [B, S, H, C].
      mask: bool [B, 1, T, S], True for visible tokens; None is causal. XLA computes it,
        unless there are `lengths`.
      lengths: int [B], of the tokens before padding, if `mask` hides just that: cuDNN
        takes them instead of it, and T is S.
      segments: int [B, T], without a mask: tokens see those before them with an equal
        number alone.
    """
    hardware, dtype = Hardware.current(), query.dtype
    tokens = 0 if segments is None else query.shape[1]
    implementation = "xla"
    if (mask is None or lengths is not None) and hardware is not ANY:
        implementation = choose(attention, hardware, dtype, query.shape[-1], tokens)
    # JAX asks for products added up in float32, which CPUs have not of float16.
    is_gpu, number = hardware.platform == "gpu", _number(hardware.capability)
    lacks = not is_gpu or (number is not None and number < LEAST_CAPABILITY)
    if lacks and dtype == (jnp.bfloat16 if is_gpu else jnp.float16):
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if segments is not None and implementation == "xla":
        return _attend_in_blocks(query, key, value, segments).astype(dtype)
    if implementation == "xla":
        return _attend_by_xla(query, key, value, mask).astype(dtype)
    is_causal = mask is None
    if segments is not None:
        mask = segments[:, None, :, None] == segments[:, None, None]
    if lengths is not None:
        mask = None
        # A row may be padding.
        lengths = jnp.maximum(lengths, 1).astype(jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=is_causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    ).astype(dtype)


def _attend_by_xla(query: Array, key: Array, value: Array, mask: Array | None) -> Array:
    """Attention by XLA, in the form that is fast on the hardware: [B, T, H, C]."""
    if Hardware.current().platform == "cpu":
        return _attend_by_heads(query, key, value, mask)
    return jax.nn.dot_product_attention(
        query, key, value, mask=mask, is_causal=mask is None, implementation="xla"
    )


def _attend_by_heads(
    query: Array, key: Array, value: Array, mask: Array | None
) -> Array:
    """Attention as `jax.nn` has it, in the form that is fast on CPUs: [B, T, H, C].

    Heads come before tokens, so that no array of pairs of tokens is transposed, and the
    sums divide the outputs, which are smaller. Why: docs/decisions/models.md#cpus
    """
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    logits = einsum("bhtc,bhsc->bhts", query, key) * query.shape[-1] ** -0.5
    if mask is None:
        mask = jnp.tri(*logits.shape[2:], dtype=bool)
    logits = jnp.where(mask, logits, -0.7 * jnp.finfo(jnp.float32).max)
    largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - largest)
    outputs = einsum("bhts,bhsc->bhtc", weights.astype(value.dtype), value)
    outputs /= jnp.sum(weights, axis=-1, keepdims=True)
    return outputs.swapaxes(1, 2)


def _attend_in_blocks(query: Array, key: Array, value: Array, segments: Array) -> Array:
    """Causal attention inside segments by XLA: [B, T, H, C], a block at a time.

    A block of queries sees no key beyond its end, which nearly halves the products; its
    weights, float32 [B, H, BLOCK, S], are computed again in the backward pass.
    """

    @jax.checkpoint
    def block(query: Array, key: Array, value: Array, segments: Array) -> Array:
        start = key.shape[1] - query.shape[1]
        mask = segments[:, start:, None] == segments[:, None]
        mask &= jnp.tri(*mask.shape[1:], start, dtype=bool)
        return _attend_by_xla(query, key, value, mask[:, None])

    size = query.shape[1]
    step = max(BLOCK, -(-size // MOST_BLOCKS))
    ends = [min(start + step, size) for start in range(0, size, step)]
    blocks = [
        block(q, key[:, :end], value[:, :end], segments[:, :end])
        for q, end in zip(jnp.split(query, ends[:-1], axis=1), ends, strict=True)
    ]
    return jnp.concatenate(blocks, axis=1)


def choose(
    attention: str,
    hardware: Hardware,
    dtype: jnp.dtype,
    head_size: int,
    segmented: int = 0,
) -> str:
    """Chooses the implementation: `xla` or `cudnn`.

    `attention` is one of these, or `auto` for cuDNN's flash attention where it exists.
    `segmented` is the number of tokens of a window with segments; 0 without. Raises
    `ConfigError` if `cudnn` was asked for and cannot be had; it says why.
    """
    obstacle = _obstacle(hardware, jnp.dtype(dtype), head_size)
    if not obstacle and segmented % SEGMENTS_MULTIPLE:
        multiple = f"a multiple of {SEGMENTS_MULTIPLE}"
        obstacle = f"packed windows of {segmented} tokens are not {multiple}"
    if attention == "cudnn" and obstacle:
        raise ConfigError(
            f"attention=cudnn was asked for and cannot be had: {obstacle}; "
            "attention=auto uses it where it exists"
        )
    return "xla" if attention == "xla" or obstacle else "cudnn"


def _obstacle(hardware: Hardware, dtype: np.dtype, head_size: int) -> str:
    """Obstacle to cuDNN's flash attention; "" for none."""
    if not (number := _number(hardware.capability)):
        return "there is no NVIDIA GPU"
    if number < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return f"the GPU has compute capability {hardware.capability}, below {least}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and the model in {dtype}"
    largest = max(size for least, size in LARGEST_HEADS.items() if number >= least)
    if head_size % HEAD_MULTIPLE or head_size > largest:
        limits = f"a multiple of {HEAD_MULTIPLE} up to {largest}"
        return f"heads of size {head_size} are not {limits}"
    return ""


def _number(capability: str) -> tuple[int, int] | None:
    """Parses a compute capability to compare; None for none of NVIDIA's."""
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return match and (int(match[1]), int(match[2]))
