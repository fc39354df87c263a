"""Metrics on disk: one JSON object a line, and TensorBoard events."""

import json
import logging
import math
import operator
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from haiku_template.bounded import contents, parse
from haiku_template.storage.files import Note, dispensable
from haiku_template.storage.workdir import (
    METRICS,
    MOST_METRICS,
    TENSORBOARD,
    write_atomically,
)

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events; called with a step and its metrics.

    A run that resumes from step `start` (0 for a new one) removes the lines after it,
    so that the file is the same as if it had never stopped. A write error is logged
    once, and ends no run.
    """

    def __init__(self, workdir: Path, start: int) -> None:
        path, self._lines = workdir / METRICS, None
        with dispensable(path):
            kept = [json.dumps(row) for row in _rows(path) if row["step"] <= start]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
            self._lines = Note(path)
        # Not tensorboardX's own writer: its thread ends at the first error, and who
        # then adds to its queue waits for ever.
        file = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._events = Note(workdir / TENSORBOARD / file, "ab")
        self._event(file_version="brain.Event:2")
        if start:  # TensorBoard leaves out what it has read of later steps.
            self._event(step=start + 1, session_log=SessionLog(status=SessionLog.START))

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        """Writes one line: `step` and the metrics, in full precision; null for NaN."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        if self._lines is not None:
            self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        values = [Summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        self._event(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Closes the files."""
        for note in filter(None, (self._lines, self._events)):
            note.close()

    def _event(self, **fields: Any) -> None:
        """Writes a TensorBoard record: length and data, each with a checksum."""
        data = Event(wall_time=time.time(), **fields).SerializeToString()
        parts = struct.pack("<Q", len(data)), data
        sums = (struct.pack("<I", masked_crc32c(part)) for part in parts)
        self._events.write(b"".join(map(operator.add, parts, sums)))


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the undamaged lines of a metrics.jsonl; [] without a file."""
    try:
        return _rows(path)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read: %s", path, error)
        return []


def _rows(path: Path) -> list[dict[str, Any]]:
    """Parses the lines; a kill cuts off the last one, and a disk may damage any."""
    if not path.exists():
        return []
    rows, lost = [], []
    text = contents(path, MOST_METRICS).decode("utf-8", "replace")
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = parse(line, dict)
            rows.append({"step": operator.index(row["step"])} | row)
        except (ValueError, TypeError, KeyError):
            lost.append(number)
    if lost and lost != [len(lines)]:
        logger.warning("%s: lines %s are damaged, and left out", path, lost)
    return rows
