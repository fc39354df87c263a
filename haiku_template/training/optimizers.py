"""Optimizers and learning-rate schedules by name: optax's, or a user's functions."""

import functools
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from haiku_template.devices import canonical_shapes
from haiku_template.errors import ConfigError, near, some
from haiku_template.params import flatten
from haiku_template.registry import check_keys, resolve

logger = logging.getLogger(__name__)

Schedule = Callable[[Any], Any]
Optimizer = optax.GradientTransformation
NOT_DECAYED = ("b", "offset", "scale")  # Why: docs/decisions/training.md#weight-decay
OF_SCHEDULE = ("learning_rate", "warmup_steps", "final_fraction")
GIVEN = dict.fromkeys((*OF_SCHEDULE, "num_steps"))  # To a schedule of a user's.
# Keys of `config.optimizer` beside an optimizer's own.
KEYS = ("schedule", "warmup_steps", "final_fraction", "weight_decay", "clip_norm")
KEYS += ("shard_moments",)
KINDS = types.FunctionType, functools.partial  # Of optax's optimizers.
DIVIDE_BY_RATE = ("dadapt_adamw", "prodigy")  # NaN, where the first rate is 0.
DECAY_FRACTION = 0.2  # Of the steps after the warm-up, in which `wsd` decays.


def make_schedule(
    name: str,
    *,
    learning_rate: float,
    num_steps: int,
    warmup_steps: int = 0,
    final_fraction: float = 0.0,
) -> Schedule:
    """Builds a learning-rate schedule: linear warm-up from 0, then a decay by name.

    Names are `cosine`, `linear`, `constant`, `wsd` (warm-up-stable-decay: constant,
    then linear in the last fifth of the steps behind it), and `module:function`, called
    with all these arguments, which makes its own warm-up; `ConfigError` for another. A
    warm-up of all steps is cut, so that a long run's settings can be tried for a few.
    """
    if warmup_steps >= num_steps:
        fault = f"warmup_steps={warmup_steps} leaves nothing of num_steps={num_steps}"
        warmup_steps = max(num_steps - 1, 0)
        logger.warning("%s, and is cut to %s", fault, warmup_steps)
    make = resolve("optimizer.schedule", name, SCHEDULES)
    if name not in SCHEDULES:
        check_keys("optimizer.schedule", name, make, GIVEN)
        return make(
            learning_rate=learning_rate,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            final_fraction=final_fraction,
        )
    shape = make(learning_rate, num_steps - warmup_steps, final_fraction)
    if not warmup_steps:
        return shape
    warmup = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules([warmup, shape], [warmup_steps])


def _warmup_stable_decay(rate: float, steps: int, final_fraction: float) -> Schedule:
    decay = max(round(steps * DECAY_FRACTION), 1)
    end = optax.linear_schedule(rate, rate * final_fraction, decay)
    return optax.join_schedules([optax.constant_schedule(rate), end], [steps - decay])


SCHEDULES: dict[str, Callable[[float, int, float], Schedule]] = {
    "cosine": optax.cosine_decay_schedule,
    "linear": lambda rate, steps, end: optax.linear_schedule(rate, rate * end, steps),
    "constant": lambda rate, steps, end: optax.constant_schedule(rate),
    "wsd": _warmup_stable_decay,
}


