"""An experiment compiled for devices: `init`, `step`, `evaluate`."""

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_leaves_with_path

from haiku_template import finetuning as tuning
from haiku_template import stored
from haiku_template.data import each_shape
from haiku_template.data.examples import as_dataset, as_labelled, evaluated
from haiku_template.devices import DeviceManager, Layout, check_host_batch
from haiku_template.devices.compiled import CompiledStep, Scalars, Specs
from haiku_template.devices.layout import REPLICATED
from haiku_template.devices.packing import PAYS, Packed, packing_of
from haiku_template.devices.transfer import canonical_shapes, own_rows
from haiku_template.errors import ConfigError, counted
from haiku_template.models import losses
from haiku_template.models.attention import for_devices
from haiku_template.models.forms import PerExample, inputs_of, with_state
from haiku_template.models.precision import Precision
from haiku_template.params import flatten, path_of
from haiku_template.reporting.perf import Work
from haiku_template.training import evaluation as evaluations
from haiku_template.training import tasks
from haiku_template.training.custom import make_custom_step
from haiku_template.training.evaluation import (
    add_up,
    make_eval_step,
    make_predict_step,
    placed_inputs,
)
from haiku_template.training.feed import Batches, Ends, Feed, StagedBatch
from haiku_template.training.initial import Initializer
from haiku_template.training.skipping import skipping
from haiku_template.training.state import Recipe, TrainState, strong
from haiku_template.training.tasks import Averages, Counts, Task, as_task, facts_of

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment

logger = logging.getLogger(__name__)

# Fields that the first state does not depend on: of how batches reach the devices.
OF_BATCHES = {"placement", "why_on_host", "steps_per_call"}
Start = Initializer | None  # Another trainer's; None makes one.
_NO_TASK = Task(lambda outputs: {})  # Of a custom step without evaluation.


class Functions(NamedTuple):
    """Pure functions of an experiment: `update` of global arrays, others of a share.

    A custom step takes the place of `gradients`; `update` then returns its results.
    """

    init: Callable[..., TrainState]
    gradients: Callable[..., Any]
    update: Callable[[TrainState, Any], Any]
    eval_step: Callable[..., Any]
    predict_step: Callable[..., Any]

    def step(self, state: TrainState, *frozen_and_batch: Any) -> Any:
        """Makes one update of a state; returns the new one and the scalars."""
        return self.update(state, self.gradients(state, *frozen_and_batch))


class Outputs(NamedTuple):
    """Paths of a model's outputs of a whole batch, and if it takes any batch size."""

    of_batch: tuple[str, ...] = ()
    of_any_size: bool = True


