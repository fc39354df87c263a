"""A loss of an example that depends on other rows of its batch is warned of."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.preflight import checks
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


def probabilities_of(x):
    return jax.nn.softmax(hk.Linear(3)(x))


def experiment(task, inputs, accumulate_steps=1, model=probabilities_of):
    labels = LABELS[: len(inputs)]
    evaluation = EvaluationSet(inputs, labels, 16) if len(inputs) else None
    return Experiment(
        model=hk.transform(model),
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


def with_prototypes(count):
    def model(x):
        init = hk.initializers.RandomNormal()
        return {"x": x, "prototypes": hk.get_parameter("w", (count, 8), init=init)}

    return model


def of_prototypes(outputs, batch):
    return {"loss": entropy(outputs["x"] @ outputs["prototypes"].T, batch["labels"])}


def time_major(x):
    return jnp.swapaxes(x.reshape(len(x), 4, 2) * hk.Linear(2)(x)[:, None], 0, 1)


def of_times(outputs):
    return {"loss": jnp.mean(outputs**2, axis=(0, 2))}


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (with_prototypes(7), of_prototypes),
        (with_prototypes(16), of_prototypes),  # As many as rows.
        (time_major, of_times),
    ],
)
def test_outputs_of_a_whole_batch_are_no_other_rows(model, task, caplog, one_device):
    trainer = experiment(task, INPUTS, model=model).trainer(one_device)
    check_parts(trainer, "eval/loss")
    assert not [x for x in caplog.records if "other rows" in x.message]


@pytest.mark.parametrize(("most", "is_found"), [(2 * 3, True), (5, False)])
def test_large_outputs_are_looked_at_in_two_rows_or_not(
    most, is_found, caplog, one_device, monkeypatch
):
    monkeypatch.setattr(checks, "MOST_VALUES", most)
    check_parts(experiment(in_batch, INPUTS).trainer(one_device), "eval/loss")
    assert bool([x for x in caplog.records if "other rows" in x.message]) == is_found


def test_a_loss_that_tells_its_values_is_given_none_that_are_made_up(one_device):
    told = []

    def telling(outputs):
        jax.debug.callback(told.append, outputs)
        return {"loss": outputs[:, 0]}

    check_parts(experiment(telling, INPUTS).trainer(one_device), "eval/loss")
    jax.effects_barrier()
    assert not told
