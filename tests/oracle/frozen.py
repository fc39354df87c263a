"""Frozen parameters in few bits, and adapters on them, as the documentation says them.

Shapes: I inputs and O outputs of a matrix [..., I, O], R the rank of an adapter.
"""

import fnmatch

import jax.numpy as jnp
import numpy as np

UNQUANTIZED = ("*embed*", "*/b", "*_b", "*bias*", "*scale", "*offset")
BLOCK = 64  # Numbers that have a scale together.
# QLoRA's table, of its appendix E.
TABLE = """
-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
0.7229568362236023 1.0
"""


def fits(patterns, path):
    """True if one of the patterns fits a path."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)


def rounded(config, path, array):
    """A frozen parameter as the model has it: rounded to what it is stored in."""
    dtype = config.get("finetuning.base_dtype", "float32")
    patterns = config.get("finetuning.unquantized", UNQUANTIZED)
    small = array.ndim < 2 or (array.shape[-1] % BLOCK if dtype == "nf4" else 0)
    small = small or (dtype == "int8" and array.shape[-2] <= 4)  # No byte is saved.
    if dtype in ("float32", "bfloat16") or small or fits(patterns, path):
        half = jnp.float32 if dtype == "float32" else jnp.bfloat16
        return jnp.asarray(array).astype(half).astype(jnp.float32)
    array = np.asarray(array, np.float32)
    return jnp.asarray(_int8(array) if dtype == "int8" else _nf4(array))


def _int8(array):
    """Whole numbers up to 127, times a scale of 64 inputs of an output."""
    *stack, inputs, outputs = array.shape
    size = inputs if inputs % BLOCK else BLOCK  # Or of all its inputs.
    blocks = array.reshape(*stack, -1, size, outputs)
    scale = np.abs(blocks).max(axis=-2, keepdims=True) / np.float32(127)
    return (np.round(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(
        array.shape
    )


def _nf4(array):
    """The nearest numbers of a table, times a scale of 64 numbers of a row."""
    table = np.array(TABLE.split(), np.float32)
    blocks = array.reshape(-1, BLOCK, 1)
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    shares = blocks / np.where(scale > 0, scale, 1)
    nearest = np.abs(shares - table).argmin(axis=-1)
    return (table[nearest] * scale[..., 0]).reshape(array.shape)


def words_of(config, path, ndim):
    """Words for the axes of an adapted tensor."""
    for pattern, words in config.get("finetuning.lora.axes", ()):
        if fits([pattern], path) and len(words.split()) == ndim:
            return words.split()
    return ["in"] * (ndim - 1) + ["out"]  # Of matrices, and of convolutions.


def change(words, shape, a, b):
    """A B as the adapted tensor has its axes."""
    letters = "klmnop"[: len(words)]
    each, ins, outs = (
        [i for i, x in enumerate(words) if x == kind] for kind in ("each", "in", "out")
    )
    name = lambda axes: "".join(letters[i] for i in axes)  # noqa: E731
    size = lambda axes: [shape[i] for i in axes]  # noqa: E731
    a = a.reshape(*size(each), *size(ins), a.shape[-1])
    b = b.reshape(*size(each), b.shape[-2], *size(outs))
    text = f"{name(each)}{name(ins)}r,{name(each)}r{name(outs)}->{letters}"
    return jnp.einsum(text, a, b)
