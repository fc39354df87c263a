"""A tracer that leaks is named, with the place where it was made."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.errors import PlacementError

INPUTS = np.ones((8, 3), np.float32)


def init(forward):
    model = hk.transform(forward)
    return lambda: model.init(jax.random.key(0), jnp.asarray(INPUTS))


def test_jit_inside_transform_names_the_parameters(devices):
    def forward(x):
        x = hk.Linear(4, name="fine")(x)
        return jax.jit(lambda x: hk.Linear(2, name="lost")(x))(x)

    words = r"\['lost'\]\['b'\], \['lost'\]\['w'\] .*test_leaks.py:\d+ is a tracer that"
    with pytest.raises(PlacementError, match=words) as caught:
        devices.init(init(forward))
    assert "fine" not in str(caught.value)
    assert "hk.scan or hk.remat" in str(caught.value)


def test_scan_inside_transform_is_named(devices):
    def forward(x):
        x = hk.Linear(3)(x)
        layer = lambda c, _: (hk.Linear(3)(c), None)  # noqa: E731
        x = jax.lax.scan(layer, x, None, length=2)[0]
        return hk.Linear(2)(x)  # Its rng is what the loop left.

    with pytest.raises(PlacementError, match=r"made at .*test_leaks.py:\d+"):
        devices.init(init(forward))


def test_a_step_that_keeps_a_value_is_named(devices):
    kept = []

    def step(state, batch):
        kept.append(batch * 2)
        return state + kept[0].sum()

    compiled = devices.compile(step, ())
    state, batch = devices.replicate(np.float32(1)), devices.shard(INPUTS)
    compiled(state, batch)
    words = r"float32\[\d, 3\] made at .*test_leaks.py:\d+ is a tracer"
    with pytest.raises(PlacementError, match=words.replace(", ", ",")):
        devices.compile(lambda s, b: step(s, b), ())(state, batch)


def test_haikus_own_scan_and_remat_leak_nothing(devices):
    def forward(x):
        layer = hk.Linear(3)
        x = hk.scan(lambda c, _: (layer(c), None), x, None, length=2)[0]
        return hk.remat(hk.Linear(2))(x)

    params = devices.init(init(forward))
    devices.check(params)
