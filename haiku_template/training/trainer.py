"""A model, a task and data, compiled for devices."""

import inspect
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import haiku as hk
import jax
import numpy as np
import optax

from haiku_template.data import Data, each_shape
from haiku_template.data.staging import RowBlocks
from haiku_template.devices import DeviceManager, Shared, check_host_batch
from haiku_template.errors import ConfigError
from haiku_template.finetuning.plan import Tuning, scale_updates
from haiku_template.finetuning.source import Source, Start, make_start
from haiku_template.models import Model
from haiku_template.models.attention import for_devices
from haiku_template.reporting.perf import UNKNOWN, Work
from haiku_template.training.evaluation import add_up, summarise
from haiku_template.training.optimizers import Schedule
from haiku_template.training.precision import Precision
from haiku_template.training.state import TrainState, make_init, make_model_init
from haiku_template.training.tasks import (
    NO_TALLY,
    Derive,
    Tally,
    Task,
    nothing_more,
    with_outputs,
)

FORWARDS = "forward(inputs, is_training) and forward(inputs)"


class Program(NamedTuple):
    """What can be run: made by `make_program`.

    Attributes:
      devices: where it runs.
      data: what it reads.
      batch_size: examples in a batch of this process.
      init: makes the train state from the seed; run it with `devices.init`.
      start: what trains, what is frozen, and where they come from.
      staged: the training data on the devices; None where it is on the host.
      train_step: (state, batch on devices) to (state, scalars); donates the state.
      eval_step: ((params, net_state), batch on devices) to sums.
      derive: metrics that are no averages, of the averages.
      tally: what is counted when evaluating.
      placement: where the training data lives, in words.
      work: what an example amounts to.
      uncompiled: both steps as they would be on one device, before any staging.
      parts: the arguments of `make_program`.
    """

    devices: DeviceManager
    data: Data
    batch_size: int
    init: Callable[..., TrainState]
    start: Start
    staged: Shared | None
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Any], dict[str, jax.Array]]
    derive: Derive
    tally: Tally
    placement: str
    work: Work
    uncompiled: tuple[Callable[..., Any], Callable[..., Any]]
    parts: dict[str, Any]

    @property
    def compute_dtype(self) -> Any:
        """What the model computes in."""
        policy = Precision.create(self.parts["precision"], self.devices.platform)
        return policy.policy.compute_dtype

    def first_state(self) -> TrainState:
        """The state before step 0, on the devices."""
        return self.devices.init(self.init, self.start.given())

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics of the evaluation set; see `evaluation.evaluate`."""
        return self.measure(state)[0]

    def measure(
        self, state: TrainState
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """As `evaluate`, and the counts of the tally over the whole set."""
        sums = add_up(self.devices, self.eval_step, state, self.data.evaluation)
        return summarise(sums, self.derive, self.tally.derive)

    def with_parts(self, **parts: Any) -> "Program":
        """The same program with some arguments of `make_program` changed."""
        return make_program(**self.parts | parts)


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
    tally: Tally = NO_TALLY,
    placement: str = "host",
    work: Work = UNKNOWN,
    tuning: Tuning = Tuning(),  # noqa: B008 (immutable)
    source: Source | None = None,
    step: ModuleType = steps,
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
      tally: what is counted over the evaluation set, such as confusions of classes.
      placement: `host`, where the training data stays and batches travel; or `device`,
        where all of it is staged once, and batches are gathered.
      work: what an example amounts to, for what is reported of the run's speed.
      tuning: what trains; by default everything.
      source: of parameters that do not start from the seed; None for none. The base is
        read again at each start.
      step: a module with the functions of `steps`.

    Raises:
      ConfigError: the data cannot be staged.
      PlacementError: the batch does not split over the devices and parts; or batches
        are not NumPy arrays of one number of rows.
      ConfigError: the model is not transformed.
      ConfigError: see `make_plan`.
      ValueError: an unknown precision.
    """
    parts = dict(locals())
    model = for_devices(with_state(model), devices.devices)
    example = each_shape(data.train)[0]
    batch_size = _check_batches(example, data)
    devices.check_batch_size(batch_size, accumulate_steps)
    policy = Precision.create(precision, devices.platform)
    model_init = make_model_init(
        model=model,
        inputs=jax.tree.map(_shape_on_device, example["inputs"]),
        preprocess=data.preprocess,
        precision=policy,
        seed=seed,
    )
    start = make_start(devices, model_init, tuning, source)
    if tuning.multipliers:
        optimizer = optax.chain(optimizer, scale_updates(tuning.multipliers))
    training = {"optimizer": optimizer, "ema_decay": ema_decay, "seed": seed}
    computing = {
        "model": model,
        "task": with_outputs(task, data.num_outputs),
        "preprocess": data.preprocess,
        "precision": policy,
        "combine": start.plan.combine,
    }
    once = {"schedule": schedule, "accumulate_steps": accumulate_steps}
    evaluating = computing | {"tally": tally, "seed": seed}
    made_of = step, once | training | computing, evaluating
    train_step, eval_step = _make_steps(devices.axis_name, *made_of)
    shared = [start.base]
    staged, words = None, "on the host, from where each batch travels"
    if placement == "device":
        data, train_step, staged, words = _stage(devices, data, train_step, batch_size)
        shared = [start.base, staged]
    return Program(
        devices=devices,
        data=data,
        batch_size=batch_size,
        init=make_init(model_init, start.plan, policy, **training),
        start=start,
        staged=staged,
        train_step=devices.compile(train_step, shared=shared),
        eval_step=devices.compile(eval_step, donate_argnums=(), shared=[start.base]),
        derive=derive,
        tally=tally,
        placement=words,
        work=work,
        uncompiled=_make_steps(None, *made_of),
        parts=parts,
    )


