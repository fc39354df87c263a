import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, PlacementError
from haiku_template.models import mlp
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from haiku_template.training.evaluation import pad

RNG = np.random.default_rng(0)


def example(size, batch_size):
    inputs = RNG.normal(size=(size, 5)).astype(np.float32)
    labels = RNG.integers(0, 3, size).astype(np.int32)
    train = ArrayDataset(inputs, labels, BatchSpec(8))
    return Data(train, EvaluationSet(inputs, labels, batch_size), 3)


def trainer_of(forward, data, devices):
    return Experiment(
        model=hk.transform(forward),
        task=classification,
        data=data,
        optimizer=optax.sgd(0.1),
    ).trainer(devices)


def test_a_model_that_knows_its_device_is_evaluated(tmp_path, devices):
    """As losses are whose negatives are of all devices."""
    axis = devices.axis_name

    def forward(x):
        place = 0 if axis is None else jax.lax.axis_index(axis)
        return hk.Linear(3)(x) + jnp.float32(place)

    data = example(24, 8)
    trainer = trainer_of(forward, data, devices)
    result = train(trainer, num_steps=2, workdir=tmp_path)
    assert np.isfinite(result.metrics["eval/loss"])


def test_a_model_may_make_arrays_while_it_is_traced(devices):
    """As the layers of e3nn_jax; predictions were an error of JAX's guard."""

    def forward(x):
        with jax.ensure_compile_time_eval():
            scale = jnp.ones(3)
        return hk.Linear(3)(x) * scale

    trainer = trainer_of(forward, example(24, 8), devices)
    own = lambda outputs: {"loss": jnp.mean(outputs, axis=1)}  # noqa: E731
    trainer = trainer.replace(task=own)  # Of whose outputs nothing is known.
    state = trainer.init()
    with devices.explicit_transfers():
        outputs = np.concatenate([*trainer.predict(state)])
        assert np.isfinite(trainer.evaluate(state)["eval/loss"])
    assert outputs.shape == (24, 3)


@pytest.mark.slow(but="31-7")
@pytest.mark.parametrize("num_devices", [1, 3, 8])
@pytest.mark.parametrize(("size", "batch_size"), [(97, 32), (5, 64), (64, 32), (31, 7)])
def test_every_example_counts_once_whatever_the_sizes(num_devices, size, batch_size):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    data = example(size, batch_size)
    data = data._replace(
        train=ArrayDataset(data.train.inputs, data.train.labels, BatchSpec(24))
    )
    model = mlp(3, width=8)
    trainer = Experiment(
        model=model, task=classification, data=data, optimizer=optax.sgd(0.1)
    ).trainer(devices)
    state = trainer.init()
    with devices.explicit_transfers():
        metrics = trainer.evaluate(state, data.evaluation)

    params = devices.fetch(state.params)
    apply = hk.without_apply_rng(model).apply
    logits = np.asarray(apply(params, data.evaluation.inputs, False), np.float64)
    labels = data.evaluation.labels
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(size), labels].mean()
    accuracy = (logits.argmax(axis=1) == labels).mean()
    assert metrics["eval/accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert metrics["eval/loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("size", [10, 12])
def test_a_number_of_a_whole_batch_counts_no_padding_on_one_device(one_device, size):
    """As the loss of a codebook, which the model makes of all rows that it gets."""
    data = example(size, 4)

    def forward(inputs, is_training):
        return hk.Linear(3)(inputs), jnp.mean(jnp.square(hk.Linear(2)(inputs) - 1))

    def task(outputs, batch):
        logits, commitment = outputs
        loss = classification.values(logits, batch)["loss"]
        return {
            "loss": loss + commitment,
            "commitment": jnp.full(len(loss), commitment),
        }

    experiment = Experiment(
        model=hk.transform(forward), task=task, data=data, optimizer=optax.sgd(0.1)
    )
    trainer = experiment.trainer(one_device)
    state = trainer.init()
    metrics = trainer.evaluate(state)

    linear = one_device.fetch(state.params)["linear_1"]
    outputs = data.evaluation.inputs @ linear["w"] + linear["b"]
    # A mean over batches weighted by their rows is the mean over all rows.
    expected = np.mean(np.square(outputs.astype(np.float64) - 1))
    assert metrics["eval/commitment"] == pytest.approx(expected, abs=1e-6)
    predictions = [*trainer.predict(state)]
    assert sum(len(logits) for logits, _ in predictions) == size


@dataclasses.dataclass
class Plain:
    """No type of JAX's: a loss takes it, and predictions cannot."""

    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    logits: jax.Array


FORMS = {  # What a model returns, and how to take its logits of that.
    "array": (lambda x: x, lambda x: x),
    "dictionary": (lambda x: {"a": x}, lambda x: x["a"]),
    "with a word": (lambda x: {"a": x, "kind": "linear"}, lambda x: x["a"]),
    "with a number": (lambda x: (x, 1.5), lambda x: x[0]),
    "with None": (lambda x: (x, None), lambda x: x[0]),
    "registered": (Registered, lambda x: x.logits),
    "dataclass": (Plain, lambda x: x.logits),
    "function": (lambda x: lambda scale: x * scale, lambda x: x(1.0)),
}


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("form", FORMS)
def test_a_model_may_return_any_type_to_its_loss(devices, form):
    """Only predictions are arrays; of a batch that is padded they are the same."""
    pack, unpack = FORMS[form]
    experiment = Experiment(
        model=hk.transform(lambda inputs, is_training: pack(hk.Linear(3)(inputs))),
        task=lambda outputs, batch: classification.values(unpack(outputs), batch),
        data=example(10, 4),
        optimizer=optax.sgd(0.1),
    )
    trainer = experiment.trainer(devices)
    state = trainer.init()
    plain = dataclasses.replace(experiment, task=classification)
    plain = dataclasses.replace(
        plain, model=hk.transform(lambda x, is_training: hk.Linear(3)(x))
    ).trainer(devices)
    expected = plain.evaluate(plain.init())["eval/loss"]
    assert trainer.evaluate(state)["eval/loss"] == pytest.approx(expected, abs=1e-7)
    if form in ("dataclass", "function"):
        kind = {"dataclass": "Plain", "function": "function"}[form]
        with pytest.raises(ConfigError, match=f"returns {kind} for a batch.*register"):
            list(trainer.predict(state))
    else:
        outputs = np.concatenate([*map(unpack, trainer.predict(state))])
        np.testing.assert_array_equal(outputs, np.concatenate([*plain.predict(state)]))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 12])
