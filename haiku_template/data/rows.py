"""Rows by the names of their columns: JSON-lines, CSV, Parquet."""

import csv
import functools
import io
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.bounded import parse
from haiku_template.data.dataset import check_memory
from haiku_template.data.files import check_names, read_with
from haiku_template.errors import ConfigError, download, need_package

PIECE = 4096  # Rows of Parquet unpacked at a time.


class Row(NamedTuple):
    """Row: where it stands, for messages, and its values by column."""

    where: str
    values: dict[str, Any]


def read_rows(path: Path, columns: Collection[str] | None) -> list[Row]:
    """Reads the rows of a file, in the format of its ending: `FORMATS`, or JSON-lines.

    Of a CSV file all values are text; of Parquet those of other columns are None, if
    some are named.
    Raises `ConfigError` for a file that is missing, damaged or without rows.
    """
    if hint := download(path, "dataset"):
        raise ConfigError(f"the data file {path} does not exist{hint}")
    if not (rows := FORMATS.get(path.suffix.lower(), _read_lines)(path, columns)):
        raise ConfigError(f"{path} is empty; at least one example is needed")
    return rows


def _by_name(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_names([name for name, _ in pairs], where)
    return dict(pairs)


def _read_text(path: Path) -> str:
    try:
        return read_with(path, Path.read_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"line {line} of {path} is not UTF-8 text: {error.reason}"
        ) from error


def _read_lines(path: Path, columns: Collection[str]) -> list[Row]:
    """Reads a JSON object of each line that is not blank."""
    lines = enumerate(_read_text(path).split("\n"), 1)
    return [_parse(f"line {n} of {path}", line) for n, line in lines if line.strip()]


def _parse(where: str, text: str) -> Row:
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
    return Row(where, values)


def csv_rows(path: Path, name: Callable[[list[str]], list[str]]) -> Iterator[Row]:
    """Iterates over a table of text.

    `name` maps its first line to the names of its columns; a first line with other
    names is a row itself. Blank lines are left out.
    """
    text = _read_text(path)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    usual = csv.field_size_limit(max(len(text), 1))  # Else texts of 128 KiB.
    first: list[str] = []
    begin = 1
    try:
        for values in reader:
            where, begin = f"line {begin} of {path}", reader.line_num + 1
            if not values:
                continue
            if not first:
                first, names = values, name(values)
                check_names(names, str(path))
                if names == first:
                    continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{where} has {len(values)} values, and the first line "
                    f"{len(first)} columns: {', '.join(first)}; commas in a text are "
                    "between double quotes"
                )
            yield Row(where, dict(zip(names, values, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"line {begin} of {path} is no CSV: {error}") from error
    finally:
        csv.field_size_limit(usual)


def _read_parquet(path: Path, columns: Collection[str] | None) -> list[Row]:
    need_package("pyarrow", f"{path} is read by pyarrow", '"haiku_template[parquet]"')
    from pyarrow import parquet

    def rows(file: Path) -> list[dict[str, Any]]:
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
            return [unread | values for piece in pieces for values in piece.to_pylist()]

    values = read_with(path, rows)
    return [Row(f"row {n} of {path}", x) for n, x in enumerate(values, 1)]


FORMATS: dict[str, Callable[[Path, Collection[str]], list[Row]]] = {
    ".csv": lambda path, columns: [*csv_rows(path, lambda first: first)],
    ".parquet": _read_parquet,
}
