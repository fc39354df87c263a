"""Runs whose batches come from worker processes: `data.workers`."""

import jax
import numpy as np
import pytest

from haiku_template.config import default_config
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, start
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment


@pytest.fixture(scope="module")
def devices():
    return DeviceManager.create("cpu", num_devices=1)


def config_of(workers, num_steps=8, **changes):
    config = default_config()
    config.update(num_steps=num_steps, eval_every=4, log_every=1, **changes)
    config.optimizer.schedule = "constant"
    config.data.workers = workers
    return config


def numbers(workdir):
    """Metrics by step and name, but for times."""
    return {
        (row["step"], name): value
        for row in read(workdir / "metrics.jsonl")
        for name, value in row.items()
        if not name.startswith("perf/")
    }


@pytest.mark.parametrize("steps_per_call", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_is_bitwise_the_same_with_workers_and_resumes_with_other_ones(
    devices, tmp_path, capsys, steps_per_call
):
    for name, workers, num_steps in [("none", 0, 8), ("two", 2, 5), ("two", 1, 8)]:
        config = config_of(workers, num_steps, steps_per_call=steps_per_call)
        start.run(config, devices, str(tmp_path / name))
    assert numbers(tmp_path / "none") == {
        key: value
        for key, value in numbers(tmp_path / "two").items()
        if key[0] != 5 or key[1].startswith("train/") or key[1] == "step"
    }
    states = [Run.open(tmp_path / name, devices).state for name in ("none", "two")]
    jax.tree.map(np.testing.assert_array_equal, *map(devices.fetch, states))
    output = capsys.readouterr().out
    assert "2 worker processes make batches" in " ".join(output.split())


def test_an_evaluation_and_predictions_are_read_by_workers(
    devices, tmp_path, monkeypatch
):
    start.run(config_of(2, 2), devices, str(tmp_path / "run"))
    run = Run.open(tmp_path / "run", devices)
    dataset, read_ahead = run.evaluation_set(), []
    original = type(dataset).read_ahead
    monkeypatch.setattr(
        type(dataset),
        "read_ahead",
        lambda *args: read_ahead.append(args[1:]) or original(*args),
    )
    metrics = run.evaluate()
    last = numbers(tmp_path / "run")
    assert metrics["eval/loss"] == last[2, "eval/loss"]
    assert read_ahead == [(0, dataset.num_batches)]


def test_staged_data_and_workers_do_not_go_together(devices):
    config = config_of(2)
    config.data.placement = "device"
    with pytest.raises(ConfigError, match="set one of the two"):
        Experiment.from_config(config, devices)


@pytest.mark.parametrize("workers", [-1, 1.5, "2", True, None])
def test_other_numbers_of_workers_are_refused(devices, workers):
    config = default_config()
    with config.unlocked(), config.ignore_type():
        config.data.workers = workers
    if workers is None:
        Experiment.from_config(config, devices)  # As 0.
        return
    with pytest.raises(ConfigError, match="config.data.workers=.*a whole number from"):
        Experiment.from_config(config, devices)
