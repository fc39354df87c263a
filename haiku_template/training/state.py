"""Everything that a step changes, and nothing else."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.finetuning.plan import Plan
from haiku_template.pretrained.reading import flatten, unflatten
from haiku_template.training.precision import Precision

Given = tuple[dict[str, Any], Any]
NOTHING_GIVEN: Given = ({}, None)


class Seeds(NamedTuple):
    """PRNG keys of a run, one for each use; see `split_seed`.

    Attributes:
      params: of the initial parameters.
      adapters: of the initial adapters.
      steps: of training steps, with the number of the step and of the device.
      evaluation: of evaluation, with the number of the example.
    """

    params: jax.Array
    adapters: jax.Array
    steps: jax.Array
    evaluation: jax.Array


def split_seed(seed: int) -> Seeds:
    """Splits a seed by use, so that no two uses ever draw from the same key."""
    key = jax.random.key(seed)
    # Haiku splits the first, as `fold_in` of small numbers does; these are large.
    uses = (jax.random.fold_in(key, 0xA0000000 + n) for n in range(3))
    return Seeds(key, *uses)


class TrainState(NamedTuple):
    """The train state: one tree, whole on every device, without a device axis.

    Randomness and data are functions of `step`, so there is nothing else to save.

    Attributes:
      step: optimizer updates done: int32 [].
      params: Haiku parameters that train, float32; see `finetuning.plan`.
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


def make_model_init(
    *,
    model: hk.TransformedWithState,
    inputs: Any,
    preprocess: Callable[[Any], Any],
    precision: Precision,
    seed: int,
) -> Callable[[], tuple[hk.Params, hk.State]]:
    """Makes the function that makes a model's parameters and state from the seed.

    Args:
      model: gives them.
      inputs: pytree of `jax.ShapeDtypeStruct` [B, ...], one batch of inputs.
      preprocess: what a step does to its inputs first.
      precision: says what parameters are.
      seed: the source of the parameters.
    """

    def init() -> tuple[hk.Params, hk.State]:
        # One row of zeros: Haiku initialises from shapes and the rng alone.
        example = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), inputs)
        example = precision.policy.cast_to_param(preprocess(example))
        return model.init(split_seed(seed).params, example, True)

    return init


def make_init(
    model_init: Callable[[], tuple[hk.Params, hk.State]],
    plan: Plan,
    precision: Precision,
    *,
    optimizer: optax.GradientTransformation,
    ema_decay: float | None,
    seed: int,
) -> Callable[..., TrainState]:
    """Makes `init(given)`, which makes the state before step 0.

    `given` holds parameters by path and state that come from elsewhere than the seed:
    ({path: leaf}, net_state or None); by default none do.

    Args:
      model_init: see `make_model_init`.
      plan: says what of the parameters trains.
      precision: says whether there is a loss scale.
      optimizer: gives `opt_state`.
      ema_decay: says whether there are averaged parameters.
      seed: the source of adapters.
    """

    def init(given: Given = NOTHING_GIVEN) -> TrainState:
        whole, net_state = model_init()
        leaves, given_state = given
        params = flatten(plan.params(whole, split_seed(seed).adapters))
        params = unflatten({path: leaves.get(path, x) for path, x in params.items()})
        net_state = net_state if given_state is None else given_state
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            net_state=net_state,
            opt_state=optimizer.init(params),
            ema_params=None if ema_decay is None else params,
            loss_scale=precision.initial_loss_scale(),
        )

    return init
