"""Everything that a step changes, and nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.training.precision import Precision


class TrainState(NamedTuple):
    """The train state: one tree, whole on every device, without a device axis.

    Randomness and data are functions of `step`, so there is nothing else to save.

    Attributes:
      step: optimizer updates done: int32 [].
      params: Haiku parameters, float32.
      net_state: Haiku state, such as running statistics; empty for `hk.transform`.
      opt_state: optax state.
      ema_params: exponential moving average of `params`; None when there is none.
      loss_scale: scale and counter of float16's loss scaling; empty otherwise.
    """

    step: jax.Array
    params: hk.Params
    net_state: hk.State
    opt_state: optax.OptState
    ema_params: hk.Params | None
    loss_scale: tuple[jax.Array, ...]


def make_init(
    *,
    model: hk.TransformedWithState,
    inputs: Any,
    preprocess: Callable[[Any], Any],
    optimizer: optax.GradientTransformation,
    precision: Precision,
    ema_decay: float | None,
    seed: int,
) -> Callable[[], TrainState]:
    """Makes the function that makes the state before step 0.

    Args:
      model: gives `params` and `net_state`.
      inputs: pytree of `jax.ShapeDtypeStruct` [B, ...], one batch of inputs.
      preprocess: what a step does to its inputs first.
      optimizer: gives `opt_state`.
      precision: says whether there is a loss scale.
      ema_decay: says whether there are averaged parameters.
      seed: the source of the initial parameters.
    """

    def init() -> TrainState:
        # One row of zeros: Haiku initialises from shapes and the rng alone.
        example = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), inputs)
        rng = jax.random.key(seed)
        example = precision.policy.cast_to_param(preprocess(example))
        params, net_state = model.init(rng, example, True)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            net_state=net_state,
            opt_state=optimizer.init(params),
            ema_params=None if ema_decay is None else params,
            loss_scale=precision.initial_loss_scale(),
        )

    return init
