"""Checks of a run before step 0, by tracing alone."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.config import completed
from haiku_template.data import ArrayDataset, each_shape, without_workers
from haiku_template.devices import DeviceManager, canonical_shapes
from haiku_template.errors import ConfigError, PlacementError, near
from haiku_template.models.forms import inputs_of, with_inputs
from haiku_template.params import path_of
from haiku_template.registry import IMPORTING
from haiku_template.training.evaluation import num_rows, numbers_text, pad, summarize
from haiku_template.training.initial import dependents
from haiku_template.training.state import split_seed
from haiku_template.training.tasks import example_values, facts_of
from haiku_template.training.trainer import Trainer

logger = logging.getLogger(__name__)

MOST_VALUES = 2**24  # That a look at a loss makes up: a fraction of a second.


def check_measured(key: str, metric: str, names: Iterable[str]) -> None:
    """Raises `ConfigError` unless a metric that `key` asks for is among the names."""
    if metric not in names:
        raise ConfigError(
            f"{key}={metric} is not measured{near(metric, names)}; possible are "
            f"{', '.join(names) or 'none without data to evaluate on'}"
        )


def check_functions(**options: Sequence[Callable[..., Any]]) -> None:
    """Raises `ConfigError` for options that are no lists of functions."""
    for name, functions in options.items():
        if not isinstance(functions, list | tuple) or not all(map(callable, functions)):
            raise ConfigError(f"{name}={functions!r:.80}, and no list of functions")


def check_parts(
    trainer: Trainer, best_metric: str, stop_when: Any = None, num_steps: int = 0
) -> None:
    """Traces a run for faults before step 0.

    Raises:
      PlacementError: a norm is not averaged over the devices.
      ConfigError: a metric that the run needs is not measured, or a batch not divided.
    """
    if IMPORTING:
        raise _imported(IMPORTING[-1])
    train = without_workers(trainer.experiment.data.train)
    size = trainer.feed.batch_size
    if isinstance(train, ArrayDataset) and train.num_examples < size:
        _warn_of_few(train.num_examples, size)
    if trainer.devices.axis_name and trainer.experiment.exact_elastic is None:
        check_norms(trainer)
    if not jax.tree.leaves(trainer.abstract.params):
        logger.warning("nothing trains: no parameter does, and LoRA adapts none")
    if (decay := trainer.experiment.ema_decay) is not None:
        _warn_of_average(decay, num_steps)
    if (name := trainer.feed.preprocessing) and trainer.experiment.step is None:
        _warn_of_raw_inputs(trainer, name)
    if trainer.recipe.task.labels == "any" and trainer.experiment.step is None:
        _warn_of_neighbours(trainer)
    planned = trainer.experiment.config.get("num_steps", num_steps)
    if planned < num_steps and trainer.experiment.schedule is not None:
        _warn_of_schedule(trainer.experiment.config, num_steps)
    check_evaluation(trainer, best_metric, stop_when)


def _warn_of_raw_inputs(trainer: Trainer, name: str) -> None:
    """Warns of a user's loss of inputs that are not preprocessed, as outputs are."""
    recipe, steps = trainer.recipe, trainer.experiment.steps
    of_batch = recipe.task.whole_batch
    if recipe.task.labels != "any":
        return
    needing: list[str] = []

    def look(variables: Any, frozen: Any, batch: Any) -> None:
        rngs, forward = (split_seed(recipe.seed).params,) * 2, steps.forward
        facts, _ = forward(recipe, variables, frozen, batch, rngs, False)
        leaves, structure = jax.tree.flatten(inputs_of(batch, of_batch))
        kept = {*map(id, jax.tree.leaves(facts["inputs"]))}

        def loss(others: list[Any]) -> Any:
            pairs = zip(leaves, others, strict=True)
            inputs = structure.unflatten([x if y is None else y for x, y in pairs])
            given = facts | {"batch": with_inputs(batch, inputs, of_batch)}
            return example_values(recipe.task, **given)[0]["loss"]

        others = [None if id(x) in kept else x for x in leaves]
        needing.extend(dependents(loss, others, None)[1])

    batch = canonical_shapes(each_shape(trainer.experiment.data.train)[0])
    trainer.devices.abstract(look, *trainer.abstract.of_model(), batch)
    if needing:
        logger.warning(
            "the loss uses the inputs of `batch`, which are as the data has them, "
            f"before {name}; a task that takes `inputs` gets them as the model does"
        )


def _warn_of_neighbours(trainer: Trainer) -> None:
    """Warns of a user's loss of an example that depends on other rows of a batch.

    A loss of the whole batch, [], is not looked at: an average is one.
    """
    recipe, evaluation = trainer.recipe, trainer.experiment.data.evaluation
    taken = facts_of(recipe.task.values).values()
    apart = trainer.devices.axis_name is not None and "axis_name" not in taken
    several = recipe.accumulate_steps > 1
    pads = evaluation is not None and "mask" not in taken
    sees = False
    with contextlib.suppress(Exception):  # A task may refuse made-up outputs.
        sees = (apart or several or pads) and _sees_neighbours(trainer)
    rows = {
        "those of its own device alone (a task that takes axis_name can gather all)": (
            sees and apart
        ),
        "those of its micro-batch alone": sees and several,
        "padding in evaluation, too (a task that takes mask can leave it out)": (
            sees and pads and _is_padded(evaluation)
        ),
    }
    if found := [text for text, is_so in rows.items() if is_so]:
        logger.warning(
            "the loss of an example depends on other rows of its batch, which are "
            f"{', and '.join(found)}: docs/extend.md"
        )