class Trainer:
    """An experiment compiled for devices; nothing is allocated before `init`.

    Attributes:
      feed: of the training set's batches.
      initializer: of the train state.
      layout: where each leaf of a train state lives.
      abstract: the train state's shapes, dtypes and shardings.
      packing: of a run's states between calls (`devices/packing.py`), or None.
      packs: whether `advance` takes packed states.
      left_out: steps whose updates a rewound run leaves out (`runs/rewind.py`).

    Raises:
      ConfigError: the model is not transformed, the data cannot be staged, or a value
        is out of its range.
      PlacementError: devices and micro-batches do not divide the batch.
    """

    left_out: frozenset[int] = frozenset()
    packs = False

    def __init__(
        self, experiment: "Experiment", devices: DeviceManager, start: Start = None
    ) -> None:
        self.experiment, self.devices = experiment, devices
        if (evaluation := experiment.data.evaluation) is not None:
            check_host_batch(evaluation.batch(0), "the evaluation batch")
        self.feed = Feed(experiment, devices)
        if start is None:
            recipe, example = _recipe(experiment, devices), self.feed.example
            start = Initializer(experiment, devices, recipe, example)
        self.initializer, self.recipe = start, start.recipe
        self.layout = Layout(devices.everyone, experiment.sharding)
        if experiment.sharding:
            self.layout.check(self.initializer.abstract)
        self.abstract = self.layout.place(self.initializer.abstract)
        # Of what a step sees of the state; a custom step sees all of it.
        is_whole = devices.axis_name is None or experiment.step is not None
        self.specs = None if is_whole else self.layout.shares(self.abstract)
        if self.recipe.plan.frozen or self.specs is not None:
            self.recipe = _with_forms(self.recipe, has_shares=self.specs is not None)
        axis_name, of_seed = devices.axis_name, self.of_seed
        update = self.functions(axis_name).update
        specs = self._eval_specs = None
        if (shares := self.specs) is not None:
            specs = Specs(shares.arguments(), (shares.params, REPLICATED, REPLICATED))
            self._eval_specs = Specs(shares.of_model())
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract.without_frozen())
        self._step = devices.compile(
            of_seed(lambda x: self.feed.gathering(x.gradients), axis_name),
            update=update,
            out_shardings=(shardings, devices.replicated),
            specs=specs,
        )
        compile_call = functools.partial(
            devices.compile_call,
            of_seed(lambda x: self.feed.gathering(x.gradients, True), axis_name),
            skipping(update) if experiment.skips else update,
            shardings,
            self.feed.steps_per_call,
            specs,
        )
        self._call, self.packing = compile_call(), packing_of(devices, self.abstract)
        self._packed_call = self.packing and compile_call(self.packing)
        self._eval_step = devices.compile(
            of_seed(attrgetter("eval_step"), axis_name),
            donate_argnums=(),
            specs=self._eval_specs,
        )
        if experiment.exact_elastic is not None:
            self._compile_shares(experiment.exact_elastic)
        self._of_several: dict[int, Trainer] = {}
        self._counts: dict[int, jax.Array] = {}  # Numbers of steps, on the devices.
        self._evaluated: set[tuple[int, int]] = set()  # Of sets: rows, batches.

    def __repr__(self) -> str:
        return f"Trainer({self.experiment!r}, {self.devices!r})"

    def _compile_shares(self, count: int) -> None:
        from haiku_template.training import shares

        devices, update = self.devices, self.functions().update
        shares.check_exact(self.experiment, devices, self.feed.batch_size)
        update = skipping(update) if self.experiment.skips else update
        self._call = shares.compile_exact(
            devices, self.recipe, self.feed, update, count
        )
        eval_step = self.of_seed(attrgetter("eval_step"))
        self._eval_step = shares.compile_exact_evaluation(devices, eval_step, count)

    def replace(self, **changes: Any) -> "Trainer":
        """Makes the trainer of the experiment with other values of these fields."""
        if all(getattr(self.experiment, k) == x for k, x in changes.items()):
            return self
        experiment = dataclasses.replace(self.experiment, **changes)
        start = self.initializer if changes.keys() <= OF_BATCHES else None
        return Trainer(experiment, self.devices, start)

    def with_steps_per_call(self, count: int) -> "Trainer":
        """Makes the trainer of so many steps a call, once."""
        if count not in self._of_several:
            self._of_several[count] = self.replace(steps_per_call=count)
        return self._of_several[count]

    def with_packing(self, num_steps: int, packs: bool | None = None) -> "Trainer":
        """Makes the trainer that advances packed states, where so many steps pay.

        `packs` is what a run that resumes chose: another program may round otherwise.
        """
        if packs is None:
            packs = num_steps >= PAYS * self.feed.steps_per_call
        if not packs or self.packing is None or self.experiment.exact_elastic:
            return self
        trainer = copy.copy(self)
        trainer.packs = True
        return trainer

    def with_replay(self, text: str, budget: Any) -> "Trainer":
        """Makes the trainer that makes steps twice, such as `first:8,every:1000`."""
        from haiku_template.config import replayed_steps
        from haiku_template.devices.replay import replaying

        return replaying(self, replayed_steps(text), budget)

    def functions(self, axis_name: str | None = None, seed: Any = None) -> Functions:
        """Makes the functions to compile; by default for one device, nothing staged."""
        steps, own_step = self.experiment.steps, self.experiment.step
        seed = self.recipe.seed if seed is None else seed
        recipe = self.recipe._replace(axis_name=axis_name, seed=seed)
        if own_step is None:
            gradients, update = steps.make_gradients(recipe), steps.make_update(recipe)
        else:
            # What it returns is the new state and the scalars.
            gradients, update = make_custom_step(recipe, own_step), lambda _, x: x

        def strongly(state: TrainState, results: Any) -> Any:
            new, scalars = update(state, results)
            return strong(new), scalars

        init = self.initializer.function(axis_name)
        eval_step = make_eval_step(recipe, steps.forward)
        predict_step = make_predict_step(recipe, steps.forward)
        return Functions(init, gradients, strongly, eval_step, predict_step)

    def of_seed(
        self, choose: Callable[[Functions], Callable], axis_name: str | None = None
    ) -> Callable[..., Any]:
        """Makes one of the functions, with the seed's array as its third argument."""

        @functools.wraps(choose(self.functions(axis_name)))
        def call(tree: Any, frozen: Any, seed: jax.Array, *arrays: Any) -> Any:
            return choose(self.functions(axis_name, seed))(tree, frozen, *arrays)

        return call

    @property
    def work(self) -> Work:
        """Tokens that an example teaches, and floating-point operations to do so."""
        example = self.feed.example if self.recipe.task.labels == "tokens" else {}
        # With a mask, examples differ in the number of these tokens.
        if "loss_mask" in example or np.ndim(example.get("labels")) != 2:
            return Work(0)
        return self._work_of(example["labels"].shape[1])

    def _work_of(self, tokens: int) -> Work:
        if (flops := self.experiment.flops_per_token) is None:
            return Work(tokens)
        plan = self.recipe.plan
        if not plan.frozen:
            return Work(tokens, tokens * flops(num_tokens=tokens))
        sizes = {k: x.size for k, x in flatten(self.abstract.params).items()}
        matrices = {k: n for k, n in sizes.items() if k in plan.trained}
        # Adapters have the paths of their matrices, and a suffix.
        adapters = {k: n for k, n in sizes.items() if k not in matrices}
        operations = flops(num_tokens=tokens, trained=matrices, added=adapters)
        return Work(tokens, tokens * operations)

    @property
    def _seed(self) -> jax.Array:
        return self.initializer.seed_there

    @property
    def _abstract_seed(self) -> jax.ShapeDtypeStruct:
        return canonical_shapes(self.initializer.seed, self.devices.replicated)

    def init(self) -> TrainState:
        """Makes the train state before step 0; raises as `Initializer.init`."""
        return self.initializer.init(self.layout)

    def batches(self, start: int, stop: int) -> Batches:
        """Context of the batches of steps `start` to `stop - 1`, put ahead of them.

        `with trainer.batches(0, 10) as batches`: its exit ends the thread. So does the
        end of a loop over the context itself, each of which begins at `start`.
        """
        return Batches(lambda: self.feed.batches(start, stop))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Makes one update; returns the new state and the step's scalars.

        The state is donated. The batch is from `batches`, or from `devices.shard`,
        which is a `ConfigError` where the data are staged.
        """
        if self.feed.staged is not None and not isinstance(batch, StagedBatch):
            raise ConfigError(
                "the training data are staged, and a step takes a batch of "
                "Trainer.batches; with placement='host' it takes one of devices.shard"
            )
        if self.experiment.exact_elastic is not None:
            new, scalars = self.advance(state, range(1), batch)
            return new, scalars.first()
        # A staged batch is two arguments: the set's arrays, and row numbers.
        last = batch if isinstance(batch, StagedBatch) else (batch,)
        new, scalars = self._step(*state.arguments(), self._seed, *last)
        return new._replace(frozen=state.frozen), scalars

    def calls(self, start: int, stop: int, ends: Ends) -> AbstractContextManager:
        """Prefetches (steps, arrays) of each call; `ends` as in `Feed.calls`."""
        return self.feed.calls(start, stop, ends)

    def advance(
        self, state: TrainState, steps: range, arrays: Any
    ) -> tuple[TrainState, Scalars]:
        """Makes the updates of a call: a new state, as this is donated, and scalars.

        That of a `packed` state is packed, too.
        """
        *staged, batch = arrays if isinstance(arrays, StagedBatch) else (arrays,)
        if (n := len(steps)) not in self._counts:
            self._counts[n] = self.devices.replicate(np.int32(n))
        call = self._packed_call if isinstance(state, Packed) else self._call
        new, scalars = call(
            *state.arguments(), self._seed, *staged, self._counts[n], batch
        )
        return new._replace(frozen=state.frozen), scalars

    def packed(self, state: TrainState) -> Any:
        """Packs a state for `advance`; returns it unless the trainer packs."""
        return self.packing.pack(self.devices, state) if self.packs else state

    def unpacked(self, state: Any) -> TrainState:
        """Unpacks a state of `advance`, whose larger arrays are those of the result."""
        is_packed = isinstance(state, Packed)
        return self.packing.unpack(self.devices, state) if is_packed else state

    def evaluate(self, state: TrainState, dataset: Any = None) -> dict[str, float]:
        """Computes metrics over an evaluation set, exact on any number of devices.

        By default over all of the experiment's, the further as `eval/NAME/...`; arrays
        [N, ...] with the names of a batch are a set. Raises `ConfigError` for others.
        """
        if dataset is not None:
            data, size = self.experiment.data, self.feed.batch_size
            dataset = as_labelled(dataset, data, size, kind=self.recipe.task.labels)
        return self.measure(state, dataset)[0]

    def measure(
        self, state: TrainState, dataset: Any = None
    ) -> tuple[Averages, Counts]:
        """Evaluates as `evaluate`; returns the metrics, and the first set's counts.

        Metrics of further sets in which no example counts are NaN; `ConfigError` for
        the first.
        """
        data, sets = self.experiment.data, {"eval/": dataset}
        if dataset is None:
            further = {f"eval/{k}/": x for k, x in data.evaluations.items()}
            sets = {"eval/": data.evaluation} | further
        variables, frozen = state.of_model()
        eval_step = functools.partial(self._eval_step, variables, frozen, self._seed)
        metrics, counts = {}, []
        for prefix, dataset in sets.items():
            size = self.padded_size(dataset)
            shapes = size, dataset.num_batches
            with contextlib.ExitStack() as stack:
                if not size or shapes not in self._evaluated:  # Their last ones differ.
                    # Compiling may read arrays that a task or a model closes over.
                    stack.enter_context(self.devices.implicit_transfers())
                sums = add_up(self.devices, eval_step, dataset, size, self.feed.alone)
            self._evaluated.add(shapes)
            if prefix == "eval/" and not sums["weight"]:
                raise evaluations.no_weight()
            metrics |= evaluations.summarize(sums, self.derived, prefix)
            counts.append(sums["counts"])
        return metrics, counts[0]

    def derived(self, averages: Averages, counts: Any = None) -> Averages:
        """Derives metrics on the host, by a task that may compute with JAX."""
        with self.devices.implicit_transfers(), contextlib.suppress(tasks.OfEvaluation):
            counts = tasks.NoCounts() if counts is None else counts
            before, derived = dict(averages), self.recipe.task.derive(averages, counts)
            numbers = tasks.numbers_of(derived)
            news = [k for k, x in derived.items() if x is not before.get(k)]
            if taken := [name for name in tasks.OF_THE_STEP if name in news]:
                raise tasks.taken_name("derives", taken[0])
            return numbers
        return {}

    @functools.cached_property
    def _predict_step(self) -> CompiledStep:
        axis_name = self.devices.axis_name
        predict_step = self.of_seed(attrgetter("predict_step"), axis_name)
        predict_step = evaluations.per_example(predict_step, self.batch_outputs)
        if self.devices.processes.count > 1:  # Each predicts on its own devices.
            return self.devices.compile_per_example(predict_step)
        return self.devices.compile_per_example(predict_step, self._eval_specs)

    def predict(self, state: TrainState, dataset: Any = None) -> Iterator[Any]:
        """Yields outputs [B, ...] for each batch of an evaluation set, on the host.

        Arrays [N, ...] are a set, as for `evaluate`. Outputs of a whole batch are None;
        raises `ConfigError` if there are no others.
        """
        data, size = self.experiment.data, self.feed.batch_size
        whole_batch = self.recipe.task.whole_batch
        dataset = data.evaluation if dataset is None else dataset
        dataset = as_dataset(dataset, data, size, whole_batch=whole_batch)
        # Once: no process waits later.
        model = self.devices.gather((*state.of_model(), self._seed))
        compiling = self.devices.implicit_transfers()
        step = compiling(lambda _, batch: self._predict_step(*model, batch))
        inputs = placed_inputs(dataset, whole_batch, self.feed.alone)
        return self.devices.map_batches(step, None, inputs)

    def padded_size(self, dataset: Any) -> int:
        """Rows to pad the batches of an evaluation set to; raises as `padded_size`."""
        shares = self.experiment.exact_elastic or self.devices.num_devices
        with self.feed.alone(), self.devices.implicit_transfers():
            cuts = shares == 1 and self._outputs.of_any_size
            unpadded = self._outputs.of_batch if cuts else self.own_batch_outputs
            return evaluations.padded_size(shares, dataset, unpadded)

    @property
    def batch_outputs(self) -> tuple[str, ...]:
        """Paths of the model's outputs of a whole batch, in which padding counts."""
        return self._outputs.of_batch

    @property
    def own_batch_outputs(self) -> tuple[str, ...]:
        """Paths of a model's own loss, and scalars, that are of a whole batch."""
        is_own = self.recipe.task.function is losses.own_loss
        return self.batch_outputs if is_own else ()

    @functools.cached_property
    def _outputs(self) -> Outputs:
        of_examples = hasattr(self.recipe.task.function, "of_examples")
        return Outputs() if of_examples else self._trace_outputs()

    def _trace_outputs(self) -> Outputs:
        size = self.feed.batch_size  # Why: docs/decisions/training.md#own-loss
        try:  # What has that many rows by chance, as experts of a batch, is no row.
            return Outputs(self._batch_outputs(7 * size + 1))
        except Exception:  # A model may be of one size, or of its multiples.
            return Outputs(self._batch_outputs(size), of_any_size=False)

    def _batch_outputs(self, size: int) -> tuple[str, ...]:
        """Traces a batch of this size, and lists what is not [size, ...]."""
        predict_step = self.functions().predict_step
        example = evaluated(self.experiment.data)
        inputs = inputs_of(example, self.recipe.task.whole_batch)
        shapes: list[tuple[str, tuple[int, ...]]] = []

        def look(*args: Any) -> None:  # Outputs may be of any type, and stay inside.
            outputs = tree_leaves_with_path(predict_step(*args))
            shapes.extend((path_of(keys), np.shape(x)) for keys, x in outputs)

        batch = canonical_shapes((inputs, np.zeros(1, np.int32)), rows=size)
        self.devices.abstract(look, *self.abstract.of_model(), batch)
        return tuple(path for path, shape in shapes if shape[:1] != (size,))

    def merged(self, state: TrainState) -> tuple[hk.Params, hk.State]:
        """Parameters to evaluate, adapters merged, and network state.

        With frozen ones they are merged one by one, to NumPy arrays on the host.
        """
        params, devices = state.averaged(), self.devices
        if self.recipe.plan.frozen:
            params = devices.fetch(params)
            with devices.on_host(), devices.implicit_transfers():
                params = self.recipe.plan.merge(params, state.frozen, devices.fetch)
        return params, state.net_state

    def trace(self, arrays: Any) -> Any:
        """Traces a call of the run for host arrays as of `feed.host_shapes`."""
        *staged, batch = self.feed.abstract(arrays)
        count = jax.ShapeDtypeStruct((), np.int32, sharding=self.devices.replicated)
        state, call = self.abstract, self._call
        if self.packs:
            state, call = self.packing.abstract(self.devices, state), self._packed_call
        return call.trace(
            *state.arguments(), self._abstract_seed, *staged, count, batch
        )

    def lower_evaluation(self) -> Any:
        """Lowers the evaluation of a batch; None without an evaluation set."""
        if (dataset := self.experiment.data.evaluation) is None:
            return None
        batch = evaluations.pad(each_shape(dataset)[0], self.padded_size(dataset))
        shapes = self.devices.abstract_batch(own_rows(self.devices.processes)(batch))
        variables, frozen = self.abstract.of_model()
        step = self._eval_step.trace(variables, frozen, self._abstract_seed, shapes)
        return step.lower()

    def compile(self) -> None:  # Why: docs/decisions/training.md#memory-budget
        """Compiles a call of the run for each shape of batches, ahead of the steps."""
        for arrays in self.feed.host_shapes():
            self.trace(arrays).lower().compile()


