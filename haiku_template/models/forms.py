"""Forms of a model: what `hk.transform` makes, adapted to one way of calling it."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

from haiku_template.errors import ConfigError
from haiku_template.models.rematerialization import remat
from haiku_template.params import flatten, mutable, ordered

MOST_LAYERS = 10_000
FORMS = {"remat", "per_example"}  # Keys of `config.model` that any model has.
BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
FORWARDS = "forward(inputs, is_training) and forward(inputs)"
# Names of the flag of training. Others with `train` in them, such as `pretrained` and
# `constraint`, are options. A flag named as in `UNCLEAR` may be it, or its opposite.
SWITCH = re.compile(r"(is_?|in_|for_)?train(ing)?_?(mode|flag|phase)?")
UNCLEAR = re.compile(
    r"deterministic|(is_|in_)?(eval|evaluation|test|testing|inference)(_mode)?"
    r"|(.*_)?(is|not)?train(ing|mode)?(_.*)?"
)


def is_lazy(outputs: Any) -> bool:
    """Tests for outputs in factors, such as the logits of a large vocabulary."""
    return hasattr(outputs, "multiply_out")


def plain_outputs(outputs: Any) -> Any:
    """Multiplies out all lazy outputs in a pytree."""
    return jax.tree.map(
        lambda x: x.multiply_out() if is_lazy(x) else x, outputs, is_leaf=is_lazy
    )


def inputs_of(batch: Any, whole_batch: bool = False) -> Any:
    """Selects what the model takes of a batch: `inputs`, or all of another tree.

    `whole_batch` is a task's: then `inputs` may be one array of several, and are taken
    alone only where the batch has nothing else but `labels`.
    """
    return batch["inputs"] if _takes_inputs(batch, whole_batch) else batch


def with_inputs(batch: Any, inputs: Any, whole_batch: bool = False) -> Any:
    """Replaces what `inputs_of` selects."""
    return batch | {"inputs": inputs} if _takes_inputs(batch, whole_batch) else inputs


# Why: docs/decisions/models.md#inputs
def _takes_inputs(batch: Any, whole_batch: bool) -> bool:
    is_named = isinstance(batch, dict) and "inputs" in batch
    return is_named and (not whole_batch or batch.keys() <= {"inputs", "labels"})


def with_state(model: Any) -> hk.TransformedWithState:
    """Adapts a model to `apply(params, net_state, rng, inputs, is_training)`.

    Raises `ConfigError` for one that is not transformed, or takes other arguments.
    """
    if isinstance(model, PerExample):
        return model
    if not isinstance(model, hk.Transformed | hk.TransformedWithState):
        raise _not_transformed(model)
    stateless = isinstance(model, hk.Transformed)
    functions, place = (model.init, model.apply), 1 if stateless else 2
    of_init, of_apply = ([*inspect.signature(f).parameters.values()] for f in functions)
    takes_rng = len(of_apply) - len(of_init) == place  # Behind params, and state.
    forward, behind = of_init[1:], of_apply[place + 1 :]
    named, of_forward = [x.name for x in behind if x.kind in BY_PLACE], forward
    if named and _names_of(forward) not in map(_names_of, (behind, of_apply[place:])):
        takes_rng = not SWITCH.fullmatch(named[0])  # Made by hand.
        of_forward = behind if takes_rng else of_apply[place:]
        if all(x.kind not in BY_PLACE for x in forward):
            forward = of_forward
    first_arguments, arguments = map(_forward_arguments, (forward, of_forward))

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        args, kwargs = first_arguments(inputs, is_training)
        first = mutable(model.init(rng, *args, **kwargs))
        return (first, {}) if stateless else first

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        args, kwargs = arguments(inputs, is_training)
        args = (rng, *args) if takes_rng else args
        if stateless:
            return model.apply(params, *args, **kwargs), state
        outputs, new = model.apply(params, state, *args, **kwargs)
        return outputs, mutable(new)

    return hk.TransformedWithState(init, apply)


def _names_of(parameters: list[inspect.Parameter]) -> list[str]:
    return [x.name for x in parameters]


def _not_transformed(model: Any) -> ConfigError:
    kind = type(model).__name__
    if isinstance(model, hk.MultiTransformed | hk.MultiTransformedWithState):
        return ConfigError(
            f"the model is a {kind}, which has several functions; possible is one of "
            "them, hk.Transformed(model.init, "
            "lambda params, rng, x: model.apply[0](params, rng, x))"
        )
    return ConfigError(
        f"the model is a {kind}; it must be what hk.transform or "
        f"hk.transform_with_state makes of {FORWARDS}"
    )


def task_rng(rng: jax.Array | None) -> jax.Array | None:
    """Makes the rng of a task, from which no other use draws; None without any."""
    if rng is None:
        return None
    first = rng if _is_one(rng) else rng[0]  # Of the examples' own.
    return jax.random.fold_in(first, 0xA0000000)


def _is_one(rng: jax.Array) -> bool:
    is_new = jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key)
    return rng.ndim == (0 if is_new else 1)  # jax.random.PRNGKey gives two numbers.


class PerExample(hk.TransformedWithState):  # Why: docs/decisions/models.md#per-example
    """A model of one example, mapped over a batch, in the form of `with_state`.

    Its `apply` splits one rng for the examples of a batch, or takes one for each.
    """


def per_example(model: Any) -> PerExample:
    """Maps a model of one example over the batch by `jax.vmap`.

    Each example has an rng of its own. Network state that depends on the example, such
    as the statistics of `hk.BatchNorm`, is a `ConfigError`. Raises as `with_state`.
    """
    single = with_state(model)

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        example = jax.tree.map(lambda x: x[0], inputs)
        return single.init(rng, ordered(example, inputs), is_training)

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        changed: list[str] = []
        like: list[Any] = []  # `vmap` sorts dictionaries.

        def one(rng: Any, example: Any) -> Any:
            example = ordered(example, inputs)
            outputs, new = single.apply(params, state, rng, example, is_training)
            like[:] = [outputs]
            old = flatten(state)
            changed.extend(k for k, x in flatten(new).items() if x is not old.get(k))
            return outputs, new

        if rng is not None and _is_one(rng):
            rng = jax.random.split(rng, jax.tree.leaves(inputs)[0].shape[0])
        try:
            outputs, new = jax.vmap(one, out_axes=(0, None))(rng, inputs)
            return ordered(outputs, *like), new
        except ValueError as error:
            if "out_axes" not in str(error):
                raise
            raise ConfigError(
                f"the model changes its state ({', '.join(changed)}) for each example, "
                "and one that is mapped over the batch has one state for all of them: "
                "such as norms over the batch need it whole (per_example=False)"
            ) from error

    return PerExample(init, apply)


def own_keys(keys: dict[str, Any]) -> dict[str, Any]:
    """Drops the keys of `config.model` that `in_form` takes, not the model.

    Raises `ConfigError` for more layers than anyone waits for.
    """
    for key in ("num_layers", "blocks"):  # Each is traced, before any shape is known.
        count = keys.get(key)
        if isinstance(count, int) and count > MOST_LAYERS:
            raise ConfigError(
                f"config.model.{key}={count}; possible is up to {MOST_LAYERS:,}"
            )
    reserved = FORMS if _patterns(keys) is not None else {"per_example"}
    return {name: value for name, value in keys.items() if name not in reserved}


def in_form(model: Any, keys: dict[str, Any]) -> Any:
    """Adapts a model by the keys of `config.model` that any model has.

    `remat`, a tuple of patterns of modules, is for `models.remat`; `per_example=True`
    maps the model over the batch.
    """
    patterns, mapped = _patterns(keys), keys.get("per_example", False)
    for pattern in patterns or ():
        if not isinstance(pattern, str):
            raise ConfigError(
                f"config.model.remat={patterns!r}; possible are a tuple of patterns of "
                "modules, such as ('*/block_*',), and what the model itself takes"
            )
    if not isinstance(mapped, bool):
        raise ConfigError(
            f"config.model.per_example={mapped!r}; possible are True and False"
        )
    model = model if patterns is None else remat(model, patterns)
    return per_example(model) if mapped else model


def _patterns(keys: dict[str, Any]) -> tuple | None:
    """Patterns in `remat`, or one that has a `*`; None if it is the model's own."""
    value = keys.get("remat")
    value = (value,) if isinstance(value, str) and "*" in value else value
    return value if isinstance(value, tuple) else None


