"""First states: of a model's parameters, read or from the seed, or a user's own.

Also a user's own train step, run by our loop.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_template.data import each_shape
from haiku_template.devices import canonical_shapes
from haiku_template.devices.step import with_axis
from haiku_template.errors import ConfigError
from haiku_template.finetuning import check_same_frozen, from_features
from haiku_template.models.forms import inputs_of, with_inputs
from haiku_template.params import flatten, unflatten
from haiku_template.storage import Checkpoints
from haiku_template.training.optimizers import own_averages
from haiku_template.training.state import Recipe, TrainState, check_leaves, split_seed
from haiku_template.training.step import Batch, Gradients, Scalars, step_rng

if TYPE_CHECKING:
    from haiku_template.training.trainer import Trainer

FIELDS = ("params", "net_state", "opt_state", "ema_params")
# Of each `hk.ExponentialMovingAverage`: `average` is computed anew in every update.
AVERAGE = {"average", "hidden", "counter"}


def make_model_init(
    recipe: Recipe, batch: Any, rows: int = 1
) -> Callable[..., tuple[hk.Params, hk.State]]:
    """Makes `init(inputs)`, which initializes a model's parameters and state.

    `batch` is a pytree of `jax.ShapeDtypeStruct` [B, ...], before `preprocess`, as are
    `inputs`; these are so many rows of zeros by default.

    Raises:
      ConfigError: when called: the task takes labels, and the batch has no inputs.
    """
    inputs = inputs_of(batch, recipe.task.whole_batch)
    names = ", ".join(batch) if isinstance(batch, dict) else "arrays without names"

    def init(example: Any = None) -> tuple[hk.Params, hk.State]:
        if inputs is batch and recipe.task.labels != "any":
            raise ConfigError(
                f"the task takes inputs and labels ({recipe.task.labels}), and the "
                f"batches of the data have {names} alone"
            )
        if example is None:  # Most initialize from shapes and the rng alone.
            shaped = lambda x: jnp.zeros((rows, *x.shape[1:]), x.dtype)  # noqa: E731
            example = jax.tree.map(shaped, inputs)
        policy, rng = recipe.precision.policy, split_seed(recipe.seed).params
        try:
            example = policy.cast_to_param(recipe.preprocess(example))
            return recipe.model.init(rng, example, True)
        except Exception as error:
            given = "whole batches" if inputs is batch else "inputs alone, of"
            error.add_note(f"The model was given {given}: {names}.{_of_bytes(example)}")
            raise

    return init


def trace_model_init(
    recipe: Recipe, batch: Any, axis_name: str | None
) -> tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]:
    """Makes a model's `init`, and traces it as `dependents`: on one row of inputs.

    It is of a whole batch if it depends on that. Raises as the model does for one row.
    """
    inputs = inputs_of(batch, recipe.task.whole_batch)

    def trace(rows: int) -> tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]:
        init = make_model_init(recipe, batch, rows)
        example = jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])), inputs)
        named = lambda x: dict(zip(("params", "net_state"), init(x), strict=True))  # noqa: E731
        return init, *dependents(named, example, axis_name)

    size = jax.tree.leaves(inputs)[0].shape[0]
    try:
        one = trace(1)
    except Exception:
        # A codebook may take more rows than one. Else the first error says more.
        with contextlib.suppress(Exception):
            if (whole := trace(size))[2]:
                return whole
        raise
    return trace(size) if one[2] else one


def dependents(
    fn: Callable[[Any], Any], inputs: Any, axis_name: str | None
) -> tuple[Any, tuple[str, ...]]:
    """Traces `fn(inputs)`: shapes of its results, and paths of those that need inputs.

    These may be too many, as all results of `hk.cond` are among them.
    """
    fn = with_axis(fn, axis_name)
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(inputs)
    jaxpr, paths = program.jaxpr, [*flatten(shapes)]
    variables = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        read = [x for x in equation.invars if not hasattr(x, "val") and x in variables]
        variables.update(_dependent_results(jaxpr, equation, read) if read else ())
    leaves = zip(paths, jaxpr.outvars, strict=True)
    names = [path for path, x in leaves if not hasattr(x, "val") and x in variables]
    return shapes, tuple(path for path in names if not _is_average(path, paths))


def _is_average(path: str, paths: Sequence[str]) -> bool:
    module, _, name = path.rpartition("/")
    return name == "average" and {f"{module}/{x}" for x in AVERAGE} <= {*paths}


def _dependent_results(jaxpr: Any, equation: Any, read: list[Any]) -> list[Any]:
    """Results of an equation that depend on some of its arguments."""
    results = equation.outvars
    if len(results) == 1 and not any("jaxpr" in key for key in equation.params):
        return results
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    parts = {"constvars": [], "invars": [*dict.fromkeys(read)], "outvars": results}
    one = jaxpr.replace(**parts, eqns=[equation], debug_info=unnamed)
    each = [[x is result for x in results] for result in results]
    return [
        x for x, only in zip(results, each, strict=True) if any(dce_jaxpr(one, only)[1])
    ]


def _of_bytes(inputs: Any) -> str:
    if all(x.dtype != jnp.uint8 for x in jax.tree.leaves(inputs)):
        return ""
    return (
        " The inputs are bytes, as the data has them; --config.data.scale_pixels=True, "
        "or from_split(..., preprocess=images.scale_pixels), makes numbers in [0, 1] "
        "of them."
    )


def make_init(recipe: Recipe, model_init: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `init(leaves, net_state, inputs)`: the state before step 0, without frozen.

    `leaves` are pretrained parameters by path, {} without any; a `net_state` of None is
    the model's own. `inputs` are those of `model_init`.
    """

    def init(
        leaves: dict[str, jax.Array],
        net_state: hk.State | None = None,
        inputs: Any = None,
    ) -> TrainState:
        whole, first = model_init(inputs)
        adapters = split_seed(recipe.seed).adapters
        params = flatten(recipe.plan.init_params(whole, adapters))
        params = unflatten({path: leaves.get(path, x) for path, x in params.items()})
        # Leaves that start fresh are not in what was read; a module's may be a tree.
        found = flatten(first) | flatten(net_state or {})
        net_state = jax.tree.unflatten(jax.tree.structure(first), found.values())
        return first_state(recipe, params=params, net_state=net_state)

    return init


