"""Frozen parameters in 8 or 4 bits, made array by array, and used in full precision.

`int8` is symmetric, with a scale for each 64 inputs of each output (the last axis), or
for all if 64 does not divide them. `nf4` is QLoRA's (arXiv:2305.14314): 64 numbers of a
row have a scale, and each is the nearest of 16, two to a byte.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.stored import Form, use

BLOCK = 64  # Numbers of one scale.
# Quantiles of a normal distribution, as the paper's appendix E lists them.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(Form):  # Why: docs/decisions/finetuning.md#int8
    """Values [..., I, O] of 8 bits, and their scales [..., I / 64 or 1, O]."""

    values: Any
    scale: Any

    @classmethod
    def store(cls, array: Any) -> "Int8":
        """Quantizes an array of NumPy's or of JAX's, [..., I, O]."""
        np_ = _numpy_of(array)
        *stack, inputs, outputs = array.shape
        block = inputs if inputs % BLOCK else BLOCK
        blocks = array.astype(np.float32).reshape(*stack, -1, block, outputs)
        scale = np_.max(np_.abs(blocks), axis=-2) / np.float32(127)
        values = np_.round(blocks / np_.where(scale > 0, scale, 1)[..., None, :])
        return cls(values.astype(np.int8).reshape(array.shape), scale)

    def use(self, dtype: Any, zero: Any = 0) -> jax.Array:
        """Makes the array that a model uses."""
        values, scale = use(self.values, None), use(self.scale, None) + zero
        blocks = values.reshape(*scale.shape[:-1], -1, scale.shape[-1])
        return (blocks * scale[..., None, :]).reshape(values.shape).astype(dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4(Form):
    """Pairs of values of 4 bits [..., I, O / 2], and their scales [..., I, O / 64]."""

    pairs: Any
    scale: Any

    @classmethod
    def store(cls, array: Any) -> "Nf4":
        """Quantizes an array of NumPy's or of JAX's, [..., I, O]; 64 divides O."""
        np_ = _numpy_of(array)
        blocks = array.astype(np.float32).reshape(*array.shape[:-1], -1, BLOCK)
        scale = np_.max(np_.abs(blocks), axis=-1)
        shares = blocks / np_.where(scale > 0, scale, 1)[..., None]
        table = np.asarray(NF4, np.float32)
        # Ties are of measure 0.
        values = np_.searchsorted((table[1:] + table[:-1]) / 2, shares.ravel())
        values = values.astype(np.uint8).reshape(*array.shape[:-1], -1, 2)
        return cls(values[..., 0] * np.uint8(16) + values[..., 1], scale)

    def use(self, dtype: Any, zero: Any = 0) -> jax.Array:
        """Makes the array that a model uses."""
        pairs, scale = use(self.pairs, None), use(self.scale, None) + zero
        values = jnp.stack([pairs >> 4, pairs & 15], axis=-1)
        shares = jnp.asarray(NF4, jnp.float32)[values]
        blocks = shares.reshape(*scale.shape, BLOCK) * scale[..., None]
        return blocks.reshape(*pairs.shape[:-1], -1).astype(dtype)


FORMS = {"int8": Int8, "nf4": Nf4}


def is_possible(name: str, shape: tuple[int, ...]) -> bool:
    """Tests if an array of a shape can be stored so; scales would outweigh vectors."""
    if len(shape) < 2 or 0 in shape:
        return False
    # A scale has 4 bytes: of 4 inputs bfloat16 has no more.
    return shape[-1] % BLOCK == 0 if name == "nf4" else shape[-2] > 4


def _numpy_of(array: Any) -> Any:
    return jnp if isinstance(array, jax.Array) else np
