"""A loss of an example that depends on other rows of its batch is warned of."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.preflight.checks import check_parts
from haiku_template.training import Experiment

INPUTS = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
LABELS = np.arange(40, dtype=np.int32) % 3
DEVICE = "those of its own device alone (a task that takes axis_name can gather all)"
MICRO_BATCH = "those of its micro-batch alone"
PADDING = "padding in evaluation, too (a task that takes mask can leave it out)"

entropy = optax.softmax_cross_entropy_with_integer_labels


def in_batch(outputs):
    return {"loss": entropy(outputs @ outputs.T, jnp.arange(len(outputs)))}


def masked(outputs, mask):
    logits = jnp.where(mask, outputs @ outputs.T, -1e9)
    return {"loss": entropy(logits, jnp.arange(len(outputs)))}


def gathered(outputs, mask, axis_name):
    if axis_name is None:
        return masked(outputs, mask)
    every = jax.lax.all_gather((outputs, mask), axis_name, tiled=True)
    logits = jnp.where(every[1], outputs @ every[0].T, -1e9)
    rows = len(mask) * jax.lax.axis_index(axis_name) + jnp.arange(len(mask))
    return {"loss": entropy(logits, rows)}


def of_example(outputs, batch, params):
    size = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
    return {"loss": entropy(outputs, batch["labels"]) + size}


def probabilities(outputs, batch):
    """Of logits it is NaN."""
    return {"loss": -jnp.log(outputs)[jnp.arange(len(outputs)), batch["labels"]]}


def mean(outputs, batch, mask):
    return {"loss": jnp.sum(entropy(outputs, batch["labels"]) * mask) / jnp.sum(mask)}


def experiment(task, inputs, accumulate_steps=1):
    net = hk.transform(lambda x: jax.nn.softmax(hk.Linear(3)(x)))
    labels = LABELS[: len(inputs)]
    evaluation = EvaluationSet(inputs, labels, 16) if len(inputs) else None
    return Experiment(
        model=net,
        task=task,
        data=Data(ArrayDataset(INPUTS, LABELS, BatchSpec(16)), evaluation, 3),
        optimizer=optax.sgd(1e-2),
        accumulate_steps=accumulate_steps,
    )


@pytest.mark.parametrize(("num_devices", "accumulate_steps"), [(1, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (in_batch, (DEVICE, MICRO_BATCH, PADDING)),
        (masked, (DEVICE, MICRO_BATCH)),
        (gathered, (MICRO_BATCH,)),
        (of_example, ()),
        (probabilities, ()),
        (mean, ()),
    ],
)
def test_a_loss_that_sees_other_rows_is_warned_of_where_these_differ(
    task, expected, num_devices, accumulate_steps, caplog
):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = experiment(task, INPUTS, accumulate_steps).trainer(devices)
    check_parts(trainer, "eval/loss")
    applies = {DEVICE: num_devices > 1, MICRO_BATCH: accumulate_steps > 1, PADDING: 1}
    found = [text for text in expected if applies[text]]
    lines = [x.message for x in caplog.records if "other rows" in x.message]
    words = "the loss of an example depends on other rows of its batch, which are "
    assert lines == [f"{words}{', and '.join(found)}: docs/extend.md"] * bool(found)


@pytest.mark.parametrize("rows", [0, 32])
def test_whole_batches_of_one_device_are_not_warned_of(rows, caplog, one_device):
    check_parts(experiment(in_batch, INPUTS[:rows]).trainer(one_device), "eval/loss")
    assert not [x for x in caplog.records if "other rows" in x.message]
