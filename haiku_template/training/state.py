"""The train state: all that a step changes, and the frozen parameters beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from haiku_template.errors import ConfigError
from haiku_template.finetuning import Plan
from haiku_template.models.precision import Precision
from haiku_template.params import flatten, leaves_by_path
from haiku_template.training.optimizers import Schedule
from haiku_template.training.optimizers import own_averages as own_averages
from haiku_template.training.tasks import Task

SKIPPED = "skipped_steps"  # Scalar of a step: 1 if it left the state as it was, or 0.
Variables = tuple[hk.Params, hk.State, jax.Array]  # Params, net_state, step.


class Seeds(NamedTuple):
    """PRNG keys of a run, one for each use.

    `steps` is folded with step and device, `evaluation` with the place of an example.
    """

    params: jax.Array
    adapters: jax.Array
    steps: jax.Array
    evaluation: jax.Array


def seed_array(seed: int) -> np.ndarray:
    """Seed as an argument [] of programs, which serve other seeds, too."""
    # Why: docs/decisions/training.md#seed-argument
    return np.asarray(seed).astype(jax.dtypes.canonicalize_dtype(np.int64))


def split_seed(seed: int | jax.Array) -> Seeds:
    """Splits a seed by use, so that no two uses ever draw from the same key."""
    key = jax.random.key(seed)  # Why: docs/decisions/training.md#seed
    # Haiku splits `key` itself, as if by `fold_in` of 0, 1, ...: no small numbers here.
    uses = (jax.random.fold_in(key, 0xA0000000 + n) for n in range(3))
    return Seeds(key, *uses)


class TrainState(NamedTuple):
    """All that a step changes, and frozen parameters: a tree without a device axis.

    Keys are made of seed, step and device, and batches of seed and step: a checkpoint
    needs neither the state of a generator nor that of an iterator.
    """

    step: jax.Array  # Steps done, also those that float16 skipped: int32 [].
    params: hk.Params  # Trainable, float32; or any pytree of a custom step.
    frozen: hk.Params  # {} without fine-tuning; not in a checkpoint.
    net_state: hk.State  # Such as running statistics; {} for `hk.transform`.
    opt_state: optax.OptState
    # Averages of `params`, if any: exponential ones, or a schedule-free optimizer's.
    ema_params: hk.Params | None
    # Why: docs/decisions/training.md#loss-scale
    loss_scale: tuple[jax.Array, ...]  # Scale and counter of float16's; else empty.

    def __repr__(self) -> str:  # A cell may end with a state.
        trees = {name: jax.tree.leaves(x) for name, x in self._asdict().items()}
        sizes = {k: sum(getattr(x, "nbytes", 0) for x in v) for k, v in trees.items()}
        texts = [f"{k}: {len(x)} of {sizes[k]:,} bytes" for k, x in trees.items() if x]
        return f"TrainState(arrays of {', '.join(texts)})"

    # Why: docs/decisions/house.md#frozen-argument
    def without_frozen(self) -> "TrainState":
        """Drops the frozen parameters, a separate argument of a compiled step."""
        return self._replace(frozen={})

    def saved(self) -> dict[str, Any]:  # Why: docs/decisions/house.md#saved-fields
        """Fields of a checkpoint by name."""
        return {name: x for name, x in self._asdict().items() if name != "frozen"}

    def averaged(self) -> hk.Params:
        """Trainable parameters to evaluate: their averages if there are any."""
        return self.params if self.ema_params is None else self.ema_params

    def of_model(self) -> tuple[Variables, hk.Params]:
        """First arguments of an evaluation step, whose parameters are the averages."""
        return (self.averaged(), self.net_state, self.step), self.frozen

    def arguments(self) -> "tuple[TrainState, hk.Params]":
        """First arguments of a train step: the state, and frozen parameters."""
        return self.without_frozen(), self.frozen


class Recipe(NamedTuple):  # Why: docs/decisions/house.md#recipe
    """Parts of an experiment that its first state and its steps are made of."""

    # `apply(params, net_state, rng, inputs, is_training)`; None without a model.
    model: hk.TransformedWithState | None
    task: Task
    optimizer: optax.GradientTransformation | None  # None in a custom step.
    preprocess: Callable[[Any], Any]  # Applied to the inputs on the device first.
    precision: Precision
    plan: Plan | None = None  # Of trainable and frozen parameters.
    has_forms: bool = False  # Parameters may be stored in forms: `stored.py`.
    axis_name: str | None = None  # Mesh axis to average over; None on one device.
    schedule: Schedule | None = None  # Reported as `learning_rate`.
    # Micro-batches of gradient accumulation, one after another; micro-batch j has the
    # rows j, j + accumulate_steps, ...: docs/decisions/training.md#micro-batches
    accumulate_steps: int = 1
    ema_decay: float | None = None  # Of the averaged parameters, for each step.
    # With the step and the device, the source of randomness; an array in a program.
    seed: int | jax.Array = 0


def strong(state: Any) -> Any:  # Why: docs/decisions/training.md#strong-types
    """Fixes weak types, which no checkpoint keeps: steps would round otherwise."""

    def fix(x: Any) -> Any:
        x = jnp.asarray(x)  # A step's 1.0 is of a weak type, too.
        is_weak = jax.typeof(x).weak_type
        return jax.lax.convert_element_type(x, x.dtype) if is_weak else x

    return jax.tree.map(fix, state)


def check_leaves(old: Any, new: Any, source: str) -> None:
    """Raises `ConfigError` unless the `source` of `new` keeps a state's leaves.

    Others could not be restored. Why: docs/decisions/training.md#state-leaves
    """
    before, after = _leaves(old), _leaves(new)
    for name in before | after:
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"{source} returns a state whose {name} is {after.get(name, 'gone')} "
                f"and was {before.get(name, 'not there')}; leaves, shapes and dtypes "
                "of a state must stay, on any number of devices"
            )


def check_update(state: TrainState, updates: Any, opt_state: Any) -> None:
    """Raises `ConfigError` for updates of other shapes, and as `check_leaves`."""
    shapes, old_shapes = (jax.tree.map(jnp.shape, x) for x in (updates, state.params))
    types, old = (jax.tree.map(jax.typeof, x) for x in (opt_state, state.opt_state))
    if shapes != old_shapes or types != old:
        _name_misfit(state, updates, opt_state)


def _name_misfit(state: TrainState, updates: Any, opt_state: Any) -> None:
    check_leaves(state.opt_state, opt_state, "the optimizer")
    shapes = {path: jnp.shape(x) for path, x in flatten(state.params).items()}
    for path, x in flatten(updates).items():
        if jnp.shape(x) != shapes.get(path):  # It would be broadcast.
            raise ConfigError(
                f"the optimizer's update of {path} has the shape {jnp.shape(x)}, and "
                f"the parameter {shapes.get(path, 'is not there')}; both must be equal"
            )


def _leaves(state: Any) -> dict[str, str]:
    leaves = leaves_by_path(state).items()
    return {path: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for path, x in leaves}


def in_dtypes_of(old: hk.State, new: hk.State) -> hk.State:
    """Casts new network state to the dtypes of the old: float32, not the model's own.

    Raises `ConfigError` if anything but a floating dtype differs.
    """
    dtypes = {path: x.dtype for path, x in tree_leaves_with_path(old)}

    def cast(path: Any, x: Any) -> Any:
        x = jnp.asarray(x)  # A module may set a Python number.
        kinds = dtypes.get(path, x.dtype), x.dtype
        floats = all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)
        return x.astype(kinds[0]) if floats and kinds[0] != x.dtype else x

    cast_new = tree_map_with_path(cast, new)
    check_leaves({"net_state": old}, {"net_state": cast_new}, "the model")
    return cast_new
