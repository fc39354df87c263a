import contextlib
import json
import math

import pytest

from haiku_template.reporting import plots
from haiku_template.storage import metrics
from haiku_template.storage.metrics import MetricsWriter, read

# Records that tensorboardX 2.6.5 wrote of the same events, at 1.5 s.
SCALARS = {"train/loss": 1.0, "é" * 70: math.inf, "large": 1e300}
SCALARS |= {"zero": 0.0, "nan": math.nan}
VERSION = (
    "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c"
)
RESUMED = "100000000000000095fbfe1809000000000000f83f10ad023a020801d17949d4"
SUMMARY = (
    "df000000000000005327f07109000000000000f83f10012ad1010a110a0a747261696e2f6c6f7373"
    "150000803f0a94010a8c01c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3"
    "a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9c3a9150000807f0a0c0a05"
    "6c61726765150000807f0a0b0a047a65726f15000000000a0a0a036e616e150000c07fa887fcee"
)


def test_lines_keep_full_precision(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        write(1, {"train/loss": math.pi})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 1, "train/loss": math.pi}]


def test_going_on_takes_back_what_was_written_after(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        for step in (10, 20, 30):
            write(step, {"train/loss": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/lo')  # A kill in the middle of a line.
    with contextlib.closing(MetricsWriter(tmp_path, 20)) as write:
        write(30, {"train/loss": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in text] == [10, 20, 30]
    assert json.loads(text[-1])["train/loss"] == 0.5


def test_tensorboard_events_are_written(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        write(1, {"train/loss": 1.0})
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) == 1
    assert b"train/loss" in files[0].read_bytes()


@pytest.mark.parametrize(
    ("field", "contents", "step", "record"),
    [
        (metrics.FILE_VERSION, b"brain.Event:2", 0, VERSION),
        (metrics.SESSION_LOG, b"\x08\x01", 301, RESUMED),
        (metrics.SUMMARY, metrics.summary(SCALARS), 1, SUMMARY),
    ],
    ids=["version", "resumed", "scalars"],
)
def test_events_are_byte_for_byte_as_tensorboardx_writes_them(
    monkeypatch, field, contents, step, record
):
    monkeypatch.setattr(metrics.time, "time", lambda: 1.5)
    assert metrics.event(field, contents, step).hex() == record


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_the_report_is_drawn_for_any_number_of_lines(tmp_path, rows):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        for step in range(1, rows + 1):
            write(step, {"train/loss": 1 / step, "train/learning_rate": 0.1})
            write(step, {"eval/loss": 1 / step})
    picture = plots.write(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
