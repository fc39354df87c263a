"""Features of a frozen trunk: computed once, into files that training maps.

A folder of them is named by a hash of all that they are made of: program, platform,
frozen parameters, network state, inputs. Shapes: N examples, B in a batch, W words of
each.
"""

import dataclasses
import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import haiku as hk
import jax
import numpy as np

from haiku_template.data.buckets import BucketedDataset, BucketedEvaluationSet
from haiku_template.data.dataset import ArrayDataset, Batch, EvaluationSet
from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning.adapters import fingerprint
from haiku_template.finetuning.cut import Cut, Model, digest, find
from haiku_template.models.forms import inputs_of
from haiku_template.params import flatten, unflatten
from haiku_template.pretrained.writing import new_folder

logger = logging.getLogger(__name__)

ARRAYS = (ArrayDataset, EvaluationSet)
NO_BATCH = {"outputs", "mask", "is_training"}  # What a task may take beside it.
ALIKE, HALF_ALIKE = 1e-4, 0.05  # Of the largest feature: more than rounding makes.
DIGEST = hashlib.sha256().digest_size  # Of a file of words, at its end.
BUCKETS = (BucketedDataset, BucketedEvaluationSet)


@dataclasses.dataclass(frozen=True)
class InOrder:
    """Each example of a set once, whatever training does with it; texts by length."""

    dataset: Any
    batch_size: int

    @functools.cached_property
    def order(self) -> np.ndarray:
        """Number of each example in the set: int64 [N]."""
        if isinstance(self.dataset, ARRAYS):
            return np.arange(len(self.dataset.inputs))
        return np.argsort(self.dataset.examples.sizes, kind="stable")

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each example once."""
        return -(-len(self.order) // self.batch_size)

    def rows(self, index: int) -> np.ndarray:
        """Numbers of the examples of one batch: int64 [B]."""
        return self.order[index * self.batch_size :][: self.batch_size]

    def batch(self, index: int) -> Batch:
        """Makes one batch."""
        rows, dataset = self.rows(index), self.dataset
        if isinstance(dataset, ARRAYS):
            return {"inputs": dataset.inputs[rows]}
        longest = np.searchsorted(dataset.lengths, dataset.examples.sizes[rows[-1]])
        return dataset.examples.batch(rows, dataset.lengths[longest])


@dataclasses.dataclass(frozen=True, eq=False)
class Words:
    """Examples of a set in buckets, with words [N, W] in place of their inputs."""

    examples: Any
    words: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Length of each example: int64 [N]."""
        return self.examples.sizes

    def batch(self, rows: np.ndarray, length: int) -> Batch:
        """Makes a batch of the examples `rows`."""
        batch = self.examples.batch(rows, length)
        others = batch if isinstance(batch, dict) else {}
        return others | {"inputs": self.words[rows]}


