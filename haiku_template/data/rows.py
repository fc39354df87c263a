"""Rows by the names of their columns: JSON-lines, CSV, Parquet."""

import csv
import functools
import io
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.bounded import parse
from haiku_template.data.dataset import check_memory
from haiku_template.data.files import check_names, read_with
from haiku_template.errors import ConfigError, counted, download, need_package

PIECE = 4096  # Rows of Parquet unpacked at a time.
PIECE_BYTES = 2**20  # Of lines read at a time.


class Row(NamedTuple):
    """Row: its place in its file, for messages, and its values by column."""

    place: str
    path: Path
    values: dict[str, Any]

    @property
    def where(self) -> str:
        """Place and file."""
        return f"{self.place} of {self.path}"


def read_rows(path: Path, columns: Collection[str] | None) -> Iterator[Row]:
    """Reads a file row by row, in the format of its ending: `FORMATS`, or JSON-lines.

    As objects of Python, rows take many times the memory of their file. Of a CSV file
    all values are text; of Parquet those of other columns are None, if some are named.
    Raises `ConfigError` for a file that is missing, damaged or without rows.
    """
    if hint := download(path, "dataset"):
        raise ConfigError(f"the data file {path} does not exist{hint}")
    rows = FORMATS.get(path.suffix.lower(), _read_lines)(path, columns)
    if (first := next(rows, None)) is None:
        raise ConfigError(f"{path} is empty; at least one example is needed")
    yield first
    yield from rows


def _by_name(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_names([name for name, _ in pairs], where)
    return dict(pairs)


def _lines(path: Path) -> Iterator[str]:
    """Reads UTF-8 line by line, with what ends a line."""
    with read_with(path, lambda file: file.open("rb")) as file:
        read = lambda: read_with(path, lambda _: file.readlines(PIECE_BYTES))  # noqa: E731
        lines = itertools.chain.from_iterable(iter(read, []))
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"line {number} of {path} is not UTF-8 text: {error.reason}"
                ) from error
            yield text.removeprefix("\ufeff") if number == 1 else text


def _read_lines(path: Path, columns: Collection[str] | None) -> Iterator[Row]:
    """Reads a JSON object of each line that is not blank."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield _parse(f"line {number}", path, line.removesuffix("\n"))


def _parse(place: str, path: Path, text: str) -> Row:
    where = f"{place} of {path}"
    try:
        values = parse(text, pairs=functools.partial(_by_name, where))
    except ConfigError:
        raise
    except ValueError as error:
        reason = getattr(error, "msg", error)
        hint = "; each line has an object, not one of a list" * (text[:1] == "[")
        raise ConfigError(f"{where} is no JSON: {reason}{hint}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no JSON object but {text.strip()[:40]}")
    return Row(place, path, values)


def csv_rows(path: Path, name: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """Iterates over a table of text.

    `name` maps its first line to the names of its columns; a first line with other
    names is a row itself. Blank lines are left out.
    """
    split = (io.StringIO(line, newline="") for line in _lines(path))  # At \r, too.
    reader = csv.reader(itertools.chain.from_iterable(split), strict=True)
    first: list[str] = []
    begin = 1
    try:
        for values in iter(lambda: _read_long(reader), None):
            place, begin = f"line {begin}", reader.line_num + 1
            if not values:
                continue
            if not first:
                first, names = values, name(values)
                check_names(names, str(path))
                if names == first:
                    continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{place} of {path} has {counted(len(values), 'values')}, and the "
                    f"first line {counted(len(first), 'columns')}: "
                    f"{', '.join(first)}; commas in a text are between double quotes"
                )
            yield Row(place, path, dict(zip(names, values, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"line {begin} of {path} is no CSV: {error}") from error


def _read_long(reader: Iterator[list[str]]) -> list[str] | None:
    """Reads a row, or None; the limit, which all readers share, is raised for it."""
    usual = csv.field_size_limit(sys.maxsize)  # Else texts of 128 KiB.
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(usual)


def _read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[Row]:
    need_package("pyarrow", f"{path} is read by pyarrow", '"haiku_template[parquet]"')
    from pyarrow import parquet

    def unpack(file: Path) -> Iterator[list[dict[str, Any]]]:
        with parquet.ParquetFile(file) as table:
            check_names(table.schema_arrow.names, str(file))
            unread = dict.fromkeys(table.schema_arrow.names)  # To be named alone.
            names = [x for x in unread if columns is None or x in columns]
            size = sum(
                table.metadata.row_group(i).total_byte_size
                for i in range(table.num_row_groups)
            )
            check_memory(size, f"{file} unpacks to {size:,} bytes", "read a part of it")
            pieces = table.iter_batches(PIECE, columns=names, use_threads=False)
            for piece in pieces:
                yield [unread | values for values in piece.to_pylist()]

    pieces = unpack(path)
    read = lambda: read_with(path, lambda _: next(pieces, None))  # noqa: E731
    for n, values in enumerate(itertools.chain.from_iterable(iter(read, None)), 1):
        yield Row(f"row {n}", path, values)


FORMATS: dict[str, Callable[[Path, Collection[str] | None], Iterator[Row]]] = {
    ".csv": lambda path, columns: csv_rows(path, lambda first: first),
    ".parquet": _read_parquet,
}
