"""The train state: all that a step changes, and the frozen parameters beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from haiku_template.finetuning import Plan
from haiku_template.params import flatten, unflatten
from haiku_template.training.precision import Precision


class Seeds(NamedTuple):
    """PRNG keys of a run, one for each use.

    `steps` is folded with step and device, `evaluation` with the place of an example.
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
    """One tree, replicated on every device, without a device axis.

    Randomness and data are functions of `step`, so there is nothing else to save.

    Attributes:
      step: optimizer updates done: int32 [].
      params: trainable Haiku parameters, float32.
      frozen: frozen parameters, {} without fine-tuning; not in a checkpoint.
      net_state: Haiku state, such as running statistics; empty for `hk.transform`.
      opt_state: optax state.
      ema_params: exponential moving average of `params`; None without one.
      loss_scale: scale and counter of float16's loss scaling; empty otherwise.
    """

    step: jax.Array
    params: hk.Params
    frozen: hk.Params
    net_state: hk.State
    opt_state: optax.OptState
    ema_params: hk.Params | None
    loss_scale: tuple[jax.Array, ...]

    def trained(self) -> "TrainState":
        """Drops the frozen parameters, a separate argument of a compiled step."""
        return self._replace(frozen={})

    def saved(self) -> dict[str, Any]:
        """Fields of a checkpoint by name."""
        return {name: x for name, x in self._asdict().items() if name != "frozen"}

    def averaged(self) -> hk.Params:
        """Trainable parameters to evaluate: their averages if there are any."""
        return self.params if self.ema_params is None else self.ema_params


def make_model_init(
    *,
    model: hk.TransformedWithState,
    inputs: Any,
    preprocess: Callable[[Any], Any],
    precision: Precision,
    seed: int,
) -> Callable[[], tuple[hk.Params, hk.State]]:
    """Makes the function that initializes a model's parameters and state.

    `inputs` is a pytree of `jax.ShapeDtypeStruct` [B, ...], before `preprocess`.
    """

    def init() -> tuple[hk.Params, hk.State]:
        # One row of zeros, as Haiku initializes from shapes and the rng alone.
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
    """Makes `init(leaves, net_state)`: the state before step 0, `frozen` left empty.

    `leaves` are pretrained parameters by path, {} without any; a `net_state` of None is
    the model's own.
    """

    def init(
        leaves: dict[str, jax.Array], net_state: hk.State | None = None
    ) -> TrainState:
        whole, first_net_state = model_init()
        params = flatten(plan.init_params(whole, split_seed(seed).adapters))
        params = unflatten({path: leaves.get(path, x) for path, x in params.items()})
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            frozen={},
            net_state=first_net_state if net_state is None else net_state,
            opt_state=optimizer.init(params),
            ema_params=None if ema_decay is None else params,
            loss_scale=precision.initial_loss_scale(),
        )

    return init
