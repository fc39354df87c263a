"""Verification: a run's first loss or outputs beside a publisher's."""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from haiku_template.errors import ConfigError, some
from haiku_template.params import flatten, in_double
from haiku_template.training import Trainer
from haiku_template.training.state import TrainState

logger = logging.getLogger(__name__)
# Of models with norms over the batch, and the like.
OF_STATE = (
    "; the model computes as in evaluation, with is_training=False and the averages of "
    "its network state, and a function that computes with True does not"
)


class Comparison(NamedTuple):
    """A leaf of both, where they are furthest apart."""

    name: str
    here: complex  # Or real.
    there: complex
    place: tuple[int, ...]
    difference: float
    largest: float  # Of the values there.

    def __str__(self) -> str:
        place = f" at {[*map(int, self.place)]}" * bool(self.place)
        return (
            f"{self.name}: {self.here:.8g} here and {self.there:.8g} there, a "
            f"difference of {self.difference:.2g}, the largest{place}; values go up to "
            f"{self.largest:.4g}"
        )


def verify(  # Why: docs/decisions/models.md#verify
    trainer: Trainer,
    state: TrainState,
    function: Callable[[Any, Any, Any], Any],
    tolerance: float = 1e-5,
) -> Iterator[Comparison]:
    """Compares a model with `function(params, net_state, batch)`, without training.

    Both get the parameters of `state`, the function float32 for those that
    `config.finetuning.base_dtype` stores otherwise, and the first batch of the training
    data, as the data have it; the model computes as in evaluation, without dropout.
    Where the function returns one number, [], it is compared with the loss, else with
    the outputs, leaf by leaf, without those of a whole batch. Network state is not
    compared: in evaluation it stays as it is.

    Yields each comparison. Raises `ConfigError` at the end for a difference of more
    than `tolerance` times the largest value there; or for other names or shapes.
    """
    if trainer.experiment.model is None:
        raise ConfigError("the experiment has no model, and nothing to compare")
    batch = trainer.experiment.data.train.batch(0)
    params, net_state = jax.tree.map(trainer.devices.fetch, trainer.merged(state))
    if trainer.recipe.plan.dtype != "float32":  # Frozen ones, or some, are bfloat16.
        params = jax.tree.map(
            lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, params
        )
    there = jax.tree.map(np.asarray, function(params, net_state, batch))
    if texts := [x for x in jax.tree.leaves(there) if x.dtype.kind in "OSUMm"]:
        raise ConfigError(f"the function returns {texts[0]!r:.60}, and no numbers")
    _refuse_state(there, net_state)
    one = SimpleNamespace(num_batches=1, batch=lambda index: batch)
    if isinstance(there, np.ndarray) and there.shape == ():
        there = {"loss": there}
        here = {"loss": trainer.evaluate(state, one)["eval/loss"]}
    else:
        (here,) = trainer.predict(state, one)
    here, there = flatten(here, is_leaf=lambda x: x is None), flatten(there)
    absent = {name for name, x in here.items() if x is None}
    if of_batch := sorted(absent & {*trainer.batch_outputs}):
        logger.warning("not compared, as of a whole batch: %s", some(of_batch))
    trees = ({k: x for k, x in y.items() if k not in absent} for y in (here, there))
    comparisons = list(_compare(*trees))
    yield from comparisons
    wrong = [x for x in comparisons if not x.difference <= tolerance * (x.largest or 1)]
    if wrong:
        worst = max(wrong, key=lambda x: x.difference / (x.largest or 1))
        raise ConfigError(
            f"{len(wrong)} of {len(comparisons)} differ by more than {tolerance:g} of "
            f"their largest value; most of all {worst}{OF_STATE * bool(net_state)}"
        )


def _refuse_state(there: Any, net_state: Any) -> None:
    """Raises `ConfigError` for a pair whose second is like the network state."""
    is_pair = isinstance(there, tuple | list) and len(there) == 2
    shapes = _shapes(flatten(net_state))
    if is_pair and net_state and _shapes(flatten(there[1])) == shapes:
        raise ConfigError(
            f"the function returns a pair, and the second has the network state's "
            f"{shapes}, which is not compared: in evaluation it stays as it is; "
            "possible is the first alone"
        )


def _compare(here: dict[str, Any], there: dict[str, Any]) -> Iterator[Comparison]:
    if _shapes(here) != _shapes(there):
        raise ConfigError(
            f"the model returns {_shapes(here)}, and the function {_shapes(there)}; "
            "possible are the same names and shapes, or one number, the loss of the "
            "batch"
        )
    for name in here:
        a, b = (in_double(x[name]) for x in (here, there))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0, np.nan_to_num(np.abs(a - b), nan=np.inf))
        place = np.unravel_index(np.argmax(apart), apart.shape)
        yield Comparison(
            name=name or "outputs",
            here=a[place].item(),
            there=b[place].item(),
            place=place,
            difference=apart[place],
            largest=np.abs(b[np.isfinite(b)]).max(initial=0),
        )


def _shapes(tree: dict[str, Any]) -> str:
    leaves = sorted(tree.items())
    return ", ".join(f"{k or 'outputs'} {[*np.shape(x)]}" for k, x in leaves)
