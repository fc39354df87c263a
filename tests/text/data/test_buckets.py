"""Batches of several lengths: compiled before the first step, and evaluated exactly."""

import json

import jax
import numpy as np
import optax
import pytest

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, each_shape
from haiku_template.errors import ConfigError
from haiku_template.preflight.budget import memory_budget
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from haiku_text.data.jsonl import jsonl
from haiku_text.data.texts import text_lengths
from haiku_text.models import bert, gpt
from haiku_text.tasks import language_model

ENCODER = {
    "vocab_size": 256,
    "context": 64,
    "width": 16,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_width": 32,
    "dropout": 0.0,
}
DECODER = {"num_layers": 1, "width": 16, "num_heads": 2, "context": 64}


def write(path, task):
    """70 examples of up to 60 tokens; what to say of each is in its first byte."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(70):
        text = "ab"[i % 2] + f"{i:02}" + "x" * int(rng.integers(50))
        if task == "classification":
            rows.append({"text": text, "label": "pos" if i % 2 else "neg"})
        else:
            rows.append({"prompt": text, "completion": "yes" if i % 2 else "no!"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trainer(devices, tmp_path, task, batch_size=16, **parts):
    path = write(tmp_path / "a.jsonl", task)
    labels = "classes" if task == "classification" else "tokens"
    spec = BatchSpec(batch_size, labels=labels)
    data = jsonl(spec, path=path, context=64, num_buckets=2, validation_fraction=0.3)
    if task == "classification":
        model = bert(data.num_outputs, pooling="mean", **ENCODER)
        fitting = {"model": model, "task": classification}
    else:
        model = gpt(data.num_outputs, **DECODER)
        fitting = {"model": model, "task": language_model}
    return Experiment(data=data, optimizer=optax.adam(1e-2), **fitting | parts).trainer(
        devices
    )


def test_lengths_are_of_texts_that_are_padded_on_the_right():
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    for kind in (mask, mask.astype(bool)):
        lengths = text_lengths(kind)
        assert lengths.tolist() == [3, 1, 0] and lengths.dtype == np.int32
    for wrong in ([0, 1, 1], [1, 0, 1]):
        with pytest.raises(ConfigError, match="row 1 of the mask has padding before"):
            text_lengths(np.array([[1, 1, 0], wrong]))


def test_encoders_get_the_lengths_of_their_texts(tmp_path):
    path = write(tmp_path / "a.jsonl", "classification")
    data = jsonl(BatchSpec(8), path=path, context=64)
    inputs = data.train.batch(3)["inputs"]
    found = jax.jit(data.preprocess)(inputs)
    np.testing.assert_array_equal(found["lengths"], text_lengths(inputs["mask"]))
    assert found["lengths"].dtype == np.int32 and "lengths" not in inputs


@pytest.mark.slow
def test_each_length_is_compiled_once(one_device, tmp_path):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, fun_name="", **__: (
            compiled.append(fun_name) if "backend_compile" in name else None
        )
    )
    made = trainer(one_device, tmp_path, "language_model")
    result = train(made, num_steps=6, workdir=tmp_path / "run", log_every=3)
    steps = compiled.count("jit(train_step)")
    assert steps == len(each_shape(made.experiment.data.train)) > 1
    lengths = {
        jax.tree.leaves(made.experiment.data.evaluation.batch(i)["inputs"])[0].shape
        for i in range(made.experiment.data.evaluation.num_batches)
    }
    assert compiled.count("jit(eval_step)") == len({n for _, n in lengths})
    assert result.metrics["train/loss"] < np.log(256)


@pytest.mark.slow
def test_the_budget_is_that_of_the_longest_batches(one_device, tmp_path):
    made = trainer(one_device, tmp_path, "classification")
    peaks = []
    for batch in each_shape(made.experiment.data.train):
        analysis = made.trace(batch).lower().compile().memory_analysis()
        peaks.append(analysis.temp_size_in_bytes)
    assert memory_budget(made).temporaries == max(peaks) > min(peaks)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "language_model"])
def test_evaluation_is_that_of_each_example_alone(devices, tmp_path, task):
    made = trainer(devices, tmp_path, task)
    state = made.init()
    metrics = made.evaluate(state)
    alone = trainer(devices, tmp_path, task, batch_size=devices.num_devices)
    assert len(each_shape(made.experiment.data.train)) > 1
    for name, value in alone.evaluate(state).items():
        assert metrics[name] == pytest.approx(value, rel=1e-5), name


def test_a_vocabulary_that_the_model_does_not_have_is_refused(one_device, tmp_path):
    config = default_config()
    path = write(tmp_path / "a.jsonl", "classification")
    config.data = {"name": "jsonl", "path": path, "context": 64}
    config.model = {"name": "bert", "pooling": "mean"} | ENCODER | {"vocab_size": 100}
    with pytest.raises(ConfigError, match="tokens up to 255.*vocab_size=100; 256 or"):
        Experiment.from_config(config, one_device).trainer(one_device)