def from_features(
    trainer: Any, model_init: Callable[[], tuple[hk.Params, hk.State]], inputs: Any
) -> tuple[Any, str]:
    """Makes the experiment of a trainer whose steps begin at its features.

    These are read from a folder in `finetuning.features_dir`, or computed first.
    `model_init` makes the model's first parameters and state; `inputs` are shapes of a
    batch's. Returns the SHA-256 of all frozen parameters, too.

    Raises:
      ConfigError: there are no such features, or they would change from step to step.
      StorageError: they cannot be written or read.
    """
    experiment, devices = trainer.experiment, trainer.devices
    data, tuning = experiment.data, experiment.finetuning
    sets = {"train": data.train, "eval": data.evaluation}
    sets |= {f"eval_{i}": x for i, x in enumerate(data.evaluations.values())}
    sets = {name: x for name, x in sets.items() if x is not None}
    _check(experiment, trainer.task, sets)
    cut = _find(trainer, model_init, inputs)
    probe = _probe(experiment, trainer.recipe.model, cut).trainer(devices)
    state = probe.init()
    ordered = {name: InOrder(x, trainer.batch_size) for name, x in sets.items()}
    base, own = (fingerprint(devices, x) for x in (state.frozen, state.net_state))
    program = _program(probe, cut.model, inputs)
    folder = Path(tuning.features_dir)
    whole, form = trainer.task.whole_batch, "digest at the end"
    folder /= _key(ordered, whole, program, devices.platform, base, own, form)
    if not folder.is_dir():
        half = trainer.recipe.precision.policy.compute_dtype != np.float32
        for x in ordered.values():
            alike = HALF_ALIKE if half else ALIKE
            _check_alone(cut, functools.partial(probe.predict, state), x, alike)
        found = {name: probe.predict(state, x) for name, x in ordered.items()}
        _write(folder, ordered, found, cut)
    words = [_map(folder / f"{k}.npy", len(x.order), cut) for k, x in ordered.items()]
    made = dataclasses.replace(
        experiment,
        model=_left(cut, model_init),
        task=_without_inputs(trainer.task)._replace(whole_batch=False),
        data=_with_words(data, words),
        why_on_host=f"as features of {tuning.features}, mapped from {folder}",
        flops_per_token=None,
        finetuning=tuning._replace(features=None, adapters=None),
        init_from=_source(devices, cut, state),
    )
    return made, base


def _check(experiment: Any, task: Any, sets: dict[str, Any]) -> None:
    """Raises `ConfigError` for an experiment that cannot begin at features."""
    what = f"config.finetuning.features={experiment.finetuning.features!r}"
    if experiment.step is not None:
        raise ConfigError(f"{what} is for steps of a model, and this one is custom")
    if "params" in inspect.signature(task.values).parameters:
        raise ConfigError(
            f"{what}: the task takes params, and those of the trunk are not there"
        )
    for name, dataset in sets.items():
        if getattr(dataset, "augment", None) is not None:
            raise ConfigError(
                f"{what}: the training data are augmented, so that their features are "
                "others in each epoch; augment nothing, or leave the key out"
            )
        if not isinstance(dataset, ARRAYS + BUCKETS):
            raise ConfigError(
                f"{what} is for sets of numbered examples: arrays, JSON-lines and what "
                f"`bucketed` makes; the batches of the {name} set "
                f"({type(dataset).__name__}) are functions of the step alone"
            )


def _check_alone(
    cut: Cut, predict: Callable[..., Any], dataset: InOrder, alike: float
) -> None:
    """Raises `ConfigError` if an example has other features beside others.

    It is the last of a batch, and then in all rows of one of the longest, where its
    features may differ by `alike`; and beside NaN, which shows any use of others.
    """
    what, first = f"config.finetuning.features={cut.model.pattern!r}", dataset.rows(0)
    rows, of, batch = first[-1:].repeat(len(first)), dataset.dataset, dataset.batch(0)
    if isinstance(of, ARRAYS):
        alone = {"inputs": of.inputs[rows]}
    else:
        alone = of.examples.batch(rows, of.lengths[-1])
    three = [batch, alone, jax.tree.map(_beside_nan, batch)].__getitem__
    words, others, beside = predict(SimpleNamespace(num_batches=3, batch=three))
    if words.shape != others.shape:
        raise ConfigError(
            f"{what}: the features of examples of another length are of another size; "
            "name a module behind what pools them"
        )
    others = np.concatenate([others, beside[-1:]])
    for one, other in zip(cut.arrays(words[-1:]), cut.arrays(others), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (one, other))
        size = np.abs(a[np.isfinite(a)]).max(initial=0)
        if not np.allclose(a, b, alike, alike * size, equal_nan=True):
            raise ConfigError(
                f"{what}: the features of an example depend on others in its batch, on "
                "its place or on padding, and would change from step to step; name a "
                "module before what mixes them, such as a norm over the batch"
            )


def _beside_nan(x: np.ndarray) -> np.ndarray:
    """Replaces all rows but the last by NaN, in arrays that may hold it."""
    if not np.issubdtype(x.dtype, np.inexact):
        return x
    return np.concatenate([np.full_like(x[:-1], np.nan), x[-1:]])


