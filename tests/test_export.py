"""Exports, used as other software would: files, and a process without Haiku."""

import copy
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data, EvaluationSet, Split, from_split
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models import mlp
from haiku_template.models.precision import Precision
from haiku_template.params import in_dictionaries
from haiku_template.pretrained.writing import check_new, new_file
from haiku_template.runs import (
    Run,
    export_forward,
    export_safetensors,
    export_stablehlo,
    train,
    write_predictions,
)
from haiku_template.runs.start import run
from haiku_template.training import Experiment, Task, classification
from haiku_template.training.trainer import with_state
from haiku_text.huggingface import check_classes, describe
from haiku_text.models import bert, gpt, multiply_out
from haiku_text.models.gpt import PRESETS
from tests.runs import Probe, run_command

SIZES = {"width": 16, "num_layers": 1, "num_heads": 2, "context": 16}
BERT = {"name": "bert", "vocab_size": 256, "mlp_width": 32, "dropout": 0.0} | SIZES
# Runs what was exported, without this package or Haiku.
CHILD = """
import sys, jax, numpy as np
forward = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
for name in sys.argv[2:]:
    with np.load(name) as arrays:
        inputs = dict(arrays)
    outputs = forward.call(inputs.get("inputs", inputs))
    np.save(name + ".out", np.asarray(outputs))
loaded = {module.split(".")[0] for module in sys.modules}
assert not loaded & {"haiku", "optax", "haiku_template"}, loaded
"""


def experiment(tmp_path, name):
    """A run of one step, of a model of each kind: its config and its workdir."""
    config = default_config()
    config.num_steps = 1
    config.batch_size = 8
    if name in ("bert", "gpt"):
        keys, config.task.name = ("text", "label"), "classification"
        if name == "gpt":
            keys, config.task.name = ("prompt", "completion"), "language_model"
        rows = [("a fine film", "good"), ("so so", "bad")]
        lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(lines))
        config.data = {"name": "jsonl", "path": str(path), "context": 16}
        config.data.validation_fraction = 0.0
    config.model = {
        "mlp": {"name": "mlp", "width": 8},
        "resnet": {"name": "resnet", "channels": (4,), "blocks": 1},
        "bert": BERT,
        "gpt": {"name": "gpt"} | SIZES,
    }[name]
    return config, tmp_path / "run"