def _is_padded(dataset: Any) -> bool:
    last = dataset.batch(dataset.num_batches - 1)
    return num_rows(last) < num_rows(dataset.batch(0))


def _sees_neighbours(trainer: Trainer) -> bool:
    """Computes a loss of two made-up outputs, equal in the first row alone.

    False if two rows are more than `MOST_VALUES`, or if the loss prints or the like.
    """
    recipe, devices = trainer.recipe, trainer.devices
    names, draw = facts_of(recipe.task.values), np.random.default_rng(0)
    own = trainer.feed.batch_size // (devices.num_devices * recipe.accumulate_steps)
    for rows in (max(2, own), 2):
        shapes = _traced_facts(trainer, rows, {"outputs", *names.values()})
        if sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) <= MOST_VALUES:
            break
    else:
        return False

    def made(x: Any) -> np.ndarray:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, x.dtype)
        return draw.uniform(0.1, 0.9, x.shape).astype(x.dtype)  # Also probabilities.

    def changed(keys: Any, x: np.ndarray) -> np.ndarray:
        is_of_rows = x.shape[:1] == (rows,) and path_of(keys) not in of_batch
        return np.concatenate([x[:1], made(x[1:])]) if is_of_rows else x

    facts, of_batch = jax.tree.map(made, shapes), trainer.batch_outputs
    facts |= {"step": np.int32(0), "mask": np.ones(rows, bool), "is_training": True}
    facts |= {"rng": split_seed(recipe.seed).params, "axis_name": None}

    def loss(outputs: Any) -> Any:
        given = facts | {"outputs": outputs}
        return recipe.task.values(**{name: given[fact] for name, fact in names.items()})

    with devices.on_host(), devices.implicit_transfers():
        of_rows = jax.jit(lambda outputs: loss(outputs)["loss"])
        traced = of_rows.trace(outputs := facts["outputs"])
        if traced.out_info.shape[:1] != (rows,) or traced.jaxpr.effects:
            return False
        one = of_rows(outputs)[0]
        other = of_rows(jax.tree_util.tree_map_with_path(changed, outputs))[0]
        return not np.allclose(one, other, rtol=1e-3, equal_nan=True)


def _traced_facts(trainer: Trainer, rows: int, names: set[str]) -> dict[str, Any]:
    """Traces a batch of so many rows to the shapes of these facts of a task."""
    recipe, forward = trainer.recipe, trainer.experiment.steps.forward
    rngs, shapes = (split_seed(recipe.seed).params,) * 2, {}

    def look(variables: Any, frozen: Any, batch: Any) -> None:
        facts, _ = forward(recipe, variables, frozen, batch, rngs, True)
        shapes.update(canonical_shapes({k: facts[k] for k in ("outputs", "inputs")}))

    (params, *_), _ = model = trainer.abstract.of_model()
    batch = canonical_shapes(each_shape(trainer.experiment.data.train)[0], rows=rows)
    trainer.devices.abstract(look, *model, batch)
    shapes |= {"batch": batch, "params": params}
    return {name: x for name, x in shapes.items() if name in names}


def _imported(module: str) -> ConfigError:
    return ConfigError(
        f"{module} trains while a command imports it; put what trains under "
        "if __name__ == '__main__':"
    )


def _warn_of_few(rows: int, size: int) -> None:
    logger.warning(
        f"a batch has {size} examples and the training set {rows}, so that some "
        f"are in a batch several times; give a batch_size of {rows} or less"
    )


def _warn_of_schedule(config: dict[str, Any], num_steps: int) -> None:
    """Warns of a learning rate that ends before the run does."""
    name = completed(config)["optimizer"]["schedule"]
    if name != "constant":
        logger.warning(
            f"the learning rate's schedule, {name}, ends at config.num_steps="
            f"{config['num_steps']}, and the run makes {num_steps} steps; set "
            "config.num_steps before Experiment.from_config"
        )


def _warn_of_average(decay: float, num_steps: int) -> None:
    """Warns of averages that keep a tenth or more of the first parameters."""
    if num_steps < 100 or (share := decay**num_steps) < 0.1:
        return
    rate = -math.log(0.01) / num_steps  # Leaves 1 %; rounded up.
    digits = -math.floor(math.log10(rate))
    rate = math.ceil(rate * 10**digits) / 10**digits
    logger.warning(
        f"ema_decay={decay}: after {num_steps} steps the averages, as evaluated, "
        f"are still {100 * share:.0f} % of the first parameters; "
        f"{1 - rate:.{digits}f} leaves 1 % or less"
    )