def _find(trainer: Any, model_init: Callable[[], Any], inputs: Any) -> Cut:
    recipe, plan, devices = trainer.recipe, trainer.plan, trainer.devices
    pattern = trainer.experiment.finetuning.features
    params, net_state = devices.abstract(model_init)
    cast = recipe.precision.policy.cast_to_compute
    seen = jax.eval_shape(lambda x: cast(recipe.preprocess(x)), inputs)
    shapes = jax.eval_shape(cast, params), net_state, seen
    where = pattern, plan.trained | plan.adapted, devices.axis_name
    with recipe.precision.norms_in_float32():
        cut = find(Model(recipe.model.apply, *shapes, *where))
    if cut.changes:
        logger.warning(
            "config.finetuning.features=%r: through the trunk, training would compute "
            "other features than evaluation does (dropout, batch statistics); this run "
            "has those of evaluation",
            pattern,
        )
    return cut


def _probe(experiment: Any, model: hk.TransformedWithState, cut: Cut) -> Any:
    """Makes the experiment whose outputs are features, as words [B, W]."""

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        return cut.compute(params, state, rng, inputs, is_training), state

    return dataclasses.replace(
        experiment,
        model=hk.TransformedWithState(model.init, apply),
        finetuning=experiment.finetuning._replace(features=None),
        placement="host",
    )


def _program(probe: Any, model: Model, inputs: Any) -> str:
    """SHA-256 of the program that computes words, from inputs as the data have them."""
    state, rows = probe.abstract, jax.tree.leaves(inputs)[0].shape[:1]
    placed = inputs, jax.ShapeDtypeStruct(rows, np.int32)
    step = probe.functions(model.axis_name).predict_step
    return digest(model.trace(step, state.variables(), state.frozen, placed)[0])


def _left(cut: Cut, model_init: Callable[[], Any]) -> hk.TransformedWithState:
    """Makes the model of words [B, W], without the parameters that are absent."""

    def init(rng: jax.Array, inputs: Any, is_training: bool) -> Any:
        del rng, inputs, is_training  # They are the whole model's.
        params, net_state = model_init()
        leaves = {k: x for k, x in flatten(params).items() if k not in cut.absent}
        return unflatten(leaves), net_state

    def apply(params: Any, state: Any, rng: Any, inputs: Any, is_training: bool) -> Any:
        return cut.left(params, state, rng, inputs, is_training)

    return hk.TransformedWithState(init, apply)


def _source(devices: Any, cut: Cut, state: Any) -> Callable[..., Any]:
    """Makes the source of what a first state has, from copies of it on the host."""
    frozen = {k: x for k, x in flatten(state.frozen).items() if k not in cut.absent}
    kept = devices.fetch((flatten(state.params), frozen, state.net_state))

    def of_host(shapes: hk.Params, skip: Any, net_state: Any) -> Any:
        del shapes, skip
        if net_state is None:  # Frozen parameters are asked for.
            return devices.replicate(kept[1]), None
        return devices.replicate(kept[0]), devices.replicate(kept[2])

    return of_host


def _without_inputs(task: Any) -> Any:
    """Makes a task that cannot read the inputs of a batch: they are words."""
    if set(inspect.signature(task.values).parameters) <= NO_BATCH:
        return task

    class WithoutInputs(dict):
        def __missing__(self, key: str) -> None:
            raise ConfigError(
                f"the task reads {key} of a batch, and with config.finetuning.features "
                "the inputs are not there, or never were"
            )

    def hide(value: Any) -> Any:
        is_batch = isinstance(value, dict) and "inputs" in value
        if not is_batch:
            return value
        return WithoutInputs({k: x for k, x in value.items() if k != "inputs"})

    @functools.wraps(task.values)
    def values(*args: Any, **kwargs: Any) -> Any:
        return task.values(*map(hide, args), **{k: hide(x) for k, x in kwargs.items()})

    def count(outputs: Any, batch: Any, mask: Any) -> Any:
        return task.count(outputs, hide(batch), mask)

    return task._replace(values=values, count=count)