def first_state(recipe: Recipe, **fields: Any) -> TrainState:
    """Makes the state before step 0; fields that are not given follow from `params`."""
    params, optimizer = fields["params"], recipe.optimizer
    opt_state = () if optimizer is None else optimizer.init(params)
    has_own = own_averages(opt_state, params) is not None
    if has_own and recipe.ema_decay is not None:
        raise ConfigError(
            "ema_decay averages parameters, and so does this schedule-free optimizer, "
            "whose averages are evaluated and exported; leave out ema_decay"
        )
    averaged = has_own or recipe.ema_decay is not None
    defaults = {
        "step": jnp.zeros((), jnp.int32),
        "frozen": {},
        "net_state": {},
        "opt_state": opt_state,
        "ema_params": params if averaged else None,
        "loss_scale": recipe.precision.initial_loss_scale(),
    }
    return TrainState(**defaults | fields)


def make_custom_init(
    recipe: Recipe, init: Callable[..., Any], batch: Any
) -> Callable[..., TrainState]:
    """Makes the state before step 0 of a user's `init(rng, batch)`.

    `batch` has the shapes of a whole batch [B, ...] of all devices. `init` gets zeros,
    or the first batch if what it returns depends on that.

    Raises:
      ConfigError: when traced: it returns no dictionary of `FIELDS` with `params`.
    """

    def make(leaves: Any, net_state: Any = None, first: Any = None) -> TrainState:
        del leaves, net_state  # Nothing is pretrained.
        if first is None:
            first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        fields = init(split_seed(recipe.seed).params, preprocessed(recipe, first))
        names = list(fields) if isinstance(fields, dict) else type(fields).__name__
        if "params" not in names or not set(names) <= set(FIELDS):
            raise ConfigError(
                f"init returns {names}; it must return a dictionary of pytrees, params "
                f"among them; possible are {', '.join(FIELDS)}"
            )
        return first_state(recipe, **jax.tree.map(jnp.asarray, fields))

    return make