def trained(tmp_path, devices, name, **keys):
    config, workdir = experiment(tmp_path, name)
    config.update(keys)
    run(config, devices, str(workdir))
    return config, workdir


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Config and workdir of runs with averaged parameters, which no test changes."""
    devices = DeviceManager.create("cpu", num_devices=1)

    @functools.cache
    def make(name, precision):
        home = tmp_path_factory.mktemp(name)
        return trained(home, devices, name, precision=precision, ema_decay=0.5)

    def of(name, precision="float32"):
        config, workdir = make(name, precision)
        return copy.deepcopy(config), workdir

    return of


@pytest.mark.slow(but="mlp")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "float32"),
        ("resnet", "bfloat16"),
        ("bert", "float32"),
        ("gpt", "float32"),
    ],
)
def test_a_process_without_haiku_computes_the_same(
    tmp_path, one_device, shared, name, precision
):
    pytest.importorskip("flatbuffers")
    config, workdir = shared(name, precision)
    output = tmp_path / "exported"
    assert export_stablehlo(Run.open(workdir, one_device, "latest"), output) == 1
    described = json.loads((output / "forward.json").read_text())
    assert described["platforms"] == ["cpu", "cuda"]

    finished = Run.open(workdir, one_device, "latest")
    trainer, state = finished.trainer, finished.state
    batch = trainer.experiment.data.train.batch(0)["inputs"]
    files, expected = [], []
    for size in (1, 3):
        inputs = jax.tree.map(lambda x, size=size: x[:size], batch)
        files.append(str(tmp_path / f"{size}.npz"))
        np.savez(
            files[-1], **(inputs if isinstance(inputs, dict) else {"inputs": inputs})
        )
        expected.append(outputs_of(trainer, config, state, inputs))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(output / "forward.stablehlo"), *files],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for file, wanted in zip(files, expected, strict=True):
        np.testing.assert_allclose(
            np.load(f"{file}.out.npy"), wanted, rtol=0, atol=1e-6
        )


def outputs_of(trainer, config, state, inputs):
    """What the model gives for the averaged parameters, by `hk.transform` alone."""
    params, net_state = state.averaged(), state.net_state
    assert params is state.ema_params
    model = with_state(trainer.experiment.model)
    precision = Precision.create(config.precision)

    def apply(params, inputs):
        cast = precision.policy.cast_to_compute
        with precision.norms_in_float32():
            outputs, _ = model.apply(cast(params), net_state, None, cast(inputs), False)
        return multiply_out(precision.cast_outputs(outputs))

    return np.asarray(jax.jit(apply)(params, inputs))


def test_the_description_names_inputs_and_classes(tmp_path, one_device, shared):
    pytest.importorskip("flatbuffers")
    _, workdir = shared("bert")
    export_stablehlo(Run.open(workdir, one_device, "1"), tmp_path / "out")
    described = json.loads((tmp_path / "out" / "forward.json").read_text())
    entry = {"shape": ["b", 16], "dtype": "int32"}
    assert described["inputs"] == {"tokens": entry, "mask": entry}
    assert list(described["outputs"].values()) == [
        {"shape": ["b", 2], "dtype": "float32"}
    ]
    assert described["class_names"] == ["bad", "good"] and described["step"] == 1


@pytest.mark.slow
def test_an_exported_program_keeps_norms_in_half_precision_apart(
    tmp_path, one_device, shared
):
    """Who runs it may not have the flag without which a jaxlib miscomputes."""
    pytest.importorskip("flatbuffers")
    for precision, has_barrier in (("bfloat16", True), ("float32", False)):
        _, workdir = shared("resnet", precision)
        output = tmp_path / precision
        export_stablehlo(Run.open(workdir, one_device, "1"), output)
        program = bytearray((output / "forward.stablehlo").read_bytes())
        text = jax.export.deserialize(program).mlir_module()
        assert ("optimization_barrier" in text) == has_barrier


def test_a_program_exported_on_four_devices_needs_one(tmp_path, four_devices):
    pytest.importorskip("flatbuffers")
    _, workdir = trained(tmp_path, four_devices, "resnet")
    finished = Run.open(workdir, four_devices, "latest")
    export_stablehlo(finished, tmp_path / "out")
    program = bytearray((tmp_path / "out" / "forward.stablehlo").read_bytes())
    batch = finished.evaluation_set().batch(0)["inputs"]
    expected = next(finished.trainer.predict(finished.state))
    found = jax.export.deserialize(program).call(batch)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_predictions_read_each_batch_once(tmp_path, one_device, shared, monkeypatch):
    _, workdir = shared("mlp")
    finished, read, batch = Run.open(workdir, one_device, "1"), [], EvaluationSet.batch
    assert int(finished.state.step) == 1
    monkeypatch.setattr(
        EvaluationSet, "batch", lambda self, i: read.append(i) or batch(self, i)
    )
    count = write_predictions(finished, tmp_path / "out.npz")
    whole = finished.evaluation_set()
    assert read == list(range(whole.num_batches)) and len(read) > 1
    with np.load(tmp_path / "out.npz") as arrays:
        assert arrays["outputs"].shape == (count, 10)
        np.testing.assert_array_equal(arrays["labels"], whole.labels)


def draws(name):
    """A model with dropout in evaluation, too, and one that can do without a key."""

    def model(inputs, is_training):
        key = hk.next_rng_key() if name == "always" else hk.maybe_next_rng_key()
        hidden = hk.Linear(8)(inputs)
        return hk.Linear(2)(hidden if key is None else hk.dropout(key, 0.5, hidden))

    return hk.transform(model)


def named(inputs, is_training):
    return Outputs(hk.Linear(2)(inputs), {"more": Outputs(inputs, inputs[:, :1])})


class Outputs(NamedTuple):
    """Outputs of a user's class."""

    logits: jax.Array
    inputs: Any


def of_script(model, workdir, devices, class_names=()):
    """A run of one step of a script's model, and its first batch of inputs."""
    x, y = np.ones((8, 3), np.float32), np.arange(8, dtype=np.int32) % 2
    x *= np.arange(8)[:, None]
    data = from_split(Split(x, y, x, y), BatchSpec(8))
    data = data._replace(class_names=class_names)
    task = Task(lambda outputs, batch: {"loss": batch["inputs"][:, 0]}, "any")
    experiment = Experiment(
        model=model, data=data, task=task, optimizer=optax.sgd(0.0), seed=7
    )
    train(experiment.trainer(devices), num_steps=1, workdir=workdir)
    return Run.open(workdir, devices, experiment=experiment), x


