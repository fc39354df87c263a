"""Tasks: losses and metrics of a model's outputs.

`loss` is what training minimizes; other values are reported. Training averages them
over a batch, evaluation over a set, across micro-batches and devices; the value
`example_weight`, if there is one, weights the examples. Metrics that are no averages,
such as perplexity, are derived from averages on the host.

Shapes: B examples, K classes or targets; T tokens, D width, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.errors import ConfigError, counted
from haiku_template.models import losses
from haiku_template.models.losses import WEIGHT, Averages, Counts, confusion, macro_f1
from haiku_template.registry import check_takes

Values = dict[str, jax.Array]
Derive = Callable[[Averages, Counts], Averages]
LABELS = ("classes", "numbers", "tokens", "any")
# What the function of a task gets by name.
FACTS = ("outputs", "inputs", "batch", "params", "rng", "step", "mask")
FACTS += ("is_training", "axis_name")
# What one array of a batch would be called, and not a dictionary of several.
OF_A_BATCH = ("labels", "label", "targets", "target", "y", "y_true")
NO_FACTS = ("net_state", "opt_state")  # A task is not given these.
NUMBERS = jax.Array | np.ndarray | np.generic | int | float
# Scalars beside a task's.
OF_THE_STEP = ("grad_norm", "learning_rate", "loss_scale", "skipped_steps")


class NoCounts(dict[str, np.ndarray]):
    """Counts of training: none; a derived metric that needs them is evaluation's."""

    def __missing__(self, name: str) -> np.ndarray:
        raise OfEvaluation(name)


class OfEvaluation(KeyError):
    """Key of counts that training has not."""


class Task(NamedTuple):
    """Loss and metrics of a model.

    `values` gets by name any of `FACTS`: `params` are the model's, as it computes with
    them; `inputs` are preprocessed, and `batch` is not; `mask`, bool [B], is False for
    padding. Two other parameters at most get the outputs, then the batch. It returns a
    dictionary, `loss` among them, of values [B], per token [B, T], or [] for a whole
    batch. `count` maps (outputs, batch, mask) to integer arrays by name, summed over a
    set on the devices.
    `derive` maps (averages, counts) to more metrics, on the host; in training there are
    no counts, and where it needs them no such metrics.
    """

    values: Callable[..., Values]
    labels: str = "any"  # Kind that data must give, of `LABELS`.
    count: Callable[[Any, Any, jax.Array], Values] = lambda outputs, batch, mask: {}
    derive: Derive = lambda averages, counts: {}
    whole_batch: bool = False  # The model has the loss: see `inputs_of`.

    @property
    def function(self) -> Callable[..., Values]:
        """Function of the values, without keywords that are bound to it."""
        is_bound = isinstance(self.values, functools.partial)
        return self.values.func if is_bound else self.values

    def __call__(self, outputs: Any, batch: Any, **options: Any) -> Values:
        """Computes the values of a batch; `options` are other facts or keywords."""
        arguments = {"outputs": outputs, "batch": batch}
        facts = facts_of(self.values, options).items()
        facts = {name: arguments[fact] for name, fact in facts if fact in arguments}
        return self.values(**facts, **options)


def taken_name(verb: str, name: str) -> ConfigError:
    """Error for a value of a task with the name of a step's."""
    return ConfigError(f"the task {verb} {name!r}, which a step has; rename it")


def _no_task(task: Any) -> ConfigError:
    return ConfigError(
        f"the task is {task!r:.60}; it is a function of outputs and batch, such as "
        "haiku_template.models.losses.classification, and names are for configs"
    )


def as_task(task: Task | Callable[..., Values]) -> Task:
    """Makes a task of a plain function, a partial task, or a task; or `ConfigError`."""
    if not callable(task):
        raise _no_task(task)
    if isinstance(task, functools.partial) and isinstance(task.func, Task):
        bound = functools.partial(task.func.values, *task.args, **task.keywords)
        task = task.func._replace(values=bound)
    task = task if isinstance(task, Task) else Task(task)
    if task.labels not in LABELS:
        raise ConfigError(
            f"the task's labels={task.labels!r}; possible are {', '.join(LABELS)}"
        )
    check_takes("the task's count", task.count, "outputs", "batch", "mask")
    check_takes("the task's derive", task.derive, "averages", "counts")
    return task