def _forward_arguments(
    parameters: list[inspect.Parameter],
) -> Callable[[Any, bool], tuple[tuple, dict[str, Any]]]:
    """Finds the arguments that `forward` takes: with or without is_training.

    Any parameter named as in `SWITCH` gets it. Without one, it is the second argument
    of `forward(inputs, _)` and `forward(*args)`, and a keyword of `**kwargs`. Raises
    `ConfigError` for other required parameters, and for flags as in `UNCLEAR`.
    """
    signature, behind = inspect.Signature(parameters), parameters[1:]
    names = [x.name for x in behind if SWITCH.fullmatch(x.name)]
    kinds = [x.kind for x in parameters]
    second = behind[0].name if behind and behind[0].kind in BY_PLACE else ""
    has_place = second in names or second.startswith("_")
    has_place |= not names and inspect.Parameter.VAR_POSITIONAL in kinds[:2]
    names = [x for x in names if not (has_place and x == second)]
    if not (has_place or names) and inspect.Parameter.VAR_KEYWORD in kinds:
        names = ["is_training"]

    def arguments(inputs: Any, is_training: bool) -> tuple[tuple, dict[str, Any]]:
        args = (inputs, is_training) if has_place else (inputs,)
        return args, dict.fromkeys(names, is_training)

    args, kwargs = arguments(None, True)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _of_forward(signature) from error
    unclear = (x for x in behind if UNCLEAR.fullmatch(x.name))
    if not (has_place or names) and any(isinstance(x.default, bool) for x in unclear):
        raise _of_forward(signature)  # It would be the same in training.
    return arguments


def _of_forward(signature: inspect.Signature) -> ConfigError:
    return ConfigError(
        f"the model is made of forward{signature}; possible are {FORWARDS}, and other "
        "parameters with defaults; is_training may be called training or train, too; "
        "a flag of another name, such as deterministic=False, would be the same in "
        "training and in evaluation"
    )
