"""Custom train steps, run by the same loop; `initial.py` has custom first states."""

import operator
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from haiku_template.errors import ConfigError
from haiku_template.models.forms import inputs_of, with_inputs
from haiku_template.params import mutable
from haiku_template.training.state import Recipe, TrainState, check_leaves
from haiku_template.training.step import Batch, Gradients, Scalars, averaged, step_rng
from haiku_template.training.tasks import check_number


def preprocessed(recipe: Recipe, batch: Any) -> Any:
    """Preprocesses what a model would take of a batch, and keeps the rest."""
    of_batch = recipe.task.whole_batch
    inputs = recipe.preprocess(inputs_of(batch, of_batch))
    return with_inputs(batch, inputs, of_batch)


# Why: docs/decisions/house.md#custom-step
def make_custom_step(recipe: Recipe, step: Callable[..., Any]) -> Gradients:
    """Makes a train step of a user's `step(state, batch, rng, axis_name)`.

    It returns the new state, whose `step` is counted here, and scalars, `loss` among
    them; it averages over the devices itself. `rng` differs on each device. Raises
    `ConfigError` when traced, for other leaves than the state's, or other scalars.
    """

    def train_step(
        state: TrainState, frozen: hk.Params, batch: Batch
    ) -> tuple[TrainState, Scalars]:
        batch = preprocessed(recipe, batch)
        rng = step_rng(recipe, state.step)
        results = step(state._replace(frozen=frozen), batch, rng, recipe.axis_name)
        kinds = [type(x) for x in results] if isinstance(results, tuple) else []
        if kinds != [TrainState, dict]:
            raise ConfigError(
                "step(state, batch, rng, axis_name) must return the new state and a "
                "dictionary of scalars, as (state._replace(params=...), {'loss': ...})"
            )
        new, scalars = results
        new = mutable(new._replace(step=state.step + 1, frozen={}))
        check_leaves(state, new, "the step")
        averages, before = map(jax.tree.leaves, (new.ema_params, state.ema_params))
        if averages and all(map(operator.is_, averages, before)):  # Not the step's own.
            means = averaged(recipe, new.ema_params, new.params, new.opt_state)
            new = new._replace(ema_params=means)
        for name, scalar in scalars.items():
            check_number("step", name, scalar)
        shapes = {name: list(jnp.shape(x)) for name, x in scalars.items()}
        if "loss" not in shapes or any(shapes.values()):
            raise ConfigError(
                f"the step returns scalars of shapes {shapes}; each must be one number "
                "([]), 'loss' among them"
            )
        if "skipped_steps" in scalars:
            raise ConfigError("the step returns 'skipped_steps', which a run counts")
        if recipe.schedule is not None:
            rate = jnp.asarray(recipe.schedule(state.step), jnp.float32)
            scalars = {"learning_rate": rate} | scalars
        return new, scalars

    return train_step