def test_what_is_of_examples_is_no_matter_of_their_number(devices, rows):
    """Loads of experts, as many as examples of a share, of a batch, or of the set."""

    def forward(inputs, is_training):
        return {"logits": hk.Linear(3)(inputs), "loads": jnp.ones(rows)}

    def task(outputs, batch):
        return classification.values(outputs["logits"], batch)

    trainer = Experiment(
        model=hk.transform(forward),
        task=task,
        data=example(12, 4),
        optimizer=optax.sgd(0.1),
    ).trainer(devices)
    assert trainer.batch_outputs == ("loads",)
    predictions = [*trainer.predict(trainer.init())]
    assert all(x["loads"] is None and len(x["logits"]) == 4 for x in predictions)


@pytest.mark.parametrize("size", [13, 16])
@pytest.mark.parametrize("groups", [False, True])
def test_a_model_of_one_batch_size_is_evaluated(one_device, groups, size):
    """It cannot be traced with any other, which would tell its rows for sure."""

    def forward(inputs, is_training):
        if groups and len(inputs) > 1:  # Of four, as of a minibatch's deviation.
            inputs = inputs.reshape(-1, 4, 5).reshape(-1, 5)
        assert groups or len(inputs) in (1, 8)  # Parameters are made with one.
        return hk.Linear(3)(inputs), 2.0

    trainer = Experiment(
        model=hk.transform(forward),
        task=lambda outputs, batch: classification.values(outputs[0], batch),
        data=example(size, 8),
        optimizer=optax.sgd(0.1),
    ).trainer(one_device)
    state = trainer.init()
    assert trainer.batch_outputs == ("1",) and trainer.evaluate(state)["eval/loss"] > 0
    assert [len(logits) for logits, _ in trainer.predict(state)] == [8, size - 8]


def test_padding_that_gives_nan_does_not_count(one_device):
    data = example(5, 4)

    def forward(inputs, is_training):
        return hk.Linear(3)(inputs / jnp.abs(inputs).sum(axis=1, keepdims=True))

    trainer = trainer_of(forward, data, one_device)
    state = trainer.init()
    metrics = trainer.evaluate(state, data.evaluation)
    assert np.isfinite(metrics["eval/loss"])


def test_averaged_parameters_are_evaluated_where_there_are_any(one_device):
    data = example(16, 16)
    options = {"model": mlp(3, width=8), "task": classification, "data": data}
    trainer = Experiment(optimizer=optax.sgd(1.0), ema_decay=0.99, **options).trainer(
        one_device
    )
    state = trainer.init()
    state, _ = trainer.step(state, one_device.shard(data.train.batch(0)))
    averaged = trainer.evaluate(state, data.evaluation)
    as_params = state._replace(params=state.ema_params, ema_params=None)
    plain = trainer.evaluate(state._replace(ema_params=None), data.evaluation)
    assert averaged == trainer.evaluate(as_params, data.evaluation)
    assert averaged != plain


class FullBatches(EvaluationSet):
    """Drops a last batch that is not full, and so all of a small set."""

    @property
    def num_batches(self):
        return len(self.inputs) // self.batch_size


