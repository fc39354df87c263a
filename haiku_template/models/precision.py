"""Mixed precision: a half-precision forward and backward pass.

Parameters, optimizer state, losses and averages stay float32, and normalization layers
compute in float32. `float16` scales the loss.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp  # Why: docs/decisions/dependencies.md#jmp

from haiku_template.errors import ConfigError
from haiku_template.models.forms import is_lazy
from haiku_template.params import ordered
from haiku_template.stored import is_form, used

POLICIES = {
    "float32": "params=float32,compute=float32,output=float32",
    "bfloat16": "params=float32,compute=bfloat16,output=float32",
    "float16": "params=float32,compute=float16,output=float32",
}
NORMS = (hk.BatchNorm, hk.LayerNorm, hk.GroupNorm, hk.InstanceNorm, hk.RMSNorm)
INITIAL_LOSS_SCALE = 2.0**15
NAMED = (
    "config.precision: parameters and inputs are cast to {}; network state is float32, "
    "and so is what a module makes of it, such as VectorQuantizerEMA: cast that in the "
    "model, or leave config.precision out"
)


class Precision(NamedTuple):
    """Precision policy of `jmp`, with loss scaling and the all-reduce's dtype.

    Attributes:
      scales_loss: True for float16.
      reduce_dtype: dtype of the gradients' all-reduce; None for their own.
      keeps_norms_apart: True if the compiler may not fuse normalization layers.
    """

    policy: jmp.Policy
    scales_loss: bool
    reduce_dtype: str | None = None
    keeps_norms_apart: bool = False

    @classmethod
    def create(cls, name: str, reduce_dtype: str | None = None) -> "Precision":
        """Makes `float32`, `bfloat16` or `float16`, or raises `ConfigError`."""
        if name not in POLICIES:
            raise ConfigError(
                f"config.precision={name!r}; possible are {', '.join(POLICIES)}"
            )
        return cls(jmp.get_policy(POLICIES[name]), name == "float16", reduce_dtype)

    def initial_loss_scale(self) -> tuple[jax.Array, ...]:
        """Leaves of the loss scale at step 0; none without loss scaling."""
        if not self.scales_loss:
            return ()
        return (jnp.float32(INITIAL_LOSS_SCALE), jnp.int32(0))

    def loss_scale(self, leaves: tuple[jax.Array, ...]) -> jmp.LossScale:
        """Rebuilds the loss scale from its leaves."""
        return jmp.DynamicLossScale(*leaves) if leaves else jmp.NoOpLossScale()

    def cast_arrays(self, params: Any) -> Any:
        """Casts parameters to the compute dtype, but for forms: scales stay exact."""
        cast = self.policy.cast_to_compute
        return jax.tree.map(
            lambda x: x if is_form(x) else cast(x), params, is_leaf=is_form
        )

    def cast_inputs(self, inputs: Any) -> Any:
        """Casts the model's inputs to the compute dtype."""
        return ordered(self.policy.cast_to_compute(inputs), inputs)

    def used(self, params: Any) -> Any:
        """Makes all parameters as the model uses them."""
        return used(params, self.policy.compute_dtype)

    def cast_outputs(self, outputs: Any) -> Any:
        """Casts outputs to float32; lazy ones stay: their product is float32."""
        cast = lambda x: x if is_lazy(x) else self.policy.cast_to_output(x)  # noqa: E731
        return ordered(jax.tree.map(cast, outputs, is_leaf=is_lazy), outputs)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Context whose error of mixed dtypes says which ones are of the precision."""
        try:
            yield
        except TypeError as error:
            name = jnp.dtype(self.policy.compute_dtype).name
            if name != "float32" and "same dtypes" in str(error):
                error.add_note(NAMED.format(name))
            raise

    def norms_in_float32(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which normalization layers compute in float32."""
        # Why: docs/decisions/training.md#precision
        if self.policy.compute_dtype == jnp.float32:
            return contextlib.nullcontext()
        return hk.intercept_methods(self._call_norm)

    def _call_norm(
        self, call: Callable[..., Any], args: tuple, kwargs: dict, context: Any
    ) -> Any:
        """Interceptor that computes normalization layers, and no others, in float32."""
        if not isinstance(context.module, NORMS) or context.method_name != "__call__":
            return call(*args, **kwargs)
        args, kwargs = jmp.cast_to_full((args, kwargs))
        outputs = call(*args, **kwargs)
        if self.keeps_norms_apart:
            outputs = jax.lax.optimization_barrier(outputs)
        return self.policy.cast_to_compute(outputs)
