"""An experiment compiled for devices: `init`, `step`, `evaluate`."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haiku_template import finetuning as tuning
from haiku_template.data import Data, each_shape, whole_batches
from haiku_template.data.prefetch import Prefetcher
from haiku_template.data.staging import RowBlocks
from haiku_template.devices import (
    DeviceManager,
    Layout,
    canonical_shapes,
    check_host_batch,
)
from haiku_template.devices.transfer import own_rows
from haiku_template.errors import ConfigError
from haiku_template.models import losses
from haiku_template.models.attention import for_devices
from haiku_template.models.forms import inputs_of, with_state
from haiku_template.models.precision import Precision
from haiku_template.params import flatten, leaves_by_path, unflatten
from haiku_template.reporting.perf import Work
from haiku_template.training.custom import make_custom_init, make_custom_step
from haiku_template.training.evaluation import (
    add_up,
    make_eval_step,
    make_predict_step,
    pad,
    padded_size,
    pads_rows,
    placed_inputs,
    summarize,
)
from haiku_template.training.initial import dependents, make_init, trace_model_init
from haiku_template.training.state import Recipe, TrainState
from haiku_template.training.tasks import Task, as_task, facts_of

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment

logger = logging.getLogger(__name__)

_NO_TASK = Task(lambda outputs: {})  # Of a custom step without evaluation.


class StagedBatch(NamedTuple):
    """Row numbers of a batch, and the staged training set to gather them from."""

    arrays: dict[str, jax.Array]
    rows: dict[str, jax.Array]


class Functions(NamedTuple):
    """Pure functions of an experiment: `update` of whole arrays, others of a share.

    A custom step is `gradients` here, which returns what `update` passes on.
    """

    init: Callable[..., TrainState]
    gradients: Callable[..., Any]
    update: Callable[[TrainState, Any], Any]
    eval_step: Callable[..., Any]
    predict_step: Callable[..., Any]

    def step(self, state: TrainState, *frozen_and_batch: Any) -> Any:
        """Makes one update of a state; returns the new one and the scalars."""
        return self.update(state, self.gradients(state, *frozen_and_batch))


class Trainer:
    """An experiment compiled for devices; nothing is allocated before `init`.

    Attributes:
      batch_size: examples in a batch of all processes.
      layout: where each leaf of a train state lives.
      from_batch: leaves of the first state, by path, that are made of the first batch.
      abstract: the train state's shapes, dtypes and shardings.
      abstract_staged: those of the staged training set; None where it is on the host.

    Raises:
      ConfigError: the model is not transformed, the data cannot be staged, or a value
        is out of its range.
      PlacementError: devices and micro-batches do not divide the batch.
    """

    def __init__(self, experiment: "Experiment", devices: DeviceManager) -> None:
        self.experiment, self.devices = experiment, devices
        data = experiment.data
        example = each_shape(data.train)[0]
        if data.evaluation is not None:
            check_host_batch(data.evaluation.batch(0), "the evaluation batch")
        self._own = own_rows(devices.processes, data.train)
        own = self._own(example)
        self.batch_size = check_host_batch(own) * devices.processes.count
        self._kinds, self._described = _kinds(own), _described(own)
        devices.check_batch_size(self.batch_size, experiment.accumulate_steps)
        self.recipe = _recipe(experiment, devices)
        self.task, self.precision = self.recipe.task, self.recipe.precision
        self._example = canonical_shapes(example, rows=self.batch_size)
        self._whole, self._net_state, self.from_batch = {}, {}, ()
        self.model_init: Callable[..., Any] | None = None
        if experiment.init is None:
            traced = trace_model_init(self.recipe, self._example, devices.axis_name)
            self.model_init, shapes, self.from_batch = traced
            shapes = Layout(devices.devices).place(shapes)
            self._whole, self._net_state = shapes["params"], shapes["net_state"]
        self.plan = tuning.Plan(frozenset(flatten(self._whole)))  # All train.
        if experiment.finetuning != tuning.Finetuning():
            axes = tuning.convolutions(lambda: devices.abstract(self.model_init))
            self.plan = tuning.make_plan(experiment.finetuning, self._whole, axes)
        self.recipe = self.recipe._replace(plan=self.plan)
        functions = self.functions(devices.axis_name)
        self._init, gradients = functions.init, functions.gradients
        abstract = self._trace_init()
        self.layout = _layout(devices, experiment.sharding, abstract)
        self.abstract = self.layout.place(abstract)
        self._train, self._blocks = data.train, None
        self._evaluated: set[tuple[int, int]] = set()  # Sizes of batches, numbers.
        self.abstract_staged = None
        if experiment.placement == "device":
            self._train = self._blocks = RowBlocks(data.train, self.batch_size)
            arrays = data.train.staged()
            self.abstract_staged = devices.abstract(lambda arrays: arrays, arrays)
            gradients = _gathering(gradients, self._blocks)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract.without_frozen())
        self._step = devices.compile(
            gradients,
            update=functions.update,
            out_shardings=(shardings, devices.replicated),
        )
        self._eval_step = devices.compile(functions.eval_step, donate_argnums=())
        self._predict_step = devices.compile_per_example(functions.predict_step)

    def functions(self, axis_name: str | None = None) -> Functions:
        """Makes the functions to compile; by default for one device, nothing staged."""
        experiment, steps = self.experiment, self.experiment.steps
        recipe = self.recipe._replace(axis_name=axis_name)
        if experiment.init is None:
            init = make_init(recipe, self.model_init)
        else:
            init = make_custom_init(recipe, experiment.init, self._example)
        if experiment.step is None:
            gradients, update = steps.make_gradients(recipe), steps.make_update(recipe)
        else:
            gradients = make_custom_step(recipe, experiment.step)
            update = _passed_on
        evaluation = recipe, steps.forward
        evaluating = make_eval_step(*evaluation), make_predict_step(*evaluation)
        return Functions(init, gradients, update, *evaluating)

    @property
    def placement(self) -> str:
        """Describes where the training data lives, and what inputs pass through."""
        if self._blocks:
            words = f"staged on each device, {self._blocks.size}"
        else:
            reason = self.experiment.why_on_host
            words = f"on the host, {reason or 'from where each batch travels'}"
        parts = words, getattr(self._train, "note", ""), self._preprocessing()
        return "; ".join(filter(None, parts))

    def _preprocessing(self) -> str:
        preprocess = self.experiment.data.preprocess
        if preprocess is Data._field_defaults["preprocess"]:
            return ""
        inputs = jax.tree.leaves(inputs_of(self._example))
        dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in inputs))
        name = getattr(preprocess, "__name__", type(preprocess).__name__)
        return f"{dtypes} inputs pass through {name} on the device"

    @property
    def work(self) -> Work:
        """Tokens that an example teaches, and floating-point operations to do so."""
        named = self._example if isinstance(self._example, dict) else {}
        flops, labels = self.experiment.flops_per_token, named.get("labels")
        of_tokens = self.task.labels == "tokens" and labels.ndim == 2
        # With a mask, examples differ in the number of these tokens.
        if not of_tokens or "loss_mask" in named:
            return Work(0)
        tokens = labels.shape[1]
        if flops is None:
            return Work(tokens)
        sizes = {}
        if self.plan.frozen:
            learned = {k: x.size for k, x in flatten(self.abstract.params).items()}
            trained = {k: n for k, n in learned.items() if k in self.plan.trained}
            # Adapters have the paths of their matrices, and a suffix.
            added = {k: n for k, n in learned.items() if k not in trained}
            sizes = {"trained": trained, "added": added}
        return Work(tokens, tokens * flops(num_tokens=tokens, **sizes))

    def _trace_init(self) -> TrainState:
        """Traces the first state: its shapes, and what of it is of the first batch."""
        experiment, devices = self.experiment, self.devices
        if experiment.init is not None:
            init = functools.partial(self._init, {}, None)
            traced = dependents(init, self._example, devices.axis_name)
            shapes, self.from_batch = traced
            return shapes
        if experiment.init_from is not None:  # Others are read.
            read = {
                f"params/{x}" for x in flatten(self._whole).keys() - self.plan.fresh
            }
            self.from_batch = tuple(x for x in self.from_batch if x not in read)
        shapes = devices.abstract(self._init, {})
        if self.plan.frozen:
            return shapes._replace(frozen=devices.abstract(self._frozen_of_seed))
        return shapes

    def init(self) -> TrainState:
        """Makes the train state before step 0 on its devices.

        Raises:
          ConfigError: pretrained parameters cannot be read, or do not fit; or what is
            of the first batch cannot be had, as this process reads a part of that.
        """
        frozen = self.frozen()
        args = *self._pretrained(frozen), *self._first_inputs()
        state = self.devices.init(self._init, *args, layout=self.layout)
        return state._replace(frozen=frozen)

    def _first_inputs(self) -> list[Any]:
        """Puts what is needed of the first batch on the devices, if anything is."""
        if not self.from_batch:
            return []
        batch = whole_batches(self.experiment.data.train).batch(0)
        rows = check_host_batch(batch)
        if rows != self.batch_size:
            raise ConfigError(
                f"{', '.join(self.from_batch)} depend on the data of the first batch, "
                f"and this process reads {rows} of the {self.batch_size} examples in "
                "it; initialize them from the seed alone, or train in one process"
            )
        return [self.devices.replicate(self._init_inputs(batch))]

    def _init_inputs(self, batch: Any) -> Any:
        if self.experiment.init is not None:
            return batch
        return inputs_of(batch, self.task.whole_batch)

    def frozen(self) -> hk.Params:
        """Reads the frozen parameters onto the devices, or makes them from the seed."""
        if not self.plan.frozen:
            return {}
        if self.experiment.init_from is None:
            logger.warning(
                "frozen parameters were never trained: config.init_from is None, so "
                "that they come from the seed"
            )
            return self._laid_out(self._frozen_of_seed, *self._first_inputs())
        shapes = hk.data_structures.merge(self._whole, self.abstract.frozen)
        leaves, _ = self.experiment.init_from(shapes, self.plan.trained, None)
        frozen = unflatten(leaves)
        return self.devices.place({"frozen": frozen}, self.layout)["frozen"]

    def _laid_out(self, make: Callable[..., hk.Params], *args: Any) -> hk.Params:
        """Makes frozen parameters where the layout has them."""
        fn = lambda *args: {"frozen": make(*args)}  # noqa: E731
        return self.devices.init(fn, *args, layout=self.layout)["frozen"]

    def _frozen_of_seed(self, inputs: Any = None) -> hk.Params:
        return self.plan.split(self.model_init(inputs)[0])[1]

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Makes one update; returns the new state and the step's scalars.

        The state is donated; the batch is from `batches` or `devices.shard`.
        """
        more = batch if isinstance(batch, StagedBatch) else (batch,)
        new, scalars = self._step(state.without_frozen(), state.frozen, *more)
        return new._replace(frozen=state.frozen), scalars

    def eval_step(self, state: TrainState, batch: Any) -> dict[str, jax.Array]:
        """Sums the task's values over one batch of `devices.shard(pad(...))`."""
        return self._eval_step(state.variables(), state.frozen, batch)

    def evaluate(self, state: TrainState, dataset: Any = None) -> dict[str, float]:
        """Computes metrics over an evaluation set, exact on any number of devices.

        By default over all of the experiment's: those of a further set are
        `eval/NAME/...`.
        """
        return self.measure(state, dataset)[0]

    def measure(
        self, state: TrainState, dataset: Any = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Evaluates as `evaluate`; returns the metrics, and the first set's counts."""
        data = self.experiment.data
        if dataset is None:
            metrics, counts = self.measure(state, data.evaluation)
            for name, further in data.evaluations.items():
                found, _ = self.measure(state, further)
                metrics |= {k.replace("/", f"/{name}/", 1): x for k, x in found.items()}
            return metrics, counts
        eval_step = functools.partial(self.eval_step, state)
        size = self.padded_size(dataset)
        shapes = size, dataset.num_batches
        with contextlib.ExitStack() as stack:
            if shapes not in self._evaluated:
                # Compiling may read arrays that a task or a model closes over.
                stack.enter_context(self.devices.implicit_transfers())
            sums = add_up(self.devices, eval_step, dataset, size)
        self._evaluated.add(shapes)
        return summarize(sums, self.task.derive)

    def predict(self, state: TrainState, dataset: Any = None) -> Iterator[Any]:
        """Yields outputs [B, ...] for each batch of an evaluation set, on the host."""
        dataset = self.experiment.data.evaluation if dataset is None else dataset
        if not self.pads:
            raise ConfigError(
                "the model returns one loss for a batch, and predictions are of "
                "examples; let it return a loss for each, [B]"
            )
        variables = state.variables()
        return self.devices.map_batches(
            lambda _, batch: self._predict_step(variables, state.frozen, batch),
            None,
            placed_inputs(dataset, self.task.whole_batch),
        )

    def padded_size(self, dataset: Any) -> int:
        """Rows to pad the batches of an evaluation set to; 0 for none.

        Raises `PlacementError` if they cannot be padded, nor sharded evenly.
        """
        return padded_size(self.devices, dataset, self.pads)

    @functools.cached_property
    def pads(self) -> bool:
        """False if a loss of the model's own is of a whole batch, padding included."""
        rows = jax.ShapeDtypeStruct((self.batch_size,), np.int32)
        variables, frozen = self.abstract.variables(), self.abstract.frozen
        batch = inputs_of(self._example, self.task.whole_batch), rows
        predict_step = self.functions().predict_step
        args = variables, frozen, batch
        return pads_rows(self.devices, self.task, predict_step, *args)

    def merged(self, state: TrainState) -> tuple[hk.Params, hk.State]:
        """Merges adapters into the parameters, averaged if there are averages."""
        params = state.averaged()
        if self.plan.frozen:
            params = self.devices.init(self.plan.merge, params, state.frozen)
        return params, state.net_state

    @contextlib.contextmanager
    def batches(self, start: int, stop: int) -> Iterator[Iterator[Any]]:
        """Prefetches the batches of steps `start` to `stop - 1` onto the devices."""
        staged = None
        if self._blocks is not None:
            arrays = self.experiment.data.train.staged()
            staged = self.devices.replicate(arrays)
        with Prefetcher(self._make_batch(staged), start, stop) as batches:
            yield self.devices.ledger.waits(batches)

    def lower(self, batch: Any) -> Any:
        """Lowers the train step for a host batch of this shape."""
        shapes, state = self.devices.abstract_batch(batch), self.abstract
        more = (shapes,) if self._blocks is None else (self.abstract_staged, shapes)
        return self._step.lower(state.without_frozen(), state.frozen, *more)

    def lower_evaluation(self) -> Any:
        """Lowers the evaluation of a batch; None without an evaluation set."""
        dataset, state = self.experiment.data.evaluation, self.abstract
        if dataset is None:
            return None
        batch = pad(each_shape(dataset)[0], self.padded_size(dataset))
        shapes = self.devices.abstract_batch(own_rows(self.devices.processes)(batch))
        return self._eval_step.lower(state.variables(), state.frozen, shapes)

    def lower_init(self) -> Any:
        """Lowers the function that makes the first state from the seed."""
        init, inputs = functools.partial(self._init, {}), []
        if self.from_batch:
            init = functools.partial(init, None)
            inputs = self._init_inputs(self._example), self.devices.replicated
            inputs = [canonical_shapes(*inputs)]
        return self.devices.lower_init(init, *inputs, layout=self.layout)

    def shapes(self) -> list[Any]:
        """Example host batches, one for each shape of a step's, the largest first."""
        return list(map(self._own, each_shape(self._train)))

    def compile(self) -> None:
        """Compiles the train step for each shape of batches, ahead of the steps."""
        for batch in self.shapes():
            self.lower(batch).compile()

    def _pretrained(self, frozen: hk.Params) -> tuple[dict[str, Any], Any]:
        """Reads pretrained trainable parameters, by path, and Haiku state."""
        source, plan = self.experiment.init_from, self.plan
        adapters = self.experiment.finetuning.adapters
        leaves, net_state = {}, None
        if source is not None:
            skip = plan.frozen | plan.fresh
            leaves, net_state = source(self._whole, skip, self._net_state)
        if adapters is not None:
            where = self.abstract.params, frozen, plan.lora, self.devices
            leaves = flatten(tuning.load_adapters(adapters, *where))
        return leaves, net_state

    def _make_batch(self, staged: Any) -> Callable[[int], Any]:
        last: tuple[Any, Any] = (None, None)

        def make(step: int) -> Any:
            nonlocal last
            with self.devices.ledger.timed("data"):
                batch = self._train.batch(step)
            # Staged data gives one object for many steps; a data set of a user's may
            # fill one dictionary with new arrays.
            if staged is None or batch is not last[0]:
                own = self._own(batch)
                if staged is None and _kinds(own) != self._kinds:
                    _check_alike(self._described, own, step)
                last = batch, self.devices.shard(own)
            return last[1] if staged is None else StagedBatch(staged, last[1])

        return make


def _kinds(batch: Any) -> list[Any]:
    leaves = jax.tree.leaves(batch)
    return [(getattr(x, "dtype", None), np.shape(x)[:1]) for x in leaves]


def _check_alike(first: dict[str, str], batch: Any, step: int) -> None:
    """Raises `ConfigError` for a batch of other leaves, rows or dtypes than the first.

    It would be compiled anew, and count as much as a whole one.
    """
    now = _described(batch)
    path = next((k for k in first | now if first.get(k) != now.get(k)), None)
    if path is not None:
        raise ConfigError(
            f"{path} is {now.get(path, 'absent')} in the batch of step {step + 1}, and "
            f"{first.get(path, 'absent')} in the first; all batches of a run have as "
            "many examples and the same dtypes: leave out a last one that is shorter"
        )


def _described(batch: Any) -> dict[str, str]:
    check_host_batch(batch)
    leaves = leaves_by_path(batch)
    return {path: f"{x.dtype} of {len(x)} rows" for path, x in leaves.items()}


def _with_outputs(task: Task, num_outputs: int) -> Task:
    """Makes classification refuse logits of another number of classes.

    A label beyond the last logit would make its loss NaN.
    """
    values = task.values
    inner = values.func if isinstance(values, functools.partial) else values
    if inner is not losses.classification:
        return task

    def checked(outputs: Any, batch: dict[str, Any]) -> losses.Values:
        shape = jnp.shape(outputs)
        if len(shape) != 2 or shape[1] != num_outputs:
            raise ConfigError(
                f"the model gives outputs of shape {list(shape)}, and the data has "
                f"{num_outputs} classes; classification takes logits [B, {num_outputs}]"
            )
        return values(outputs, batch)

    return task._replace(values=checked)


def _recipe(experiment: "Experiment", devices: DeviceManager) -> Recipe:
    """Adapts an experiment's model, task and optimizer; the plan is still to make."""
    data, model = experiment.data, experiment.model
    task = as_task(experiment.task or _NO_TASK)
    facts_of(task.values)  # Raises for those that it cannot have.
    dtypes = experiment.precision, experiment.reduce_dtype
    optimizer, multipliers = experiment.optimizer, experiment.finetuning.multipliers
    if multipliers:
        optimizer = optax.chain(optimizer, tuning.scale_updates(multipliers))
    return Recipe(
        model=model and for_devices(with_state(model), devices.devices),
        task=_with_outputs(task, data.num_outputs),
        optimizer=optimizer,
        preprocess=data.preprocess,
        precision=Precision.create(*dtypes),
        schedule=experiment.schedule,
        accumulate_steps=experiment.accumulate_steps,
        ema_decay=experiment.ema_decay,
        seed=experiment.seed,
    )


def _layout(devices: DeviceManager, rules: Any, state: TrainState) -> Layout:
    """Makes the layout of a state, given its shapes; raises `ConfigError`."""
    if rules and devices.processes.count > 1:
        raise ConfigError(
            "config.sharding (and optimizer.shard_moments) cannot be had with several "
            "processes; leave it out"
        )
    layout = Layout(devices.everyone, rules)
    layout.check(state)
    return layout


def _passed_on(state: TrainState, results: Any) -> Any:
    """Update of a custom step, whose results are the new state and the scalars."""
    del state
    return results


def _gathering(gradients: Callable[..., Any], blocks: RowBlocks) -> Callable[..., Any]:
    """Makes the gradients take staged arrays and row numbers for a batch."""

    @functools.wraps(gradients)
    def gather_and_differentiate(
        state: TrainState, frozen: hk.Params, arrays: Any, rows: Any
    ) -> Any:
        return gradients(state, frozen, blocks.gather(arrays, rows, state.step))

    return gather_and_differentiate