def test_an_evaluation_set_without_batches_is_refused(tmp_path, one_device):
    data = example(5, 8)
    few = FullBatches(data.evaluation.inputs, data.evaluation.labels, 8)
    trainer = Experiment(
        model=mlp(3, width=8),
        task=classification,
        data=data._replace(evaluation=few),
        optimizer=optax.sgd(0.1),
    ).trainer(one_device)
    words = "a FullBatches, has num_batches=0, and metrics are of one batch at least"
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=1, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=words):
        trainer.evaluate(trainer.init())


@pytest.mark.parametrize("first", [2**31 - 1, 2**31, 5 * 2**31 + 7])
def test_examples_beyond_the_places_of_int32_are_no_padding(first):
    places = pad({"inputs": np.ones(2)}, 3, first)[1]
    assert places.dtype == np.int32 and (places >= 0).tolist() == [True, True, False]
    assert places[1] == (first + 1) % 2**31


def test_pad_marks_the_examples():
    padded, places = pad({"inputs": {"ids": np.ones((2, 3))}, "labels": np.ones(2)}, 4)
    assert (places >= 0).tolist() == [True, True, False, False]
    assert padded["inputs"]["ids"].shape == (4, 3)
    assert padded["inputs"]["ids"][2:].sum() == 0


class Rows:
    """Batches as a user's own data set gives them, ten examples in all."""

    def __init__(self, size, **arrays):
        self.size, self.arrays = size, arrays
        self.num_batches = -(-10 // size)

    def batch(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return jax.tree.map(lambda x: x[rows].copy(), self.arrays)


def evaluated(devices, task, size, **arrays):
    train = Rows(8, **arrays)
    trainer = Experiment(
        model=hk.transform(lambda inputs, is_training: hk.Linear(1)(inputs)[:, 0]),
        task=task,
        data=Data(train, Rows(size, **arrays), 1),
        optimizer=optax.sgd(0.1),
    ).trainer(devices)
    return trainer.evaluate(trainer.init())


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_labels_that_are_a_dictionary_are_evaluated_whatever_the_batch_size(
    devices, size
):
    inputs = RNG.normal(size=(10, 5)).astype(np.float32)
    labels = {"near": inputs[:, 0].copy(), "far": inputs[:, 1] + 3, "one": inputs[:, 2]}

    def task(outputs, batch):
        errors = [jnp.square(outputs - x) for x in batch["labels"].values()]
        return {"loss": sum(errors)}

    expected = evaluated(devices, task, 8, inputs=inputs, labels=labels)
    found = evaluated(devices, task, size, inputs=inputs, labels=labels)
    assert found == pytest.approx(expected, rel=1e-6)


def test_names_of_a_batch_and_of_values_are_all_the_user_s(devices):
    inputs = RNG.normal(size=(10, 5)).astype(np.float32)
    names = ("mask", "examples", "weight", "places", "values", "counts")
    arrays = {name: RNG.random(10).astype(np.float32) for name in names}

    def task(outputs, batch):
        values = {name: batch[name] * 1.0 for name in names}
        return {"loss": outputs * batch["mask"]} | values

    found = evaluated(devices, task, 4, inputs=inputs, labels=inputs[:, 0], **arrays)
    for name in names:
        assert found[f"eval/{name}"] == pytest.approx(arrays[name].mean(), rel=1e-6)


def test_examples_count_by_their_weight(devices):
    inputs = RNG.normal(size=(10, 5)).astype(np.float32)
    weights = np.array([0, 1, 2, 0.5, 0, 4, 1, 0, 3, 1], np.float32)

    def task(outputs, batch):
        value = batch["inputs"][:, 0] / batch["weights"]  # Not finite where it is 0.
        return {"loss": value, "example_weight": batch["weights"]}

    found = evaluated(
        devices, task, 4, inputs=inputs, labels=inputs[:, 0], weights=weights
    )
    expected = inputs[weights > 0, 0].sum() / weights.sum()
    assert found == {"eval/loss": pytest.approx(expected, rel=1e-5)}


class OnDevice:
    """An evaluation set whose batches are JAX arrays, from the second on."""

    num_batches = 2

    def batch(self, index):
        array = jnp.asarray if index else np.asarray
        return {"inputs": array(np.ones((4, 5))), "labels": array(np.zeros(4, int))}


def test_evaluation_data_that_is_on_a_device_is_refused_as_training_does(devices):
    data = example(16, 8)
    options = {"model": mlp(3, width=8), "task": classification}
    options["optimizer"] = optax.sgd(0.1)
    inputs = jnp.asarray(data.evaluation.inputs)
    on_device = EvaluationSet(inputs, data.evaluation.labels, 8)
    with pytest.raises(PlacementError, match=r"evaluation batch's \['inputs'\].*JAX"):
        Experiment(data=data._replace(evaluation=on_device), **options).trainer(devices)
    made = Experiment(data=data._replace(evaluation=OnDevice()), **options)
    trainer = made.trainer(devices)
    with pytest.raises(PlacementError, match=r"evaluation batch 1's \['inputs'\].*JAX"):
        trainer.evaluate(trainer.init())