def matrices(params: Any) -> Any:
    """Weight-decay mask: True for leaves of two or more dimensions, but of no norm."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim > 1 and getattr(path[-1], "key", "") not in NOT_DECAYED,
        params,
    )


def make_optimizer(
    name: str,
    schedule: Schedule,
    *,
    weight_decay: float = 0.0,
    clip_norm: float | None = None,
    shard_moments: bool = False,
    **kwargs: Any,
) -> Optimizer:
    """Builds an optimizer by name, with gradient clipping and decoupled weight decay.

    Args:
      name: an optimizer of optax or optax.contrib that takes a learning rate, or
        `module:function`.
      weight_decay: times the learning rate, for `matrices`, or all where optax's has no
        mask; with `sgd`, `lars`, `adadelta`, `madgrad` and `cocob` L2 regularization,
        added to the gradient; with `lamb` within the trust ratio; with those that
        estimate their rate (`dog`, `dowg`, `dadapt_adamw`, `prodigy`) times that.
      **kwargs: the optimizer's own, such as `b1`; None means its default.

    Raises `ConfigError` for another name, or a key that this optimizer does not take.
    """
    del shard_moments  # A rule of the layout.
    is_known = name in _optimizers() or ":" in str(name)
    function = resolve("optimizer", name, _optimizers() if is_known else _usable())
    parameters = inspect.signature(function).parameters
    keys = {key: value for key, value in kwargs.items() if value is not None}
    if odd := [key for key in keys if key not in parameters]:
        raise _unknown(odd[0], name, parameters)
    if name in _optimizers() and (reason := _obstacle(name, schedule, keys)):
        raise _unusable(name, reason)
    mask = next((k for k in ("mask", "weight_decay_mask") if k in parameters), None)
    decays = "weight_decay" in parameters and name != "muon"  # Its: matrices.
    if name not in _optimizers():
        function, weight_decay, clip_norm = _yours(function, weight_decay, clip_norm)
    if name == "sgd":
        keys = {"momentum": 0.9} | keys
    elif decays and mask is not None:
        keys = {mask: matrices, "weight_decay": weight_decay} | keys
    elif decays and weight_decay:
        keys |= _all_decay(name, weight_decay)
    optimizer = function(schedule, **keys)
    if name == "sgd":
        decay = optax.add_decayed_weights(weight_decay, mask=matrices)
        optimizer = optax.chain(decay, optimizer)
    elif weight_decay and not decays:
        rate = lambda step: -weight_decay * schedule(step)  # noqa: E731
        decay = optax.add_decayed_weights(rate, mask=matrices)
        optimizer = optax.chain(optimizer, decay)
    if clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def _unknown(key: str, name: str, parameters: Iterable[str]) -> ConfigError:
    names = [k for k in parameters if "decay" not in k and "mask" not in k]
    return ConfigError(
        f"config.optimizer: {name} takes no {key}{near(key, [*names, *KEYS])}; besides "
        f"{', '.join(KEYS)} it takes {', '.join(names)}"
    )


def _unusable(name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"config.optimizer.name={name!r} of optax cannot be made of a learning-rate "
        "schedule and the other keys, and updated by gradients, parameters and a loss "
        f"({reason}); possible are {', '.join(_usable())}, or module:function, which "
        "makes one of yours"
    )


def _yours(
    function: Callable[..., Any], weight_decay: float, clip_norm: float | None
) -> tuple[Callable[..., Any], float, float | None]:
    """Gives an optimizer of a user those of the two that it takes; the others stay."""
    parameters, keys = inspect.signature(function).parameters, {}
    needs = [k for k, x in parameters.items() if x.default is x.empty]
    has_mask = not parameters.keys().isdisjoint(("mask", "weight_decay_mask"))
    if "clip_norm" in parameters and (clip_norm or "clip_norm" in needs):
        keys["clip_norm"], clip_norm = clip_norm, None
    takes_decay = "weight_decay" in parameters and not has_mask
    if takes_decay and (weight_decay or "weight_decay" in needs):
        keys["weight_decay"], weight_decay = weight_decay, 0.0
    return functools.partial(function, **keys), weight_decay, clip_norm


def _all_decay(name: str, weight_decay: float) -> dict[str, float]:
    # Behind it, a decay would be by another rate, or of other parameters than its.
    logger.warning("%s takes no mask: it decays biases and norms, too", name)
    return {"weight_decay": weight_decay}


@functools.cache
def _usable() -> dict[str, Callable[..., Any]]:
    schedule, every = optax.constant_schedule(1.0), _optimizers()
    return {k: every[k] for k in every if not _obstacle(k, schedule, {})}


def _obstacle(name: str, schedule: Schedule, keys: dict[str, Any]) -> str:
    """Error of making and updating an optimizer, by tracing it; "" for none."""
    shapes = {"w": (2, 3), "b": (4,)}  # Why: docs/decisions/training.md#optimizer-names
    params = {k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()}
    try:
        with warnings.catch_warnings(action="ignore"):
            optimizer = _optimizers()[name](schedule, **keys)
            update = optax.with_extra_args_support(optimizer).update
            state = canonical_shapes(jax.eval_shape(optimizer.init, params))  # No keys.
            jax.eval_shape(update, params, state, params, value=0.0)
    except Exception as error:  # optax has many kinds.
        return str(error).partition("\n")[0]
    return ""


def own_averages(opt_state: Any, params: Any) -> Any:
    """Averages of the parameters that a schedule-free optimizer keeps; or None."""
    # Why: docs/decisions/training.md#schedule-free
    kind = optax.contrib.ScheduleFreeState
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
    states = [x for x in nodes if isinstance(x, kind)]
    return _averages_of(states, params) if states else None


def _averages_of(states: list[Any], params: Any) -> Any:
    """Averages that the states of schedule-free optimizers keep, each of its part."""
    averages = flatten(params)
    for state in states:
        fast = flatten(state.z)  # Where it is masked, as by `optax.partition`: no leaf.
        if odd := fast.keys() - averages.keys():
            raise ConfigError(
                f"a schedule-free optimizer keeps averages of {some(odd)!r}, which is "
                "no parameter: leave out the wrapper that changes their tree"
            )
        slow = {path: averages[path] for path in fast}
        means = optax.contrib.schedule_free_eval_params(state._replace(z=fast), slow)
        averages |= {k: x.astype(averages[k].dtype) for k, x in means.items()}
    return jax.tree.unflatten(jax.tree.structure(params), averages.values())


def make_optimization(num_steps: int, **keys: Any) -> tuple[Optimizer, Schedule]:
    """Makes the optimizer and the schedule of `config.optimizer`, whose keys these are.

    Arguments and errors are those of `make_schedule` and `make_optimizer`.
    """
    name, warmup_steps = keys.pop("schedule"), keys["warmup_steps"]
    if keys["name"] in DIVIDE_BY_RATE and name in SCHEDULES and warmup_steps:
        raise _divides(keys["name"], warmup_steps)
    values = {key: keys.pop(key) for key in OF_SCHEDULE}
    schedule = make_schedule(name, num_steps=num_steps, **values)
    return make_optimizer(schedule=schedule, **keys), schedule


def _divides(name: str, warmup_steps: int) -> ConfigError:
    return ConfigError(
        f"config.optimizer.warmup_steps={warmup_steps} begins with a learning rate "
        f"of 0, by which {name} divides; possible is 0"
    )


@functools.cache
def _optimizers() -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for module in (optax.contrib, optax)  # Why: docs/decisions/house.md#optimizers
        for name, function in inspect.getmembers(module, lambda x: isinstance(x, KINDS))
        if not name.startswith(("_", "scale_by_"))
        and "learning_rate" in inspect.signature(function).parameters
    }
