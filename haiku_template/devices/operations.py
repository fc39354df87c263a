"""Floating-point operations of a program, counted in its jaxpr."""

import math
from typing import Any

from jax.extend.core import jaxprs_in_params

# In names of primitives whose work is not seen in a jaxpr.
UNCOUNTED = ("ragged_dot", "window", "fft", "attention", "pallas", "ffi_call")
CONVOLUTION = 8  # Times what a product's operation takes, of small ones on CPUs.


def operations(jaxpr: Any, convolution: float = CONVOLUTION) -> float:
    """Floating-point operations of a program, about; infinite if not all are seen.

    Those of a convolution count so often each. Why: docs/decisions/training.md#calls
    """
    count = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if any(part in name for part in UNCOUNTED):
            return math.inf
        jaxprs = jaxprs_in_params(equation.params)
        inner = sum(operations(jaxpr, convolution) for jaxpr in jaxprs)
        size = sum(getattr(x.aval, "size", 0) for x in equation.outvars)
        if name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            size *= 2 * math.prod(equation.invars[0].aval.shape[i] for i in axes)
        if name == "conv_general_dilated":
            size *= convolution * _operations_of_output(equation)
        count += max(inner * equation.params.get("length", 1), size)  # Scans' length.
    return count


def _operations_of_output(equation: Any) -> float:
    """Operations of one output of a convolution; infinite for XLA's slow ones."""
    kernel, params = equation.invars[1].aval, equation.params
    has_groups = params["feature_group_count"] * params["batch_group_count"] > 1
    outputs, *_ = params["dimension_numbers"].rhs_spec
    is_slow = has_groups or kernel.ndim > 4
    return math.inf if is_slow else 2 * kernel.size // kernel.shape[outputs]
