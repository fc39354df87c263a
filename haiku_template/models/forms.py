"""Forms of a model: what `hk.transform` makes, adapted to one way of calling it."""

import inspect
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

from haiku_template.errors import ConfigError

FORWARDS = "forward(inputs, is_training) and forward(inputs)"


def is_lazy(outputs: Any) -> bool:
    """Tests for outputs in factors, such as the logits of a large vocabulary."""
    return hasattr(outputs, "multiply_out")


def plain_outputs(outputs: Any) -> Any:
    """Multiplies out all lazy outputs in a pytree."""
    return jax.tree.map(
        lambda x: x.multiply_out() if is_lazy(x) else x, outputs, is_leaf=is_lazy
    )


def with_state(model: Any) -> hk.TransformedWithState:
    """Adapts a model to `apply(params, net_state, rng, inputs, is_training)`.

    `is_training`, state and rng are left out for models that take none.

    Raises:
      ConfigError: it is not transformed, or its function takes other arguments.
    """
    stateless = isinstance(model, hk.Transformed)
    if not stateless and not isinstance(model, hk.TransformedWithState):
        raise ConfigError(
            f"the model is a {type(model).__name__}; it must be what hk.transform or "
            f"hk.transform_with_state makes of {FORWARDS}"
        )
    own = inspect.signature(model.init).parameters  # Those of apply, less the state.
    takes_rng = len(inspect.signature(model.apply).parameters) - len(own) == (
        1 if stateless else 2
    )
    arguments = _forward_arguments(list(own.values())[1:])

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        args, kwargs = arguments(inputs, is_training)
        made = model.init(rng, *args, **kwargs)
        return (made, {}) if stateless else made

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        args, kwargs = arguments(inputs, is_training)
        first = (params,) if stateless else (params, state)
        made = model.apply(*first, *((rng,) if takes_rng else ()), *args, **kwargs)
        return (made, state) if stateless else made

    return hk.TransformedWithState(init, apply)


def _forward_arguments(
    parameters: list[inspect.Parameter],
) -> Callable[[Any, bool], tuple[tuple, dict[str, Any]]]:
    """Finds the form of call that `forward` takes, with or without is_training."""
    signature = inspect.Signature(parameters)
    for form in (
        lambda inputs, is_training: ((inputs, is_training), {}),
        lambda inputs, is_training: ((inputs,), {"is_training": is_training}),
        lambda inputs, is_training: ((inputs,), {}),
    ):
        args, kwargs = form(None, True)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        second = parameters[1] if len(args) == 2 and len(parameters) > 1 else None
        if second and second.default is not second.empty and "train" not in second.name:
            continue  # An option of the user's, which has its default.
        return form
    raise ConfigError(
        f"the model is made of forward{signature}; possible are {FORWARDS}"
    )
