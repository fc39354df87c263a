"""New examples for a finished run: files of arrays, tables, pictures, functions.

They take the place of an evaluation set, so that they have the shapes and dtypes of the
run's own batches; what differs is a `ConfigError`. Imports no JAX.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haiku_template.bounded import at_home, exists, is_dir
from haiku_template.data.dataset import (
    Data,
    Rows,
    check_memory,
    class_numbers,
    each_shape,
)
from haiku_template.data.datasets import check_classes
from haiku_template.data.files import check_names, read_with
from haiku_template.data.tables import OF_THE_LOSS, read_table
from haiku_template.data.trees import leaves_by_path, map_leaves, nested
from haiku_template.errors import ConfigError, need_package, some
from haiku_template.registry import check_takes, resolve

logger = logging.getLogger(__name__)
POSSIBLE = (
    "possible are .npy and .npz files, the tables .csv, .jsonl and .parquet, a folder "
    "of pictures, and a function as module:function"
)
TABLES = (".csv", ".jsonl", ".parquet")
# What others call the arrays of a .npz; those that were trained on are left out.
NAMES = {"x": "inputs", "x_test": "inputs", "y": "labels", "y_test": "labels"}
NAMES |= {"x_train": "", "y_train": ""}
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels.


class Examples(NamedTuple):
    """Examples as an evaluation set, and the file of each, if each has one."""

    dataset: Any
    files: tuple[str, ...] = ()


def read_examples(
    name: str, data: Data, batch_size: int, whole_batch: bool = False
) -> Examples:
    """Reads what `--inputs` names, for a run that was trained on `data`.

    `whole_batch` is its task's. Raises `ConfigError` for what cannot be read, or is not
    as the run's batches.
    """
    if not name:  # As of a shell's variable; Path("") is the current folder.
        raise ConfigError(f"--inputs= is empty; {POSSIBLE}")
    path = at_home(name)
    suffix = path.suffix.lower()
    if not exists(path) and ":" in name:
        function = resolve("--inputs", name, {})
        check_takes(f"--inputs={name!r}", function)
        return Examples(
            as_dataset(function(), data, batch_size, whole_batch=whole_batch)
        )
    if suffix in TABLES and data.read is not None:
        return Examples(data.read(path))
    like = each_shape(data.train)[0]
    if is_dir(path):
        if not (isinstance(like, Mapping) and hasattr(like.get("inputs"), "shape")):
            raise ConfigError(
                f"--inputs={path} holds pictures, one array, and a batch of the run "
                f"has {', '.join(leaves_by_path(like))}; possible are a .npz or a "
                "table with these names, and a function as module:function"
            )
        arrays, files = _read_pictures(path, like["inputs"], class_numbers(data))
        return Examples(as_dataset(arrays, data, batch_size, name), files)
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": lambda file: np.load(file, mmap_mode="r", allow_pickle=False),
        ".npz": lambda file: _read_npz(file, like),
        **dict.fromkeys(
            TABLES, lambda file: read_table(file, like, data, taken(like, whole_batch))
        ),
    }
    if suffix not in readers:
        fault = f"--inputs={name} is of no kind that is read here"
        if not exists(path):
            near = ", ".join(sorted(x.name for x in path.parent.glob("*"))[:8])
            fault = f"--inputs={path} does not exist; {path.parent} holds {near}"
        raise ConfigError(f"{fault}; {POSSIBLE}")
    arrays = read_with(path, readers[suffix])
    return Examples(as_dataset(arrays, data, batch_size, name, whole_batch))


def evaluated(data: Data) -> Any:
    """Makes a batch as a model gets it in evaluation, of the largest shape.

    It is one to train on, unless those to evaluate on have names of their own.
    """
    sets = _sets(data)
    train, evaluation = (each_shape(sets[i])[0] for i in (0, -1))
    is_alike = leaves_by_path(train).keys() == leaves_by_path(evaluation).keys()
    return train if is_alike else evaluation


def _sets(data: Data) -> list[Any]:
    return [x for x in (data.train, data.evaluation) if x is not None]


def taken(like: Any, whole_batch: bool) -> set[str]:
    """Names of a batch that the model takes, as `models.forms.inputs_of` selects."""
    names = _names(leaves_by_path(like))
    is_alone = not whole_batch or names <= {"inputs", "labels"}
    return {"inputs"} if "inputs" in names and is_alone else names - {*OF_THE_LOSS}


def _names(paths: Iterable[str]) -> set[str]:
    return {path.partition("/")[0] for path in paths}


def as_dataset(
    arrays: Any,
    data: Data,
    batch_size: int,
    where: str = "the set of examples",
    whole_batch: bool = False,
) -> Any:
    """Makes an evaluation set of a tree of arrays [N, ...]; such a set stays one.

    An array alone is the `inputs`; those that the model does not take may be missing.
    Raises `ConfigError`, which says `where`, for arrays that are not as the batches of
    `data`.
    """
    if hasattr(arrays, "num_batches"):
        return arrays
    sets = _sets(data)
    # Those of packed texts are named otherwise, and of any length.
    for place, shapes in enumerate(map(each_shape, sets)):
        leaves, like = _side_by_side(arrays, shapes[0], whole_batch)
        if leaves_by_path(like).keys() == leaves.keys():
            is_packed = place > 0 and getattr(data.train, "any_length", False)
            several = is_packed or len(shapes) > 1
            break
    else:
        like = each_shape(data.train)[0]
        raise _other_names(where, *_side_by_side(arrays, like, whole_batch))
    counts = {path: len(x) if np.ndim(x) else 0 for path, x in leaves.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ConfigError(
            f"{where} has {', '.join(f'{n} {x}' for x, n in counts.items())}; each "
            "array has one row an example, and one at least"
        )
    if "labels" in leaves:
        leaves["labels"] = _indices(leaves["labels"], class_numbers(data), where)
    fit = lambda x, like: _fitting(f"{x} of {where}", leaves[x], like, several)  # noqa: E731
    return Rows(map_leaves(fit, like), batch_size)


def _side_by_side(
    arrays: Any, like: Any, whole_batch: bool
) -> tuple[dict[str, Any], Any]:
    """Leaves of arrays by path; and what of a batch they are to be like."""
    if isinstance(like, Mapping) and "inputs" in like:
        is_tree = isinstance(like["inputs"], Mapping) and "inputs" not in arrays
        if is_tree or not isinstance(arrays, Mapping):
            arrays = {"inputs": arrays}
    leaves = leaves_by_path(arrays)
    if isinstance(like, dict):
        needed = taken(like, whole_batch) | _names(leaves)  # Outputs need no more.
        like = {name: leaf for name, leaf in like.items() if name in needed}
    return leaves, like


def _other_names(where: str, paths: Iterable[str], like: Any) -> ConfigError:
    return ConfigError(
        f"{where} has {some((x or 'one array' for x in paths), 8)}, and a batch "
        f"of the run {some(leaves_by_path(like), 8)}; the names must agree"
    )


def as_labelled(
    arrays: Any,
    data: Data,
    batch_size: int,
    where: str = "the set of examples",
    kind: str = "any",
) -> Any:
    """Makes an evaluation set as `as_dataset`, with all that the run's batches have.

    Raises `ConfigError`, too, if an array of them is missing, or some labels are
    outside the classes, for a task that takes labels of the `kind` `classes`.
    """
    dataset = as_dataset(arrays, data, batch_size, where)
    like = each_shape(data.train)[0]
    if not isinstance(like, Mapping):
        return dataset
    batch = dataset.batch(0)
    there = {*batch} if isinstance(batch, Mapping) else set()
    if "labels" in like and "labels" not in there:
        names = some(class_numbers(data), 8)
        folders = f", and a folder of pictures for each class ({names})" * bool(names)
        raise ConfigError(
            f"{where} has no labels, which an evaluation compares the outputs with; "
            f"possible are arrays `inputs` and `labels`, and a column `label`{folders}"
        )
    if isinstance(dataset, Rows) and like.keys() != there:
        raise _other_names(where, batch, like)
    if isinstance(dataset, Rows) and kind == "classes" and data.num_outputs:
        check_classes(dataset.arrays["labels"], data.num_outputs, where)
    return dataset


def _indices(labels: Any, classes: dict[str, int], where: str) -> Any:
    """Numbers of labels [N] that are names of classes; others as they are."""
    if np.asarray(labels).dtype.kind not in "OU" or not classes:
        return labels
    if unknown := [x for x in np.ravel(labels).tolist() if str(x) not in classes]:
        raise ConfigError(
            f"{where} has the label {unknown[0]!r}, and the classes of the run are "
            f"{some(classes, 20)}"
        )
    numbers = [classes[str(x)] for x in np.ravel(labels)]
    return np.array(numbers, np.int32).reshape(np.shape(labels))


def _fitting(name: str, array: Any, like: Any, several: bool) -> np.ndarray:
    """Array in the shape and dtype of a run's batches; `several` differ in length."""
    if np.ma.is_masked(array):
        raise ConfigError(f"{name} has masked values; fill them as the training set's")
    array = np.asarray(array)
    # Axes of size 1 are no difference; tokens of another length are none either.
    shape, expected = array.shape[1:], like.shape[1:]
    if [n for n in shape if n != 1] == [n for n in expected if n != 1]:
        array = array.reshape(len(array), *expected)
    elif not (several and len(shape) == len(expected) and shape[1:] == expected[1:]):
        advice = "the first axis of an array is that of the examples"
        raise ConfigError(
            f"{name} has the shape {list(array.shape)}, and the run was trained on "
            f"{['N', *expected]}; {advice}".replace("'N'", "N")
        )
    a, b = (x.dtype.kind.replace("u", "i") for x in (array, like))
    fits = a == b and np.can_cast(array.dtype, like.dtype, "same_kind")
    if a == b and a in "if" and not np.can_cast(array.dtype, like.dtype):
        limits = np.iinfo(like.dtype) if a == "i" else np.finfo(like.dtype)
        finite = array[np.isfinite(array)]
        low, high = finite.min(initial=0), finite.max(initial=0)
        fits = limits.min <= low and high <= limits.max
    if (a, b) == ("i", "b"):
        fits = np.isin(array, (0, 1)).all()
    if not fits:
        raise ConfigError(
            f"{name} is {array.dtype}, and the run was trained on {like.dtype}, in "
            "which it would be other values; convert it as the training set was"
        )
    return array.astype(like.dtype, copy=False)


