"""Tables of numbers, .csv, .jsonl and .parquet, as arrays by name."""

import math
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.data.dataset import Batch, Data, class_numbers
from haiku_template.data.rows import Row, read_csv, read_rows
from haiku_template.data.trees import leaves_by_path, nested
from haiku_template.errors import some

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
    rows = read_csv(path, _names) if is_csv else read_rows(path, None)
    if not rows:
        raise ValueError("it has no rows")
    columns = [*rows[0].values]
    present = needed | {*columns} - {"labels"}
    leaves = {
        x.removeprefix("inputs/"): (x, leaf)
        for x, leaf in leaves_by_path(like).items()
        if x.partition("/")[0] in present
    }
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
        beside = [x for x in sizes if x in columns]
        names = f" ({some(free)})" * (columns != _numbered(len(columns)))
        names += f" beside {', '.join(beside)}" * bool(beside)
        is_long = not labels and len(free) > sum(unnamed.values())
        hint = "; a column of labels is named label" * is_long
        hint += "".join(f"; {x} is its column of labels" for x in labels)
        raise ValueError(
            f"it has {len(free)} columns of inputs{names}, and {facts}{hint}"
        )
    if columns != _numbered(len(columns)) and len(unnamed) > 1:
        raise ValueError(f"it has no columns {', '.join(unnamed)}, and {facts}")
    arrays = {}
    for name, (leaf_path, leaf) in leaves.items():
        names = [free.pop(0) for _ in range(unnamed.get(name, 0))] or [name]
        arrays[leaf_path] = _read_numbers(rows, names, leaf)
    if labels:
        cells = [row.values[labels[0]] for row in rows]
        if None in cells:
            raise ValueError(f"{rows[cells.index(None)].where} has no {labels[0]}")
        arrays["labels"] = _labels([str(x).strip() for x in cells], like, data)
    return nested(arrays)


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


def _read_numbers(rows: list[Row], columns: list[str], like: Any) -> np.ndarray:
    """Array [N, ...] of columns of numbers, or of one column of lists of them."""
    size, numbers = math.prod(like.shape[1:]), []
    for row in rows:
        try:
            cells = np.array([row.values[x] for x in columns], object)
            numbers.append([*map(_number, cells.ravel())])
        except (KeyError, TypeError, ValueError):
            numbers.append([])
        if len(numbers[-1]) != size:
            is_list = len(columns) < size
            kind = f"{size} numbers as {columns[0]}" if is_list else NUMBERS
            raise ValueError(f"{row.where} is not {kind}")
    return _numbers(numbers, like.dtype.kind).reshape(len(rows), *like.shape[1:])


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