def facts_of(function: Callable[..., Any], keys: Iterable[str] = ()) -> dict[str, str]:
    """Maps a function's parameters, without its `keys`, to the facts that they take."""
    signature = inspect.signature(function)
    parameters = [p for name, p in signature.parameters.items() if name not in keys]
    facts = {p.name: p.name for p in parameters if p.name in FACTS}
    free = [name for name in ("outputs", "batch") if name not in facts]
    unnamed = [
        p.name
        for p in parameters
        if p.name not in FACTS and p.default is p.empty
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(unnamed) > len(free) or not {*unnamed}.isdisjoint(NO_FACTS):
        raise _no_facts(unnamed)
    return facts | dict(zip(unnamed, free, strict=False))


def _no_facts(names: list[str]) -> ConfigError:
    return ConfigError(
        f"the task takes {', '.join(names)}; possible are {', '.join(FACTS)}, "
        "and names of your own for the outputs and the batch alone"
    )


def example_values(task: Task, **facts: Any) -> tuple[Values, jax.Array | None]:
    """Computes a task's values and weights, each [B]; None if all weigh the same.

    `facts` are those of `FACTS`. A value [B, ...] is averaged over its other dimensions
    with weights of the same shape, if there are any; [] counts for each example. Raises
    `ConfigError` for a value of another shape, no `loss`, or no dictionary.
    """
    parameters, rows = facts_of(task.values), len(facts["mask"])
    names = [*facts["batch"]] if isinstance(facts["batch"], dict) else []
    if task.labels != "any" and "labels" not in names:
        raise _no_labels(task, names)
    if names and any(parameters.get(name) == "batch" for name in OF_A_BATCH):
        raise _no_labels_alone(parameters, names)
    values = task.values(**{name: facts[fact] for name, fact in parameters.items()})
    if not isinstance(values, dict) or not all(isinstance(x, str) for x in values):
        raise _no_dictionary(values)
    if "loss" not in values:
        raise ConfigError(f"the task returns {', '.join(values)} and no 'loss'")
    if taken := [name for name in OF_THE_STEP if name in values]:
        raise taken_name("returns", taken[0])
    for name, value in values.items():
        if (shape := getattr(value, "shape", None)) != (rows,):
            shape = _check_shape(name, value, facts["batch"], rows)
        if not shape and "mask" not in parameters.values() and not facts["is_training"]:
            raise _unmasked(name, rows)
    values = dict(values)
    if (weights := values.pop(WEIGHT, None)) is not None:
        # Weights are data: they have no gradient.
        weights = jax.lax.stop_gradient(jnp.asarray(weights, jnp.float32))
        # A fault, which guards name. Why: docs/decisions/training.md#refused-values
        weights = jnp.where(weights >= 0, weights, jnp.nan)
        weights = jnp.broadcast_to(weights, weights.shape or (rows,))
    averages = {k: jnp.asarray(x) for k, x in values.items()}
    fits = not facts["is_training"] or averages["loss"].dtype.kind not in "iub"
    if not fits or any(map(jnp.iscomplexobj, averages.values())):
        _refuse_dtypes({k: x.dtype for k, x in averages.items()})
    for name in [k for k, x in averages.items() if x.shape != (rows,)]:
        averages[name] = _per_example(name, averages[name], weights, rows)
    if weights is not None:
        weights = jnp.sum(weights.reshape(rows, -1), axis=1)
    return averages, weights


def numbers_of(derived: dict[str, Any]) -> Averages:
    """Converts what a task derives; `ConfigError` for other than numbers by name."""
    try:
        return {name: float(value) for name, value in derived.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _no_numbers(derived) from error


def _no_numbers(derived: Any) -> ConfigError:
    return ConfigError(
        f"the task derives {derived!r:.80}; it must return a dictionary of numbers "
        "by name, each of them one number"
    )


def _no_labels(task: Task, names: list[str]) -> ConfigError:
    return ConfigError(
        f"the task takes labels ({task.labels}), and the batches of the data have "
        f"{', '.join(names) or 'arrays without names'} alone"
    )


def _unmasked(name: str, rows: int) -> ConfigError:
    return ConfigError(
        f"the task's {name!r} is one number for {counted(rows, 'examples')}; return "
        "one for each, [B], without a mean over them (of code that stays: its jax.vmap "
        "over batches of one example, or the model returns its loss, and the task is "
        "own_loss). A number of a whole batch counts what may be padding in "
        "evaluation: let it take `mask`, bool [B], False there (a constant may leave "
        "it unused; on several devices, what the model makes of a batch counts "
        "padding, and there is none if eval batches divide the set)"
    )


def _no_labels_alone(parameters: dict[str, str], names: list[str]) -> ConfigError:
    return ConfigError(
        f"the task takes {', '.join(parameters)}, and what it takes beside the outputs "
        f"is the whole batch, a dictionary of {', '.join(names)}: let it take `batch`, "
        "and use batch['labels']"
    )


def _no_dictionary(values: Any) -> ConfigError:
    is_array = isinstance(values, jax.Array | np.ndarray)
    kind = f"an array {list(values.shape)}" if is_array else type(values).__name__
    return ConfigError(
        f"the task returns {kind}; it must return a dictionary of "
        "per-example values [B], 'loss' among them: {'loss': ...}"
        + (", or the Task be named itself: module:TASK" * isinstance(values, Task))
    )


def _refuse_dtypes(dtypes: dict[str, Any]) -> None:
    name = next((k for k, x in dtypes.items() if x.kind == "c"), "loss")
    raise ConfigError(
        f"the task's {name!r} is {dtypes[name]}; values are real, and a loss is of a "
        "floating dtype: a number of mistakes has no gradient"
    )


def check_number(whose: str, name: str, value: Any) -> None:
    """Raises `ConfigError` for a value of a user's function that is no array."""
    if not isinstance(value, NUMBERS):
        raise ConfigError(
            f"the {whose}'s {name!r} is a {type(value).__name__}; possible are arrays "
            "and numbers: of several give each a name of its own"
        )


def _check_shape(name: str, value: Any, batch: Any, rows: int) -> tuple[int, ...]:
    """Shape of a value; `ConfigError` if not of examples, tokens or the batch."""
    check_number("task", name, value)
    shape = jnp.shape(value)
    # Outputs [B, 1] minus labels [B] broadcast to [B, B]: a meaningless mean, also
    # where inputs are B wide.
    # Why: docs/decisions/house.md#task-values
    is_square = len(shape) > 1 and shape[1] == rows
    leaves = jax.tree.leaves(_beside_inputs(batch) if is_square else batch)
    of_batch = {jnp.shape(x)[: None if is_square else len(shape)] for x in leaves}
    if shape not in {(), (rows,)} | of_batch:
        pairs = ", which may be all pairs of them" if is_square else ""
        raise ConfigError(
            f"the task's {name!r} has shape {list(shape)} for "
            f"{counted(rows, 'examples')}{pairs}; each value must be one number per "
            f"example: [{rows}], per token, as an array of the batch has them, or one "
            "for the batch: []; take the mean over other dimensions"
        )
    return shape


def _beside_inputs(batch: Any) -> Any:
    """Arrays beside the inputs; all of a batch where there are no others."""
    is_named = isinstance(batch, dict) and "inputs" in batch
    beside = {k: x for k, x in batch.items() if k != "inputs"} if is_named else {}
    return beside or batch


def _per_example(name: str, value: Any, weights: Any, rows: int) -> jax.Array:
    if value.ndim < 2:
        return jnp.broadcast_to(value, (rows,))
    if weights is None or weights.ndim < 2:
        return jnp.mean(value.reshape(rows, -1), axis=1)
    if value.shape != weights.shape:
        raise ConfigError(
            f"the task's {name!r} has shape {list(value.shape)}, and its {WEIGHT!r} "
            f"{list(weights.shape)}; possible are [{rows}], and the shape of the values"
        )
    sums = weighted_sum(value, weights, axis=tuple(range(1, value.ndim)))
    return divide(sums, jnp.sum(weights.reshape(rows, -1), axis=1))


def weighted_sum(values: jax.Array, weights: jax.Array, axis: Any = None) -> jax.Array:
    """Sums weighted values; one of weight 0 may be NaN, but not its gradient."""
    return jnp.sum(jnp.where(weights == 0, 0, values * weights), axis=axis)


def divide(sums: Any, weight: jax.Array) -> Any:
    """Divides sums by a weight; 0 where nothing counts, and NaN where it is NaN."""
    return jax.tree.map(lambda x: x / jnp.where(weight == 0, 1, weight), sums)


classification = Task(losses.classification, "classes", confusion, macro_f1)
regression = Task(losses.regression, "numbers")
own_loss = Task(losses.own_loss, whole_batch=True)

TASKS: dict[str, Task | str] = {
    "classification": classification,
    "language_model": "haiku_text.tasks:language_model",
    "own_loss": own_loss,
    "regression": regression,
}
