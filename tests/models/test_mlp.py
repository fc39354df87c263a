"""The MLP: shapes, and that dropout belongs to training."""

import jax
import numpy as np
import pytest

from haiku_template.models import mlp

INPUTS = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def init(model, inputs=INPUTS):
    return jax.jit(model.init, static_argnums=2)(jax.random.key(0), inputs, False)


def apply(model, params, rng, inputs, is_training):
    return jax.jit(model.apply, static_argnums=3)(params, rng, inputs, is_training)


@pytest.mark.slow(but="shape2-7")
@pytest.mark.parametrize("num_outputs", [1, 7])
@pytest.mark.parametrize("shape", [(3, 5), (2, 8, 8, 1), (1, 2, 3)])
def test_outputs_are_one_row_an_example(shape, num_outputs):
    model = mlp(num_outputs, width=4)
    inputs = np.ones(shape, np.float32)
    outputs = apply(model, init(model, inputs), None, inputs, False)
    assert outputs.shape == (shape[0], num_outputs)


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_hidden_layers_are_as_many_and_as_wide_as_asked(num_layers):
    params = init(mlp(2, width=4, num_layers=num_layers))
    shapes = [layer["w"].shape for layer in params.values()]
    widths = [5] + [4] * num_layers + [2]
    assert shapes == list(zip(widths[:-1], widths[1:], strict=True))


def test_an_example_does_not_depend_on_the_rest_of_the_batch():
    model = mlp(3)
    params = init(model)
    whole = apply(model, params, None, INPUTS, True)
    alone = apply(model, params, None, INPUTS[2:3], True)
    np.testing.assert_allclose(whole[2:3], alone, atol=1e-6)


def test_dropout_acts_in_training():
    model = mlp(3, dropout=0.5)
    params = init(model)
    a, again, b = (
        apply(model, params, jax.random.key(seed), INPUTS, True) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(a, again)
    assert np.all(np.any(a != b, axis=1))


def test_dropout_does_not_act_in_evaluation():
    params = init(mlp(3))
    with_dropout = apply(mlp(3, dropout=0.5), params, None, INPUTS, False)
    without = apply(mlp(3), params, None, INPUTS, False)
    np.testing.assert_array_equal(with_dropout, without)


def test_without_dropout_training_needs_no_key_and_changes_nothing():
    model = mlp(3, dropout=0.0)
    params = init(model)
    in_training = apply(model, params, None, INPUTS, True)
    np.testing.assert_array_equal(
        in_training, apply(model, params, None, INPUTS, False)
    )
