"""New examples for a finished run: files of arrays, tables, pictures, functions.

They take the place of an evaluation set, so that they have the shapes and dtypes of the
run's own batches; what differs is a `ConfigError`. Imports no JAX.
"""

import csv
import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from haiku_template.data.dataset import Batch, Data, each_shape
from haiku_template.data.datasets import check_classes
from haiku_template.data.files import check_names, read_with
from haiku_template.data.rows import Row, read_rows
from haiku_template.data.trees import count_rows, leaves_by_path, map_leaves, nested
from haiku_template.errors import ConfigError
from haiku_template.registry import resolve

logger = logging.getLogger(__name__)
POSSIBLE = (
    "possible are .npy and .npz files, the tables .csv, .jsonl and .parquet, a folder "
    "of pictures, and a function as module:function"
)
TABLES = (".csv", ".jsonl", ".parquet")
# What others call the arrays of a .npz, and the last column of a table.
NAMES = {"x": "inputs", "x_test": "inputs", "y": "labels", "y_test": "labels"}
LABELS = {"label", "labels", "class", "target", "y"}
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm"}
NUMBERS = "one number in each column"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by the number of channels.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Every row of a tree of arrays [N, ...] once, in order."""

    arrays: Batch
    batch_size: int

    def __len__(self) -> int:
        return count_rows(self.arrays)

    @property
    def num_batches(self) -> int:
        """Number of batches that hold each row once."""
        return -(-len(self) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Copies the rows of one batch."""
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return map_leaves(lambda _, x: np.array(x[rows]), self.arrays)


class Examples(NamedTuple):
    """Examples as an evaluation set, and the file of each, if each has one."""

    dataset: Any
    files: tuple[str, ...] = ()


def read_examples(name: str, data: Data, batch_size: int) -> Examples:
    """Reads what `--inputs` names, for a run that was trained on `data`.

    Raises `ConfigError` for what cannot be read, or is not as the run's batches.
    """
    path = Path(name).expanduser()
    if not path.exists() and ":" in name:
        return Examples(as_dataset(resolve("--inputs", name, {})(), data, batch_size))
    if path.suffix in TABLES and data.read is not None:
        return Examples(data.read(path))
    like = _first(data)
    if path.is_dir():
        arrays, files = _read_pictures(path, _shape_of(like, path), _classes(data))
        return Examples(as_dataset(arrays, data, batch_size, name), files)
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": lambda file: np.load(file, mmap_mode="r", allow_pickle=False),
        ".npz": _read_npz,
        **dict.fromkeys(TABLES, lambda file: _read_table(file, like, data)),
    }
    if path.suffix not in readers:
        fault = f"--inputs={name} is of no kind that is read here"
        raise ConfigError(f"{fault if path.exists() else _absent(path)}; {POSSIBLE}")
    arrays = read_with(path, readers[path.suffix])
    return Examples(as_dataset(arrays, data, batch_size, name))


