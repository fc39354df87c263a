"""A data set may use the memory of a batch again for the next one."""

import haiku as hk
import jax
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Data
from haiku_template.devices import DeviceManager, host_buffer
from haiku_template.runs import train
from haiku_template.runs.predictions import _predict
from haiku_template.storage import read
from haiku_template.training import Experiment, classification

RNG = np.random.default_rng(0)
BATCHES, ROWS, WIDTH = 16, 64, 16
INPUTS = RNG.normal(size=(BATCHES, ROWS, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, 4, (BATCHES, ROWS)).astype(np.int32)


class Refilled:
    """Batches of one buffer, aligned so that CPU devices would take it over."""

    spec, num_batches = BatchSpec(ROWS), BATCHES

    def __init__(self, is_one_buffer, view):
        self.inputs = host_buffer((ROWS, WIDTH), np.float32).view(view)
        self.labels = host_buffer((ROWS,), np.int32).view(view)
        self.is_one_buffer = is_one_buffer

    def batch(self, step):
        index = step % BATCHES
        if not self.is_one_buffer:
            return {"inputs": INPUTS[index].copy(), "labels": LABELS[index].copy()}
        self.inputs[:], self.labels[:] = INPUTS[index], LABELS[index]
        return {"inputs": self.inputs, "labels": self.labels}


class Mapped(np.ndarray):
    """An array of a type of its own, as `np.memmap` is."""


def forward(x):
    return hk.nets.MLP([256, 256, 4])(x)


@pytest.mark.slow(but="4-7")
@pytest.mark.parametrize(
    "num_devices, steps_per_call, view",
    [(1, 1, np.ndarray), (1, 7, np.ndarray), (4, 1, np.ndarray), (4, 7, Mapped)],
)
def test_memory_used_again_changes_no_number(
    tmp_path, num_devices, steps_per_call, view
):
    devices, runs = DeviceManager.create("cpu", num_devices=num_devices), []
    for is_one_buffer in (False, True):
        data, workdir = Refilled(is_one_buffer, view), tmp_path / str(is_one_buffer)
        trainer = Experiment(
            model=hk.without_apply_rng(hk.transform(forward)),
            task=classification,
            data=Data(data, data, 4),
            optimizer=optax.sgd(0.1),
            steps_per_call=steps_per_call,
        ).trainer(devices)
        state = train(trainer, num_steps=30, workdir=workdir, log_every=1).state
        rows = read(workdir / "metrics.jsonl")
        losses = [row["train/loss"] for row in rows if "train/loss" in row]
        predictions = [*_predict(trainer, state, data)]
        runs.append((losses, trainer.evaluate(state), predictions))
    assert len(runs[0][0]) == 30
    jax.tree.map(np.testing.assert_array_equal, *runs)