def _with_words(data: Any, words: list[np.ndarray]) -> Any:
    """Puts words in the place of the inputs of each set, in order."""
    each = iter(words)

    def replaced(dataset: Any) -> Any:
        if isinstance(dataset, ARRAYS):
            return dataclasses.replace(dataset, inputs=next(each))
        examples = Words(dataset.examples, next(each))
        return dataclasses.replace(dataset, examples=examples)

    as_it_is = type(data)._field_defaults["preprocess"]
    parts = {"train": replaced(data.train), "preprocess": as_it_is}
    if data.evaluation is not None:
        parts["evaluation"] = replaced(data.evaluation)
    parts["evaluations"] = {k: replaced(x) for k, x in data.evaluations.items()}
    return data._replace(**parts)


def _key(ordered: dict[str, InOrder], whole: bool, *facts: str) -> str:
    """Name of a folder: a hash of the facts and of all inputs."""
    found = hashlib.sha256(" ".join(facts).encode())
    for name, dataset in ordered.items():
        for index in range(dataset.num_batches):
            inputs = inputs_of(dataset.batch(index), whole)
            for path, leaf in flatten(inputs).items():
                described = f"{name} {path} {leaf.dtype}{list(leaf.shape)}\n"
                found.update(described.encode())
                found.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return found.hexdigest()[:16]


def _write(
    folder: Path, ordered: dict[str, InOrder], found: dict[str, Any], cut: Cut
) -> None:
    """Writes a folder of words, whole or not at all."""
    count = sum(len(dataset.order) for dataset in ordered.values())
    logger.warning("%s: features of %d examples are computed", folder, count)
    try:
        with new_folder(folder) as partial:
            for name, dataset in ordered.items():
                _write_words(partial / f"{name}.npy", dataset, found[name], cut)
    except (ConfigError, StorageError):
        if not folder.is_dir():  # Else another run wrote the same.
            raise


def _write_words(file: Path, dataset: InOrder, found: Any, cut: Cut) -> None:
    """Writes rows to their places: a mapping would crash where a disk is full."""
    header = {"descr": cut.dtype.str, "fortran_order": False}
    header["shape"] = len(dataset.order), cut.width
    with file.open("w+b") as opened:
        np.lib.format.write_array_header_1_0(opened, header)
        begin, size = opened.tell(), cut.width * cut.dtype.itemsize
        for index, words in enumerate(found):
            rows = dataset.rows(index)
            ends = np.flatnonzero(np.diff(rows) != 1) + 1
            for run in np.split(np.arange(len(rows)), ends):
                opened.seek(begin + int(rows[run[0]]) * size)
                opened.write(np.ascontiguousarray(words[run]))
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").digest()
        opened.write(digest)  # At the end, where it was read to.
        opened.flush()
        os.fsync(opened.fileno())


def _map(file: Path, rows: int, cut: Cut) -> np.ndarray:
    """Maps words [N, W]; raises `StorageError` unless all are there."""
    try:
        words = np.load(file, mmap_mode="r", allow_pickle=False)
        if words.shape != (rows, cut.width) or words.dtype != cut.dtype:
            raise ValueError(f"it holds {words.dtype}{list(words.shape)}")
        _check_digest(file)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"the features in {file} cannot be read ({error}); remove {file.parent}, "
            "and they are computed again"
        ) from error
    return words.view(np.ndarray)  # Slicing numpy.memmap is several times slower.


def _check_digest(file: Path) -> None:
    """Raises `ValueError` unless a file ends with the digest of all before."""
    digest, left = hashlib.sha256(), file.stat().st_size - DIGEST
    with file.open("rb") as opened:
        while left > 0:
            digest.update(part := opened.read(min(left, 2**20)))
            left -= len(part) or left
        if opened.read() != digest.digest():
            raise ValueError("its digest is another")
