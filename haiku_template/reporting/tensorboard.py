"""Pictures, histograms, texts and hyper-parameters for TensorBoard.

Fields are those of TensorFlow's summary.proto and TensorBoard's plugin_data.proto.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.bounded import exists
from haiku_template.params import in_double
from haiku_template.storage import metrics
from haiku_template.storage.files import append_whole
from haiku_template.storage.metrics import SUMMARY, event, sized, varint
from haiku_template.storage.workdir import TENSORBOARD, write_atomically

BINS = 30
# Read before a run's own events, which TensorBoard follows to their end.
HPARAMS = "events.out.tfevents.0.hparams"
STRING = 7  # DT_STRING of types.proto.


def write(workdir: Path, name: str, step: int, *values: bytes) -> None:
    """Appends summaries to the run `name` below this one in TensorBoard."""
    path = workdir / TENSORBOARD / name / "events.out.tfevents.0"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = event(SUMMARY, b"".join(values), step)
    if not (exists(path) and path.stat().st_size):
        data = event(metrics.FILE_VERSION, b"brain.Event:2") + data
    append_whole(path, data)


def picture(tag: str, png: bytes) -> bytes:
    """Encodes a picture; its size is in the PNG's header."""
    width, height = struct.unpack(">II", png[16:24])
    size = _field(1, height) + _field(2, width) + _field(3, 4)  # RGBA.
    return _value(tag, sized(4, size + sized(4, png)))


def histogram(tag: str, values: np.ndarray) -> bytes:
    """Encodes the finite ones of `values`, any shape, in 30 bins; of complex, sizes."""
    finite = in_double(values).ravel()
    finite = np.abs(finite) if np.iscomplexobj(finite) else finite
    finite = finite[np.isfinite(finite)]
    counts, edges = np.histogram(finite, BINS)
    facts = (edges[0], edges[-1], finite.size, finite.sum(), np.square(finite).sum())
    fields = b"".join(_double(i, fact) for i, fact in enumerate(facts, 1))
    for field, numbers in ((6, edges[1:]), (7, counts)):
        fields += sized(field, numbers.astype("<f8").tobytes())
    return _value(tag, sized(5, fields))


def text(tag: str, markdown: str) -> bytes:
    """Encodes a text, which TensorBoard reads as Markdown."""
    tensor = _field(1, STRING) + sized(8, markdown.encode())
    return _value(tag, sized(8, tensor) + _plugin("text"))


def write_hparams(workdir: Path, values: dict[str, Any]) -> None:
    """Writes the hyper-parameters of a run, by name, for the page HPARAMS."""
    entries = b"".join(
        sized(1, sized(1, name.encode()) + sized(2, _of_any(value)))
        for name, value in values.items()
    )
    content = sized(3, entries)  # HParamsPluginData.session_start_info.
    value = _value("_hparams_/session_start_info", _plugin("hparams", content))
    records = event(metrics.FILE_VERSION, b"brain.Event:2") + event(SUMMARY, value)
    folder = workdir / TENSORBOARD
    folder.mkdir(exist_ok=True)
    write_atomically(folder / HPARAMS, records)


def _value(tag: str, contents: bytes) -> bytes:
    return sized(1, sized(1, tag.encode()) + contents)


def _plugin(name: str, content: bytes = b"") -> bytes:
    data = sized(1, name.encode()) + (sized(2, content) if content else b"")
    return sized(9, sized(1, data))


def _of_any(value: Any) -> bytes:
    """Encodes a google.protobuf.Value: a number, a boolean, or a text."""
    if isinstance(value, bool):
        return _field(4, int(value))
    if isinstance(value, int | float):
        return _double(2, value)
    return sized(3, str(value).encode())


def _field(field: int, number: int) -> bytes:
    return varint(field, metrics.VARINT) + varint(number)


def _double(field: int, number: float) -> bytes:
    return varint(field, metrics.DOUBLE) + struct.pack("<d", number)
