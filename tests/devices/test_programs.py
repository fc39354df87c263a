"""Programs of few operations are compiled for one thread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.devices import DeviceManager
from haiku_template.devices.compiled import compile_step


def branches(width, calls=None):
    """Makes a step of twelve branches of which none needs another."""

    def step(state, batch):
        if calls is not None:
            calls.append(width)
        products = [jnp.tanh(batch @ state * i) for i in range(12)]
        return state + sum(x.T @ x for x in products), products[0].sum()

    rng = np.random.default_rng(0)
    return step, *(rng.normal(size=(width, width)).astype(np.float32) for _ in "ab")


@pytest.mark.parametrize(("width", "is_short"), [(16, True), (128, False)])
def test_a_step_of_few_operations_is_compiled_for_one_thread(
    one_device, width, is_short
):
    """To the same bits, and traced once."""
    step, state, batch = branches(width, calls := [])
    compiled = compile_step(one_device, step)
    host = state
    args = one_device.replicate(state), one_device.shard(batch)
    program = compiled.compiled
    text, in_order, any_order = (
        x.trace(*args).lower().compile().as_text()
        for x in (program, program.in_order, program.any_order)
    )
    assert in_order != any_order, "both are scheduled alike: this test shows nothing"
    assert text == (in_order if is_short else any_order)
    assert calls == [width]
    results = jax.device_get(compiled(*args))
    assert calls == [width]
    expected = jax.device_get(jax.jit(step)(host, batch))
    jax.tree.map(np.testing.assert_array_equal, results, expected)


def test_inside_another_program_it_has_the_options_of_that(one_device):
    step, state, batch = branches(16)
    compiled = compile_step(one_device, step)
    args = one_device.replicate(state), one_device.shard(batch)
    inside = jax.jit(lambda *args: compiled(*args)[1])
    np.testing.assert_array_equal(inside(*args), jax.jit(step)(state, batch)[1])


@pytest.mark.parametrize("num_devices", [1, 4])
def test_several_devices_are_compiled_as_before(num_devices):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    step, *_ = branches(16)
    compiled = compile_step(devices, lambda state, batch: step(state, batch)[1])
    assert isinstance(compiled.compiled, type(jax.jit(step))) == (num_devices > 1)
