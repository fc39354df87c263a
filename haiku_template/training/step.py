"""The mathematics of a run: pure functions of (state, frozen parameters, batch).

Gradients, updates and averages are of the trainable `params` alone; without
fine-tuning the frozen parameters are an empty tree.

Each is written once, for one device's share of the batch. What must agree on all
devices is averaged over `axis_name`, which is None on one device; nothing here knows
how many there are.

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
from haiku_template.training.optimizers import Schedule
from haiku_template.training.precision import Precision
from haiku_template.training.state import TrainState
from haiku_template.training.tasks import NO_TALLY, Tally, Task

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
      task: per-example values of the outputs, `loss` among them.
      optimizer: makes updates of gradients.
      preprocess: what happens to the inputs on the device first.
      precision: see `Precision`.
      axis_name: the mesh axis to average over; None on one device.
      combine: makes the model's parameters of trainable ones, frozen ones and an rng.
      schedule: reported as `learning_rate`; None reports none.
      accumulate_steps: parts that the share is worked through in, one after another,
        to save memory. Gradients are averaged over all of them; batch statistics are
        those of each part, and move once for each.
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
    ) -> tuple[jax.Array, tuple[hk.State, Scalars]]:
        policy = precision.policy
        params = combine(*policy.cast_to_compute((params, frozen)), rng)
        inputs = policy.cast_to_compute(preprocess(batch["inputs"]))
        with precision.norms_in_float32():
            outputs, net_state = model.apply(params, net_state, rng, inputs, True)
        values = _per_example(task, precision.cast_outputs(outputs), batch)
        scalars = {name: jnp.mean(value) for name, value in values.items()}
        return scale.scale(scalars["loss"]), (net_state, scalars)

    gradient = jax.grad(loss_and_more, has_aux=True)

    def train_step(
        state: TrainState, frozen: hk.Params, batch: Batch
    ) -> tuple[TrainState, Scalars]:
        scale = precision.loss_scale(state.loss_scale)
        rng = _step_rng(seed, state.step, axis_name)
        grads, (net_state, scalars) = _accumulate(
            functools.partial(gradient, state.params, frozen, scale),
            state.net_state,
            rng,
            batch,
            accumulate_steps,
        )
        grads, scalars = mean_over(axis_name, (scale.unscale(grads), scalars))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = state._replace(
            step=state.step + 1,
            params=params,
            net_state=net_state,
            opt_state=opt_state,
            ema_params=_average(state.ema_params, params, ema_decay),
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
) -> Callable[[tuple[hk.Params, hk.State], hk.Params, Any], Any]:
    """Makes `forward((params, net_state), frozen, inputs)`: outputs in evaluation."""

    def forward(
        variables: tuple[hk.Params, hk.State], frozen: hk.Params, inputs: Any
    ) -> Any:
        policy = precision.policy
        params, net_state = variables
        params = combine(*policy.cast_to_compute((params, frozen)))
        inputs = policy.cast_to_compute(preprocess(inputs))
        with precision.norms_in_float32():
            outputs, _ = model.apply(params, net_state, None, inputs, False)
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
    tally: Tally = NO_TALLY,
) -> Callable[[tuple[hk.Params, hk.State], hk.Params, Batch], Scalars]:
    """Makes `eval_step((params, net_state), frozen, batch)`: sums over one batch.

    `batch["mask"]` (bool [B]) says which rows are examples and which are padding.
    Returns each value of the task, summed over the examples on all devices;
    `examples`, their number; and the counts of the tally.
    """
    forward = make_forward(
        model=model, preprocess=preprocess, precision=precision, combine=combine
    )

    def eval_step(
        variables: tuple[hk.Params, hk.State], frozen: hk.Params, batch: Batch
    ) -> Scalars:
        outputs = forward(variables, frozen, batch["inputs"])
        values = _per_example(task, outputs, batch)
        # `where` and not a product: padding may give NaN.
        mask = batch["mask"]
        sums = {k: jnp.sum(jnp.where(mask, v, 0)) for k, v in values.items()}
        sums["examples"] = jnp.sum(mask.astype(jnp.float32))
        return sum_over(axis_name, sums | tally.count(outputs, batch))

    return eval_step


def _per_example(task: Task, outputs: Any, batch: Batch) -> Scalars:
    """The task's values, each of shape [B]: averages and [B, 1] would count wrongly."""
    values = task(outputs, batch)
    rows = len(jax.tree.leaves(batch["labels"])[0])
    for name, value in values.items():
        if jnp.shape(value) != (rows,):
            raise ConfigError(
                f"the task's {name!r} has shape {list(jnp.shape(value))} for {rows} "
                f"examples; each value must be one number an example: [{rows}]"
            )
    if "loss" not in values:
        raise ConfigError(f"the task returns {', '.join(values)} and no 'loss'")
    return values


def _step_rng(seed: int, step: jax.Array, axis_name: str | None) -> jax.Array:
    rng = jax.random.fold_in(jax.random.key(seed), step)
    device = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    return jax.random.fold_in(rng, device)


def _accumulate(
    gradient: Callable[..., Any],
    net_state: hk.State,
    rng: jax.Array,
    batch: Batch,
    parts: int,
) -> tuple[hk.Params, tuple[hk.State, Scalars]]:
    """Averages gradients and scalars over equal parts of a batch, one at a time."""
    if parts == 1:
        return gradient(net_state, rng, batch)
    batch = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    rngs = jax.random.split(rng, parts)

    def add(carry: Any, part: Any) -> tuple[Any, None]:
        net_state, total = carry
        grads, (net_state, scalars) = gradient(net_state, *part)
        return (net_state, jax.tree.map(jnp.add, total, (grads, scalars))), None

    first = jax.tree.map(lambda x: x[0], (rngs, batch))
    grads, (_, scalars) = jax.eval_shape(gradient, net_state, *first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (grads, scalars))
    (net_state, total), _ = jax.lax.scan(add, (net_state, zeros), (rngs, batch))
    grads, scalars = jax.tree.map(lambda x: x / parts, total)
    return grads, (net_state, scalars)


def _average(
    averages: hk.Params | None, params: hk.Params, decay: float | None
) -> hk.Params | None:
    if averages is None:
        return None
    return optax.incremental_update(params, averages, 1 - decay)


def _skip_unless_finite(
    grads: hk.Params, scale: jmp.DynamicLossScale, old: TrainState, new: TrainState
) -> TrainState:
    """The new state, or with an infinite gradient the old one; either way the step."""
    finite = jmp.all_finite(grads)
    kept = jmp.select_tree(finite, new, old._replace(step=new.step))
    adjusted = scale.adjust(finite)
    return kept._replace(loss_scale=(adjusted.loss_scale, adjusted.counter))