def check_norms(trainer: Trainer) -> None:
    """Raises `PlacementError` if normalization does not average over the devices."""
    devices, experiment = trainer.devices, trainer.experiment
    alone = _norms_alone(devices, trainer.functions(devices.axis_name).init, {})
    if alone and experiment.step is None:  # In `init`; training may fix them.
        recipe, state = trainer.recipe, trainer.abstract

        def forward(*args: Any) -> Any:
            rng = split_seed(recipe.seed).params
            return experiment.steps.forward(recipe, *args, (rng, rng), True)[1]

        batch = canonical_shapes(each_shape(experiment.data.train)[0])
        alone = _norms_alone(devices, forward, *state.of_model(), batch)
    if alone:
        raise PlacementError(
            f"{', '.join(alone[:3])} would keep statistics of its own on each of the "
            f"{devices.num_devices} devices: give it "
            "cross_replica_axis=devices.axis_name (in a function of your own that a "
            "config names: axis_name; around code that stays as it is, "
            "haiku_template.published.norms_over(axis_name)), or "
            "is_training=hk.running_init(), which keeps its statistics as they are"
        )


def _norms_alone(devices: DeviceManager, function: Callable, *args: Any) -> list[str]:
    """Names norms that are called to train, and without the axis of the devices."""
    alone: list[str] = []

    def look(call: Any, args: tuple, kwargs: dict, context: Any) -> Any:
        module = context.module
        if (
            context.method_name == "__call__"
            and kwargs.get("is_training", args[1] if len(args) > 1 else False) is True
            and getattr(module, "cross_replica_axis", "not a norm") is None
            and not isinstance(module, hk.nets.VectorQuantizer)  # It has no state.
        ):
            alone.append(f"{type(module).__name__} {module.module_name}")
        return call(*args, **kwargs)

    with hk.intercept_methods(look):  # Why: docs/decisions/training.md#norms
        devices.abstract(function, *args)
    return alone


# Why: docs/decisions/training.md#traced-evaluation
def check_evaluation(trainer: Trainer, best_metric: str, stop_when: Any = None) -> None:
    """Traces the evaluation, whose metrics must have the best and early stopping's."""
    data, early = trainer.experiment.data, getattr(stop_when, "metric", None)
    if (dataset := data.evaluation) is None:
        if early:
            check_measured("early_stop.metric", early, ())
        return
    state, eval_step = trainer.abstract, trainer.functions().eval_step
    try:
        for evaluation in (dataset, *(sets := data.evaluations).values()):
            trainer.padded_size(evaluation)  # Raises if the devices do not divide it.
        if of_batch := trainer.own_batch_outputs:
            _warn_of_numbers(of_batch)
        shapes = canonical_shapes(pad(dataset.batch(0), trainer.padded_size(dataset)))
        sums = trainer.devices.abstract(eval_step, *state.of_model(), shapes)
    except KeyError as error:
        _check_names(error, trainer.feed.example, dataset.batch(0))
        raise
    numbers = jax.tree.map(lambda x: np.ones(x.shape), sums)
    try:
        names = summarize(numbers, trainer.derived)
    except ConfigError:
        raise
    except Exception:  # A derived metric may refuse these made-up numbers.
        known = _with_sets(summarize(numbers, lambda *_: {}), sets)
        return _warn_of_metric(best_metric, known)
    names = _with_sets(names, sets) if sets else names
    check_measured("best_metric", best_metric, names)
    if early and not early.startswith(("train/", "perf/")):
        check_measured("early_stop.metric", early, names)


def _warn_of_metric(best_metric: str, known: list[str]) -> None:
    meant = "" if best_metric in known else near(best_metric, known, cutoff=0.8)
    if meant:
        logger.warning(
            f"best_metric={best_metric} is none of {', '.join(known)}{meant}; "
            "unless it is a derived metric, no checkpoint is the best"
        )


def _check_names(error: KeyError, *batches: Any) -> None:
    names = [sorted(map(str, x)) if isinstance(x, dict) else [] for x in batches]
    train, evaluation = map(", ".join, names)
    if str(*error.args[:1]) in {*names[0]} - {*names[1]}:
        raise ConfigError(
            f"the evaluation asks for {error}; a batch of the evaluation set has "
            f"{evaluation}, and one to train on {train}: a task or a model may take "
            "what both have"
        ) from error


def _warn_of_numbers(of_batch: Sequence[str]) -> None:
    logger.warning(
        f"the model returns {numbers_text(of_batch)} for a batch: its evaluation is "
        "exact if that is a mean over the examples; numbers for each, [B], are exact "
        "in any case"
    )


def _with_sets(names: Iterable[str], sets: Iterable[str]) -> list[str]:
    of_sets = [k.replace("/", f"/{s}/", 1) for s in sets for k in names]
    if taken := [name for name in of_sets if name in names]:
        raise ConfigError(
            f"a metric of the task and one of a further evaluation set are {taken[0]}; "
            "rename one of the two"
        )
    return [*names, *of_sets]
