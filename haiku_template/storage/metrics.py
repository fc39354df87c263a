"""Metrics on disk: one JSON object a line, and TensorBoard events."""

import ctypes
import itertools
import json
import logging
import math
import operator
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from haiku_template.bounded import exists, is_number, lines, parse
from haiku_template.storage import workdir as workdirs
from haiku_template.storage.files import Note, dispensable

logger = logging.getLogger(__name__)
Row = dict[str, Any]
# Maker of a row of its keys and values. All rows have the same: they take a third.
INTERNED = lambda pairs: {sys.intern(key): x for key, x in pairs}  # noqa: E731
UNREADABLE = "%s cannot be read: %s"
MOST_BYTES = 2_500_000  # Of lines that a picture needs: some 5,000.
# Fields of TensorFlow's event.proto, and kinds of a protocol buffer's values.
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5
CRC_TABLE = [*range(256)]  # Of CRC-32C: eight shifts of each byte.
for _ in range(8):
    CRC_TABLE = [crc >> 1 ^ (crc & 1) * 0x82F63B78 for crc in CRC_TABLE]


class MetricsWriter:  # Why: docs/decisions/storage.md#metrics
    """Writes metrics.jsonl and TensorBoard events; called with a step and its metrics.

    A run that resumes from step `start` (0 for a new one) removes the lines after it,
    so that the file is the same as if it had never stopped; one that stopped early,
    and goes on, keeps the line of the step that was its last. A write error is logged
    once, and ends no run.
    """

    def __init__(self, workdir: Path, start: int) -> None:
        path, self._lines = workdir / workdirs.METRICS, None
        with dispensable(path):
            for half in workdir.glob(f".{path.name}.[0-9]*"):
                half.unlink()  # Of a start that was killed as it wrote it.
            rows = (row for row in rows_of(path) if row["step"] <= start)
            workdirs.write_atomically(path, (f"{json.dumps(x)}\n" for x in rows))
            self._lines = Note(path)
        file = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._events = Note(workdir / workdirs.TENSORBOARD / file, "ab")
        self._events.write(event(FILE_VERSION, b"brain.Event:2"))
        if start:  # TensorBoard leaves out what it has read of later steps.
            starts = varint(1, VARINT) + varint(1)  # SessionLog.START.
            self._events.write(event(SESSION_LOG, starts, start + 1))

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line: `step` and the metrics, in full precision; null for NaN."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._events.write(event(SUMMARY, summary(metrics), step))

    def close(self) -> None:
        """Closes the files."""
        for note in filter(None, (self._lines, self._events)):
            note.close()


# Why: docs/decisions/dependencies.md#tensorboard
def event(field: int, contents: bytes, step: int = 0) -> bytes:
    """Encodes an `Event` as a record of a TFRecord file: length, data, checksums."""
    data = varint(WALL_TIME, DOUBLE) + struct.pack("<d", time.time())
    if step:
        data += varint(STEP, VARINT) + varint(step)
    data += sized(field, contents)
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def summary(metrics: dict[str, float]) -> bytes:
    """Encodes a `Summary` of scalars, each a tag and a float32 (infinite if large)."""
    return b"".join(
        sized(1, sized(1, tag.encode()) + varint(2, FLOAT) + bytes(ctypes.c_float(x)))
        for tag, x in metrics.items()
    )


def sized(field: int, contents: bytes) -> bytes:
    """Encodes a field of bytes."""
    return varint(field, BYTES) + varint(len(contents)) + contents


def varint(number: int, kind: int | None = None) -> bytes:
    """Encodes a varint: seven bits a byte. With a kind it is a field's number."""
    if kind is not None:
        number = number << 3 | kind
    if number < 0x80:
        return bytes([number])
    return bytes([number & 0x7F | 0x80]) + varint(number >> 7)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as TensorFlow masks it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def read(path: Path, take: Callable[[Iterator[Row]], list[Row]] = list) -> list[Row]:
    """Reads the undamaged lines of a metrics.jsonl, as `take`; [] without a file."""
    try:
        return take(rows_of(path))
    except OSError as error:
        logger.warning(UNREADABLE, path, error)
        return []


def sampled(
    path: Path, look: Any = lambda _: None, most: int = MOST_BYTES
) -> list[Row]:
    """Samples a metrics.jsonl of any length evenly: some `most` bytes of its lines.

    All evaluations are among them, each with the row before it, and the last row, and
    rows of which `look` returns True; it is called with each row of the file.
    """
    every = 1 + (path.stat().st_size if exists(path) else 0) // most

    def choose(rows: Iterator[Row]) -> list[Row]:
        pairs = enumerate(itertools.pairwise(itertools.chain(rows, [{}])))
        return [
            row
            for number, (row, after) in pairs
            if look(row) or number % every == 0 or _stays(row) or _stays(after)
        ]

    return read(path, choose)


def _stays(row: Row) -> bool:
    """True for an evaluation, and for the end, which is no row."""
    return not row or any(key.startswith("eval/") for key in row)


class Reader:
    """Reader of a metrics.jsonl that grows, as it is called again and again."""

    def __init__(self, path: Path) -> None:
        self._path, self._place, self._rows = path, 0, []

    def __call__(self) -> list[Row]:
        """Reads the lines since the last call, and returns the rows of all."""
        try:
            self._rows += _undamaged(self._path, self._lines())
        except OSError as error:
            logger.warning(UNREADABLE, self._path, error)
        return [*self._rows]

    def _lines(self) -> Iterator[bytes]:
        for line in lines(self._path, self._place) if exists(self._path) else ():
            if not line.endswith(b"\n"):  # Not all of it is written yet.
                return
            self._place += len(line)
            yield line


def rows_of(path: Path) -> Iterator[Row]:
    """Iterates over the undamaged lines of a metrics.jsonl; raises `OSError`."""
    return _undamaged(path, lines(path) if exists(path) else ())


def _undamaged(path: Path, text: Iterable[bytes]) -> Iterator[Row]:
    """Parses lines; a kill cuts off the last one, and a disk may damage any."""
    damaged, number = [], 0
    for number, line in enumerate(text, 1):
        try:
            row = parse(line.decode("utf-8", "replace"), dict, INTERNED)
            if not all(x is None or is_number(x) for x in row.values()):
                raise ValueError("other things than numbers")
            row = {"step": operator.index(row["step"])} | row
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
        else:
            yield row
    if damaged and damaged != [number]:
        logger.warning("%s: lines %s are damaged, and left out", path, damaged)
