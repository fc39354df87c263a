"""First states: of pretrained parameters, the seed, or the first batch."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING, Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from haiku_template import finetuning as tuning
from haiku_template.data import whole_batches
from haiku_template.devices import DeviceManager, Layout, canonical_shapes
from haiku_template.devices.collectives import with_axis
from haiku_template.devices.transfer import check_host_batch
from haiku_template.errors import ConfigError, some
from haiku_template.models.forms import inputs_of
from haiku_template.params import flatten, mutable, ordered, unflatten
from haiku_template.stored import is_form
from haiku_template.training.custom import preprocessed
from haiku_template.training.optimizers import own_averages
from haiku_template.training.state import (
    Recipe,
    TrainState,
    seed_array,
    split_seed,
    strong,
)

if TYPE_CHECKING:
    from haiku_template.training.experiment import Experiment

logger = logging.getLogger(__name__)

# Of each `hk.ExponentialMovingAverage`: `average` is computed anew in every update.
AVERAGE = {"average", "hidden", "counter"}
NO_TUNING = tuning.Finetuning()
FIELDS = ("params", "net_state", "opt_state", "ema_params")  # Of a custom init.
Paths = tuple[str, ...]
# A function of a recipe and inputs to first fields, their shapes, and paths of those
# that need the inputs.
Traced = tuple[Callable[..., Any], dict[str, Any], Paths]


class Initializer:
    """Initializer of an experiment's train state; nothing is allocated before `init`.

    Attributes:
      recipe: the experiment's, with its plan of trainable and frozen parameters.
      abstract: shapes and dtypes of the first state.
      from_batch: leaves of the first state, by path, that are made of the first batch.
      seed: the recipe's, as `seed_array`.
    """

    def __init__(
        self,
        experiment: "Experiment",
        devices: DeviceManager,
        recipe: Recipe,
        example: Any,
    ) -> None:
        self._experiment, self._devices, self._example = experiment, devices, example
        self.seed = seed_array(recipe.seed)
        axis_name, init = devices.axis_name, experiment.init
        if init is None:
            traced = trace_model_init(recipe, example, axis_name)
        else:
            first = functools.partial(init_custom, init=init, batch=example)
            bound = functools.partial(first, recipe)
            traced = first, *dependents(bound, example, axis_name)
        self._first, fields, self.from_batch = traced
        shapes = Layout(devices.devices).place(fields)
        self._params, self._net_state = shapes["params"], shapes.get("net_state", {})
        # Why: docs/decisions/finetuning.md#no-finetuning
        plan = tuning.Plan(frozenset(flatten(self._params)))  # All train.
        if experiment.init_from is not None or experiment.finetuning != NO_TUNING:
            _check_names(self._params)
        if experiment.finetuning != NO_TUNING:
            bound = functools.partial(self._first, recipe)
            axes = tuning.convolutions(lambda: devices.abstract(bound))
            plan = tuning.make_plan(experiment.finetuning, self._params, axes)
        kinds = {x.dtype for x in jax.tree.leaves(self._params)}
        if not all(jnp.issubdtype(x, jnp.inexact) for x in kinds):
            _check_gradients(experiment, plan.trained, flatten(self._params))
        if experiment.init_from is not None:  # These do not depend on the batch.
            read = {f"params/{x}" for x in flatten(self._params).keys() - plan.fresh}
            self.from_batch = tuple(x for x in self.from_batch if x not in read)
        self.recipe = recipe._replace(plan=plan)
        of_axis = self.recipe._replace(axis_name=devices.axis_name)
        self._init = functools.partial(first_state, of_axis, self._first)
        # Of shapes: tracing a deep model's init once more takes seconds.
        state = lambda fields: first_state(self.recipe, lambda *_: fields, 0, {})  # noqa: E731
        self.abstract = devices.abstract(state, fields)
        if plan.frozen:
            frozen = devices.abstract(self._frozen_of_seed, self.seed)
            self.abstract = self.abstract._replace(frozen=frozen)
        if any(jnp.issubdtype(x, jnp.complexfloating) for x in kinds):
            _check_moments(flatten(self._params), flatten(self.abstract.opt_state))
        if experiment.finetuning.multipliers and recipe.ema_decay is None:
            _check_no_averages(self.abstract.ema_params)

    def function(self, axis_name: str | None) -> Callable[..., TrainState]:
        """Makes the pure function of pretrained leaves to a first state."""
        recipe = self.recipe._replace(axis_name=axis_name)
        return functools.partial(first_state, recipe, self._first, recipe.seed)

    @functools.cached_property
    def seed_there(self) -> jax.Array:
        """The seed's array on the devices, for all steps."""
        return self._devices.replicate(self.seed)

    def init(self, layout: Layout) -> TrainState:
        """Makes the train state before step 0 where a layout has it.

        Raises `ConfigError` if pretrained parameters cannot be read, or do not fit.
        """
        experiment, frozen = self._experiment, self.frozen(layout)
        adapters = experiment.finetuning.adapters
        inputs = self._first_inputs() if self.from_batch else None
        if experiment.init_from is not None or adapters is not None:
            return self._init_pretrained(frozen, inputs, layout)
        state = self._devices.init(
            self._init, self.seed, {}, None, inputs, layout=layout
        )
        return state._replace(frozen=frozen)

    def _init_pretrained(
        self, frozen: hk.Params, inputs: Any, layout: Layout
    ) -> TrainState:
        """Reads trainable parameters, and makes the state around them, as placed."""
        # Why: docs/decisions/devices.md#leaf-by-leaf
        place = functools.partial(self._place, "params", layout=layout)
        experiment, plan = self._experiment, self.recipe.plan
        leaves, net_state = {}, None
        if (source := experiment.init_from) is not None:
            skip = plan.frozen | plan.fresh
            leaves, net_state = source(self._params, skip, self._net_state, place)
        if (adapters := experiment.finetuning.adapters) is not None:
            params = tuning.load_adapters(
                adapters,
                self.abstract.params,
                frozen,
                plan.lora,
                self._devices,
                place,
                plan.fresh,
            )
            leaves = flatten(params)

        def init(*args: Any) -> TrainState:
            state = self._init(*args)
            others = {k: x for k, x in flatten(state.params).items() if k not in leaves}
            return state._replace(params=unflatten(others))

        state = self._devices.init(
            init, self.seed, leaves, net_state, inputs, layout=layout
        )
        params = unflatten(flatten(state.params) | leaves)
        return state._replace(params=params, frozen=frozen)

    def lower(self, layout: Layout) -> Any:
        """Lowers the function that makes the first state from the seed."""
        inputs = self._inputs(self._example) if self.from_batch else None
        seed, inputs = canonical_shapes((self.seed, inputs), self._devices.replicated)
        return self._devices.lower_init(
            self._init, seed, {}, None, inputs, layout=layout
        )

    def _first_inputs(self) -> Any:
        """Puts what is needed of the first batch on the devices."""
        batch = whole_batches(self._experiment.data.train).batch(0)
        rows = check_host_batch(batch)
        size = len(jax.tree.leaves(self._example)[0])
        if rows != size:
            raise ConfigError(
                f"{', '.join(self.from_batch)} depend on the data of the first batch, "
                f"and this process reads {rows} of the {size} examples in it; "
                "initialize them from the seed alone, or train in one process"
            )
        return self._devices.replicate(self._inputs(batch))

    def _inputs(self, batch: Any) -> Any:
        if self._experiment.init is not None:
            return batch
        return inputs_of(batch, self.recipe.task.whole_batch)

    def frozen(self, layout: Layout) -> hk.Params:
        """Reads the frozen parameters onto the devices, or makes them from the seed."""
        return self._frozen(layout) if self.recipe.plan.frozen else {}

    def _frozen(self, layout: Layout) -> hk.Params:
        if self._experiment.init_from is None:
            logger.warning(
                "frozen parameters were never trained: config.init_from is None, so "
                "that they come from the seed"
            )
            make = lambda *args: {"frozen": self._frozen_of_seed(*args)}  # noqa: E731
            inputs = self._first_inputs() if self.from_batch else None
            made = self._devices.init(make, self.seed, inputs, layout=layout)
            return made["frozen"]
        plan = self.recipe.plan
        arrays = hk.data_structures.filter(
            lambda module, name, x: not is_form(x), self.abstract.frozen
        )
        shapes = hk.data_structures.merge(self._params, arrays)

        def place(path: str, array: Any) -> Any:
            return self._place("frozen", path, plan.store(path, array), layout)

        leaves, _ = self._experiment.init_from(shapes, plan.trained, None, place)
        return unflatten(leaves)

    def _place(self, field: str, path: str, leaf: Any, layout: Layout) -> Any:
        """Puts a parameter, or its form, where a layout has it in a field."""
        placed = self._devices.place({field: unflatten({path: leaf})}, layout)
        return flatten(placed, is_leaf=is_form)[f"{field}/{path}"]

    def _frozen_of_seed(self, seed: Any, inputs: Any = None) -> hk.Params:
        recipe = self.recipe._replace(seed=seed)
        return recipe.plan.split(self._first(recipe, inputs)["params"])[1]


