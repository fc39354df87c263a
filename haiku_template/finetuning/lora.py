"""LoRA (Hu et al. 2021, arXiv:2106.09685): low-rank adapters of frozen matrices.

They are a form of stored parameters, so that any Haiku model can have them: where it
asks for W it gets W + (alpha / rank) A B, one for the whole batch.

Shapes: W [I, O] (inputs, outputs), A [I, R], B [R, O], R the rank. Each axis of another
W is one of its inputs, which A has in a row, one of its outputs, which B has, or, such
as the layers of a stack, one along which each matrix has an A and a B of its own.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_template import stored

A, B = "_lora_a", "_lora_b"  # Behind the name of W.
# Why: docs/decisions/finetuning.md#lora-axes
KINDS = ("each", "in", "out")  # Of axes.
MATRIX = "in out"
CONVOLUTIONS = (hk.ConvND, hk.ConvNDTranspose, hk.DepthwiseConv1D)
CONVOLUTIONS += (hk.DepthwiseConv2D, hk.DepthwiseConv3D)


class Lora(NamedTuple):
    """Configuration of LoRA adapters."""

    rank: int  # R; 0 makes none.
    alpha: float = 16.0  # The LoRA scale times R.
    # Share of the rows of A that a step drops, in [0, 1): the same rows for all of a
    # device's examples, where the paper draws for each.
    dropout: float = 0.0
    patterns: tuple[str, ...] = ("*/w",)  # Of matrices to adapt, by path.
    # Of other tensors, (pattern, a word for each axis): ("*/query_w", "in out out"). In
    # a plan, of each tensor that it adapts and that is no matrix.
    axes: tuple[tuple[str, str], ...] = ()


def init_adapters(
    lora: Lora, shapes: dict[str, tuple[int, ...]], rng: jax.Array
) -> dict[str, jax.Array]:
    """Initializes A (normal, variance 1 / I) and B (zero), which leave W unchanged.

    `shapes` are of the adapted tensors by path; the adapters are float32, by path.
    """
    adapters, axes = {}, dict(lora.axes)
    for i, (path, shape) in enumerate(sorted(shapes.items())):
        order = _order(axes.get(path, MATRIX))
        stack, *sides = ([shape[axis] for axis in kind] for kind in order)
        inputs, outputs = map(math.prod, sides)
        key, sizes = jax.random.fold_in(rng, i), (*stack, inputs, lora.rank)
        a = jax.random.normal(key, sizes, jnp.float32)
        adapters[path + A] = a * max(inputs, 1) ** -0.5
        adapters[path + B] = jnp.zeros((*stack, lora.rank, outputs), jnp.float32)
    return adapters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted(stored.Form):
    """A frozen tensor W, perhaps quantized, A, and (alpha / rank) B."""

    base: Any
    a: Any
    b: Any
    axes: str = dataclasses.field(metadata={"static": True})

    def use(self, dtype: Any, zero: Any = 0) -> jax.Array:
        """Makes W + (alpha / rank) A B."""
        base = stored.use(self.base, dtype, zero).astype(dtype)
        # Else XLA adds to a copy of W, and keeps that for the backward pass.
        change = jax.lax.optimization_barrier((self.a + zero).astype(dtype) @ self.b)
        if self.axes != MATRIX:
            # A loop over layers gives each its own part, without the loop's axes.
            order = sum(_order(" ".join(self.axes.split()[-base.ndim :])), ())
            change = change.reshape([base.shape[axis] for axis in order])
            change = change.transpose(np.argsort(order))
        return base + change


def adapt(
    lora: Lora,
    paths: Iterable[str],
    leaves: dict[str, Any],
    rng: jax.Array | None,
    dtype: Any,
) -> dict[str, Any]:
    """Joins adapters and the tensors of `paths`; returns the leaves without adapters.

    `leaves` are by path; `rng` is the source of dropout, None drops nothing. A and B
    are multiplied in a dtype.
    """
    adapted, axes = dict(leaves), dict(lora.axes)
    for i, path in enumerate(sorted(paths)):
        factors = adapted.pop(path + A), adapted.pop(path + B)
        a, b = (stored.use(x, dtype).astype(dtype) for x in factors)
        if rng is not None and lora.dropout:
            keep, rows = 1 - lora.dropout, (*a.shape[:-1], 1)
            mask = jax.random.bernoulli(jax.random.fold_in(rng, i), keep, rows)
            a = jnp.where(mask, a / keep, 0)
        # The LoRA scale belongs to the thin factor, where it costs least.
        # Why: docs/decisions/finetuning.md#lora
        b = lora.alpha / lora.rank * b
        adapted[path] = Adapted(adapted[path], a, b, axes.get(path, MATRIX))
    return adapted


def _order(axes: str) -> tuple[tuple[int, ...], ...]:
    """Axes of each of `KINDS`, by number."""
    words = axes.split()
    return tuple(tuple(i for i, x in enumerate(words) if x == kind) for kind in KINDS)


def convolutions(trace: Callable[[], Any]) -> dict[str, str]:
    """Axes, by path, of the weights of Haiku's convolutions that `trace` calls."""
    axes = {}

    def note(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, CONVOLUTIONS) and context.method_name == "__call__":
            last = "out in" if isinstance(module, hk.ConvNDTranspose) else MATRIX
            axes[f"{module.module_name}/w"] = "in " * len(module.kernel_shape) + last
        return run(*args, **kwargs)

    with hk.intercept_methods(note):
        trace()
    return axes


def is_adapter(name: str) -> bool:
    """Tests if a parameter's name is an adapter's."""
    return name.endswith((A, B))
