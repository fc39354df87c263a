"""First states: of a model's parameters, read or from the seed."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_template.devices.compiled import with_axis
from haiku_template.errors import ConfigError
from haiku_template.models.forms import inputs_of
from haiku_template.params import flatten, unflatten
from haiku_template.training.optimizers import own_averages
from haiku_template.training.state import Recipe, TrainState, split_seed

if TYPE_CHECKING:
    pass

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
            kind = "whole batches" if inputs is batch else "inputs alone, of"
            error.add_note(f"The model was given {kind}: {names}.{_of_bytes(example)}")
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
        by_field = lambda x: dict(zip(("params", "net_state"), init(x), strict=True))  # noqa: E731
        return init, *dependents(by_field, example, axis_name)

    size = jax.tree.leaves(inputs)[0].shape[0]
    try:
        one = trace(1)
    except Exception:
        # A codebook may take more rows than one. Else the first error says more.
        with contextlib.suppress(Exception):
            if (of_batch := trace(size))[2]:
                return of_batch
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
    one = jaxpr.replace(
        constvars=[],
        invars=[*dict.fromkeys(read)],
        outvars=results,
        eqns=[equation],
        debug_info=unnamed,
    )
    used = lambda mask: any(dce_jaxpr(one, mask)[1])  # noqa: E731
    return [x for x in results if used([x is result for result in results])]


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
        params, first = model_init(inputs)
        if recipe.plan.frozen:
            params = recipe.plan.init_params(params, split_seed(recipe.seed).adapters)
        params = {path: leaves.get(path, x) for path, x in flatten(params).items()}
        params = unflatten(params)
        # Leaves that start fresh are not in what was read; a module's may be a tree.
        leaves_of_state = flatten(first) | flatten(net_state or {})
        structure = jax.tree.structure(first)
        net_state = jax.tree.unflatten(structure, leaves_of_state.values())
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