def _check_gradients(
    experiment: "Experiment", trained: Iterable[str], shapes: dict[str, Any]
) -> None:
    kinds = {k: x.dtype for k, x in shapes.items() if k in trained}
    odd = [k for k, x in kinds.items() if not jnp.issubdtype(x, jnp.inexact)]
    if odd and experiment.step is None:
        raise ConfigError(
            f"{some(odd)} would train, and {kinds[odd[0]]} has no gradient; make it by "
            "hk.get_state, or let finetuning.train name the other parameters"
        )


def _check_moments(params: dict[str, Any], opt_state: dict[str, Any]) -> None:
    for path, moment in opt_state.items():
        _, _, name = path.partition("/mu/" if "/mu/" in path else "/trace/")
        param = params.get(name, moment)
        if jnp.iscomplexobj(param) and not jnp.iscomplexobj(moment):
            raise ConfigError(
                f"{name} is {param.dtype}, and the optimizer keeps its moment {path} "
                f"as {moment.dtype}, without imaginary parts: leave out "
                "optimizer.mu_dtype (or accumulator_dtype)"
            )


def init_model(recipe: Recipe, example: Any = None, *, batch: Any) -> dict[str, Any]:
    """Initializes a model's `params` and `net_state`.

    `batch` is a pytree of `jax.ShapeDtypeStruct` [B, ...], before `preprocess`, as is
    `example`, the inputs; these are zeros by default.
    """
    inputs = inputs_of(batch, recipe.task.whole_batch)
    if inputs is batch and recipe.task.labels != "any":
        raise _no_inputs(recipe.task.labels, batch)
    if example is None:  # Most initialize from shapes and the rng alone.
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
    policy, rng = recipe.precision.policy, split_seed(recipe.seed).params
    try:
        example = recipe.preprocess(example)
        example = ordered(policy.cast_to_param(example), example)
        params, net_state = recipe.model.init(rng, example, True)
    except Exception as error:
        error.add_note(_given(batch, inputs is batch, example))
        raise
    return {"params": params, "net_state": net_state}