def preprocessed(recipe: Recipe, batch: Any) -> Any:
    """Preprocesses what a model would take of a batch, and keeps the rest."""
    whole = recipe.task.whole_batch
    inputs = recipe.preprocess(inputs_of(batch, whole))
    return with_inputs(batch, inputs, whole)


def restored_or_first(
    trainer: "Trainer", checkpoints: Checkpoints, num_steps: int
) -> tuple[int, TrainState]:
    """Restores the newest checkpoint or initializes; returns the step and its state.

    Raises:
      ConfigError: it is beyond `num_steps`, or the frozen parameters changed.
      StorageError: it is damaged, or does not fit.
    """
    start, workdir = checkpoints.latest or 0, checkpoints.directory.parent
    trainer.devices.processes.agree(
        {
            "the newest checkpoint": start,
            "num_steps": num_steps,
            "the placement of the data": trainer.placement,
        }
    )
    if start > num_steps:
        raise ConfigError(
            f"{workdir} has a checkpoint of step {start}, and num_steps is "
            f"{num_steps}; a run does not go back: use another --workdir"
        )
    if start:
        saved = checkpoints.restore(start, trainer.abstract.saved())
        state = TrainState(**saved, frozen=trainer.frozen())
    else:
        state = trainer.init()
    trainer.devices.check(state, trainer.layout)
    whole, base = trainer.through or (trainer, None)
    if whole.experiment.init_from is not None:
        check_same_frozen(trainer.devices, state.frozen, workdir, base)
    return start, state


def with_features(trainer: "Trainer") -> "Trainer":
    """Makes the trainer that begins at `finetuning.features`; the same without any.

    They are computed if they are not there yet. Raises as `from_features`.
    """
    if trainer.experiment.finetuning.features is None:
        return trainer
    if trainer.devices.processes.count > 1:
        raise ConfigError(
            "config.finetuning.features are computed and read by one process; leave "
            "out --num_processes, or train through the trunk"
        )
    example = canonical_shapes(each_shape(trainer.experiment.data.train)[0])
    inputs = inputs_of(example, trainer.task.whole_batch)
    experiment, base = from_features(trainer, trainer.model_init, inputs)
    made = type(trainer)(experiment, trainer.devices)
    made.through = trainer, base
    return made


def make_custom_step(recipe: Recipe, step: Callable[..., Any]) -> Gradients:
    """Makes a train step of a user's `step(state, batch, rng, axis_name)`.

    It returns the new state, whose `step` is counted here, and scalars, `loss` among
    them; it averages over the devices itself. `rng` differs on each device.

    Raises:
      ConfigError: when traced: it returns other leaves than the state's, or other
        scalars.
    """

    def train_step(
        state: TrainState, frozen: hk.Params, batch: Batch
    ) -> tuple[TrainState, Scalars]:
        batch = preprocessed(recipe, batch)
        rng = step_rng(recipe, state.step)
        whole = state._replace(frozen=frozen)
        made = step(whole, batch, rng, recipe.axis_name)
        kinds = [type(x) for x in made] if isinstance(made, tuple) else []
        if kinds != [TrainState, dict]:
            raise ConfigError(
                "step(state, batch, rng, axis_name) must return the new state and a "
                "dictionary of scalars, as (state._replace(params=...), {'loss': ...})"
            )
        new, scalars = made
        new = new._replace(step=state.step + 1, frozen={})
        check_leaves(state, new, "the step")
        shapes = {name: list(jnp.shape(x)) for name, x in scalars.items()}
        if "loss" not in shapes or any(shapes.values()):
            raise ConfigError(
                f"the step returns scalars of shapes {shapes}; each must be one number "
                "([]), 'loss' among them"
            )
        return new, scalars

    return train_step