def exported_of(run, folder):
    export_stablehlo(run, folder)
    program = bytearray((folder / "forward.stablehlo").read_bytes())
    return jax.export.deserialize(program)


@pytest.mark.parametrize("name", ["always", "if there is a key"])
def test_a_model_that_draws_in_evaluation_is_refused(tmp_path, one_device, name):
    run, _ = of_script(draws(name), tmp_path / "run", one_device)
    with pytest.raises(ConfigError, match="cannot be exported.*only if is_training"):
        export_stablehlo(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_program_that_draws_nothing_has_no_key(tmp_path, one_device):
    """Although Haiku's stacks of layers ask for one."""

    def stacked(inputs, is_training):
        layers = hk.layer_stack(2)(lambda x: jax.nn.relu(hk.Linear(3)(x)))
        return hk.Linear(2)(layers(inputs))

    pytest.importorskip("flatbuffers")
    run, inputs = of_script(hk.transform(stacked), tmp_path / "run", one_device)
    outputs = exported_of(run, tmp_path / "out").call(inputs)
    np.testing.assert_allclose(outputs, run.predict(inputs), atol=1e-6)
    model, variables = run.model()
    assert "random" not in str(jax.make_jaxpr(model)(variables, inputs))
    assert model(variables, inputs[:0]).shape == (0, 2)


def test_a_model_that_refuses_numpys_arrays_is_exported(tmp_path, one_device):
    """The physics models of DeepMind ask what they were given."""

    def model(inputs, is_training):
        if not isinstance(inputs, jnp.ndarray):
            raise NotImplementedError(type(inputs))
        return hk.Linear(2)(inputs)

    pytest.importorskip("flatbuffers")
    run, inputs = of_script(hk.transform(model), tmp_path / "run", one_device)
    outputs = exported_of(run, tmp_path / "out").call(inputs)
    np.testing.assert_allclose(outputs, run.predict(inputs), atol=1e-6)


def test_a_key_that_changes_nothing_is_no_obstacle(tmp_path, one_device):
    """Perceiver IO asks for one in evaluation, too, for a dropout of nothing."""

    def model(inputs, is_training):
        rate = 0.5 if is_training else 0.0
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), rate, inputs))

    pytest.importorskip("flatbuffers")
    run, inputs = of_script(hk.transform(model), tmp_path / "run", one_device)
    outputs = exported_of(run, tmp_path / "out").call(inputs)
    np.testing.assert_allclose(outputs, run.predict(inputs), atol=1e-6)