def trace_model_init(recipe: Recipe, batch: Any, axis_name: str | None) -> Traced:
    """Binds `init_model`, and traces it as `dependents`: on one row if that will do."""

    def trace(rows: int) -> Traced:
        few = jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])), batch)
        init = functools.partial(init_model, batch=few)
        example = inputs_of(few, recipe.task.whole_batch)
        bound = functools.partial(init, recipe)
        return init, *dependents(bound, example, axis_name)

    size = jax.tree.leaves(batch)[0].shape[0]
    try:
        one = trace(1)
    except Exception:
        # A codebook may take more rows than one. Else the first error says more.
        with contextlib.suppress(Exception):
            if (of_batch := trace(size))[2]:
                return of_batch
        raise
    if one[2]:
        return trace(size)
    leaves = flatten(one[1]["net_state"])
    rows = [k for k, x in leaves.items() if 1 in x.shape]  # Of any axis.
    # Norms' are [1, ..., C]: another trace takes time.
    norms = [k for k in rows if f"{k.rpartition('/')[0]}/average" in leaves]
    if size > 1 and norms != rows:
        _check_no_rows(leaves, lambda: flatten(trace(size)[1]["net_state"]))
    return one


def _check_no_rows(of_one: dict[str, Any], of_batch: Callable[[], Any]) -> None:
    leaves: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # A device has a part of the batch.
        leaves = of_batch()
    shared = [k for k in of_one if k in leaves]
    if odd := [k for k in shared if leaves[k].shape != of_one[k].shape]:
        raise ConfigError(
            f"the model's network state {odd[0]} has a row for each example, and one "
            "state is for batches of any size; a state that is carried from batch to "
            "batch is of a train step of your own: docs/extend.md"
        )


