"""Convolutions in loops are in the order that XLA's CPU compiler is fast with."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir

from configs import digits_resnet
from haiku_template.devices import convolutions
from haiku_template.devices.convolutions import CONVOLUTION
from haiku_template.training import Experiment

NHWC = ("NHWC", "HWIO", "NHWC")
RNG = np.random.default_rng(0)
FAST = {"b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


CASES = {
    "plain": (normal(4, 8, 8, 3), normal(3, 3, 3, 5), {}),
    "stride": (normal(4, 8, 8, 3), normal(3, 3, 3, 5), {"window_strides": (2, 1)}),
    "dilated": (normal(4, 8, 8, 3), normal(3, 2, 3, 5), {"rhs_dilation": (1, 2)}),
    "transposed": (
        normal(4, 6, 5, 3),
        normal(3, 3, 3, 5),
        {"lhs_dilation": (2, 3), "padding": ((1, 2), (0, 2))},
    ),
    "groups": (normal(4, 8, 8, 6), normal(3, 3, 2, 9), {"feature_group_count": 3}),
    "depthwise": (normal(4, 8, 8, 6), normal(3, 3, 1, 6), {"feature_group_count": 6}),
    "batch groups": (normal(4, 8, 8, 3), normal(3, 3, 3, 6), {"batch_group_count": 2}),
    "channels first": (
        normal(4, 3, 8, 7),
        normal(5, 3, 3, 2),
        {"dimension_numbers": ("NCHW", "OIHW", "NCHW")},
    ),
    "mixed": (
        normal(8, 3, 7, 4),
        normal(3, 5, 2, 3),
        {"dimension_numbers": ("HCWN", "IOWH", "WNCH")},
    ),
    "one dimension": (
        normal(4, 9, 3),
        normal(4, 3, 5),
        {"window_strides": (1,), "dimension_numbers": ("NWC", "WIO", "NWC")},
    ),
    "three": (
        normal(2, 5, 4, 6, 3),
        normal(3, 2, 3, 3, 5),
        {"window_strides": (1, 1, 2), "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")},
    ),
    "complex": (normal(4, 8, 8, 3) * 1j, normal(3, 3, 3, 5) + 1j, {}),
}


def convolved(options):
    options = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": NHWC,
    } | options
    return lambda x, w: jax.lax.conv_general_dilated(x, w, **options)


def gradients(options):
    """Makes `f(x, w)`: outputs, and gradients of both from a cotangent."""

    def f(x, w):
        outputs, transpose = jax.vjp(convolved(options), x, w)
        return outputs, *transpose(jnp.cos(outputs.real).astype(outputs.dtype))

    return f


def in_loop(f):
    def looped(x, w):
        shapes = jax.eval_shape(f, x, w)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

        def body(i, last):
            zero = 0 * last[0].ravel()[0]  # Else nothing depends on the loop.
            return f(x + zero.astype(x.dtype), w)

        return jax.lax.fori_loop(0, 2, body, zeros)

    return looped


@pytest.fixture
def without_the_rule(monkeypatch):
    """A context in which JAX lowers convolutions in its own way."""
    rules = mlir._platform_specific_lowerings["cpu"]

    @contextlib.contextmanager
    def context():
        with monkeypatch.context() as patch:
            original = rules[CONVOLUTION].rule.original
            patch.setitem(rules, CONVOLUTION, original)
            jax.clear_caches()
            yield
        jax.clear_caches()

    return context


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_jax(without_the_rule, case):
    """Bit by bit outside of loops, where XLA orders dimensions itself."""
    x, w, options = CASES[case]
    f = gradients(options)
    results = jax.jit(f)(x, w), jax.jit(in_loop(f))(x, w)
    with without_the_rule():
        expected = jax.jit(gradients(options))(x, w)
    jax.tree.map(np.testing.assert_array_equal, results[0], expected)
    for result, right in zip(results[1], expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-4)


def orders(program):
    return set(re.findall(r"dim_labels=(\S+?)[,\s]", program.compile().as_text()))


@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_convolutions_of_accumulated_gradients_are_fast(one_device, accumulate_steps):
    config = digits_resnet.get_config()
    config.model.channels, config.model.blocks = (4, 8), 1
    config.batch_size, config.accumulate_steps = 16, accumulate_steps
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    found = orders(trainer.trace(trainer.feed.host_shapes()[0]).lower())
    assert found and found <= FAST


def test_xla_still_orders_no_dimensions_in_loops(without_the_rule):
    x, w, options = CASES["plain"]
    loop = in_loop(gradients(options))
    assert orders(jax.jit(loop).lower(x, w)) <= FAST
    with without_the_rule():
        assert orders(jax.jit(gradients(options)).lower(x, w)) <= FAST
        assert not orders(jax.jit(loop).lower(x, w)) <= FAST, "convolutions.py may go"


def test_depthwise_convolutions_stay_as_jax_lowers_them(without_the_rule):
    """In loops they are 20 times slower in the other order."""
    x, w, options = CASES["depthwise"]
    gradient = lambda x, w: gradients(options)(x, w)[1]  # noqa: E731
    lowered = jax.jit(in_loop(lambda x, w: (gradient(x, w),))).lower(x, w)
    with without_the_rule():
        plain = jax.jit(in_loop(lambda x, w: (gradient(x, w),))).lower(x, w)
    assert orders(lowered) == orders(plain) != set()
    kernels = lambda x, w: gradients(options)(x, w)[2]  # noqa: E731
    lowered = jax.jit(in_loop(lambda x, w: (kernels(x, w),))).lower(x, w)
    assert orders(lowered) <= FAST


def test_a_second_call_registers_nothing():
    rules = mlir._platform_specific_lowerings["cpu"]
    before = rules[CONVOLUTION]
    convolutions.install()
    assert rules[CONVOLUTION] is before


@pytest.mark.parametrize("rules", [None, {}, {"cpu": {}}, {"cpu": {CONVOLUTION: 0}}])
def test_a_jax_without_the_names_is_left_as_it_is(monkeypatch, rules):
    monkeypatch.setattr(mlir, "_platform_specific_lowerings", rules)
    if rules is None:
        monkeypatch.delattr(mlir, "_platform_specific_lowerings")
    before = str(rules)
    convolutions.install()
    assert str(rules) == before


def test_a_jax_without_internal_modules_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(jax, "_src")
    convolutions.install()
