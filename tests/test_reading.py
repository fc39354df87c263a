"""The files that a reader opens to follow one batch: traced, in a run of digits."""

import sys
import threading
from pathlib import Path

import jax
import numpy as np

from configs import digits
from haiku_template.runs import train
from haiku_template.training import Experiment

PACKAGE = Path(__file__).parents[1] / "haiku_template"
ROWS = 52  # Of a batch; no parameter has as many.


def holds(value, depth=0):
    """Tests for a batch, a part of one, or scalars and metrics made of it."""
    if isinstance(value, np.ndarray | jax.Array):
        return value.shape[:1] == (ROWS,)
    if isinstance(value, dict) and any("loss" in str(name) for name in value):
        return True
    if depth == 3 or not isinstance(value, dict | tuple | list):
        return False
    values = value.values() if isinstance(value, dict) else value
    return len(values) < 40 and any(holds(item, depth + 1) for item in values)


def test_a_batch_passes_twelve_files_from_the_data_set_to_a_metric(
    one_device, tmp_path
):
    passed, watching = set(), [False]

    def look(frame, event, result):
        file = Path(frame.f_code.co_filename)
        if watching[0] and event in ("call", "return") and PACKAGE in file.parents:
            values = frame.f_locals.values() if event == "call" else [result]
            if any(map(holds, values)):
                passed.add(str(file.relative_to(PACKAGE)))

    def watch(event):
        if event.what == "step":
            watching[0] = 5 <= event.step < 15

    config = digits.get_config()
    config.batch_size = ROWS
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        train(trainer, num_steps=16, workdir=tmp_path, log_every=5, hooks=[watch])
    finally:
        threading.setprofile(None)
        sys.setprofile(before)
    assert {"data/dataset.py", "runs/loop.py", "storage/metrics.py"} < passed
    assert len(passed) <= 12, sorted(passed)
