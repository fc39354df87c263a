import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.models import mlp
from haiku_template.training import Experiment, classification
from haiku_template.training.evaluation import pad

RNG = np.random.default_rng(0)


def example(size, batch_size):
    inputs = RNG.normal(size=(size, 5)).astype(np.float32)
    labels = RNG.integers(0, 3, size).astype(np.int32)
    train = ArrayDataset(inputs, labels, BatchSpec(8))
    return Data(train, EvaluationSet(inputs, labels, batch_size), 3)


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


def test_padding_that_gives_nan_does_not_count(one_device):
    data = example(5, 4)

    def forward(inputs, is_training):
        return hk.Linear(3)(inputs / jnp.abs(inputs).sum(axis=1, keepdims=True))

    trainer = Experiment(
        model=hk.transform(forward),
        task=classification,
        data=data,
        optimizer=optax.sgd(0.1),
    ).trainer(one_device)
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


def test_pad_marks_the_examples():
    padded = pad({"inputs": {"ids": np.ones((2, 3))}, "labels": np.ones(2)}, 4)
    assert padded["mask"].tolist() == [True, True, False, False]
    assert padded["inputs"]["ids"].shape == (4, 3)
    assert padded["inputs"]["ids"][2:].sum() == 0