def _with_outputs(task: Task, num_outputs: int) -> Task:
    """Wraps classification, to refuse logits of another number of classes."""
    if task.function is not losses.classification:
        return task

    def checked(outputs: Any, batch: dict[str, Any]) -> losses.Values:
        if len(shape := jnp.shape(outputs)) != 2 or shape[1] != num_outputs:
            data = f"the data has {counted(num_outputs or 0, 'classes')}"
            raise ConfigError(
                f"the model gives outputs of shape {list(shape)}, and {data}; "
                f"classification takes logits [B, {num_outputs or 'num_outputs'}]"
            )
        return task.values(outputs, batch)

    checked.of_examples = True
    return task._replace(values=checked)


def _recipe(experiment: "Experiment", devices: DeviceManager) -> Recipe:
    data, model = experiment.data, experiment.model
    task = as_task(experiment.task or _NO_TASK)
    facts_of(task.values)  # Raises for parameters that no fact fits.
    optimizer, multipliers = experiment.optimizer, experiment.finetuning.multipliers
    if multipliers:
        optimizer = optax.chain(optimizer, tuning.scale_updates(multipliers))
    return Recipe(
        model=model and for_devices(with_state(model), devices.devices),
        task=_with_outputs(task, data.num_outputs),
        optimizer=optimizer,
        preprocess=data.preprocess,
        precision=Precision.create(experiment.precision, experiment.reduce_dtype),
        schedule=experiment.schedule,
        accumulate_steps=experiment.accumulate_steps,
        ema_decay=experiment.ema_decay,
        seed=experiment.seed,
    )


def _with_forms(recipe: Recipe, has_shares: bool) -> Recipe:
    """Makes a recipe whose parameters may be stored in other forms than are used."""
    model, dtype = recipe.model, recipe.precision.policy.compute_dtype
    if model is not None:
        # Frozen parameters would get gradients, too; mapped examples each their own.
        is_mapped = isinstance(model, PerExample)
        in_order = has_shares and not recipe.plan.frozen and not is_mapped
        model = model._replace(apply=stored.using(model.apply, dtype, in_order))
    return recipe._replace(model=model, has_forms=True)
