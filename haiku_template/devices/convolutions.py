"""The order of a convolution's dimensions that XLA's CPU compiler is fast with.

It brings convolutions into that order itself, but only outside of loops: in one, the
gradient of a kernel took 200 times as long. Why: docs/decisions/devices.md#convolutions
"""

from typing import Any

import jax
from jax.extend.core import primitives
from jax.interpreters import mlir

CONVOLUTION = primitives.conv_general_dilated_p


def install() -> None:
    """Has JAX lower convolutions for CPUs in the order of XLA's fast ones.

    Numbers stay what they are. A JAX without the names that this needs stays as it is.
    """
    try:
        rules = jax._src.interpreters.mlir._platform_specific_lowerings
        entry = rules["cpu"][CONVOLUTION]
        rule = entry.rule
    except (AttributeError, KeyError):
        return
    if hasattr(rule, "original"):
        return

    def lower(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        numbers, canonical = params["dimension_numbers"], _canonical(lhs.type.rank)
        # Those of groups are slower in that order: depthwise ones 20 times.
        if numbers == canonical or params["feature_group_count"] > 1:
            return rule(ctx, lhs, rhs, **params)
        return in_order(ctx, lhs, rhs, **params)

    lower.original = entry
    in_order = mlir.lower_fun(_in_order, multiple_results=False)
    mlir.register_lowering(CONVOLUTION, lower, platform="cpu")


def _in_order(lhs: Any, rhs: Any, **params: Any) -> jax.Array:
    numbers = params["dimension_numbers"]
    batch, feature, *spatial = numbers.lhs_spec
    lhs = jax.lax.transpose(lhs, (batch, *spatial, feature))
    outputs, inputs, *spatial = numbers.rhs_spec
    rhs = jax.lax.transpose(rhs, (*spatial, inputs, outputs))
    params["dimension_numbers"] = _canonical(lhs.ndim)
    result = CONVOLUTION.bind(lhs, rhs, **params)
    batch, feature, *spatial = numbers.out_spec
    order = (batch, *spatial, feature)
    return jax.lax.transpose(result, [order.index(i) for i in range(lhs.ndim)])


def _canonical(rank: int) -> jax.lax.ConvDimensionNumbers:
    """Examples, spatial dimensions, features; of kernels spatial, inputs, outputs."""
    last = rank - 1
    images = (0, last, *range(1, last))
    return jax.lax.ConvDimensionNumbers(
        images, (last, last - 1, *range(last - 1)), images
    )
