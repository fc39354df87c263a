"""Programs of one CPU: few operations are not handed from thread to thread."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

# In names of primitives whose work is not seen in a jaxpr.
UNCOUNTED = ("ragged_dot", "window", "fft", "attention", "pallas", "ffi_call")
FEW = 1.6e7  # Floating-point operations of a step that one thread makes sooner.
CONVOLUTION = 8  # Times what a product's operation takes, of small ones on CPUs.
IN_ORDER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


class Program:
    """A `jax.jit` of a function that is traced once, and compiled by its operations."""

    # Why: docs/decisions/devices.md#in-order
    def __init__(self, run: Callable[..., Any], **options: Any) -> None:
        self.any_order = jax.jit(run, **options)
        self.in_order = jax.jit(run, **options, compiler_options=IN_ORDER)
        self._chosen: Any = None

    def __call__(self, *args: Any) -> Any:
        """Calls the program, which the first call compiles."""
        return (self._chosen or self._choose(*args))(*args)

    def trace(self, *args: Any) -> Any:
        """Traces the function for these shapes."""
        return self._choose(*args).trace(*args)

    def _cache_size(self) -> int:  # As that of a `jax.jit`, for tests.
        return self.any_order._cache_size() + self.in_order._cache_size()

    def _choose(self, *args: Any) -> Any:
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if traced or jax.config.jax_disable_jit:
            return self.any_order  # Options are those of the program around it.
        if self._chosen is None:
            jaxpr = self.any_order.trace(*args).jaxpr.jaxpr
            self._chosen = self.in_order if operations(jaxpr) < FEW else self.any_order
        return self._chosen


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