def _read_npz(path: Path, like: Any) -> Any:
    batch_names = {
        x.removeprefix("inputs/").partition("/")[0] for x in leaves_by_path(like)
    }
    new_names = {x: name for x, name in NAMES.items() if x not in batch_names}
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        if len(names) == 1 and "/" not in names[0]:
            return archive[names[0]]
        names = [x for x in names if new_names.get(x.partition("/")[0], x)]
        if not names:
            raise ConfigError(
                f"{path} has {', '.join(archive.files) or 'no array'}; new examples "
                "are arrays named inputs, x or x_test, or as in the run's batches"
            )
        parts = (name.partition("/") for name in names)
        paths = [f"{new_names.get(x, x)}{''.join(rest)}" for x, *rest in parts]
        check_names(paths, str(path), "an array")
        return nested({x: archive[name] for x, name in zip(paths, names, strict=True)})


def _read_pictures(
    folder: Path, like: Any, classes: dict[str, int]
) -> tuple[Any, tuple[str, ...]]:
    """Reads pictures, sorted by name; those in a folder of a class are labelled."""
    need_package("PIL", "pictures are read with Pillow", '"haiku_template[plots]"')
    paths = [x.relative_to(folder) for x in sorted(folder.rglob("*"))]
    shown = [x for x in paths if not any(part.startswith(".") for part in x.parts)]
    if not (files := [folder / x for x in shown if x.suffix.lower() in PICTURES]):
        raise ConfigError(f"{folder} holds no pictures: {', '.join(sorted(PICTURES))}")
    shape = like.shape[1:]
    if len(shape) != 3 or shape[2] not in MODES:
        raise ConfigError(
            f"the run was trained on {['N', *shape]}, and pictures are [N, height, "
            "width, 1, 3 or 4 channels]".replace("'N'", "N")
        )
    inputs, resized = _stack(files, like)
    if resized:
        logger.warning(
            "%d of %d pictures were resized to %d x %d, the first %s",
            *(len(resized), len(files), *shape[:2], resized[0].name),
        )
    if like.dtype.kind == "f":
        logger.warning(
            "pixels are scaled from bytes to [0, 1]: the run takes fractions"
        )
    names = tuple(str(x.relative_to(folder)) for x in files)
    labels = [classes.get(file.parent.name) for file in files]
    if None in labels:
        if {*labels} != {None}:
            advice = "no folder of a class, so that none has a label"
            logger.warning("%s is in %s", names[labels.index(None)], advice)
        return {"inputs": inputs}, names
    return {"inputs": inputs, "labels": np.array(labels, np.int32)}, names


