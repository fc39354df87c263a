"""Runs whose batches come from worker processes: `data.workers`."""

import functools
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from PIL import Image

from examples import pictures
from haiku_template import train as command
from haiku_template.config import default_config
from haiku_template.data import BatchSpec, ahead
from haiku_template.data.worker import digests
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, start
from haiku_template.runs.predictions import write_predictions
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
    output = " ".join(output.split())
    assert "2 worker processes make batches" in output
    assert "1 worker process makes batches" in output


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
    assert write_predictions(run, tmp_path / "outputs.jsonl") == 360
    assert read_ahead == [(0, dataset.num_batches)] * 2


def test_the_command_takes_the_key_with_each_data_set():
    for name in ("digits", "npz", "tokens"):
        command._check_data_keys({"name": name, "placement": "host", "workers": 2})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'worker'"):
        command._check_data_keys({"name": "digits", "worker": 2})


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


def write_pictures(root):
    """40 pictures to train on and 10 to test, of two classes."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 10)):
        for i in range(count):
            file = root / part / "ab"[i % 2] / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(256, size=(20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)


def config_of_pictures(root, **changes):
    config = pictures.get_config()
    config.data.path, config.data.size, config.batch_size = str(root), 16, 8
    config.model.update(channels=(4,), blocks=1)
    config.update(changes)
    return config


def test_a_folder_of_pictures_is_decoded_to_the_same_bits(devices, tmp_path):
    write_pictures(tmp_path)
    data = Experiment.from_config(config_of_pictures(tmp_path), devices).data
    assert data.class_names == ("a", "b") and data.num_outputs == 2
    for dataset, start_at, stop in ((data.train, 3, 16), (data.evaluation, 0, 2)):
        with ahead(dataset, start_at, stop):
            batches = [dataset.batch(n) for n in range(start_at, stop)]
        expected = map(dataset.dataset.batch, range(start_at, stop))
        assert list(map(digests, batches)) == list(map(digests, expected))
    file = tmp_path / "train" / "b" / "7.png"
    Image.new("RGB", (16, 15)).save(file)
    with pytest.raises(ConfigError, match="7.png has 16 x 15 pixels, and config.data"):
        [data.train.batch(step) for step in range(5)]
    for file in (tmp_path / "test").glob("*/*"):
        file.unlink()
    with pytest.raises(ConfigError, match="no pictures in test/CLASS/"):
        Experiment.from_config(config_of_pictures(tmp_path), devices)


def test_classes_of_pictures_are_folders_that_are_seen_in_train(tmp_path):
    write_pictures(tmp_path)
    for part in ("train", "test"):
        (tmp_path / part / ".ipynb_checkpoints").mkdir()
    read = functools.partial(
        pictures.pictures, BatchSpec(2), path=str(tmp_path), size=16
    )
    assert read().class_names == ("a", "b")
    (tmp_path / "test" / "c").mkdir()
    with pytest.raises(ConfigError, match="test/c is a class that train/ does not"):
        read()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves_the_run_and_no_worker_speaks(tmp_path):
    """The terminal sends it to all processes of the command."""
    write_pictures(tmp_path / "pictures")
    flags = ["--device=cpu"]
    flags += ["--config=examples/pictures.py", f"--workdir={tmp_path / 'run'}"]
    flags += [f"--config.data.path={tmp_path / 'pictures'}"]
    flags += ["--config.data.size=16", "--config.batch_size=8"]
    flags += ["--config.num_steps=1000000", "--config.log_every=1"]
    with subprocess.Popen(
        [sys.executable, "-m", "haiku_template.train", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as run:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and run.poll() is None:
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGINT)
        errors = run.communicate(timeout=120)[1]
        assert run.returncode == 130, errors
    assert "SIGINT" in errors and "Traceback" not in errors and "worker" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)  # None of them is left.