def test_outputs_of_a_users_class_are_exported_as_dictionaries(tmp_path, one_device):
    pytest.importorskip("flatbuffers")
    names = tuple(np.unique([3, 7]))  # Which JSON does not know.
    model = hk.without_apply_rng(hk.transform(named))
    run, inputs = of_script(model, tmp_path / "run", one_device, class_names=names)
    found = exported_of(run, tmp_path / "out").call(inputs)
    assert found.keys() == {"logits", "inputs"}
    np.testing.assert_array_equal(found["inputs"]["more"]["logits"], inputs)
    described = json.loads((tmp_path / "out/forward.json").read_text())
    assert described["class_names"] == ["3", "7"]
    assert "inputs/more/logits" in described["outputs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Graph:
    """Inputs of a user's class, whose names do not sort as its fields."""

    nodes: Any
    edges: Any
    kind: str = dataclasses.field(default="mesh", metadata={"static": True})


@pytest.mark.parametrize("kind", [Outputs, Graph])
def test_inputs_and_outputs_of_a_users_class_are_dictionaries_in_files(
    kind, tmp_path, one_device
):
    """Where there are no such classes; a run's own program has them."""
    pytest.importorskip("flatbuffers")
    x, y = np.eye(8, 3, dtype=np.float32), np.arange(8, dtype=np.int32) % 2
    batch = {"inputs": kind(x, 2 * x), "labels": y}
    first, second = {Outputs: ("logits", "inputs"), Graph: ("nodes", "edges")}[kind]

    def model(inputs):
        a, b = getattr(inputs, first), getattr(inputs, second)
        return kind(hk.Linear(2)(a), {"more": kind(b, jnp.mean(b))})

    def task(outputs, batch):
        return classification.values(getattr(outputs, first), batch)

    dataset = SimpleNamespace(num_batches=1, batch=lambda index: batch)
    data = Data(dataset, dataset, 2)
    experiment = Experiment(
        model=hk.transform(model), data=data, task=task, optimizer=optax.sgd(0.0)
    )
    train(experiment.trainer(one_device), num_steps=1, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=experiment)
    outputs = run.predict({"inputs": batch["inputs"]})
    assert isinstance(outputs, kind)
    logits = getattr(outputs, first)
    program = exported_of(run, tmp_path / "out")
    found = program.call({first: x, second: 2 * x})
    np.testing.assert_allclose(found[first], logits, rtol=1e-6)
    assert {*found} == {first, second} and {*found[second]["more"]} == {first, second}
    write_predictions(run, tmp_path / "out.jsonl")
    lines = [*map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())]
    expected = {first: 2 * x[3], second: None}
    np.testing.assert_allclose(lines[3]["outputs"][first], logits[3], rtol=1e-6)
    assert lines[3]["outputs"][second] == {
        "more": expected | {first: [*expected[first]]}
    }
    write_predictions(run, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        assert {*arrays} == {
            f"outputs/{first}",
            f"outputs/{second}/more/{first}",
            "labels",
        }


class Nothing(NamedTuple):
    """As optax's empty state."""


def test_trees_are_in_dictionaries_whatever_they_hold():
    tree = {"a": Nothing(), "b": (Outputs(1, [2, None]), {}), "c": Graph(4, Nothing())}
    there = {"a": {}, "b": ({"logits": 1, "inputs": [2, None]}, {})}
    assert in_dictionaries(tree) == there | {"c": {"nodes": 4, "edges": {}}}
    assert in_dictionaries(7) == 7 and in_dictionaries(None) is None


def test_a_tree_without_names_is_exported_by_numbers():
    pytest.importorskip("flatbuffers")
    inputs = [Probe("pos", np.ones((3, 5), np.float32))]
    twice = lambda x: Probe("out", x[0].data * 2)  # noqa: E731
    _, serialized = export_forward(twice, inputs)
    found = jax.export.deserialize(bytearray(serialized)).call([{"0": inputs[0].data}])
    np.testing.assert_array_equal(found["0"], np.full((3, 5), 2))


def test_an_error_without_words_has_its_class(tmp_path):
    def forward(inputs):
        if not isinstance(inputs.shape[0], int):
            raise AssertionError
        return inputs

    with pytest.raises(ConfigError, match="AssertionError; --batch_size=1 is for a"):
        export_forward(forward, np.zeros((3, 5), np.float32))


def test_what_another_has_written_meanwhile_is_left_alone(tmp_path):
    file = tmp_path / "out.npz"
    words = "exists, and nothing is overwritten"
    with pytest.raises(ConfigError, match=words), new_file(file) as partial:
        partial.write_text("second")
        file.write_text("first")
    assert file.read_text() == "first" and [*tmp_path.iterdir()] == [file]
    link = tmp_path / "link.npz"
    link.symlink_to("absent")
    with pytest.raises(ConfigError, match=words):
        check_new(link)


def test_a_model_of_one_batch_size_is_refused():
    def forward(inputs):
        return inputs.reshape(3, -1)

    words = "a batch of any size, on cpu and.*; --batch_size=1 is for a model of one"
    with pytest.raises(ConfigError, match=words):
        export_forward(forward, np.zeros((3, 5), np.float32))


def test_a_model_that_takes_the_length_of_a_batch_is_told_of_its_shape():
    """JAX's words were of an object that no model names."""
    pytest.importorskip("flatbuffers")
    inputs = np.zeros((3, 5, 2), np.float32)
    with pytest.raises(ConfigError, match=r"integer \(in the model x.shape\[0\] may"):
        export_forward(lambda x: x.reshape(len(x), 10), inputs)
    exported, _ = export_forward(lambda x: x.reshape(x.shape[0], 10), inputs)
    assert str(exported.out_avals[0].shape[0]) == "b"


def test_a_model_of_one_batch_size_is_exported_for_it():
    pytest.importorskip("flatbuffers")

    def forward(inputs):  # As a model that calls int() on the number of examples.
        return inputs.reshape(int(len(inputs)), -1) * 2

    inputs = {"given": np.ones((3, 5), np.float32)}
    exported, serialized = export_forward(lambda x: forward(x["given"]), inputs, 2)
    assert exported.out_avals[0].shape == (2, 5)
    one = {"given": inputs["given"][:2]}
    found = jax.export.deserialize(bytearray(serialized)).call(one)
    np.testing.assert_array_equal(found, np.full((2, 5), 2))
    with pytest.raises(
        ConfigError, match="a batch of 2, on cpu and cuda: (?!.*size=1)"
    ):
        export_forward(lambda x: forward(x["given"][:, 7:]).sum(axis=9), inputs, 2)


def test_models_of_hugging_faces_families_get_its_names(tmp_path, one_device, shared):
    _, workdir = shared("bert")
    output = tmp_path / "out"
    assert export_safetensors(Run.open(workdir, one_device, "latest"), output) == 1
    found = describe(output, bert.family)
    assert found.config["id2label"] == {"0": "bad", "1": "good"}
    assert found.config["architectures"] == ["BertForSequenceClassification"]
    assert {k: found.arguments[k] for k in SIZES} == SIZES
    tensors = load_file(output / "model.safetensors")
    state = Run.open(workdir, one_device, "latest").state
    head = np.asarray(state.ema_params["bert/head"]["w"])
    np.testing.assert_array_equal(tensors["classifier.weight"], head.T)
    assert "bert.encoder.layer.0.attention.self.query.weight" in tensors


def as_transformers(folder, tokens, mask):
    """The logits of BertForSequenceClassification, from what the folder says alone."""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    tensors = load_file(folder / "model.safetensors")
    heads = config["num_attention_heads"]

    def linear(name, x):
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    kinds = ("word", "position", "token_type")
    word, position, kind = (
        tensors[f"bert.embeddings.{name}_embeddings.weight"] for name in kinds
    )
    x = word[tokens] + position[: tokens.shape[1]] + kind[0]
    x = norm("bert.embeddings.LayerNorm", x)
    for i in range(config["num_hidden_layers"]):
        at = f"bert.encoder.layer.{i}."
        q, k, v = (
            split(linear(f"{at}attention.self.{name}", x))
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        scores = np.where(mask[:, None, None, :], scores, -1e30)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        y = (scores / scores.sum(-1, keepdims=True)) @ v
        y = linear(f"{at}attention.output.dense", y.swapaxes(1, 2).reshape(x.shape))
        x = norm(f"{at}attention.output.LayerNorm", x + y)
        y = linear(f"{at}intermediate.dense", x)
        y = y * (1 + np.vectorize(math.erf)(y / np.sqrt(2))) / 2
        x = norm(f"{at}output.LayerNorm", x + linear(f"{at}output.dense", y))
    logits = linear("classifier", np.tanh(linear("bert.pooler.dense", x[:, 0])))
    assert len(config["id2label"]) == logits.shape[1]  # Else it loads another head.
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "mine:margin"])
def test_what_is_exported_of_a_bert_computes_the_same_in_transformers(
    tmp_path, one_device, task
):
    config, workdir = experiment(tmp_path, "bert")
    run(config, one_device, str(workdir))
    finished = Run.open(workdir, one_device, "latest")
    trainer, state = finished.trainer, large(finished.state)
    finished.config.task = {"name": task}
    # A cached property: as if the checkpoint held these.
    vars(finished)["checkpoint"] = (finished.step, state)
    output = tmp_path / "out"
    export_safetensors(finished, output)
    inputs = trainer.experiment.data.train.batch(0)["inputs"]
    model = with_state(trainer.experiment.model)
    expected, _ = model.apply(state.params, {}, None, inputs, False)
    found = as_transformers(output, inputs["tokens"], inputs["mask"])
    assert np.std(found) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def large(state):
    """The state with parameters that make a difference."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), state.params
    )
    return state._replace(params=params)


def test_a_classifier_that_transformers_lacks_is_not_exported_in_its_names(
    tmp_path, one_device, shared
):
    finished = Run.open(shared("bert")[1], one_device, "latest")
    assert finished.state is not None  # Read with the model that it is of.
    finished.config.model.pooling = "mean"
    words = "train with --config.model.pooling=cls, .* --format=stablehlo"
    with pytest.raises(ConfigError, match=words):
        export_safetensors(finished, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_presets_of_a_gpt_are_spelled_out(tmp_path, one_device, monkeypatch):
    monkeypatch.setitem(PRESETS, "124M", PRESETS["124M"]._replace(**SIZES))
    config, workdir = experiment(tmp_path, "gpt")
    config.model = {"name": "gpt", "preset": "124M"}
    run(config, one_device, str(workdir))
    export_safetensors(Run.open(workdir, one_device, "latest"), tmp_path / "out")
    arguments = describe(tmp_path / "out", gpt.family).arguments
    assert {k: arguments[k] for k in SIZES} == SIZES
    assert arguments["num_outputs"] == 256


@pytest.mark.slow
def test_other_models_keep_haikus_names_and_their_state(tmp_path, devices):
    config, workdir = trained(tmp_path, devices, "resnet", ema_decay=0.5)
    output = tmp_path / "out"
    export_safetensors(Run.open(workdir, devices, "latest"), output)
    state = Run.open(workdir, devices, "latest").state
    for file, tree in (("model", state.ema_params), ("state", state.net_state)):
        tensors = load_file(output / f"{file}.safetensors")
        expected = {
            f"{module}/{name}": np.asarray(x)
            for module, name, x in hk.data_structures.traverse(devices.fetch(tree))
        }
        assert tensors.keys() == expected.keys() and tensors
        for name, value in expected.items():
            np.testing.assert_array_equal(tensors[name], value)
            assert tensors[name].shape == value.shape  # Counters have none.
    assert json.loads((output / "config.json").read_text())["model"]["name"] == "resnet"


@pytest.mark.slow(but="resnet-False")
@pytest.mark.parametrize(
    ("name", "as_file"), [("mlp", False), ("resnet", False), ("resnet", True)]
)
def test_a_run_starts_from_what_was_exported_with_its_network_state(
    tmp_path, one_device, shared, name, as_file
):
    devices = one_device
    config, workdir = shared(name)
    output = tmp_path / "out"
    finished = Run.open(workdir, devices, "latest")
    export_safetensors(finished, output)
    trainer, state = finished.trainer, finished.state
    config.init_from = str(output / "model.safetensors" if as_file else output)
    start = Experiment.from_config(config, devices).trainer(devices)
    first = start.init()
    for a, b in (
        (first.params, state.ema_params),
        (first.net_state, state.net_state),
    ):
        jax.tree.map(np.testing.assert_array_equal, a, b)
        assert jax.tree.map(np.shape, a) == jax.tree.map(np.shape, b)
    assert start.evaluate(first) == pytest.approx(trainer.evaluate(state), abs=1e-6)
    run(config, devices, str(tmp_path / "next"))


@pytest.mark.slow
def test_network_state_that_no_file_gives_is_warned_of(
    tmp_path, one_device, shared, caplog
):
    config, workdir = shared("resnet")
    export_safetensors(Run.open(workdir, one_device, "latest"), tmp_path / "out")
    (tmp_path / "out" / "state.safetensors").unlink()
    config.init_from = str(tmp_path / "out")
    Experiment.from_config(config, one_device).trainer(one_device).init()
    assert "state.safetensors is not there" in caplog.text
    assert "which would give group_0/~/block_0/~/batchnorm_0" in caplog.text


def test_network_state_of_another_model_is_refused(tmp_path, one_device, shared):
    config, workdir = shared("resnet")
    export_safetensors(Run.open(workdir, one_device, "latest"), tmp_path / "out")
    file = tmp_path / "out" / "state.safetensors"
    tensors = load_file(file)
    tensors.pop("stem_norm/~/mean_ema/average")
    save_file(tensors, file)
    config.init_from = str(tmp_path / "out")
    words = "missing  state:stem_norm/~/mean_ema/average"
    with pytest.raises(ConfigError, match=words):
        Experiment.from_config(config, one_device).trainer(one_device).init()


@pytest.mark.slow
def test_adapters_are_merged(tmp_path, one_device):
    lora = {"finetuning.lora.rank": 2, "finetuning.train": ("mlp/~/linear_1/*",)}
    config, workdir = experiment(tmp_path, "mlp")
    config.update_from_flattened_dict(lora)
    config.num_steps = 5
    run(config, one_device, str(workdir))
    finished = Run.open(workdir, one_device, "latest")
    export_safetensors(finished, tmp_path / "out")
    trainer, state = finished.trainer, finished.state
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    params = {}
    for path, value in tensors.items():
        module, _, name = path.rpartition("/")
        params.setdefault(module, {})[name] = value
    held_out = trainer.experiment.data.evaluation
    inputs = np.concatenate([held_out.batch(i)["inputs"] for i in range(45)])
    labels = np.concatenate([held_out.batch(i)["labels"] for i in range(45)])
    logits = mlp(10, width=8).apply(params, None, inputs, False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    assert float(loss) == pytest.approx(trainer.evaluate(state)["eval/loss"], abs=1e-5)
    first = trainer.initializer.frozen(trainer.layout)["mlp/~/linear_0"]["w"]
    assert np.abs(params["mlp/~/linear_0"]["w"] - first).max() > 1e-4


@pytest.mark.parametrize("write", [export_safetensors, export_stablehlo])
def test_what_is_there_is_left_alone(tmp_path, one_device, write):
    config, workdir = experiment(tmp_path, "mlp")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match="file exists, and nothing is overwritten"):
        write(Run(workdir, config, one_device, "latest"), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_step_that_is_not_there_is_refused_and_nothing_is_left(
    tmp_path, one_device, shared
):
    _, workdir = shared("mlp")
    with pytest.raises(ConfigError, match="--checkpoint=7 is not in .*steps .1"):
        export_safetensors(Run.open(workdir, one_device, "7"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_and_says_mistakes_in_one_sentence(
    tmp_path, shared, command
):
    _, workdir = shared("mlp")
    flags = [f"--workdir={workdir}", f"--output={tmp_path / 'out'}"]
    done = command("export", *flags, "--format=safetensors")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out'}: step 1 of {workdir}" in done.stdout
    for more, words in (
        (["--format=safetensors"], "exists, and nothing is overwritten"),
        (["--format=torch"], "safetensors|npz|stablehlo|onnx"),
        ([], "--format is needed"),
    ):
        done = command("export", *flags, *more)
        assert done.returncode == 64, done.stderr
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1 and words in lines[0], done.stderr


def test_classes_of_a_head_are_those_of_the_data_in_their_order(
    tmp_path, one_device, shared, caplog
):
    """Else a head would be taken for one of permuted classes, in silence."""
    _, workdir = shared("bert")
    run_, output = Run.open(workdir, one_device, "latest"), tmp_path / "out"
    export_safetensors(run_, output)
    assert describe(output).config["problem_type"] == "single_label_classification"
    check_classes(output, ("bad", "good"), ())
    check_classes(output, ("0", "1"), ())  # Its own numbers.
    assert "head" not in caplog.text
    check_classes(output, ("left", "right"), ())
    assert "['bad', 'good'], taken in this order for the data's" in caplog.text
    file = output / "config.json"
    labels = {"id2label": {"0": "Good", "1": "Bad"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | labels))
    check_classes(output, ("bad", "good"), ("bert/head/*",))
    config = run_.config.copy_and_resolve_references()
    config.init_from = str(output)
    config.model = {"name": "bert", "pooling": "cls"}
    with pytest.raises(ConfigError, match=r"data.classes=\"\('good', 'bad'\)\""):
        run(config, one_device, str(tmp_path / "new"))
    config.data.classes = ("good", "bad")
    data = Experiment.from_config(config, one_device).data
    assert data.class_names == ("good", "bad")


def test_a_gpt_made_here_says_what_ends_its_texts(tmp_path, one_device, shared):
    """transformers takes 50256 for it, and rates of dropout of 0.1."""
    _, workdir = shared("gpt")
    export_safetensors(Run.open(workdir, one_device, "latest"), tmp_path / "out")
    config = describe(tmp_path / "out").config
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 0)
    dropouts = [config[f"{x}_pdrop"] for x in ("embd", "resid", "attn")]
    assert dropouts == [0.0] * 3


@pytest.mark.parametrize("format", ["safetensors", "stablehlo", "adapters"])
def test_a_folder_is_not_written_under_the_name_of_a_file(tmp_path, format):
    """Of --output=c.safetensors came a folder, which nothing reads as that file."""
    flags = [f"--workdir={tmp_path}", f"--format={format}"]
    done = run_command("export", *flags, f"--output={tmp_path}/c.safetensors")
    assert done.returncode == 64, done.stderr
    assert "c.safetensors is the name of a file; name a new folder" in done.stderr
