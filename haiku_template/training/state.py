"""The train state: all that a step changes, and the frozen parameters beside it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import optax

from haiku_template.finetuning import Plan
from haiku_template.models.precision import Precision
from haiku_template.training.optimizers import Schedule
from haiku_template.training.tasks import Task

Variables = tuple[hk.Params, hk.State, jax.Array]  # Params, net_state, step.


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

    def variables(self) -> Variables:
        """Arguments of an evaluation step: averaged parameters, net_state, step."""
        return self.averaged(), self.net_state, self.step


class Recipe(NamedTuple):
    """Parts of an experiment that its first state and its steps are made of.

    Attributes:
      model: `apply(params, net_state, rng, inputs, is_training)`; None without one.
      task: loss and metrics.
      optimizer: None for a train step that has its own.
      preprocess: applied to the inputs on the device first.
      precision: of the forward and backward pass.
      plan: of trainable and frozen parameters.
      axis_name: mesh axis to average over; None on one device.
      schedule: reported as `learning_rate`; None reports none.
      accumulate_steps: micro-batches of gradient accumulation, one after another.
        Micro-batch j has the rows j, j + `accumulate_steps`, ...: the same on any
        number of devices.
      ema_decay: decay of the averaged parameters for each step; None for none.
      seed: with the step and the device, the source of randomness.
    """

    model: hk.TransformedWithState | None
    task: Task
    optimizer: optax.GradientTransformation | None
    preprocess: Callable[[Any], Any]
    precision: Precision
    plan: Plan | None = None
    axis_name: str | None = None
    schedule: Schedule | None = None
    accumulate_steps: int = 1
    ema_decay: float | None = None
    seed: int = 0
