"""Parameters as stored and as used: where a model asks for one, its form is undone.

A form takes the place of a parameter in the tree that the model's `apply` is given: 8
bits with their scales, a frozen matrix with its adapter. The model gets the array that
it expects, inside the module that asks, so that no two layers' arrays need exist at
once, and in a rematerialized module none is kept for the backward pass.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

Apply = Callable[..., Any]
NOTE = (
    "Parameters of this run are stored in another form than they are used in (LoRA, "
    "int8, nf4, shares of a layout), and become arrays where hk.get_parameter asks for "
    "them. A model that reads its parameters by other means can have none of these."
)
STACK = (
    "Vectors of a stack of layers (hk.layer_stack) are a matrix by their shape; those "
    "that this run quantizes belong into config.finetuning.unquantized."
)


class Form:  # Why: docs/decisions/finetuning.md#forms
    """Form of a stored parameter: a pytree node of its arrays."""

    def use(self, dtype: Any, zero: Any = 0) -> jax.Array:
        """Makes the array that a model uses, after a `zero` was computed.

        The zero is added to the smallest of the arrays that it is made of.
        """
        raise NotImplementedError


def is_form(leaf: Any) -> bool:
    """Tests for a parameter that is stored in another form than it is used in."""
    return isinstance(leaf, Form)


def use(leaf: Any, dtype: Any, zero: Any = 0) -> Any:
    """Makes a parameter as it is used: the one place where stored becomes used."""
    return leaf.use(dtype, zero) if is_form(leaf) else leaf


def used(params: Any, dtype: Any) -> Any:
    """Makes all parameters of a tree as they are used; others stay."""
    return jax.tree.map(lambda leaf: use(leaf, dtype), params, is_leaf=is_form)


def using(apply: Apply, dtype: Any, in_order: bool = False) -> Apply:
    """Makes an `apply(params, ...)` of a Haiku model that takes forms, too.

    With `in_order` the backward pass makes the gradients of a module's parameters
    before it goes on to the module before, so that no inputs wait for them.
    A model that reads its parameters by other means than `hk.get_parameter` and
    `hk.get_params` raises what its first operation on a form does, with a note.
    """
    # Inputs and tokens of the modules that are being called, outermost first.
    calls: list[tuple[Any, Any]] = [(None, None)]

    def call(run: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        del context
        first = next(filter(_is_array, jax.tree.leaves((args, kwargs))), None)
        args, token = _gated(args) if in_order else (args, None)
        calls.append((first, token))
        try:
            return run(*args, **kwargs)
        finally:
            calls.pop()

    def get(next_getter: Callable[[Any], Any], value: Any, context: Any) -> Any:
        del context
        first, token = calls[-1]
        array = use(value, dtype, _zero(first))
        return next_getter(array if token is None else _tied(array, token))

    def run(*args: Any) -> Any:
        with hk.custom_getter(get), hk.intercept_methods(call), _whole_trees(dtype):
            return apply(*args)

    # A frame of its own, which stays empty: getters reach the frames inside it.
    outer = hk.transform(run)

    def apply_stored(*args: Any) -> Any:
        try:
            return outer.apply({}, None, *args)
        except (TypeError, AttributeError, ValueError) as error:
            if any(form.__name__ in str(error) for form in Form.__subclasses__()):
                error.add_note(NOTE)
            if "leading axis sizes" in str(error):
                error.add_note(STACK)
            raise

    return apply_stored


def _is_array(leaf: Any) -> bool:
    is_array = isinstance(leaf, jax.Array) and leaf.size > 0
    return is_array and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _zero(x: Any) -> Any:
    """Zero that is computed from a module's input, if it has any."""
    return 0 if x is None else _zero_of(jax.lax.stop_gradient(x))


# Why: docs/decisions/finetuning.md#forms-after-inputs
@jax.custom_batching.custom_vmap
def _zero_of(x: jax.Array) -> jax.Array:
    first = jnp.abs(x.ravel()[0]).astype(jnp.float32)
    return jnp.minimum(jnp.where(jnp.isnan(first), 0, first), 0)


@_zero_of.def_vmap
def _zero_of_examples(size: int, is_mapped: Any, x: jax.Array) -> tuple[Any, bool]:
    del is_mapped  # One for all: a zero of each made a parameter for each.
    return _zero_of(x[0]) if size else jnp.zeros((), jnp.float32), False


# Why: docs/decisions/devices.md#gradients-in-order
def _gated(args: tuple) -> tuple[tuple, Any]:
    """Arguments whose gradient is there after those of all that is tied to a token."""
    for i, x in enumerate(args):
        is_traced = isinstance(x, jax.core.Tracer) and x.size > 0
        if is_traced and jnp.issubdtype(x.dtype, jnp.floating):
            gated, token = _gate(jnp.add(x, x.dtype.type(0)))  # No array of NumPy's.
            return (*args[:i], gated, *args[i + 1 :]), token
    return args, None


@jax.custom_jvp
def _gate(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x, jnp.zeros((), jnp.float32)


@_gate.defjvp
def _gate_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    # A zero that XLA does not know to be one, forward and backward.
    change = _zero(*primals) * tangents[0].ravel()[0].astype(jnp.float32)
    return _gate(*primals), (*tangents, change)


@jax.custom_jvp
def _tied(array: jax.Array, token: jax.Array) -> jax.Array:
    del token
    return array


@_tied.defjvp
def _tied_jvp(primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    array, token = tangents
    corner = token.astype(array.dtype).reshape((1,) * array.ndim)
    rest = [(0, size - 1, 0) for size in array.shape]
    return _tied(*primals), array + jax.lax.pad(corner, corner.dtype.type(0), rest)


@contextlib.contextmanager
def _whole_trees(dtype: Any) -> Iterator[None]:
    """Context in which `hk.get_params` has no forms."""
    # Why: docs/decisions/patches.md#get-params
    get_params = hk.get_params
    hk.get_params = lambda: used(get_params(), dtype)
    try:
        yield
    finally:
        hk.get_params = get_params
