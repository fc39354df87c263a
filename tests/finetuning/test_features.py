"""A head from features that are computed once, as docs/finetuning.md does it."""

import dataclasses

import haiku as hk
import jax
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.finetuning import Finetuning
from haiku_template.models.losses import classification
from haiku_template.training import Experiment
from tests.runs import run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(20, 6)).astype(np.float32)
LABELS = RNG.integers(0, 3, 20).astype(np.int32)


def forward(inputs, is_training):
    x = jax.nn.relu(hk.Linear(19, name="trunk")(inputs))
    x = hk.BatchNorm(True, True, 0.9, name="norm")(x, hk.running_init())
    return hk.Linear(3, name="head")(x)


def up_to(model, name):
    def stop(call, args, kwargs, context):
        is_call = context.method_name == "__call__"
        is_head = is_call and context.module.module_name == name
        return args[0] if is_head else call(*args, **kwargs)

    def apply(params, state, rng, inputs, is_training):
        with hk.intercept_methods(stop):
            return model.apply(params, state, rng, inputs, is_training)

    return model._replace(apply=apply)


def data_of(inputs):
    spec = BatchSpec(8, labels="classes")
    held_out = EvaluationSet(inputs[:9], LABELS[:9], 8)
    return Data(ArrayDataset(inputs, LABELS, spec), held_out, 3)


@pytest.mark.slow(but="four devices-float32")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_head_from_features_is_one_through_the_trunk(devices, precision):
    through = Experiment(
        model=hk.transform_with_state(forward),
        task=classification,
        data=data_of(INPUTS),
        optimizer=optax.adam(1e-2),
        finetuning=Finetuning(train=("head/*",)),
        precision=precision,
    )
    trunk = dataclasses.replace(through, model=up_to(through.model, "head"))
    trunk, trainer = trunk.trainer(devices), through.trainer(devices)
    batches = trunk.predict(trunk.init(), EvaluationSet(INPUTS, LABELS, 8))
    features = np.concatenate(list(batches))
    head = dataclasses.replace(
        through,
        model=hk.transform(lambda x: hk.Linear(3, name="head")(x)),
        data=data_of(features),
        finetuning=Finetuning(),
    ).trainer(devices)
    # Both begin with the same parameters; the same seed makes others of other models.
    first = devices.init(lambda x: x, trainer.init().params)
    state, history = run_steps(trainer, 5)
    of_head, history_of_head = run_steps(head, 5, head.init()._replace(params=first))
    losses = [float(x["loss"]) for x in history]
    assert losses == pytest.approx(
        [float(x["loss"]) for x in history_of_head], abs=1e-6
    )
    assert len(set(losses)) == 5
    for a, b in zip(*map(jax.tree.leaves, (state.params, of_head.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    metrics = trainer.evaluate(state._replace(params=of_head.params))
    assert metrics == pytest.approx(head.evaluate(of_head), abs=1e-6)
