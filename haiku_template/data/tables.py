"""Tables of numbers, .csv, .jsonl and .parquet, as arrays by name."""

import contextlib
import itertools
import math
from array import array
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.data.dataset import Batch, Data, class_numbers
from haiku_template.data.rows import Row, csv_rows, read_rows
from haiku_template.data.trees import leaves_by_path, nested
from haiku_template.errors import counted, some

OF_THE_LOSS = ("labels", "loss_mask")  # Names in a batch.
LABELS = {"label", "labels", "class", "target", "y"}
NUMBERS = "one number in each column"
BOOLEANS = {"true": 1.0, "false": 0.0}  # In words, as pandas writes them.
GAPS = {"", "na", "n/a", "null", "none", "?"}


def read_table(path: Path, like: Batch, data: Data, needed: Set[str]) -> Any:
    """Reads numbers, a row an example; a column named `label` or so is its label.

    An array of several is the column of its name; one of the `needed` without is made
    of the columns that are left, one for each value. Without a header all are, in their
    order.
    """
    is_csv = path.suffix.lower() == ".csv"
    rows = csv_rows(path, _names) if is_csv else read_rows(path, None)
    with contextlib.closing(rows):
        return _arrays(rows, like, data, needed)


def _arrays(rows: Iterator[Row], like: Batch, data: Data, needed: Set[str]) -> Any:
    if (first := next(rows, None)) is None:
        raise ValueError("it has no rows")
    columns, labels = _columns([*first.values], like, needed)
    numbers = {name: array("d") for name in columns}
    cells: list[str] = []
    # Row by row: as text a row takes ten times the memory of its numbers.
    for row in itertools.chain([first], rows):
        if row.values.keys() != first.values.keys():
            raise ValueError(
                f"{row.where} has other columns than {', '.join(first.values)}"
            )
        for name, (names, leaf) in columns.items():
            values = _row(row, names, math.prod(leaf.shape[1:]))
            numbers[name].frombytes(values.tobytes())
        for name in labels:
            if row.values[name] is None:
                raise ValueError(f"{row.where} has no {name}")
            cells.append(str(row.values[name]).strip())
    arrays = {}
    for name, (_, leaf) in columns.items():
        values = _numbers(numbers.pop(name), leaf.dtype.kind)
        arrays[name] = values.reshape(-1, *leaf.shape[1:])
    if labels:
        arrays["labels"] = _labels(cells, like, data)
    return nested(arrays)


def _columns(
    columns: list[str], like: Batch, needed: Set[str]
) -> tuple[dict[str, tuple[list[str], Any]], list[str]]:
    """Columns of each array by its path, with what it is like; and that of labels."""
    present = needed | {*columns} - {"labels"}
    leaves = {
        x.removeprefix("inputs/"): (x, leaf)
        for x, leaf in leaves_by_path(like).items()
        if x.partition("/")[0] in present
    }
    labels = [x for x in columns if x.strip().lower() in LABELS and x not in leaves]
    if len(labels) > 1:
        raise ValueError(f"it has {len(labels)} columns of labels: {', '.join(labels)}")
    free = [x for x in columns if x not in leaves and x not in labels]
    sizes = {x: math.prod(leaf.shape[1:]) for x, (_, leaf) in leaves.items()}
    unnamed = {x: size for x, size in sizes.items() if x not in columns}
    several = ", ".join(f"{x} {size}" for x, size in sizes.items())
    facts = f"an example of the run has {counted(sum(sizes.values()), 'values')}"
    facts += f" ({several})" * (len(sizes) > 1)
    if len(free) != sum(unnamed.values()):
        beside = [x for x in sizes if x in columns]
        names = f" ({some(free)})" * (columns != _numbered(len(columns)))
        names += f" beside {', '.join(beside)}" * bool(beside)
        is_long = not labels and len(free) > sum(unnamed.values())
        hint = "; a column of labels is named label" * is_long
        hint += "".join(f"; {x} is its column of labels" for x in labels)
        raise ValueError(
            f"it has {counted(len(free), 'columns')} of inputs{names}, and "
            f"{facts}{hint}"
        )
    if columns != _numbered(len(columns)) and len(unnamed) > 1:
        raise ValueError(f"it has no columns {', '.join(unnamed)}, and {facts}")
    in_order = iter(free)
    return {
        path: ([*itertools.islice(in_order, unnamed.get(name, 0))] or [name], leaf)
        for name, (path, leaf) in leaves.items()
    }, labels


def _numbered(count: int) -> list[str]:
    return [f" {i}" for i in range(count)]


def _names(first: list[str]) -> list[str]:
    """Names of the columns, which the first line of a table has, or is numbers."""
    numbers = [x for x in first if _is_number(x)]
    if first == [*map(str, range(len(first)))]:
        raise ValueError(
            f"the first line, {','.join(first)[:40]}, may be an example, or names that "
            "pandas gave; write names of columns above it"
        )
    has_gap = numbers and any(x.strip().lower() in GAPS for x in first)
    if len(numbers) == len(first):
        return _numbered(len(first))
    if has_gap or not all(map(str.isdecimal, numbers)):
        raise ValueError(f"the first line is neither names of columns nor {NUMBERS}")
    return first


def _row(row: Row, columns: list[str], size: int) -> np.ndarray:
    """Numbers of a row, of its columns or of a list in one of them: float64 [n]."""
    try:
        cells = np.array([row.values[x] for x in columns], object)
        numbers = np.array([*map(_number, cells.ravel())], np.float64)
    except (KeyError, TypeError, ValueError):
        numbers = np.empty(0)
    if len(numbers) != size:
        is_list = len(columns) < size
        kind = f"{size} numbers as {columns[0]}" if is_list else NUMBERS
        raise ValueError(f"{row.where} is not {kind}")
    return numbers


def _labels(cells: list[str], like: Batch, data: Data) -> np.ndarray:
    """Labels of a table: text if all are names of classes, or one is no number.

    Where names are numbers, 1.0 is the name 1, unless another is the same number.
    """
    names, values = class_numbers(data), {}
    for name in data.class_names and filter(_is_number, names):
        values[_number(name)] = "" if _number(name) in values else name
    cells = [(_is_number(x) and values.get(_number(x))) or x for x in cells]
    if values or {*cells} <= names.keys() or not all(map(_is_number, cells)):
        return np.array(cells)
    array = like.get("labels") if isinstance(like, dict) else None
    return _numbers([*map(_number, cells)], getattr(array, "dtype", np.dtype(int)).kind)


def _numbers(values: Any, kind: str) -> np.ndarray:
    """Makes numbers float64, or int64 where all are whole and `kind` is not float.

    Beyond 2**53 float64 does not hold each whole number, and they stay as they are.
    """
    numbers = np.array(values, np.float64)
    is_whole = np.array_equal(numbers, numbers.round()) and abs(numbers).max() < 2**53
    return numbers.astype(np.int64) if kind in "iub" and is_whole else numbers


def _number(cell: Any) -> float:
    try:
        return float(cell)
    except ValueError:
        if (text := str(cell).strip().lower()) in BOOLEANS:
            return BOOLEANS[text]
        raise


def _is_number(text: str) -> bool:
    try:
        _number(text)
    except ValueError:
        return False
    return True
