"""The mathematics of a run: pure functions of (state, frozen parameters, batch).

Gradients, updates and averages are of the trainable `params`; `frozen` is empty without
fine-tuning. Each function is written for one device's share of the batch, and averages
over `axis_name`, which is None on one device.

Shapes: B examples in one device's share of a batch.
"""

import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax

from haiku_template.devices import mean_over, sum_over
from haiku_template.errors import ConfigError
from haiku_template.models import plain_outputs
from haiku_template.training.optimizers import Schedule
from haiku_template.training.precision import Precision
from haiku_template.training.state import TrainState, split_seed
from haiku_template.training.tasks import WEIGHT, Task

Batch = dict[str, Any]
Scalars = dict[str, jax.Array]
Combine = Callable[..., hk.Params]


def make_train_step(
    *,
    model: hk.TransformedWithState,
    task: Task,
    optimizer: optax.GradientTransformation,
    preprocess: Callable[[Any], Any],
    precision: Precision,
    axis_name: str | None,
    combine: Combine,
    schedule: Schedule | None = None,
    accumulate_steps: int = 1,
    ema_decay: float | None = None,
    seed: int = 0,
) -> Callable[[TrainState, hk.Params, Batch], tuple[TrainState, Scalars]]:
    """Makes `train_step(state, frozen, batch)`, which returns (new state, scalars).

    Args:
      model: `apply(params, net_state, rng, inputs, is_training)`.
      preprocess: applied to the inputs on the device first.
      axis_name: the mesh axis to average over; None on one device.
      combine: merges trainable parameters, frozen ones and an rng into the model's.
      schedule: reported as `learning_rate`; None reports none.
      accumulate_steps: micro-batches of gradient accumulation, one after another. Each
        moves the batch statistics once. Micro-batch j has the rows j, j +
        `accumulate_steps`, ...: the same on any number of devices.
      ema_decay: decay of the averaged parameters for each step; None for none.
      seed: with the step and the device, the source of randomness.
    """

    def loss_and_more(
        params: hk.Params,
        frozen: hk.Params,
        scale: Any,
        net_state: hk.State,
        rng: jax.Array,
        batch: Batch,
    ) -> tuple[jax.Array, tuple[hk.State, Scalars, jax.Array | None]]:
        cast = precision.policy.cast_to_compute
        rng, adapters_rng = jax.random.split(rng)
        params = combine(*cast((params, frozen)), adapters_rng)
        inputs = cast(preprocess(batch["inputs"]))
        with precision.norms_in_float32():
            outputs, net_state = model.apply(params, net_state, rng, inputs, True)
        scalars, weight = _averages(task, precision.cast_outputs(outputs), batch)
        return scale.scale(scalars["loss"]), (net_state, scalars, weight)

    gradient = jax.grad(loss_and_more, has_aux=True)

    def train_step(
        state: TrainState, frozen: hk.Params, batch: Batch
    ) -> tuple[TrainState, Scalars]:
        scale = precision.loss_scale(state.loss_scale)
        grads, (net_state, scalars, weight) = _accumulate(
            functools.partial(gradient, state.params, frozen, scale),
            state.net_state,
            _step_rng(seed, state.step, axis_name),
            batch,
            accumulate_steps,
        )
        means = scale.unscale(grads), scalars
        grads, scalars = _average_over(axis_name, means, weight)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = state._replace(
            step=state.step + 1,
            params=params,
            net_state=net_state,
            opt_state=opt_state,
            ema_params=_moving_average(state.ema_params, params, ema_decay),
        )
        scalars["grad_norm"] = optax.tree.norm(grads)
        if schedule is not None:
            scalars["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        if precision.scales_loss:
            new = _skip_unless_finite(grads, scale, state, new)
            scalars["loss_scale"] = new.loss_scale[0]
        return new, scalars

    return train_step


def make_forward(
    *,
    model: hk.TransformedWithState,
    preprocess: Callable[[Any], Any],
    precision: Precision,
    combine: Combine,
) -> Callable[..., Any]:
    """Makes `forward((params, net_state), frozen, inputs, rng)`, as in evaluation.

    `rng` is for models that draw in each forward pass; others take None.
    """

    def forward(
        variables: tuple[hk.Params, hk.State],
        frozen: hk.Params,
        inputs: Any,
        rng: jax.Array | None = None,
    ) -> Any:
        policy = precision.policy
        params, net_state = variables
        params = combine(*policy.cast_to_compute((params, frozen)))
        inputs = policy.cast_to_compute(preprocess(inputs))
        with precision.norms_in_float32():
            outputs, _ = model.apply(params, net_state, rng, inputs, False)
        return precision.cast_outputs(outputs)

    return forward


def make_eval_step(
    *,
    model: hk.TransformedWithState,
    task: Task,
    preprocess: Callable[[Any], Any],
    precision: Precision,
    axis_name: str | None,
    combine: Combine,
    seed: int = 0,
) -> Callable[[tuple[hk.Params, hk.State], hk.Params, Any], dict[str, Any]]:
    """Makes `eval_step((params, net_state), frozen, (batch, places))`: a batch's sums.

    `places` is from `evaluation.pad`: int32 [B], negative where a row is padding. The
    seed and the place of a device's first row are the source of randomness.

    Sums over all devices: `values`, the task's values times the examples' weights;
    `weight`, these weights; `counts`, the task's.
    """
    forward = make_forward(
        model=model, preprocess=preprocess, precision=precision, combine=combine
    )

    def eval_step(
        variables: tuple[hk.Params, hk.State],
        frozen: hk.Params,
        padded: tuple[Batch, jax.Array],
    ) -> dict[str, Any]:
        batch, places = padded
        rng = jax.random.fold_in(split_seed(seed).evaluation, places[0])
        outputs = forward(variables, frozen, batch["inputs"], rng)
        values, weights = _per_example(task, outputs, batch)
        mask = places >= 0
        weights = jnp.where(mask, 1.0 if weights is None else weights, 0.0)
        sums = {
            "values": {k: _weighted_sum(v, weights) for k, v in values.items()},
            "weight": jnp.sum(weights),
            "counts": task.count(outputs, batch, mask),
        }
        return sum_over(axis_name, sums)

    return eval_step


def make_predict_step(
    *, make_forward: Callable[..., Any], seed: int, **computing: Any
) -> Callable[[tuple[hk.Params, hk.State], hk.Params, Any], Any]:
    """Makes `predict_step((params, net_state), frozen, (inputs, places))`: outputs.

    `places` (int32 [B]) and the seed are the source of randomness, as in evaluation.
    `make_forward` is this module's, or a user's; it takes the other arguments.
    """
    forward = make_forward(**computing)

    def predict_step(
        variables: tuple[hk.Params, hk.State],
        frozen: hk.Params,
        placed: tuple[Any, jax.Array],
    ) -> Any:
        inputs, places = placed
        rng = jax.random.fold_in(split_seed(seed).evaluation, places[0])
        return plain_outputs(forward(variables, frozen, inputs, rng))

    return predict_step


def _per_example(
    task: Task, outputs: Any, batch: Batch
) -> tuple[Scalars, jax.Array | None]:
    """Checks the task's values, each [B], and takes the weights out of them."""
    values = task(outputs, batch)
    if not isinstance(values, dict):
        raise ConfigError(
            f"the task returns a {type(values).__name__}; it must return a dictionary "
            "of per-example values [B], 'loss' among them"
        )
    values = dict(values)
    rows = len(jax.tree.leaves(batch)[0])
    for name, value in values.items():
        if jnp.shape(value) != (rows,):
            raise ConfigError(
                f"the task's {name!r} has shape {list(jnp.shape(value))} for {rows} "
                f"examples; each value must be one number an example: [{rows}]"
            )
    if "loss" not in values:
        raise ConfigError(f"the task returns {', '.join(values)} and no 'loss'")
    weights = values.pop(WEIGHT, None)
    if weights is not None:
        # Weights are data: they have no gradient.
        weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
    return values, weights


def _averages(
    task: Task, outputs: Any, batch: Batch
) -> tuple[Scalars, jax.Array | None]:
    """Averages the task's values; returns the sum of the weights beside them."""
    values, weights = _per_example(task, outputs, batch)
    if weights is None:
        return {name: jnp.mean(value) for name, value in values.items()}, None
    weight = jnp.sum(weights)
    sums = {name: _weighted_sum(value, weights) for name, value in values.items()}
    return _divide(sums, weight), weight


def _weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    # `where`, because padding and examples of weight 0 may give NaN.
    return jnp.sum(jnp.where(weights > 0, values * weights, 0))


def _divide(sums: Any, weight: jax.Array) -> Any:
    """Divides sums by a weight; 0 where nothing counts."""
    return jax.tree.map(lambda x: x / jnp.where(weight > 0, weight, 1), sums)


def _average_over(axis_name: str | None, tree: Any, weight: jax.Array | None) -> Any:
    """Averages over devices, each with its weight; None weighs them equally."""
    if weight is None or axis_name is None:
        return mean_over(axis_name, tree)
    sums = jax.tree.map(lambda x: x * weight, tree)
    return _divide(*sum_over(axis_name, (sums, weight)))


def _step_rng(seed: int, step: jax.Array, axis_name: str | None) -> jax.Array:
    rng = jax.random.fold_in(split_seed(seed).steps, step)
    device = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    return jax.random.fold_in(rng, device)


def _accumulate(
    gradient: Callable[..., Any],
    net_state: hk.State,
    rng: jax.Array,
    batch: Batch,
    parts: int,
) -> tuple[hk.Params, tuple[hk.State, Scalars, jax.Array | None]]:
    """Gradient accumulation: averages gradients and scalars over micro-batches."""
    if parts == 1:
        return gradient(net_state, rng, batch)
    # Every `parts`-th row: a micro-batch, of which batch statistics are taken, has the
    # same rows on any number of devices.
    batch = jax.tree.map(
        lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch
    )
    rngs = jax.random.split(rng, parts)

    def add(carry: Any, part: Any) -> tuple[Any, None]:
        net_state, total = carry
        grads, (net_state, scalars, weight) = gradient(net_state, *part)
        if weight is not None:
            grads, scalars = jax.tree.map(lambda x: x * weight, (grads, scalars))
        return (net_state, jax.tree.map(jnp.add, total, (grads, scalars, weight))), None

    first = jax.tree.map(lambda x: x[0], (rngs, batch))
    grads, (_, *more) = jax.eval_shape(gradient, net_state, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, *more))
    (net_state, total), _ = jax.lax.scan(add, (net_state, zeros), (rngs, batch))
    *sums, weight = total
    if weight is None:
        grads, scalars = jax.tree.map(lambda x: x / parts, sums)
    else:
        grads, scalars = _divide(sums, weight)
    return grads, (net_state, scalars, weight)


def _moving_average(
    averages: hk.Params | None, params: hk.Params, decay: float | None
) -> hk.Params | None:
    if averages is None:
        return None
    return optax.incremental_update(params, averages, 1 - decay)


def _skip_unless_finite(
    grads: hk.Params, scale: jmp.DynamicLossScale, old: TrainState, new: TrainState
) -> TrainState:
    """Keeps the old state if a gradient is not finite, with the new step."""
    finite = jmp.all_finite(grads)
    kept = jmp.select_tree(finite, new, old._replace(step=new.step))
    adjusted = scale.adjust(finite)
    return kept._replace(loss_scale=(adjusted.loss_scale, adjusted.counter))