def dependents(fn: Callable, inputs: Any, axis_name: str | None) -> tuple[Any, Paths]:
    """Traces `fn(inputs)`: shapes of its results, and paths of those that need inputs.

    These may be too many, as all results of `hk.cond` are among them.
    """
    fn = with_axis(fn, axis_name)  # Why: docs/decisions/training.md#first-batch
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(inputs)
    # A callback, such as one that prints, takes values and makes no leaf of them.
    equations = [x.replace(effects=set()) for x in program.jaxpr.eqns]
    jaxpr, paths = program.jaxpr.replace(eqns=equations), flatten(shapes).keys()
    if not any(dce_jaxpr(jaxpr, True)[1]):
        return shapes, ()
    candidates = [x for x in paths if not _is_average(x, paths)]
    return shapes, tuple(_needing_inputs(jaxpr, paths, candidates))


def _needing_inputs(jaxpr: Any, paths: Set[str], candidates: list[str]) -> list[str]:
    """Halves paths until none of a half needs the inputs: each test walks a program."""
    names = {*candidates}
    if not names or not any(dce_jaxpr(jaxpr, [x in names for x in paths])[1]):
        return []
    if len(names) == 1:
        return candidates
    middle = len(candidates) // 2
    halves = candidates[:middle], candidates[middle:]
    return [name for x in halves for name in _needing_inputs(jaxpr, paths, x)]


def _is_average(path: str, paths: Set[str]) -> bool:
    module, _, name = path.rpartition("/")
    return name == "average" and {f"{module}/{x}" for x in AVERAGE} <= paths


def _check_averaged(params: Any, has_own: bool) -> None:
    if has_own:
        raise ConfigError(
            "ema_decay averages parameters, and so does this schedule-free optimizer, "
            "whose averages are evaluated and exported; leave out ema_decay"
        )
    halves = jnp.bfloat16, jnp.float16
    odd = [name for name, x in flatten(params).items() if x.dtype in halves]
    if odd:
        raise ConfigError(
            f"ema_decay averages parameters in their own dtype, and {some(odd)} in "
            "half precision, in which such averages stand still; possible are float32 "
            "parameters (config.precision is of what is computed), or no ema_decay"
        )


def _check_no_averages(averages: Any) -> None:
    if averages is not None:
        raise ConfigError(
            "config.finetuning.multipliers scale the updates of an optimizer, of which "
            "a schedule-free one knows nothing: its averages would be of others; leave "
            "out multipliers, or take another optimizer and ema_decay"
        )