def with_state(model: Any) -> hk.TransformedWithState:
    """The model as `apply(params, net_state, rng, inputs, is_training)`.

    A model of `forward(inputs)` is the same in training and evaluation; one without
    state has an empty one; one that `hk.without_apply_rng` made draws nothing.

    Raises:
      ConfigError: it is not transformed, or its function takes other arguments.
    """
    stateless = isinstance(model, hk.Transformed)
    if not stateless and not isinstance(model, hk.TransformedWithState):
        raise ConfigError(
            f"the model is a {type(model).__name__}; it must be what hk.transform or "
            f"hk.transform_with_state makes of {FORWARDS}"
        )
    own = inspect.signature(model.init).parameters  # Those of apply, less the state.
    takes_rng = len(inspect.signature(model.apply).parameters) - len(own) == (
        1 if stateless else 2
    )
    arguments = _forward_arguments(list(own.values())[1:])

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        args, kwargs = arguments(inputs, is_training)
        made = model.init(rng, *args, **kwargs)
        return (made, {}) if stateless else made

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        args, kwargs = arguments(inputs, is_training)
        first = (params,) if stateless else (params, state)
        made = model.apply(*first, *((rng,) if takes_rng else ()), *args, **kwargs)
        return (made, state) if stateless else made

    return hk.TransformedWithState(init, apply)


def _forward_arguments(
    parameters: list[inspect.Parameter],
) -> Callable[[Any, bool], tuple[tuple, dict[str, Any]]]:
    """How `forward` is called with inputs and is_training, by what it takes."""
    signature = inspect.Signature(parameters)
    for form in (
        lambda inputs, is_training: ((inputs, is_training), {}),
        lambda inputs, is_training: ((inputs,), {"is_training": is_training}),
        lambda inputs, is_training: ((inputs,), {}),
    ):
        args, kwargs = form(None, True)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        second = parameters[1] if len(args) == 2 and len(parameters) > 1 else None
        if second and second.default is not second.empty and "train" not in second.name:
            continue  # An option of the user's, which has its default.
        return form
    raise ConfigError(
        f"the model is made of forward{signature}; possible are {FORWARDS}"
    )


def compile_ahead(program: Program) -> None:
    """Compiles the train step for each shape of batches; steps find it done."""
    state = program.devices.abstract(program.init)
    for batch in each_shape(program.data.train):
        shapes = program.devices.abstract_batch(batch)
        program.train_step.lower(state, shapes).compile()


def batch_maker(program: Program) -> Callable[[int], Any]:
    """A function that makes the batch of a step and puts it on the devices."""
    devices = program.devices
    last: tuple[Any, Any] = (None, None)

    def make(step: int) -> Any:
        nonlocal last
        begun = time.perf_counter()
        batch = program.data.train.batch(step)
        devices.ledger.add_since("data", begun)
        if batch is not last[0]:  # Staged data gives one object for many steps.
            last = batch, devices.shard(batch)
        return last[1]

    return make


def _stage(
    devices: DeviceManager, data: Data, train_step: Callable, batch_size: int
) -> tuple[Data, Callable, Shared, str]:
    """Data and train step that work with row numbers, the staged arrays, and words."""
    blocks = RowBlocks(data.train, batch_size)
    arrays = blocks.dataset.staged()
    staged = Shared.create(
        devices.abstract(lambda arrays: arrays, arrays),
        lambda: devices.replicate(arrays),
    )

    def step(state: TrainState, block: Any, base: hk.Params, arrays: Any) -> Any:
        return train_step(state, blocks.gather(arrays, block, state.step), base)

    words = f"staged on each device, {blocks.size}"
    return data._replace(train=blocks), step, staged, words


def _make_steps(
    axis_name: str | None,
    step: ModuleType,
    training: dict[str, Any],
    evaluating: dict[str, Any],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return (
        step.make_train_step(axis_name=axis_name, **training),
        step.make_eval_step(axis_name=axis_name, **evaluating),
    )


def _check_batches(example: Any, data: Data) -> int:
    """The rows of a training batch; both kinds of batches are in host memory."""
    if data.evaluation is not None:
        check_host_batch(data.evaluation.batch(0), "the evaluation batch")
    return check_host_batch(example)


def _shape_on_device(x: np.ndarray) -> jax.ShapeDtypeStruct:
    """The shape, and the dtype that JAX makes of it: float64 becomes float32."""
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
