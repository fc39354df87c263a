"""The mathematics of training: pure functions of (state, frozen parameters, batch).

Evaluation sums in `training/evaluation.py` what `forward` gives here.

Gradients, updates and averages are of the trainable `params`; `frozen` is empty without
fine-tuning. Gradients and scalars are of one device's share of a batch, then averaged
over `axis_name` (None on one device), net_state by the model if at all. The update is
of global arrays.

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

from haiku_template.devices import mean_over, norm_over
from haiku_template.models import inputs_of, task_rng
from haiku_template.training.state import (
    Recipe,
    TrainState,
    Variables,
    check_update,
    in_dtypes_of,
    own_averages,
    split_seed,
)
from haiku_template.training.tasks import divide, example_values, weighted_sum

Batch = Any  # A tree of arrays.
Scalars = dict[str, jax.Array]
# Gradients, and net_state, scalars and a device's mean weight.
Graded = tuple[hk.Params, tuple[hk.State, Scalars, jax.Array | None]]
Results = tuple[hk.Params, Scalars, hk.State]  # Of all devices, by `gradients`.
Gradients = Callable[[TrainState, hk.Params, Batch], Any]
Update = Callable[[TrainState, Any], tuple[TrainState, Scalars]]


def forward(
    recipe: Recipe,
    variables: Variables,
    frozen: hk.Params,
    batch: Batch,
    rngs: tuple[jax.Array | None, jax.Array | None],
    is_training: bool,
) -> tuple[dict[str, Any], hk.State]:
    """Runs the model in its precision; returns what a task may ask for, and net_state.

    `rngs` are the model's and that of LoRA's dropout; None for one that is not used.
    Without a model the outputs are None.
    """
    precision, policy = recipe.precision, recipe.precision.policy
    cast = precision.cast_arrays if recipe.has_forms else policy.cast_to_compute
    params, net_state, step = variables
    params = cast(params)
    if recipe.plan.frozen:
        dtype = policy.compute_dtype
        params = recipe.plan.combine(params, cast(frozen), dtype, rngs[1])
    outputs, inputs = None, inputs_of(batch, recipe.task.whole_batch)
    inputs = recipe.preprocess(inputs)
    if recipe.model is not None:
        with precision.norms_in_float32(), precision.named():
            outputs, net_state = recipe.model.apply(
                params, net_state, rngs[0], precision.cast_inputs(inputs), is_training
            )
        outputs = precision.cast_outputs(outputs)
    facts = {
        "outputs": outputs,
        "inputs": inputs,
        "batch": batch,
        "params": precision.used(params) if recipe.has_forms else params,
        "rng": task_rng(rngs[0]),
        "step": step,
        "mask": jnp.ones(jax.tree.leaves(batch)[0].shape[:1], bool),
        "is_training": is_training,
        "axis_name": recipe.axis_name,
    }
    return facts, net_state


def make_gradients(recipe: Recipe) -> Gradients:
    """Makes `gradients(state, frozen, batch)`, of one device's share of a batch.

    Returns gradients and scalars, averaged over the devices, and the new net_state.
    """

    def gradients(state: TrainState, frozen: hk.Params, batch: Batch) -> Results:
        rng = step_rng(recipe, state.step)
        graded = share_gradients(recipe, state, frozen, rng, batch)
        grads, (net_state, scalars, _) = graded
        grads = recipe.precision.loss_scale(state.loss_scale).unscale(grads)
        dtype = recipe.precision.reduce_dtype
        grads, scalars = mean_over(recipe.axis_name, (grads, scalars), dtype)
        norm = norm_over(recipe.axis_name, grads)
        return grads, scalars | {"grad_norm": norm}, net_state

    gradients.__name__ = "train_step"  # The compiled program's, in profiles and logs.
    return gradients


def share_gradients(
    recipe: Recipe, state: TrainState, frozen: hk.Params, rng: jax.Array, batch: Batch
) -> Graded:
    """Gradients of a share's scaled loss; its net_state, scalars and mean weight."""
    if recipe.accumulate_steps > 1:
        one = functools.partial(share_gradients, recipe._replace(accumulate_steps=1))
        return _accumulate(one, recipe, state, frozen, rng, batch)
    scale = recipe.precision.loss_scale(state.loss_scale)

    def loss(
        params: hk.Params, net_state: hk.State, rng: jax.Array, batch: Batch
    ) -> tuple[jax.Array, tuple[hk.State, Scalars, jax.Array | None]]:
        variables, rngs = (params, net_state, state.step), tuple(jax.random.split(rng))
        facts, new = forward(recipe, variables, frozen, batch, rngs, True)
        net_state = new if new is net_state else in_dtypes_of(net_state, new)
        values, weights = example_values(recipe.task, **facts)
        if weights is None:
            scalars = {name: jnp.mean(value) for name, value in values.items()}
            return scale.scale(scalars["loss"]), (net_state, scalars, None)
        # Averaged before differentiation: no factor differs between devices after.
        # Why: docs/decisions/training.md#weights
        weight = mean_over(recipe.axis_name, jnp.sum(weights))
        sums = {name: weighted_sum(x, weights) for name, x in values.items()}
        scalars = divide(sums, weight)  # Why: docs/decisions/training.md#averages
        return scale.scale(scalars["loss"]), (net_state, scalars, weight)

    graded = jax.grad(loss, has_aux=True)(state.params, state.net_state, rng, batch)
    # JAX's gradient of a complex parameter is conjugated: it points elsewhere.
    return jax.tree.map(jnp.conj, graded[0]), graded[1]


