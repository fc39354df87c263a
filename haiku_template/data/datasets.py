"""Data sets by name: a table of functions, and any function of your own.

A data set function takes a `BatchSpec` and the keys of `config.data` except `name`,
and returns `Data`. It imports no JAX and downloads nothing.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.data import dataset, files, images
from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.errors import ConfigError, counted
from haiku_template.registry import make

MANY_CLASSES = 10**6  # More than any classifier has; one wrong label shows more.


def from_split(
    split: files.Split,
    spec: BatchSpec,
    *,
    num_classes: int | None = None,  # As many as the training labels show.
    preprocess: Callable[[Any], Any] | None = None,  # None: bytes stay bytes.
    augment: Callable[[np.ndarray, np.random.Generator], np.ndarray] | None = None,
    where: str = "the data set",  # In errors.
) -> Data:
    """Makes `Data` of arrays; without labels, an output is as large as an input.

    Inputs are an array or a dictionary, a tuple or another tree of arrays, which the
    model takes; so may labels be, for a task that takes any. `preprocess` is of inputs
    on the device, such as `images.scale_pixels`; `augment` of training inputs on the
    host. Raises `ConfigError` for an empty part, parts of different shapes or inputs of
    different dtypes, labels that are missing, outside the classes or of the wrong type;
    it names the part.
    """
    train_part, test_part = f"the training part of {where}", f"the test part of {where}"
    train = dataset.arrays_by_name(split.x_train, split.y_train)
    test = dataset.arrays_by_name(split.x_test, split.y_test)
    train = dataset.check_arrays(train, train_part)
    test = dataset.check_arrays(test, test_part)
    if (split.y_train is None) != (split.y_test is None):
        raise ConfigError(f"one part of {where} has labels; give both, or neither")
    if train.keys() != test.keys():
        raise ConfigError(
            f"{train_part} has {', '.join(train)}, and the test part "
            f"{', '.join(test)}; they must agree"
        )
    for name, array in train.items():
        a, b = list(array.shape[1:]), list(test[name].shape[1:])
        if a != b:
            raise ConfigError(
                f"an example's {name} in {train_part} has shape {a} and in the test "
                f"part {b}; they must agree"
            )
        a, b = array.dtype, test[name].dtype
        if a != b and name.startswith("inputs"):
            raise ConfigError(
                f"the {name} in {train_part} are {a} and in the test part {b}, which a "
                "model would take for other values; they must agree"
            )
    num_outputs, is_classes = _count_outputs(
        train, spec.labels, num_classes, train_part
    )
    if is_classes:
        check_classes(test["labels"], num_outputs, test_part)
    elif num_classes is not None:
        raise ConfigError(
            f"num_classes={num_classes}, and the labels of {where} are no classes, one "
            "whole number an example; leave it out"
        )
    data = Data(
        dataset.ArrayDataset(split.x_train, split.y_train, spec, augment),
        dataset.EvaluationSet(split.x_test, split.y_test, spec.batch_size),
        num_outputs,
    )
    # Why: docs/decisions/data.md#inputs
    return data._replace(preprocess=preprocess) if preprocess else data


def _count_outputs(
    arrays: dict[str, Any], kind: str, num_classes: int | None, where: str
) -> tuple[int, bool]:
    """Number of outputs for these leaves, and True if they are classes."""
    is_whole = isinstance(num_classes, int | np.integer) and num_classes is not True
    if num_classes is not None and not (is_whole and num_classes > 0):
        raise ConfigError(
            f"num_classes={num_classes!r} for {where}; possible is a whole number from "
            "1, and None for as many as the labels show"
        )
    labels, several = arrays.get("labels"), arrays.keys() - {"labels"}
    targets = [x for x in several if x.startswith("labels/")]
    if labels is None:
        if kind != "any":
            reason = f"labels {', '.join(sorted(targets))}" if targets else "no labels"
            raise ConfigError(
                f"{where} has {reason}, and the task needs {kind}; a task of your own "
                'needs none, or takes several (of a script, BatchSpec(labels="any"))'
            )
        return sum(math.prod(arrays[x].shape[1:]) for x in targets or several), False
    # Of a task that takes any, one whole number for each example is its class.
    may_be = labels.ndim == 1 and labels.dtype.kind in "iu"
    if kind == "any" and may_be:
        try:
            return check_classes(labels, num_classes, where), True
        except ConfigError as error:
            hint = 'Task(..., labels="numbers"), or BatchSpec in a script'
            raise ConfigError(f"{error}; if they are no classes: {hint}") from None
    if kind == "tokens" and labels.ndim > 1:  # Else the task says what it takes.
        raise ConfigError(
            f"{where} is arrays, and the task takes tokens, whose vocabulary they do "
            'not tell; give spec._replace(labels="any"), and the model its vocab_size'
        )
    if kind not in ("any", "numbers"):
        return check_classes(labels, num_classes, where), True
    if labels.dtype.kind not in "fiub":
        raise ConfigError(
            f"{where} has labels of type {labels.dtype}; regression takes numbers"
        )
    return math.prod(labels.shape[1:]), False


def check_classes(labels: np.ndarray, num_classes: int | None, where: str) -> int:
    """Number of classes, by default one more than the largest label."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"{where} has labels of type {labels.dtype} and shape "
            f"{list(labels.shape)}; classification takes one whole number an example"
        )
    classes = num_classes or max(int(labels.max()) + 1, 1)
    if not num_classes and classes > MANY_CLASSES:
        raise ConfigError(
            f"{where} has labels up to {classes - 1}; if there are so many classes, "
            "say so with --config.data.num_classes"
        )
    if len(outside := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise ConfigError(
            f"{where} has {counted(len(outside), 'labels')} outside the "
            f"{counted(classes, 'classes')} (0 to {classes - 1}); the first is "
            f"{labels[outside[0]]}, of example {outside[0]}"
        )
    return classes


def digits(spec: BatchSpec) -> Data:
    """scikit-learn's 1,797 handwritten digits, 8 x 8: 1,437 to train on, 360 to test.

    Source: https://archive.ics.uci.edu/dataset/80; a file of scikit-learn, unimported.
    """
    if (package := importlib.util.find_spec("sklearn")) is None:
        raise ConfigError(
            "the digits data set comes with scikit-learn, which is not installed: "
            "pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, delimiter=",")
    order = np.random.default_rng(0).permutation(len(table))
    x = (table[order, :-1] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    y = table[order, -1].astype(np.int32)
    return Data(
        dataset.ArrayDataset(x[:1437], y[:1437], spec),
        dataset.EvaluationSet(x[1437:], y[1437:], spec.batch_size),
        1 if spec.labels == "numbers" else 10,
    )


def _from_file(
    name: str,
    description: str,
    read: Callable[[Path], files.Split],
    spec: BatchSpec,
    *,
    path: str | None = None,
    num_classes: int | None = None,
    scale_pixels: bool = False,  # Bytes to [0, 1], as of images.
) -> Data:
    """Reads a file of arrays; `name`, `description` and `read` are of its kind."""
    return from_split(
        read(files.data_path(path, name, description)),
        spec,
        num_classes=num_classes,
        preprocess=images.scale_pixels if scale_pixels else None,
        where=str(path),
    )


def _ten_classes(spec: BatchSpec) -> int | None:
    return None if spec.labels == "numbers" else 10


def mnist(spec: BatchSpec, *, path: str | None = None) -> Data:
    """MNIST or Fashion-MNIST: 60,000 images 28 x 28 to train on, 10,000 to test."""
    description = "the directory with MNIST's or Fashion-MNIST's four idx files"
    read = partial(_from_file, "mnist", description, files.read_mnist)
    return read(spec, path=path, num_classes=_ten_classes(spec), scale_pixels=True)


def cifar10(
    spec: BatchSpec, *, path: str | None = None, crop_and_flip: bool = False
) -> Data:
    """CIFAR-10: 50,000 images 32 x 32 to train on, 10,000 to test."""
    description = "the directory with CIFAR-10's binary files"
    return from_split(
        files.read_cifar10(files.data_path(path, "cifar10", description)),
        spec,
        num_classes=_ten_classes(spec),
        preprocess=images.standardize_cifar10,
        augment=images.crop_and_flip if crop_and_flip else None,
        where=str(path),
    )


def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the keys of `config.data` that are the run's, and not its function's."""
    return {k: x for k, x in values.items() if k not in ("placement", "workers")}


def by_name(values: Mapping[str, Any], spec: BatchSpec) -> Data:
    """Makes `config.data`, or raises `ConfigError`, also for what is no `Data`."""
    data = make("data", arguments(values), DATASETS, spec)
    if not isinstance(data, Data):
        raise _no_data(values["name"], data)
    return data


def _no_data(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"config.data: {name} returned a {type(value).__name__}; it must return a "
        "haiku_template.data.Data, which from_split makes of arrays"
    )


DATASETS: dict[str, Callable[..., Data] | str] = {
    "digits": digits,
    "npz": partial(_from_file, "npz", "a .npz file", files.read_npz),
    "safetensors": partial(
        _from_file, "safetensors", "a .safetensors file", files.read_safetensors
    ),
    "npy": partial(_from_file, "npy", "a directory of .npy files", files.read_npy),
    "mnist": mnist,
    "cifar10": cifar10,
    "jsonl": "haiku_text.data:jsonl",
    "tokens": "haiku_text.data:tokens",
    "bytes": "haiku_text.data:byte_text",
}