def as_dataset(
    arrays: Any, data: Data, batch_size: int, where: str = "the examples"
) -> Any:
    """Makes an evaluation set of a tree of arrays [N, ...]; such a set stays one.

    An array alone is the `inputs`. Raises `ConfigError`, which says `where`, for arrays
    that are not as the batches of `data`.
    """
    if hasattr(arrays, "num_batches"):
        return arrays
    shapes = each_shape(data.train)
    like = shapes[0]
    if isinstance(like, Mapping) and "inputs" in like:
        is_tree = isinstance(like["inputs"], Mapping) and "inputs" not in arrays
        if is_tree or not isinstance(arrays, Mapping):
            arrays = {"inputs": arrays}
    leaves = leaves_by_path(arrays)
    if isinstance(like, dict) and not any(map(_is_label, leaves)):
        like = {name: leaf for name, leaf in like.items() if name != "labels"}
    expected = leaves_by_path(like)
    if expected.keys() != leaves.keys():
        raise ConfigError(
            f"{where} has {', '.join(x or 'one array' for x in leaves)}, and a batch "
            f"of the run {', '.join(leaves_by_path(shapes[0]))}; the names must agree"
        )
    counts = {path: len(x) if np.ndim(x) else 0 for path, x in leaves.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ConfigError(
            f"{where} has {', '.join(f'{n} {x}' for x, n in counts.items())}; each "
            "array has one row an example, and one at least"
        )
    if "labels" in leaves:
        leaves["labels"] = _indices(leaves["labels"], _classes(data), where)
    several = len(shapes) > 1
    fit = lambda x, like: _fitting(f"{x} of {where}", leaves[x], like, several)  # noqa: E731
    return Rows(map_leaves(fit, like), batch_size)


def as_labelled(
    arrays: Any, data: Data, batch_size: int, where: str, kind: str = "any"
) -> Any:
    """Makes an evaluation set as `as_dataset`, with labels if the run's batches have.

    Raises `ConfigError`, too, if it has none, or some outside the classes, for a task
    that takes labels of the `kind` `classes`.
    """
    dataset, like = as_dataset(arrays, data, batch_size, where), _first(data)
    if not isinstance(like, Mapping) or "labels" not in like:
        return dataset
    batch = dataset.batch(0)
    if not isinstance(batch, Mapping) or "labels" not in batch:
        names = ", ".join([*_classes(data)][:8])
        raise ConfigError(
            f"{where} has no labels, which an evaluation compares the outputs with; "
            "possible are arrays `inputs` and `labels`, a column `label`, and a folder "
            "of pictures for each class" + f" ({names})" * bool(names)
        )
    if isinstance(dataset, Rows) and kind == "classes" and data.num_outputs:
        check_classes(dataset.arrays["labels"], data.num_outputs, where)
    return dataset


def _is_label(path: str) -> bool:
    return path.partition("/")[0] == "labels"


def _first(data: Data) -> Batch:
    return each_shape(data.train)[0]


def _classes(data: Data) -> dict[str, int]:
    """Numbers of the classes by name; none if a label is not one whole number."""
    like = _first(data)
    labels = like.get("labels") if isinstance(like, Mapping) else None
    if getattr(labels, "ndim", 0) != 1 or labels.dtype.kind not in "iu":
        return {}
    names = data.class_names or range(data.num_outputs)
    return {str(name): i for i, name in enumerate(names)}


def _indices(labels: Any, classes: dict[str, int], where: str) -> Any:
    """Numbers of labels [N] that are names of classes; others as they are."""
    if np.asarray(labels).dtype.kind not in "OU" or not classes:
        return labels
    if unknown := [x for x in np.ravel(labels).tolist() if str(x) not in classes]:
        raise ConfigError(
            f"{where} has the label {unknown[0]!r}, and the classes of the run are "
            f"{', '.join([*classes][:20])}"
        )
    return np.array([classes[str(x)] for x in np.ravel(labels)], np.int32)


def _fitting(name: str, array: Any, like: Any, several: bool) -> np.ndarray:
    """Array in the shape and dtype of a run's batches; `several` differ in length."""
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
    kinds = {"u": "i"}
    a, b = (kinds.get(x.dtype.kind, x.dtype.kind) for x in (array, like))
    fits = a == b and np.can_cast(array.dtype, like.dtype, "same_kind")
    if a == b and a in "if" and not np.can_cast(array.dtype, like.dtype):
        fits = _is_within(array, like.dtype)
    if not fits:
        raise ConfigError(
            f"{name} is {array.dtype}, and the run was trained on {like.dtype}, in "
            "which it would be other values; convert it as the training set was"
        )
    return array.astype(like.dtype, copy=False)


def _is_within(array: np.ndarray, dtype: Any) -> bool:
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    finite = array[np.isfinite(array)]
    return not finite.size or limits.min <= finite.min() and finite.max() <= limits.max


def _shape_of(like: Batch, path: Path) -> Any:
    """First batch's inputs, which must be one array."""
    if isinstance(like, Mapping) and hasattr(like.get("inputs"), "shape"):
        return like["inputs"]
    raise ConfigError(
        f"--inputs={path} holds pictures, one array, and a batch of the run has "
        f"{', '.join(leaves_by_path(like))}; possible are a .npz or a table with these "
        "names, and a function as module:function"
    )


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as archive:
        names = archive.files
        if len(names) == 1 and "/" not in names[0]:
            return archive[names[0]]
        names = [x for x in names if x.partition("/")[0] not in ("x_train", "y_train")]
        parts = (name.partition("/") for name in names)
        paths = [f"{NAMES.get(first, first)}{''.join(rest)}" for first, *rest in parts]
        check_names(paths, str(path), "an array")
        return nested({x: archive[name] for x, name in zip(paths, names, strict=True)})


def _read_table(path: Path, like: Batch, data: Data) -> Any:
    """Reads numbers, a row an example; a column named `label` or so is its label.

    An array of several is the column of its name; one without is made of the columns
    that are left, one for each value. Without a header all are, in their order.
    """
    rows, has_names = _read_cells(path)
    leaves = {
        x.removeprefix("inputs/"): (x, leaf)
        for x, leaf in leaves_by_path(like).items()
        if not _is_label(x)
    }
    columns = [*rows[0].values] if rows else []
    for row in rows:
        if row.values.keys() != rows[0].values.keys():
            raise ValueError(f"{row.where} has other columns than {', '.join(columns)}")
    labels = [x for x in columns if x.strip().lower() in LABELS and x not in leaves]
    if len(labels) > 1:
        raise ValueError(f"it has {len(labels)} columns of labels: {', '.join(labels)}")
    free = [x for x in columns if x not in leaves and x not in labels]
    sizes = {x: math.prod(leaf.shape[1:]) for x, (_, leaf) in leaves.items()}
    unnamed = {x: size for x, size in sizes.items() if x not in columns}
    several = ", ".join(f"{x} {size}" for x, size in sizes.items())
    facts = f"an example of the run has {sum(sizes.values())} values"
    facts += f" ({several})" * (len(sizes) > 1)
    if len(free) != sum(unnamed.values()):
        raise ValueError(f"it has {len(free)} columns of inputs, and {facts}")
    if has_names and len(unnamed) > 1:
        raise ValueError(f"it has no columns {', '.join(unnamed)}, and {facts}")
    arrays = {}
    for name, (leaf_path, leaf) in leaves.items():
        names = [free.pop(0) for _ in range(unnamed.get(name, 0))] or [name]
        arrays[leaf_path] = _read_numbers(rows, names, leaf)
    if labels:
        arrays["labels"] = _labels([_label(row, labels[0]) for row in rows], data)
    return nested(arrays)


def _read_cells(path: Path) -> tuple[list[Row], bool]:
    """Reads the rows of a table, and if its columns have names."""
    if path.suffix != ".csv":
        return read_rows(path, None), True
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = [line for line in csv.reader(file) if line]
    if not lines:
        raise ValueError("it has no rows")
    has_names = not all(map(_is_number, lines[0]))
    if has_names and any(_is_number(x) and not x.isdecimal() for x in lines[0]):
        raise ValueError(f"line 1 is neither names of columns nor {NUMBERS}")
    names = lines.pop(0) if has_names else [f" {i}" for i in range(len(lines[0]))]
    check_names(names, str(path))
    rows = []
    for number, line in enumerate(lines, 1 + has_names):
        if len(line) != len(names):
            raise ValueError(f"line {number} is not {NUMBERS}")
        rows.append(Row(f"line {number}", dict(zip(names, line, strict=True))))
    return rows, has_names


def _read_numbers(rows: list[Row], columns: list[str], like: Any) -> np.ndarray:
    """Array [N, ...] of columns of numbers, or of one column of lists of them."""
    size, numbers = math.prod(like.shape[1:]), []
    for row in rows:
        try:
            cells = np.array([row.values[x] for x in columns], object)
            numbers.append([float(x) for x in cells.ravel()])
        except (KeyError, TypeError, ValueError):
            numbers.append([])
        if len(numbers[-1]) != size:
            is_list = len(columns) < size
            kind = f"{size} numbers as {columns[0]}" if is_list else NUMBERS
            raise ValueError(f"{row.where} is not {kind}")
    return _numbers(numbers, like.dtype.kind).reshape(len(rows), *like.shape[1:])


def _label(row: Row, column: str) -> str:
    if row.values[column] is None:
        raise ValueError(f"{row.where} has no {column}")
    return str(row.values[column]).strip()


def _labels(cells: list[str], data: Data) -> np.ndarray:
    """Labels of a table: text if all are names of classes, or one is no number."""
    if set(cells) <= _classes(data).keys() or not all(map(_is_number, cells)):
        return np.array(cells)
    like = _first(data)
    array = like.get("labels") if isinstance(like, Mapping) else None
    return _numbers(cells, getattr(array, "dtype", np.dtype(int)).kind)


def _numbers(values: Any, kind: str) -> np.ndarray:
    """Parses numbers: float64, or int64 where all are whole and `kind` is not float."""
    numbers = np.array(values, np.float64)
    is_whole = kind in "iub" and np.array_equal(numbers, numbers.round())
    return numbers.astype(np.int64) if is_whole else numbers


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_pictures(
    folder: Path, like: Any, classes: dict[str, int]
) -> tuple[Any, tuple[str, ...]]:
    """Reads pictures, sorted by name; those in a folder of a class are labelled."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(
            "pictures are read with Pillow, which is not installed: pip install "
            '"haiku_template[plots]"'
        )
    files = [x for x in sorted(folder.rglob("*")) if x.suffix.lower() in PICTURES]
    if not files:
        raise ConfigError(f"{folder} holds no pictures: {', '.join(sorted(PICTURES))}")
    shape = like.shape[1:]
    if len(shape) != 3 or shape[2] not in MODES:
        raise ConfigError(
            f"the run was trained on {['N', *shape]}, and pictures are [N, height, "
            "width, 1, 3 or 4 channels]".replace("'N'", "N")
        )
    resized: list[Path] = []
    inputs = np.stack(
        [read_with(x, lambda f: _pixels(f, shape, resized)) for x in files]
    )
    if resized:
        logger.warning(
            "%d of %d pictures were resized to %d x %d, the first %s",
            *(len(resized), len(files), *shape[:2], resized[0].name),
        )
    if like.dtype.kind == "f":
        logger.warning(
            "pixels are scaled from bytes to [0, 1]: the run takes fractions"
        )
        inputs = (inputs / np.float32(255)).astype(like.dtype)
    names = tuple(str(x.relative_to(folder)) for x in files)
    labels = [classes.get(file.parent.name) for file in files]
    if None in labels:
        return {"inputs": inputs}, names
    return {"inputs": inputs, "labels": np.array(labels, np.int32)}, names


def _pixels(file: Path, shape: tuple[int, ...], resized: list[Path]) -> np.ndarray:
    from PIL import Image

    height, width, channels = shape
    with Image.open(file) as image:
        image = image.convert(MODES[channels])
        if image.size != (width, height):
            resized.append(file)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(shape)


def _absent(path: Path) -> str:
    near = sorted(x.name for x in path.parent.glob("*"))[:8]
    return f"--inputs={path} does not exist; {path.parent} holds {', '.join(near)}"
