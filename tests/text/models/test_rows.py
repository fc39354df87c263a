"""Linear and normalization layers on CPUs are Haiku's, in another form."""

import haiku as hk
import jax
import numpy as np
import pytest

from haiku_template.models.attention import ANY, Hardware
from haiku_text.models import layers

MODULES = {
    "tall": lambda x: layers.linear(6, "linear")(x),
    "wide": lambda x: layers.linear(12, "linear")(x),
    "norm": lambda x: layers.norm("norm")(x),
}


def with_gradients(module, x):
    """Initial parameters, outputs [..., D], and gradients of both."""
    model = hk.without_apply_rng(hk.transform(MODULES[module]))
    params = model.init(jax.random.key(0), x)
    # So that biases and scales are not all the same.
    params = jax.tree.map(lambda p: p + np.arange(p.shape[-1]) / 10, params)
    outputs, gradient = jax.vjp(jax.jit(model.apply), params, x)
    return params, outputs, gradient(10 * np.cos(outputs))


@pytest.mark.parametrize("shape", [(4, 5, 8), (3, 8), (1, 1, 8)])
@pytest.mark.parametrize("module", MODULES)
def test_the_form_for_cpus_is_haiku_s_layer(monkeypatch, module, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("f4")
    ours = with_gradients(module, x)
    monkeypatch.setattr(Hardware, "current", lambda: ANY)
    haiku = with_gradients(module, x)
    jax.tree.map(np.testing.assert_array_equal, ours[0], haiku[0])
    for a, b in zip(*map(jax.tree.leaves, (ours[1:], haiku[1:])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_program_for_any_platform_and_for_gpus_has_haiku_s_modules(monkeypatch):
    def modules():
        model = hk.transform(
            lambda: [type(layers.linear(6, "linear")), type(layers.norm("norm"))]
        )
        return model.apply({}, None)

    assert modules() == [layers.FastLinear, layers.FastLayerNorm]
    for hardware in (ANY, Hardware("gpu", "9.0")):
        monkeypatch.setattr(Hardware, "current", lambda those=hardware: those)
        assert modules() == [hk.Linear, hk.LayerNorm]


def test_no_gradient_of_rows_is_added_up_by_a_sum():
    """XLA takes many times as long for it on CPUs as for a product."""
    x = jax.ShapeDtypeStruct((16, 128, 8), "float32")

    @hk.transform
    def model(x):
        return layers.norm("norm")(layers.linear(8, "linear")(x)).sum()

    params = jax.eval_shape(model.init, jax.random.key(0), x)
    gradient = jax.jit(jax.grad(model.apply)).lower(params, None, x)
    assert "tensor<2048x8xf32>, tensor<f32>) -> tensor<8xf32>" not in gradient.as_text()
    assert (
        "tensor<2048xf32>, tensor<2048x8xf32>) -> tensor<8xf32>" in gradient.as_text()
    )