def _check_names(params: hk.Params) -> None:
    for module, names in params.items():
        if slashed := [name for name in names if "/" in name]:
            raise ConfigError(
                f"the parameter {slashed[0]!r} of the module {module} has a slash in "
                "its name, and config.init_from and config.finetuning know parameters "
                "by MODULE/NAME; possible is another name, or a module of its own"
            )


def _names(batch: Any) -> str:
    return (
        ", ".join(map(str, batch))
        if isinstance(batch, dict)
        else "arrays without names"
    )


def _no_inputs(labels: str, batch: Any) -> ConfigError:
    return ConfigError(
        f"the task takes inputs and labels ({labels}), and the batches of the data "
        f"have {_names(batch)} alone"
    )


def _given(batch: Any, is_whole: bool, inputs: Any) -> str:
    part = "all" if is_whole else "inputs alone"
    note = f"Of a batch of {_names(batch)} the model was given {part}."
    if all(x.dtype != jnp.uint8 for x in jax.tree.leaves(inputs)):
        return note
    return (
        f"{note} The inputs are bytes, as the data has them; "
        "--config.data.scale_pixels=True, or from_split(..., "
        "preprocess=images.scale_pixels), makes numbers in [0, 1] of them."
    )


def init_custom(
    recipe: Recipe, first: Any = None, *, init: Callable[..., Any], batch: Any
) -> dict[str, Any]:
    """Makes the fields of a first state by a user's `init(rng, batch)`.

    `batch` has the shapes of a whole batch [B, ...] of all devices. `init` gets zeros,
    or the first batch if what it returns depends on that. Raises `ConfigError` if it
    returns no dictionary of `FIELDS` with `params`.
    """
    if first is None:
        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    fields = init(split_seed(recipe.seed).params, preprocessed(recipe, first))
    fields = mutable(fields)
    names = list(fields) if isinstance(fields, dict) else type(fields).__name__
    if "params" not in names or not set(names) <= set(FIELDS):
        raise ConfigError(
            f"init returns {names}; it must return a dictionary of pytrees, params "
            f"among them; possible are {', '.join(FIELDS)}"
        )
    return jax.tree.map(jnp.asarray, fields)


def first_state(
    recipe: Recipe,
    first: Callable[[Recipe, Any], dict[str, Any]],
    seed: Any,
    leaves: dict[str, jax.Array],
    net_state: Any = None,
    inputs: Any = None,
) -> TrainState:
    """Makes the state before step 0, without frozen parameters.

    `first(recipe, inputs)` gives fields of it, others follow from `params`; `leaves`
    are pretrained parameters by path, and replace them, as does a `net_state`.
    """
    recipe = recipe._replace(seed=seed)
    optimizer, fields = recipe.optimizer, {"net_state": {}} | first(recipe, inputs)
    if recipe.plan.frozen:
        rng = split_seed(recipe.seed).adapters
        fields["params"] = recipe.plan.init_params(fields["params"], rng)
    if leaves:
        fields["params"] = unflatten(flatten(fields["params"]) | leaves)
    if net_state is not None:
        fields["net_state"] = _with_leaves(fields["net_state"], net_state)
    params = fields["params"]
    opt_state = () if optimizer is None else optimizer.init(params)
    has_own = own_averages(opt_state, params) is not None
    if recipe.ema_decay is not None:
        _check_averaged(params, has_own)
    averaged = has_own or recipe.ema_decay is not None
    defaults = {
        "step": jnp.zeros((), jnp.int32),
        "frozen": {},
        "opt_state": opt_state,
        "ema_params": params if averaged else None,
        "loss_scale": recipe.precision.initial_loss_scale(),
    }
    return strong(TrainState(**defaults | fields))


def _with_leaves(tree: Any, source: Any) -> Any:
    """Replaces the leaves that a source has; a module's state may be a tree."""
    leaves = flatten(tree) | flatten(source)
    return jax.tree.structure(tree).unflatten(leaves.values())
