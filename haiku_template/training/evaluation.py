"""Exact evaluation: each example counts once, on any number of devices.

Shapes: B examples in one device's share of a batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.data import ahead
from haiku_template.devices import DeviceManager, check_host_batch, sum_over
from haiku_template.devices.transfer import detached, own_rows, pad_rows
from haiku_template.errors import ConfigError, PlacementError, counted, some
from haiku_template.models import plain_outputs
from haiku_template.models.forms import PerExample, inputs_of
from haiku_template.params import path_of
from haiku_template.training.feed import Prefetcher
from haiku_template.training.state import Recipe, Variables, split_seed
from haiku_template.training.tasks import Averages, Derive, example_values, weighted_sum

Alone = Callable[[], Any]  # Context to read a set in.
Placed = tuple[Any, Any]  # A batch, and the places of its rows in the set: int32 [B].
Sums = dict[str, Any]
EvalStep = Callable[..., Sums]


def pad(batch: Any, size: int, first: int = 0) -> Placed:
    """Pads a batch with zeros to `size` rows, if it has fewer.

    Beside it, as its names are the user's, are the places of its rows in the set, whose
    first is `first`: int32 [size], from 0 again after 2**31, negative for padding.
    """
    rows = num_rows(batch)
    size = max(size, rows)
    places = (np.arange(first, first + size) % 2**31).astype(np.int32)
    places[rows:] = ~places[rows:]
    return pad_rows(batch, size), places


def num_rows(batch: Any) -> int:
    """Counts the rows of a batch."""
    return len(jax.tree.leaves(batch)[0])


def add_up(
    devices: DeviceManager, eval_step: EvalStep, dataset: Any, size: int, alone: Alone
) -> Sums:
    """Sums `eval_step` over an evaluation set in float64, within a batch in float32."""
    padded, sums = _padded(dataset, size, alone), None
    cut = own_rows(devices.processes)
    make = lambda _: devices.shard(cut(next(padded)))  # noqa: E731
    with Prefetcher(make, range(dataset.num_batches)) as batches:
        for fetched in devices.fetch_each(map(eval_step, batches)):
            new = jax.tree.map(lambda x: np.asarray(x, np.float64), fetched)
            sums = new if sums is None else jax.tree.map(np.add, sums, new)
    return sums


def _padded(dataset: Any, size: int, alone: Alone) -> Iterator[Placed]:
    first = 0
    with ahead(dataset, 0, dataset.num_batches):
        for index in range(dataset.num_batches):
            with alone():
                batch = detached(dataset.batch(index))
            rows = check_host_batch(batch, f"evaluation batch {index}")
            yield pad(batch, size, first)
            first += rows


def placed_inputs(dataset: Any, whole_batch: bool, alone: Alone) -> Iterator[Placed]:
    """Yields what the model takes of each batch, and its rows' places: int32 [B].

    `whole_batch` is a task's, `alone` a context to read in; `ConfigError` if empty.
    """
    if dataset.num_batches < 1:
        raise ConfigError("there are no examples to predict: the set has no batch")
    for batch, places in _padded(dataset, 0, alone):
        yield inputs_of(batch, whole_batch), places


def padded_size(n: int, dataset: Any, of_batch: Sequence[str] = ()) -> int:
    """Rows of a padded batch: a multiple of n, of the devices; 0 with any `of_batch`.

    Raises `PlacementError` if it would be padded and may not, `ConfigError` if empty.
    """
    if dataset.num_batches < 1:
        raise _no_batch(dataset)
    rows = num_rows(dataset.batch(0))
    if of_batch and n > 1:
        _check_even(dataset, rows, n, of_batch)
    return 0 if of_batch else -(-rows // n) * n


def _no_batch(dataset: Any) -> ConfigError:
    return ConfigError(
        f"the evaluation set, a {type(dataset).__name__}, has num_batches="
        f"{dataset.num_batches}, and metrics are of one batch at least; give it "
        "examples, or train without: Data(evaluation=None)"
    )


def _check_even(dataset: Any, rows: int, n: int, of_batch: Sequence[str]) -> None:
    last = num_rows(dataset.batch(dataset.num_batches - 1))
    if rows % n or last % n:
        size = (dataset.num_batches - 1) * rows + last
        raise PlacementError(
            f"the evaluation set has {counted(size, 'examples')} in batches of {rows}, "
            f"the last of {last}, to be sharded over {n} devices; the model returns "
            f"{numbers_text(of_batch)} for a batch, in which padding would count: "
            f"possible are a batch size and a number of examples that {n} divides, or "
            "numbers for each example, [B]"
        )


def no_weight() -> ConfigError:
    """Error for a set of which no example counts."""
    return ConfigError(
        "no example of the evaluation set counts: each has an example_weight of 0, or "
        "a loss_mask without True, and metrics are averages over those that count"
    )


def numbers_text(of_batch: Sequence[str]) -> str:
    """Names the numbers of a whole batch of a model with a loss of its own."""
    names = [{"": "loss", "0": "loss"}.get(x, x.removeprefix("1/")) for x in of_batch]
    return f"one number ({some(names)})"


def summarize(sums: Sums, derive: Derive, prefix: str = "eval/") -> Averages:
    """Metrics of the sums of `add_up`, derived ones too; NaN where nothing counts."""
    weight = float(sums["weight"])
    averages = {
        name: float(value) / weight if weight else math.nan
        for name, value in sums["values"].items()
    }
    averages |= derive(averages, sums["counts"])
    return {prefix + name: value for name, value in averages.items()}


def make_eval_step(recipe: Recipe, forward: Callable[..., Any]) -> EvalStep:
    """Makes `eval_step(variables, frozen, (batch, places))`: a batch's sums.

    `variables` are (params, net_state, step), `places` is from `pad`. The seed and the
    place of a device's first row are the source of randomness.

    Sums over all devices: `values`, the task's values times the examples' weights;
    `weight`, these weights; `counts`, the task's.
    """

    def eval_step(variables: Variables, frozen: hk.Params, padded: Placed) -> Sums:
        batch, places = padded
        rngs = evaluation_rng(recipe, places), None
        facts, _ = forward(recipe, variables, frozen, batch, rngs, False)
        facts["mask"] = mask = places >= 0
        values, weights = example_values(recipe.task, **facts)
        weights = jnp.where(mask, jnp.float32(1) if weights is None else weights, 0)
        sums = {
            "values": {k: weighted_sum(v, weights) for k, v in values.items()},
            "weight": jnp.sum(weights),
            "counts": recipe.task.count(facts["outputs"], batch, weights > 0),
        }
        return sum_over(recipe.axis_name, sums)

    return eval_step


def make_predict_step(recipe: Recipe, forward: Callable[..., Any]) -> Callable:
    """Makes `predict_step(variables, frozen, (inputs, places))`: outputs [B, ...].

    Arguments and randomness are as in evaluation.
    """

    def predict_step(variables: Variables, frozen: hk.Params, inputs: Placed) -> Any:
        batch, rngs = {"inputs": inputs[0]}, (evaluation_rng(recipe, inputs[1]), None)
        facts, _ = forward(recipe, variables, frozen, batch, rngs, False)
        return plain_outputs(facts["outputs"])

    return predict_step


def per_example(predict_step: Callable, of_batch: Sequence[str]) -> Callable:
    """Wraps a prediction step: outputs of a whole batch, of these paths, are None.

    Padding would count in them. Its result raises `ConfigError` if no output remains.
    """

    def predict_rows(*args: Any) -> Any:
        outputs = predict_step(*args)
        leaves = jax.tree_util.tree_leaves_with_path(outputs)
        paths = (path_of(keys) for keys, _ in leaves)
        rows = jax.tree.map(lambda x: None if next(paths) in of_batch else x, outputs)
        if not jax.tree.leaves(rows):
            form = lambda x: list(x.shape) if hasattr(x, "shape") else type(x).__name__  # noqa: E731
            raise ConfigError(
                f"the model returns {jax.tree.map(form, outputs)} for a batch, and "
                "predictions are arrays of examples: let it return one with a row for "
                "each, [B, ...], such as the loss of each; a dataclass is registered "
                "with jax.tree_util.register_dataclass"
            )
        return rows

    return predict_rows


def evaluation_rng(recipe: Recipe, places: jax.Array) -> jax.Array:
    """PRNG key of examples at these places of their set, or one for each of them."""
    rng = split_seed(recipe.seed).evaluation
    if isinstance(recipe.model, PerExample):  # The same on any number of devices.
        return jax.vmap(jax.random.fold_in, (None, 0))(rng, places)
    return jax.random.fold_in(rng, places[0])
