"""A step's time adds up, and what bounds the run is what takes most of it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.models import mlp
from haiku_template.reporting.display import PARTS, bound_text
from haiku_template.reporting.perf import Clock
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification

INPUTS = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
LABELS = np.arange(50, dtype=np.int32) % 3


class Slow:
    """A data set that takes longer than its step."""

    def batch(self, step):
        time.sleep(0.02)
        return ArrayDataset(INPUTS, LABELS, BatchSpec(8)).batch(step)


def speeds(tmp_path, devices, dataset, **options):
    trainer = Experiment(
        task=classification,
        data=Data(dataset, None, 3),
        optimizer=optax.adam(1e-3),
        **{"model": mlp(3, width=8)} | options,
    ).trainer(devices)
    train(trainer, num_steps=30, workdir=tmp_path, log_every=10)
    return [
        row for row in read(tmp_path / "metrics.jsonl") if "perf/data_seconds" in row
    ]


@pytest.mark.slow(but="one device")
def test_the_parts_of_a_step_add_up_to_its_time(tmp_path, devices):
    rows = speeds(tmp_path, devices, ArrayDataset(INPUTS, LABELS, BatchSpec(8)))
    assert len(rows) == 3
    for row in rows:
        total = sum(row.get(name, 0) for name in PARTS)
        assert total == pytest.approx(1 / row["perf/steps_per_second"], rel=1e-3)
        assert row["perf/compute_seconds"] > 0
    share = 8 * 8 * 4 + 8 * 4  # Inputs and labels; the last steps are made ahead.
    assert 0 < rows[0]["perf/bytes_to_devices"] <= share * 1.5
    assert rows[1]["perf/bytes_from_devices"] >= 4 / 10  # The scalars of one step.


def test_a_run_that_waits_for_data_is_bound_by_data(tmp_path, one_device, capsys):
    rows = speeds(tmp_path, one_device, Slow())
    for row in rows:
        name, _, share = bound_text(row).removeprefix("bound by ").rpartition(" ")
        assert name == "data" and int(share.rstrip("%")) >= 50
        assert row["perf/data_seconds"] > 0.01
    assert "bound by data " in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_computes_is_bound_by_compute(tmp_path, one_device):
    wide = mlp(3, width=512, num_layers=6)
    data = ArrayDataset(np.tile(INPUTS, (20, 1)), np.tile(LABELS, 20), BatchSpec(256))
    rows = speeds(tmp_path, one_device, data, model=wide, steps_per_call=1)
    assert all(bound_text(row).startswith("bound by compute ") for row in rows)


def test_copies_that_are_waited_for_bound_a_run(monkeypatch):
    devices = DeviceManager.create("cpu", num_devices=1)
    clock = Clock(devices)
    clock.start(0)
    for name, seconds in {"waiting": 0.8, "data": 0.1, "to_devices": 0.7}.items():
        devices.ledger.add({name: seconds})
    metrics = clock.read(1)
    assert metrics["perf/to_devices_seconds"] == pytest.approx(0.7)
    assert metrics["perf/data_seconds"] == pytest.approx(0.1)
    assert bound_text(metrics).startswith("bound by host-to-device ")


def test_what_happens_in_a_pause_does_not_count(one_device):
    clock = Clock(one_device)
    clock.start(0)
    with clock.paused():
        time.sleep(0.05)
        one_device.fetch(jax.device_put(jnp.ones(1000), one_device.devices[0]))
    metrics = clock.read(1)
    assert metrics["perf/bytes_from_devices"] == 0
    assert 1 / metrics["perf/steps_per_second"] < 0.05


def test_dispatch_is_named_where_it_is_no_computation():
    metrics = {"perf/dispatch_seconds": 0.6, "perf/compute_seconds": 0.2}
    assert bound_text(metrics) == "bound by dispatch 75%"
