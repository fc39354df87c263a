"""The mathematics of exact elastic mode: gradients of logical shares, and the update.

Why: docs/decisions/training.md#exact-elastic
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.devices import DeviceManager, norm_over
from haiku_template.devices.compiled import CompiledStep, Scalars, pack
from haiku_template.devices.exact import ExactStep, Shares, exact_evaluation, in_order
from haiku_template.errors import ConfigError
from haiku_template.training import step
from haiku_template.training.state import Recipe, TrainState, split_seed, strong
from haiku_template.training.step import Batch, Update, in_dtypes, share_gradients
from haiku_template.training.tasks import divide

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment
    from haiku_template.training.feed import Feed


def check_exact(experiment: "Experiment", devices: DeviceManager, rows: int) -> None:
    """Raises `ConfigError` for what is not exact on any number of devices.

    `rows` are those of a batch of all processes.
    """
    count = experiment.exact_elastic
    name = f"config.exact_elastic={count}"
    causes = {
        "a step of your own": experiment.step is not None,
        "config.step": experiment.steps is not step,
        "config.sharding": bool(experiment.sharding),
        "config.reduce_dtype": experiment.reduce_dtype is not None,
        "config.steps_per_call above 1": (experiment.steps_per_call or 1) > 1,
        "--target": devices.memory is not None,
    }
    if cause := next((cause for cause, is_so in causes.items() if is_so), None):
        raise ConfigError(f"{name} does not go together with {cause}; leave one out")
    divisor = count * experiment.accumulate_steps
    if rows % divisor:
        raise ConfigError(
            f"{name} shares, each of config.accumulate_steps="
            f"{experiment.accumulate_steps} micro-batches, do not divide a batch of "
            f"{rows}; the nearest batch size that they do is "
            f"{-(-rows // divisor) * divisor}"
        )


def compile_exact(
    devices: DeviceManager, recipe: Recipe, feed: "Feed", update: Update, shares: int
) -> CompiledStep:
    """Compiles a step as `compile_call` does, by shares: `call(state, ..., batch)`.

    Network state and randomness are of each share; averages of the state go on.
    """

    def gradients(
        share: jax.Array, state: TrainState, frozen: hk.Params, seed: Any, *arrays: Any
    ) -> Any:
        of_share = _share_gradients(recipe._replace(seed=seed), share)
        results = feed.gathering(of_share)(state, frozen, *arrays)
        return jax.tree.map(lambda x: x[None], results)

    def exact_update(
        state: TrainState, results: list[Any]
    ) -> tuple[TrainState, Scalars]:
        new, scalars = update(state, _averages(recipe, state, results))
        return new, pack(scalars)

    call = ExactStep(Shares(devices, shares), gradients, exact_update)
    return CompiledStep(devices, call, True, token=lambda x: (x, x[1].tables[0]))


def compile_exact_evaluation(
    devices: DeviceManager, eval_step: Callable[..., Any], shares: int
) -> CompiledStep:
    """Compiles an evaluation step, to the sums of a batch."""
    call = exact_evaluation(Shares(devices, shares), eval_step)
    return CompiledStep(devices, call, False, token=lambda x: (x, x["weight"]))


def _share_gradients(recipe: Recipe, share: jax.Array) -> Callable[..., Any]:
    def train_step(state: TrainState, frozen: hk.Params, batch: Batch) -> Any:
        rng = jax.random.fold_in(split_seed(recipe.seed).steps, state.step)
        rng = jax.random.fold_in(rng, share)
        graded = share_gradients(recipe, state, frozen, rng, batch)
        grads, (net_state, scalars, weight) = graded
        if weight is not None:
            grads, scalars = jax.tree.map(lambda x: x * weight, (grads, scalars))
        # Between programs one device keeps weak types, and several do not.
        return strong(((grads, scalars), net_state, weight))

    return train_step


def _averages(recipe: Recipe, state: TrainState, results: list[Any]) -> Any:
    """Averages the results of the shares, as those of `step.make_gradients`."""
    first, count = results[0][1], len(results)
    sums, net_state, weight = in_order(results)
    if weight is None:
        grads, scalars = jax.tree.map(lambda x: x / count, sums)
    else:
        grads, scalars = divide(sums, weight)
    grads = in_dtypes(grads, state.params)
    grads = recipe.precision.loss_scale(state.loss_scale).unscale(grads)

    def mean(total: jax.Array, x: jax.Array) -> jax.Array:
        return total / count if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    net_state = jax.tree.map(mean, net_state, first)
    return grads, scalars | {"grad_norm": norm_over(None, grads)}, net_state