def make_update(recipe: Recipe) -> Update:
    """Makes `update(state, results)`, of the results of `gradients`.

    Arrays are global, wherever they live: it knows no devices. Returns the new state
    and scalars. Why: docs/decisions/training.md#gradients-and-update
    """

    def update(state: TrainState, results: Results) -> tuple[TrainState, Scalars]:
        grads, scalars, net_state = results
        change = functools.partial(recipe.optimizer.update, grads, state.opt_state)
        try:
            updates, opt_state = change(state.params, value=scalars["loss"])
        except TypeError as error:  # Many take no loss.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, opt_state = change(state.params)
        check_update(state, updates, opt_state)
        params = optax.apply_updates(state.params, updates)
        if (averages := state.ema_params) is not None:
            averages = averaged(recipe, averages, params, opt_state)
        new = state._replace(
            step=state.step + 1,
            params=params,
            net_state=net_state,
            opt_state=opt_state,
            ema_params=averages,
        )
        if recipe.schedule is not None:
            rate = recipe.schedule(state.step)
            scalars["learning_rate"] = jnp.asarray(rate, jnp.float32)
        if recipe.precision.scales_loss:
            scale = recipe.precision.loss_scale(state.loss_scale)
            new = _skip_unless_finite(grads, scale, state, new)
            scalars["loss_scale"] = new.loss_scale[0]
        return new, scalars

    return update


def averaged(recipe: Recipe, averages: Any, params: Any, opt_state: Any) -> Any:
    """Averages the parameters after an update, or leaves what a custom init made."""
    if recipe.ema_decay is not None:
        mean = functools.partial(_mean, 1 - recipe.ema_decay)
        return jax.tree.map(mean, params, averages)
    of_optimizer = own_averages(opt_state, params)
    return averages if of_optimizer is None else of_optimizer


def _mean(rate: float, new: jax.Array, average: jax.Array) -> jax.Array:
    """Moves an average; a count or a key, of a custom step, is the newest."""
    has_mean = jnp.issubdtype(new.dtype, jnp.inexact)
    return optax.incremental_update(new, average, rate) if has_mean else new


def step_rng(recipe: Recipe, step: jax.Array) -> jax.Array:
    """PRNG key of the seed, the step and the device."""
    # Why: docs/decisions/training.md#rng
    rng = jax.random.fold_in(split_seed(recipe.seed).steps, step)
    device = 0 if recipe.axis_name is None else jax.lax.axis_index(recipe.axis_name)
    return jax.random.fold_in(rng, device)


def _accumulate(
    gradient: Callable[..., Graded],
    recipe: Recipe,
    state: TrainState,
    frozen: hk.Params,
    rng: jax.Array,
    batch: Batch,
) -> Graded:
    """Gradient accumulation: averages gradients and scalars over micro-batches.

    Each micro-batch updates net_state.
    """
    n = recipe.accumulate_steps
    # Every n-th row: the same rows on any number of devices.
    # Why: docs/decisions/training.md#micro-batches
    batch = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), batch)
    micro_batches = jax.random.split(rng, n), batch

    def add(carry: Any, micro_batch: Any) -> tuple[Any, None]:
        net_state, total = carry
        rng, batch = micro_batch
        trees = state.params, frozen, batch
        if recipe.has_forms and recipe.axis_name is not None:
            # Else XLA may gather shares before the loop, and hold all of them whole.
            trees = jax.lax.optimization_barrier(trees)
        params, fixed, batch = trees
        current = state._replace(params=params, net_state=net_state)
        grads, (net_state, scalars, weight) = gradient(current, fixed, rng, batch)
        if weight is not None:
            grads, scalars = jax.tree.map(lambda x: x * weight, (grads, scalars))
        return (net_state, jax.tree.map(jnp.add, total, (grads, scalars, weight))), None

    # Shapes of it: a key that is indexed counts as used (JAX_DEBUG_KEY_REUSE).
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)  # noqa: E731
    shapes = jax.tree.map(one, micro_batches)
    abstract, (_, *averages) = jax.eval_shape(gradient, state, frozen, *shapes)
    # In half precision a sum would stand still.
    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
    zeros = jax.tree.map(wide, (abstract, *averages))
    if recipe.axis_name is not None:
        rng, last = jax.tree.map(lambda x: x[-1], micro_batches)
        micro_batches = jax.tree.map(lambda x: x[:-1], micro_batches)
    carry, _ = jax.lax.scan(add, (state.net_state, zeros), micro_batches)
    if recipe.axis_name is not None:
        # After the loop, so that all-reduces run beside its backward pass. A key in the
        # barrier would count as used.
        # Why: docs/decisions/training.md#last-micro-batch
        carry, last = jax.lax.optimization_barrier((carry, last))
        carry, _ = add(carry, (rng, last))
    net_state, (*sums, weight) = carry
    if weight is None:
        grads, scalars = jax.tree.map(lambda x: x / n, sums)
    else:
        grads, scalars = divide(sums, weight)
    return in_dtypes(grads, abstract), (net_state, scalars, weight)


def in_dtypes(grads: Any, like: Any) -> Any:
    """Casts gradients, whose sums are float32, to the dtypes of another tree."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), grads, like)


def _skip_unless_finite(
    grads: hk.Params, scale: jmp.DynamicLossScale, old: TrainState, new: TrainState
) -> TrainState:
    """Keeps the old state, with the new step, unless each gradient is finite.

    The loss scale is adjusted in both cases.
    """
    finite = jmp.all_finite(grads)
    state = jmp.select_tree(finite, new, old._replace(step=new.step))
    adjusted = scale.adjust(finite)
    return state._replace(loss_scale=(adjusted.loss_scale, adjusted.counter))
