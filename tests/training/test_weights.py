"""Weighted losses are those of a plain loop where devices see each other's examples."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import Data
from haiku_template.devices import DeviceManager
from haiku_template.training import Experiment
from tests.runs import run_steps

RNG = np.random.default_rng(0)
ROWS, TOKENS, STEPS = 16, 3, 2
BATCHES = [
    {
        "inputs": RNG.normal(size=(ROWS, TOKENS, 4)).astype(np.float32),
        "labels": RNG.integers(0, 2, (ROWS, TOKENS)).astype(np.int32),
        # No two rows, and so no two devices or micro-batches, weigh the same.
        "weights": RNG.uniform(0.1, 3, (ROWS, TOKENS)).astype(np.float32),
    }
    for _ in range(STEPS)
]


class Batches:
    def batch(self, step):
        return BATCHES[step]


def batch_norm(axis_name):
    def forward(inputs, is_training):
        norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis_name)
        return hk.Linear(2)(jax.nn.relu(norm(hk.Linear(4)(inputs), is_training)))

    return hk.transform_with_state(forward)


def plain(axis_name):
    return hk.transform(lambda inputs: hk.Linear(2)(inputs))


def tokens(outputs, batch, axis_name):
    losses = optax.softmax_cross_entropy_with_integer_labels
    return {
        "loss": losses(outputs, batch["labels"]),
        "example_weight": batch["weights"],
    }


def examples(outputs, batch, axis_name):
    values = tokens(outputs, batch, axis_name)
    return {"loss": values["loss"].mean(1), "example_weight": batch["weights"][:, 0]}


def contrastive(outputs, batch, axis_name):
    """Each example next to those of all devices, as in SimCLR."""
    one, two = outputs[:, 0], outputs[:, 1]
    first, others = 0, two
    if axis_name is not None:
        first = jax.lax.axis_index(axis_name) * len(one)
        others = jax.lax.all_gather(two, axis_name, tiled=True)
    own = first + jnp.arange(len(one))
    losses = optax.softmax_cross_entropy_with_integer_labels(one @ others.T, own)
    return {"loss": losses, "example_weight": batch["weights"][:, 0]}


def by_hand(model, task, params, net_state, parts):
    """Scalars and parameters of a loop on one device, without the template."""

    def loss(params, net_state, batch):
        outputs, net_state = model.apply(params, net_state, None, batch["inputs"], True)
        values = task(outputs, batch, None)
        return jnp.sum(values["loss"] * values["example_weight"]), net_state

    losses = []
    for batch in BATCHES:
        weight = np.sum(
            task(np.zeros((ROWS, TOKENS, 2)), batch, None)["example_weight"]
        )
        total, sums = 0.0, jax.tree.map(jnp.zeros_like, params)
        for part in range(parts):
            rows = jax.tree.map(lambda x, part=part: x[part::parts], batch)
            (value, net_state), grads = jax.value_and_grad(loss, has_aux=True)(
                params, net_state, rows
            )
            total, sums = total + value, jax.tree.map(jnp.add, sums, grads)
        params = jax.tree.map(lambda p, g, w=weight: p - 0.3 * g / w, params, sums)
        losses.append(float(total / weight))
    return losses, params


@pytest.mark.slow(but="quick")
@pytest.mark.parametrize(
    "num_devices, parts",
    [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), pytest.param(4, 2, id="quick")],
)
@pytest.mark.parametrize(
    "net, task",
    [(batch_norm, tokens), (batch_norm, examples), (plain, contrastive)],
    ids=["norm and tokens", "norm", "all_gather"],
)
def test_weighted_gradients_are_those_of_a_plain_loop(net, task, num_devices, parts):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = Experiment(
        model=net(devices.axis_name),
        task=task,
        data=Data(Batches(), None, 2),
        optimizer=optax.sgd(0.3),
        accumulate_steps=parts,
    ).trainer(devices)
    first = devices.fetch(trainer.init())
    state, history = run_steps(trainer, STEPS)

    model = net(None)
    if net is plain:
        apply = model.apply
        model = hk.TransformedWithState(
            model.init, lambda p, s, rng, x, _: (apply(p, rng, x), s)
        )
    losses, params = by_hand(model, task, first.params, first.net_state, parts)
    assert [x["loss"] for x in history] == pytest.approx(losses, abs=1e-6)
    for a, b in zip(
        *map(jax.tree.leaves, (devices.fetch(state.params), params)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_float16_gradients_keep_their_size_whatever_the_weights(one_device, parts):
    """Sums of large weights times the loss scale would be infinite."""

    def task(outputs, batch):
        values = tokens(outputs, batch, None)
        return values | {"example_weight": 1000 * values["example_weight"]}

    trainer = Experiment(
        model=plain(None),
        task=task,
        data=Data(Batches(), None, 2),
        optimizer=optax.sgd(0.3),
        accumulate_steps=parts,
        precision="float16",
    ).trainer(one_device)
    _, history = run_steps(trainer, STEPS)
    assert {float(x["loss_scale"]) for x in history} == {2.0**15}
