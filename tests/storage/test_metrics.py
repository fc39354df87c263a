import contextlib
import json
import math

import pytest
from tensorboardX import SummaryWriter  # noqa: F401  (importable without TensorFlow)

from haiku_template.reporting import plots
from haiku_template.storage.metrics import MetricsWriter, read


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


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_the_report_is_drawn_for_any_number_of_lines(tmp_path, rows):
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        for step in range(1, rows + 1):
            write(step, {"train/loss": 1 / step, "train/learning_rate": 0.1})
            write(step, {"eval/loss": 1 / step})
    picture = plots.write(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