def _stack(files: list[Path], like: Any) -> tuple[np.ndarray, list[Path]]:
    """Reads pictures to bytes, or to fractions if the run takes them: [N, H, W, C].

    Beside them are the files of those that were resized. Memory holds them once.
    """
    is_float, resized = like.dtype.kind == "f", []
    dtype, shape = like.dtype if is_float else np.dtype(np.uint8), like.shape[1:]
    size = len(files) * math.prod(shape) * dtype.itemsize
    fact = f"{len(files):,} pictures have {size:,} bytes in the run's shape and dtype"
    check_memory(size, fact, "give --inputs a part of them at a time")
    inputs = np.empty((len(files), *shape), dtype)
    for row, file in zip(inputs, files, strict=True):
        pixels = read_with(file, lambda x: _pixels(x, shape, resized))
        row[...] = pixels / np.float32(255) if is_float else pixels
    return inputs, resized


def _pixels(file: Path, shape: tuple[int, ...], resized: list[Path]) -> np.ndarray:
    from PIL import Image

    height, width, channels = shape
    with Image.open(file) as image:
        if image.mode.startswith(("I", "F")):  # Bytes would be cut off at 255.
            raise ValueError(
                f"its pixels are of mode {image.mode}, not bytes; convert it as the "
                "training set was, or give arrays"
            )
        image = image.convert(MODES[channels])
        if image.size != (width, height):
            resized.append(file)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(shape)
