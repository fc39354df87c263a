"""Runs on batches without labels, from arrays and from what only goes forward."""

import functools
import json
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template import config as configs
from haiku_template.data import (
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    from_iterator,
    from_split,
)
from haiku_template.data.images import scale_pixels
from haiku_template.devices import DeviceManager
from haiku_template.preflight.checks import check_parts
from haiku_template.runs import Run, train
from haiku_template.runs.predictions import write_predictions
from haiku_template.runs.start import run
from haiku_template.training import Experiment

MINE = """
import haiku as hk
import jax.numpy as jnp
import numpy as np
from haiku_template.data import Split, from_split

def data(spec):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    return from_split(Split(x[:24], None, x[24:], None), spec)

def autoencoder(num_outputs, axis_name):
    def forward(inputs, is_training):
        return hk.nets.MLP([4, num_outputs])(inputs)
    return hk.transform(forward)

def reconstruction(outputs, batch):
    return {"loss": jnp.mean(jnp.square(outputs - batch["inputs"]), axis=1)}
"""


def batches():
    rng = np.random.default_rng(0)
    for _ in range(5):
        yield {"inputs": rng.normal(size=(8, 6)).astype(np.float32)}


def made(make, devices):
    evaluation = EvaluationSet(next(batches())["inputs"], None, 4)
    return Experiment(
        model=hk.transform(lambda inputs: hk.nets.MLP([4, 6])(inputs)),
        task=lambda outputs, batch: {
            "loss": jnp.mean(jnp.square(outputs - batch["inputs"]), axis=1)
        },
        data=Data(from_iterator(make), evaluation, 6),
        optimizer=optax.adam(1e-2),
    ).trainer(devices)


@pytest.mark.slow(but="four devices")
def test_a_run_from_a_generator_stopped_and_resumed_is_bitwise_the_same(
    tmp_path, devices, caplog
):
    def run_to(num_steps, name, save_every=None):
        options = {"num_steps": num_steps, "save_every": save_every}
        return train(made(batches, devices), workdir=tmp_path / name, **options)

    whole = run_to(13, "whole")
    run_to(7, "parts")
    resumed = run_to(13, "parts")
    for x, y in zip(*map(jax.tree.leaves, (whole.state, resumed.state)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert whole.metrics["eval/loss"] == resumed.metrics["eval/loss"]
    assert "reading past 6 batches, to step 7" in caplog.text


def test_a_generator_that_raised_once_is_made_anew(tmp_path, one_device):
    given, faults = [], [OSError("the network is gone")]

    def unsteady():
        for batch in batches():
            given.append(batch)
            if len(given) > 7 and faults:
                raise faults.pop()
            yield batch

    trainer = made(unsteady, one_device)
    with pytest.raises(OSError, match="the network is gone"):
        train(trainer, num_steps=13, workdir=tmp_path / "run")
    resumed = train(trainer, num_steps=13, workdir=tmp_path / "run")
    whole = train(made(batches, one_device), num_steps=13, workdir=tmp_path / "whole")
    assert resumed.metrics["train/loss"] == whole.metrics["train/loss"]


@pytest.mark.parametrize("placement", ["host", "device"])
def test_an_autoencoder_needs_no_labels(tmp_path, monkeypatch, placement):
    (tmp_path / "mine_unlabeled.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_unlabeled", raising=False)
    config = configs.default_config()
    config.update({"num_steps": 20, "batch_size": 8})
    config.data = {"name": "mine_unlabeled:data", "placement": placement}
    config.model = {"name": "mine_unlabeled:autoencoder"}
    config.task = {"name": "mine_unlabeled:reconstruction"}
    devices, workdir = DeviceManager.create("cpu", num_devices=2), tmp_path / "run"
    run(config, devices, str(workdir))
    finished = Run.open(workdir, devices, "latest", trust=[tmp_path])
    assert write_predictions(finished, tmp_path / "out.jsonl") == 16
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row.keys() == {"outputs"} for row in rows)
    inputs = finished.trainer.experiment.data.evaluation.inputs
    errors = np.square(np.array([row["outputs"] for row in rows]) - inputs)
    expected = finished.evaluate()["eval/loss"]
    assert errors.mean() == pytest.approx(expected, rel=1e-5)


def scaled(task, preprocess=scale_pixels):
    """A trainer of an autoencoder whose inputs are bytes, scaled on the device."""
    x = np.random.default_rng(0).integers(0, 256, (8, 6)).astype(np.uint8)
    spec = BatchSpec(4, labels="any")
    return Experiment(
        model=hk.transform(lambda inputs: jax.nn.sigmoid(hk.nets.MLP([4, 6])(inputs))),
        task=task,
        data=from_split(Split(x, None, x, None), spec, preprocess=preprocess),
        optimizer=optax.sgd(0.1),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


def of_batch(outputs, batch):
    return {"loss": jnp.mean(jnp.square(outputs - batch["inputs"]), axis=1)}


def of_inputs(outputs, inputs, batch):
    loss = jnp.mean(jnp.square(outputs - inputs), axis=1)
    return {"loss": loss, "bytes": jnp.mean(batch["inputs"], axis=1)}


def test_a_loss_of_inputs_gets_them_as_the_model_does():
    trainer = scaled(of_inputs)
    state, x = trainer.init(), trainer.experiment.data.evaluation
    batches = [x.batch(n)["inputs"] for n in range(x.num_batches)]
    pairs = zip(batches, trainer.predict(state), strict=True)
    loss = np.mean([np.square(y - x / 255.0).mean() for x, y in pairs])
    metrics = trainer.evaluate(state)
    assert metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["eval/bytes"] == pytest.approx(np.mean(batches), rel=1e-5)


@pytest.mark.parametrize(
    ("task", "warns"),
    [
        (of_batch, True),
        (of_inputs, False),  # Of a metric alone.
        (lambda outputs, batch: {"loss": outputs[: len(batch["inputs"]), 0]}, False),
    ],
)
def test_a_loss_of_inputs_that_are_not_preprocessed_is_warned_of(task, warns, caplog):
    check_parts(scaled(task), "eval/loss")
    assert ("before scale_pixels; a task that takes `inputs`" in caplog.text) is warns


def test_a_warning_names_the_function_of_a_partial(caplog):
    def divide(inputs, by):
        return inputs / by

    check_parts(scaled(of_batch, functools.partial(divide, by=255)), "eval/loss")
    assert "before divide; a task" in caplog.text


@pytest.mark.parametrize("name", ["image", "weight"])
def test_a_loss_of_inputs_that_pass_as_they_are_is_not_warned_of(name, caplog):
    image, weight = np.zeros((8, 2, 3), np.uint8), np.ones((8, 6), np.float32)
    x = {"image": image, "weight": weight}
    spec = BatchSpec(4, labels="any")
    trainer = Experiment(
        model=hk.transform(lambda x: hk.Linear(6)(hk.Flatten()(x["image"]))),
        task=lambda outputs, batch: {
            "loss": jnp.mean(outputs, 1) * batch["inputs"][name].reshape(-1, 6)[:, 0]
        },
        data=from_split(Split(x, None, x, None), spec, preprocess=scale_pixels),
        optimizer=optax.sgd(0.1),
    ).trainer(DeviceManager.create("cpu", num_devices=1))
    check_parts(trainer, "eval/loss")
    assert ("before scale_pixels" in caplog.text) is (name == "image")
