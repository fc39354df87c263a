"""A script's run is evaluated, predicted, exported and generated from as a config's."""

import dataclasses
import json
import os

import numpy as np
import optax
import pytest
import safetensors.numpy

from haiku_template.config import default_config, to_dict
from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    from_split,
)
from haiku_template.devices import DeviceManager, mean_over
from haiku_template.errors import ConfigError, StorageError
from haiku_template.models import mlp
from haiku_template.runs import (
    Run,
    export_safetensors,
    export_stablehlo,
    train,
    write_predictions,
)
from haiku_template.storage import read
from haiku_template.training import Experiment, Task, classification
from haiku_text import generation
from haiku_text.models import gpt
from haiku_text.tasks import language_model
from tests.runs import ROOT

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 3)).astype(np.float32)
LABELS = RNG.integers(0, 2, 48).astype(np.int32)


def experiment(devices, width=8):
    """What a user's module would have, for their script and for the commands."""
    split = Split(INPUTS[:32], LABELS[:32], INPUTS[32:], LABELS[32:])
    return Experiment(
        model=mlp(2, devices.axis_name, width=width),
        task=classification,
        data=from_split(split, BatchSpec(8)),
        optimizer=optax.adam(1e-2),
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script") / "run"
    devices = DeviceManager.create("cpu", num_devices=1)
    train(experiment(devices).trainer(devices), num_steps=4, workdir=folder)
    return folder


def test_commands_take_the_function_that_makes_the_experiment(
    workdir, command, tmp_path
):
    given = (f"--workdir={workdir}", "--experiment=tests.test_scripts:experiment")
    done = command("evaluate", *given)
    assert done.returncode == 0, done.stderr
    rows = read(workdir / "metrics.jsonl")
    found = json.loads(done.stdout)
    assert found["step"] == 4
    assert found["eval/loss"] == pytest.approx(rows[-1]["eval/loss"], abs=1e-6)
    for name, words in (
        ("", "give --experiment="),
        ("none:f", "--experiment='none:f'"),
    ):
        flags = [f"--workdir={workdir}"] + [f"--experiment={name}"] * bool(name)
        done = command("evaluate", *flags)
        assert done.returncode == 64 and words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_scripts_run_is_exported(workdir, devices, tmp_path):
    run = Run.open(workdir, devices, experiment=experiment)
    assert export_safetensors(run, tmp_path / "a") == 4
    saved = safetensors.numpy.load_file(tmp_path / "a" / "model.safetensors")
    params = devices.fetch(run.parameters()[0])
    for name, leaf in saved.items():
        module, _, leaf_name = name.rpartition("/")
        np.testing.assert_array_equal(leaf, params[module][leaf_name])
    assert export_stablehlo(run, tmp_path / "b") == 4


def test_an_experiment_that_was_edited_is_said_or_refused(workdir, one_device, caplog):
    edited = Run.open(
        workdir,
        one_device,
        experiment=lambda devices: experiment(devices, width=9),
    )
    with pytest.raises(StorageError, match="does not fit this model"):
        edited.evaluate()
    assert "computed something else" in caplog.text
    with pytest.raises(ConfigError, match="made by a script.*--experiment="):
        Run.open(workdir, one_device, "latest")


def test_text_is_generated_from_a_scripts_run(tmp_path, one_device):
    tokens = RNG.integers(0, 20, 400).astype(np.uint16)
    windows = np.stack([tokens[i : i + 9] for i in range(0, 380, 9)])
    inputs, labels = windows[:, :-1], windows[:, 1:]
    sets = ArrayDataset(inputs, labels, BatchSpec(8)), EvaluationSet(inputs, labels, 8)
    data = Data(*sets, 20, lambda tokens: tokens.astype(np.int32))
    model = gpt(20, num_layers=1, width=8, num_heads=2, context=16)
    made = Experiment(
        model=model,
        task=language_model,
        data=data,
        optimizer=optax.adam(1e-2),
        family=gpt.family,
    )
    train(made.trainer(one_device), num_steps=2, workdir=tmp_path)
    loaded = generation.load(Run.open(tmp_path, one_device, experiment=made))
    assert (loaded.step, loaded.vocabulary, loaded.context) == (2, 20, 16)
    sampling = generation.Sampling(temperature=0, vocabulary=20)
    written = generation.make_generate(one_device, loaded, sampling)([[1, 2, 3]], 4)
    assert len(list(written)) == 4


def test_a_script_that_trains_when_it_is_imported_is_refused(
    workdir, command, tmp_path
):
    (tmp_path / "unguarded.py").write_text(
        "from haiku_template.devices import DeviceManager, mean_over\n"
        "from haiku_template.runs import train\n"
        "from tests.test_scripts import experiment\n"
        "devices = DeviceManager.create('cpu')\n"
        "trainer = experiment(devices).trainer(devices)\n"
        f"train(trainer, num_steps=9, workdir={str(workdir)!r})\n"
    )
    done = command(
        "evaluate",
        f"--workdir={workdir}",
        "--experiment=unguarded:experiment",
        PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
    )
    assert done.returncode == 64 and "if __name__ == '__main__':" in done.stderr
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["4"]


def test_a_run_without_a_model_has_no_outputs_to_predict(tmp_path, one_device):
    task = Task(lambda batch: {"loss": batch["inputs"][:, 0]})

    def step(state, batch, rng, axis_name):
        return state, {"loss": mean_over(axis_name, batch["inputs"].mean())}

    made = Experiment(
        data=experiment(one_device).data,
        init=lambda rng, batch: {"params": batch["inputs"][0]},
        step=step,
        task=task,
    )
    train(made.trainer(one_device), num_steps=1, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=made)
    assert "eval/loss" in run.evaluate()
    for write in (write_predictions, export_stablehlo):
        with pytest.raises(ConfigError, match="no model, and so no outputs"):
            write(run, tmp_path / "outputs.npz")


def described(**changes):
    """A config of a user's script, which names the parts of this module."""
    config = default_config()
    config.num_steps, config.batch_size = 4, 16
    config.model = {"name": "mlp", "width": 4}
    config.update_from_flattened_dict(changes)
    return config


def test_a_script_of_a_config_keeps_it_for_the_commands(tmp_path, one_device, command):
    made = Experiment.from_config(described(), one_device)
    options = {"num_steps": 2, "best_metric": "eval/accuracy", "best_mode": "max"}
    train(made.trainer(one_device), workdir=tmp_path / "run", **options)
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["model"] == {"name": "mlp", "width": 4} and kept["num_steps"] == 4
    assert kept["best_metric"] == "eval/accuracy" and kept["best_mode"] == "max"
    done = command("evaluate", f"--workdir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "another" not in done.stderr and "edited" not in done.stderr
    rows = read(tmp_path / "run" / "metrics.jsonl")
    found = json.loads(done.stdout)
    assert found["eval/loss"] == pytest.approx(rows[-1]["eval/loss"], abs=1e-6)
    # The same script resumes; one of another config does not.
    train(made.trainer(one_device), workdir=tmp_path / "run", **options)
    other = Experiment.from_config(described(**{"model.width": 5}), one_device)
    with pytest.raises(ConfigError, match="model.width: 4 there, 5 now"):
        train(other.trainer(one_device), workdir=tmp_path / "run", **options)


@pytest.mark.parametrize("name", ["model", "task", "optimizer", "data", "seed"])
def test_a_part_that_the_script_replaced_is_not_what_the_config_says(one_device, name):
    made = Experiment.from_config(described(), one_device)
    parts = {"model": mlp(10, width=7), "task": lambda outputs, batch: {}, "seed": 5}
    parts |= {"optimizer": optax.sgd(0.1), "data": made.data._replace(num_outputs=11)}
    assert made.config == to_dict(described())
    assert dataclasses.replace(made, placement="device").config == made.config
    assert dataclasses.replace(made, **{name: parts[name]}).config == {}
    again = dataclasses.replace(made, **{name: getattr(made, name)})
    assert again.config == made.config


def test_a_run_that_began_without_a_config_goes_on_without(tmp_path, one_device):
    """As a version before this one left it."""
    made, workdir = Experiment.from_config(described(), one_device), tmp_path / "run"
    train(made.trainer(one_device), workdir=workdir, num_steps=1, config={})
    assert json.loads((workdir / "config.json").read_text()) == {}
    train(made.trainer(one_device), workdir=workdir, num_steps=2)
    assert json.loads((workdir / "config.json").read_text()) == {}
