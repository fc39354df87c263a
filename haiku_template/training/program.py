"""A model, a task and data, compiled for devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax

from haiku_template.data import Data
from haiku_template.devices import DeviceManager
from haiku_template.models import Model
from haiku_template.training import steps
from haiku_template.training.evaluation import evaluate
from haiku_template.training.optimizers import Schedule
from haiku_template.training.precision import Precision
from haiku_template.training.state import TrainState, make_init
from haiku_template.training.tasks import Derive, Task, nothing_more


class ProgramError(ValueError):
    """Parts that make no program."""

    exit_code = 64


class Program(NamedTuple):
    """What can be run: made by `make_program`.

    Attributes:
      devices: where it runs.
      data: what it reads.
      batch_size: examples in a batch of this process.
      init: makes the train state; run it with `devices.init`.
      train_step: (state, batch on devices) to (state, scalars); donates the state.
      eval_step: ((params, net_state), batch on devices) to sums.
      derive: metrics that are no averages, of the averages.
      parts: the arguments of `make_program`.
    """

    devices: DeviceManager
    data: Data
    batch_size: int
    init: Callable[[], TrainState]
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Any], dict[str, jax.Array]]
    derive: Derive
    parts: dict[str, Any]

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics of the evaluation set; see `evaluation.evaluate`."""
        data = self.data.evaluation
        return evaluate(self.devices, self.eval_step, state, data, self.derive)

    def with_accumulation(self, accumulate_steps: int) -> "Program":
        """The same program, working through each batch in so many parts."""
        return make_program(**self.parts | {"accumulate_steps": accumulate_steps})


def make_program(
    *,
    devices: DeviceManager,
    model: Model,
    task: Task,
    data: Data,
    optimizer: optax.GradientTransformation,
    schedule: Schedule | None = None,
    precision: str = "float32",
    accumulate_steps: int = 1,
    ema_decay: float | None = None,
    seed: int = 0,
    derive: Derive = nothing_more,
) -> Program:
    """Puts the parts of a run together; nothing is compiled or allocated yet.

    Args:
      devices: where to run.
      model: a transformed `forward(inputs, is_training)`, with or without state.
      task: per-example values of the outputs, `loss` among them.
      data: what to train and evaluate on.
      optimizer: an optax optimizer.
      schedule: reported as the learning rate; None reports none.
      precision: `float32`, `bfloat16` or `float16`.
      accumulate_steps: parts of a device's share of a batch, worked through in turn.
      ema_decay: evaluate an average of the parameters with this decay.
      seed: of the initial parameters and of dropout.
      derive: makes further metrics of the task's averages, such as `perplexity`.

    Raises:
      PlacementError: the batch does not split over the devices and parts.
      ProgramError: the model is not transformed.
      ValueError: an unknown precision.
    """
    parts = dict(locals())
    if not isinstance(model, hk.Transformed | hk.TransformedWithState):
        raise ProgramError(
            f"the model is a {type(model).__name__}; it must be what hk.transform or "
            "hk.transform_with_state makes of forward(inputs, is_training)"
        )
    example = data.train.batch(0)
    batch_size = len(jax.tree.leaves(example)[0])
    devices.check_batch_size(batch_size, accumulate_steps)
    if isinstance(model, hk.Transformed):
        model = hk.with_empty_state(model)
    shared = {
        "model": model,
        "preprocess": data.preprocess,
        "precision": Precision.create(precision, devices.platform),
    }
    init = make_init(
        inputs=jax.tree.map(_shape_on_device, example["inputs"]),
        optimizer=optimizer,
        ema_decay=ema_decay,
        seed=seed,
        **shared,
    )
    train_step = steps.make_train_step(
        task=task,
        optimizer=optimizer,
        schedule=schedule,
        accumulate_steps=accumulate_steps,
        ema_decay=ema_decay,
        seed=seed,
        axis_name=devices.axis_name,
        **shared,
    )
    eval_step = steps.make_eval_step(task=task, axis_name=devices.axis_name, **shared)
    return Program(
        devices,
        data,
        batch_size,
        init,
        devices.compile(train_step),
        devices.compile(eval_step, donate_argnums=()),
        derive,
        parts,
    )


def _shape_on_device(x: np.ndarray) -> jax.ShapeDtypeStruct:
    """The shape, and the dtype that JAX makes of it: float64 becomes float32."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
