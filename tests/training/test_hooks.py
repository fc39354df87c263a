"""Hooks that a config names: distributions, pictures, and a model's own text."""

import json
from types import SimpleNamespace

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits, gpt_bytes
from haiku_template.data import Data
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.reporting import plots, tensorboard
from haiku_template.runs import start
from haiku_template.runs.hooks import images
from haiku_template.storage import metrics, read
from haiku_template.training import Experiment, Task, classification, regression

CPU = DeviceManager.create("cpu", num_devices=1)


def values(file):
    """Bodies of the events of a file, without their lengths and checksums."""
    data, place = file.read_bytes(), 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 8], "little")
        yield data[place + 12 : place + 12 + size]
        place += size + 16


def config(**changes):
    config = digits.get_config()
    config.update_from_flattened_dict({"num_steps": 6, "eval_every": 3, "log_every": 6})
    config.optimizer.warmup_steps = 0
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["one", "two devices"]
)
def test_pictures_and_distributions_are_written_and_change_no_number(tmp_path, devices):
    devices = DeviceManager.create("cpu", num_devices=devices)
    runs = {"with": ("images", "histograms"), "without": ()}
    for name, hooks in runs.items():
        start.run(config(hooks=hooks), devices, str(tmp_path / name))
    rows = [read(tmp_path / name / "metrics.jsonl") for name in runs]
    for a, b in zip(*rows, strict=True):
        same = [key for key in a if not key.startswith("perf/")]
        assert [a[key] for key in same] == pytest.approx([b[key] for key in same])
    folder = tmp_path / "with"
    files = sorted(x.name for x in (folder / "images").iterdir())
    assert files == ["3.png", "6.png"]
    (events,) = (folder / "tensorboard" / "images").iterdir()
    (version, *pictures) = values(events)
    assert b"brain.Event:2" in version and len(pictures) == 2
    assert (folder / "images" / "6.png").read_bytes() in pictures[1]
    (events,) = (folder / "tensorboard" / "histograms").iterdir()
    (_, *steps) = values(events)
    assert len(steps) == 2 and all(b"mlp/~/linear_0/w" in step for step in steps)


CLASSES = Task(lambda o, batch: classification.values(o[0], batch), labels="classes")
ANY = Task(lambda o, batch: {"loss": jnp.mean(o, axis=1)})
OF_PIXELS = {  # Task, what the model makes of outputs, labels; and the titles.
    "classes": (classification, lambda x: x, [1, 2, 1], ["1", "1, not 2", "1"]),
    "and a number": (CLASSES, lambda x: (x, 1.0), [1, 2, 1], ["1", "1, not 2", "1"]),
    "numbers": (regression, lambda x: x[:, :1], [0.5, 1.0, 2.0], ["", "", ""]),
    "pixels": (ANY, lambda x: x, [1, 2, 1], ["", "", ""]),
}


@pytest.mark.parametrize("case", OF_PIXELS)
def test_a_picture_says_what_is_predicted_where_that_is_a_class(
    case, tmp_path, monkeypatch
):
    task, pack, labels, expected = OF_PIXELS[case]
    batch = {"inputs": np.zeros((3, 2, 2), np.float32), "labels": np.array(labels)}

    def model(inputs):
        bias = jnp.array([0.0, 1.0, 0.5]) + 0 * hk.Linear(1)(inputs[:, 0])
        return pack(bias)

    dataset = SimpleNamespace(num_batches=1, batch=lambda index: batch)
    experiment = Experiment(
        model=hk.transform(model),
        task=task,
        data=Data(dataset, dataset, 3 if task is not regression else 1),
        optimizer=optax.sgd(0.1),
    )
    drawn = []
    monkeypatch.setattr(plots, "write_pictures", lambda *args: drawn.append(args[2]))
    hook = images(trainer := experiment.trainer(CPU), tmp_path)
    state = trainer.init()
    hook(SimpleNamespace(what="evaluation", step=1, state=state))
    assert drawn == [expected]


@pytest.mark.slow
def test_text_that_a_model_writes_is_kept_for_each_evaluation(tmp_path):
    small = gpt_bytes.get_config()
    small.num_steps, small.eval_every, small.log_every = 4, 2, 4
    small.model.num_layers, small.model.width, small.model.num_heads = 1, 16, 2
    small.data.context = small.model.context = 32
    small.data.eval_windows, small.batch_size = 4, 4
    small.save_every, small.hooks = None, ("samples",)
    start.run(small, CPU, str(tmp_path / "run"))
    lines = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert [row["prompt"] for row in rows[:3]] == [row["prompt"] for row in rows[3:]]
    assert all(row["text"] for row in rows)
    assert [row["text"] for row in rows[:3]] != [row["text"] for row in rows[3:]]
    (events,) = (tmp_path / "run" / "tensorboard" / "samples").iterdir()
    assert len(list(values(events))) == 3


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (("image",), "config.hooks='image' is not known .did you mean images"),
        (("samples",), "config.hooks=samples is for a language model"),
    ],
)
def test_hooks_that_do_not_fit_are_refused_before_the_run(tmp_path, hooks, words):
    with pytest.raises(ConfigError, match=words):
        start.run(config(hooks=hooks), CPU, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_pictures_of_inputs_that_are_none_are_refused(tmp_path):
    x = np.zeros((40, 5), np.float32)
    y = np.zeros(40, np.int32)
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = {"name": "npz", "path": str(tmp_path / "data.npz"), "placement": "host"}
    wrong = config(hooks=("images",))
    wrong.data = data
    with pytest.raises(ConfigError, match=r"and here they are \[128, 5\]|\[40, 5\]"):
        start.run(wrong, CPU, str(tmp_path / "run"))


@pytest.mark.parametrize("unit", [1, 1j])
def test_a_distribution_counts_what_is_finite(monkeypatch, unit):
    """Of complex numbers it is of their magnitudes."""
    monkeypatch.setattr(metrics.time, "time", lambda: 1.5)
    x = unit * np.array([[0.0, 1.0], [np.nan, 3.0]])
    data = tensorboard.histogram("x", x)
    numbers = np.frombuffer(data[-30 * 8 :], "<f8")
    assert numbers.sum() == 3 and numbers[[0, 10, 29]].tolist() == [1, 1, 1]
