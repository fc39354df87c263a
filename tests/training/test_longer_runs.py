"""Runs that resume with other intervals, or for more steps."""

import json
import runpy
import sys

import haiku as hk
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.data.datasets import digits as digits_data
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models import losses, mlp
from haiku_template.preflight.checks import check_parts
from haiku_template.runs import Run, start, train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment
from tests.runs import ROOT

CPU = DeviceManager.create("cpu", num_devices=1)


def run(workdir, **changes):
    config = digits.get_config()
    config.model.width, config.batch_size, config.log_every = 8, 16, 5
    config.num_steps, config.optimizer.warmup_steps = 10, 5
    for key, value in changes.items():
        config[key] = value
    start.run(config, CPU, str(workdir))


@pytest.mark.slow
def test_a_run_goes_on_longer_and_says_what_its_schedule_becomes(tmp_path, caplog):
    run(tmp_path)
    run(tmp_path, num_steps=20, log_every=2, eval_every=4, save_every=8, keep_last=3)
    assert "num_steps: 10 there, 20 now" in caplog.text
    assert "the schedule cosine of the learning rate now ends at step 20" in caplog.text
    rows = read(tmp_path / "metrics.jsonl")
    trained = [row["step"] for row in rows if "train/loss" in row]
    assert trained == [5, 10, 12, 14, 16, 18, 20]
    assert [row["step"] for row in rows if "eval/loss" in row] == [10, 12, 16, 20]
    assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 20
    caplog.clear()
    run(tmp_path, num_steps=20, log_every=2, eval_every=4, save_every=8, keep_last=3)
    assert "another config" not in caplog.text


@pytest.mark.parametrize(
    ("schedule", "num_steps", "warns"),
    [("cosine", 11, True), ("cosine", 10, False), ("constant", 11, False)],
)
def test_a_script_is_warned_of_a_schedule_that_ends_before_it(
    schedule, num_steps, warns, caplog
):
    config = digits.get_config()
    config.num_steps, config.optimizer.warmup_steps = 10, 5
    config.optimizer.schedule = schedule
    trainer = Experiment.from_config(config, CPU).trainer(CPU)
    check_parts(trainer, config.best_metric, num_steps=num_steps)
    words = "schedule, cosine, ends at config.num_steps=10, and the run makes 11 steps"
    assert (words in caplog.text) == warns == ("schedule" in caplog.text)


def test_the_mathematics_of_a_run_does_not_change_when_it_resumes(tmp_path):
    run(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(
        ConfigError, match="another config.*init_from.*seed: 0 there, 1 now"
    ):
        run(tmp_path, num_steps=20, seed=1)
    with pytest.raises(ConfigError, match="a run does not go back"):
        run(tmp_path, num_steps=5)
    assert (tmp_path / "config.json").read_bytes() == before


def own_model(num_outputs, axis_name=None):
    return mlp(num_outputs, width=4)


def own_data(spec):
    return digits_data(spec)


def own_task(outputs, batch):
    return losses.classification(outputs, batch)


def own_schedule(learning_rate, num_steps, **_):
    return lambda step: learning_rate * (1 - step / num_steps)


OWN = {key: {key: {"name": f"{__name__}:own_{key}"}} for key in ("model", "data")}
OWN["task"] = {"task": {"name": f"{__name__}:own_task"}}
OWN["schedule"] = OWN["task"] | {"schedule": f"{__name__}:own_schedule"}


@pytest.mark.slow(but="model")
@pytest.mark.parametrize("own", OWN)
def test_a_run_of_ones_own_code_goes_on_longer_twice(tmp_path, own, caplog):
    parts = OWN[own] | {"eval_every": None}
    schedule = parts.pop("schedule", "cosine")

    def go_on(num_steps, learning_rate=1e-3):
        config = digits.get_config()
        config.optimizer.schedule = schedule
        config.optimizer.learning_rate = learning_rate
        run(tmp_path, num_steps=num_steps, optimizer=config.optimizer, **parts)

    for num_steps in (4, 8, 12):
        go_on(num_steps)
    assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 12
    assert Run.open(tmp_path, CPU).trainer and "computed" not in caplog.text
    with pytest.raises(ConfigError, match="learning_rate"):
        go_on(16, 2e-3)


def test_ones_own_code_that_was_edited_is_refused_in_a_longer_run_as_well(
    tmp_path, monkeypatch
):
    model, module = OWN["model"], sys.modules[__name__]
    run(tmp_path, **model)
    monkeypatch.setattr(
        module, "own_model", lambda num_outputs, axis_name: mlp(num_outputs, width=5)
    )
    with pytest.raises(ConfigError, match="train step.*edited since. Nothing") as error:
        run(tmp_path, num_steps=20, **model)
    assert "num_steps" not in str(error.value)


@pytest.mark.slow
def test_a_project_of_make_new_goes_on_longer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "skeleton")
    for num_steps in (2, 4):
        config = runpy.run_path(ROOT / "skeleton/configs/first.py")["get_config"]()
        config.num_steps, config.batch_size = num_steps, 16
        config.model.width, config.model.num_blocks = 4, 1
        start.run(config, CPU, str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_project")]:
        del sys.modules[name]


@pytest.mark.slow
def test_a_script_is_told_that_num_steps_may_be_in_its_schedule(tmp_path):
    inputs = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
    arrays = inputs, (inputs[:, 0] > 0).astype(np.int32)

    def script(num_steps, rate=None):
        parts = {
            "model": hk.transform(lambda x: hk.Linear(2)(x)),
            "task": own_task,
            "data": from_split(Split(*arrays, *arrays), BatchSpec(8)),
            "optimizer": optax.sgd(rate or optax.cosine_decay_schedule(0.1, num_steps)),
        }
        trainer = Experiment(**parts).trainer(CPU)
        workdir = tmp_path / ("constant" if rate else "cosine")
        train(trainer, num_steps=num_steps, workdir=workdir, log_every=None)

    script(2)
    words = "or num_steps, which was 2 and is 4, is in its schedule"
    with pytest.raises(ConfigError, match=words):
        script(4)
    for num_steps in (2, 4, 6):
        script(num_steps, rate=0.1)
    with pytest.raises(ConfigError, match="or num_steps, which was 2 and is 8"):
        script(8, rate=0.2)
    with pytest.raises(ConfigError, match="was edited since. Nothing"):
        script(2, rate=0.3)
