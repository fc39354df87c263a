"""Rematerialization of modules by name: the same numbers, less memory."""

import contextlib
import dataclasses
from collections import OrderedDict, defaultdict
from functools import partial
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.errors import ConfigError
from haiku_template.models import remat, repeated_blocks
from haiku_template.models.forms import in_form, own_keys
from haiku_template.preflight import fingerprint
from haiku_template.training import Experiment, regression
from tests.runs import run_steps

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.normal(size=(32, 1)).astype(np.float32)


class Block(hk.Module):
    """Draws, keeps statistics, takes and returns what is no array."""

    def __init__(self, axis_name=None, name=None):
        super().__init__(name)
        self.axis_name = axis_name

    def __call__(self, x, is_training, act, mask=None, rate=0.5):
        if is_training:
            x = hk.dropout(hk.next_rng_key(), rate, x)
        y = act(hk.Linear(32)(x))
        y = hk.BatchNorm(True, True, 0.9, cross_replica_axis=self.axis_name)(
            y, is_training
        )
        return {"x": x + hk.Linear(x.shape[-1])(y), "mask": mask, "act": act}

    def scaled(self, x):
        return 2.0 * x


def model(axis_name=None):
    def forward(inputs, is_training):
        x, act = inputs, jax.nn.gelu
        for i in range(2):
            made = Block(axis_name, name=f"block_{i}")(x, is_training, act)
            x, act = made["x"], made["act"]
            assert made["mask"] is None
        twice = Block(axis_name, name="twice")
        x = twice(x, is_training, act)["x"]
        x = twice(twice.scaled(x), is_training=is_training, act=act)["x"]
        noise = jax.random.normal(hk.next_rng_key())  # After those of the blocks.
        return hk.Linear(1, name="head")(x) + 0.01 * noise

    return hk.transform_with_state(forward)


def build(devices, patterns=()):
    data = from_split(Split(X, Y, X, Y), BatchSpec(16, labels="numbers"))
    parts = {"task": regression, "data": data, "optimizer": optax.adam(1e-3)}
    made = remat(model(devices.axis_name), patterns)
    return Experiment(model=made, **parts).trainer(devices)


def largest_difference(a, b):
    """Of values above 1 relative to a leaf's largest: a variance here is 55."""

    def difference(x, y):
        return np.abs(x - y).max() / max(1, np.abs(x).max())

    return max(jax.tree.leaves(jax.tree.map(difference, a, b)))


def recomputed(model):
    """Number of modules that are computed again, and of those inside them."""
    params, state = jax.eval_shape(lambda: model.init(jax.random.key(0), X, True))
    key = jax.random.key(0)
    jaxpr = jax.make_jaxpr(lambda p, s: model.apply(p, s, key, X, True))(params, state)
    found = [
        e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("checkpoint", "remat2")
    ]
    inside = sum(str(e.params["jaxpr"]).count("prevent_cse") for e in found)
    return len(found), inside


@pytest.mark.slow
@pytest.mark.parametrize(
    "patterns",
    [("*/block_*", "twice"), ("block_1/*",), ("*",)],
    ids=["outermost", "inside", "all"],
)
def test_steps_are_the_same_with_statistics_and_dropout(devices, patterns):
    plain, again = build(devices), build(devices, patterns)
    fetched = devices.fetch(plain.init()), devices.fetch(again.init())
    assert largest_difference(*fetched) == 0
    ends = [run_steps(trainer, 2) for trainer in (plain, again)]
    states = [devices.fetch(state) for state, _ in ends]
    assert largest_difference(*states) < 1e-6
    assert largest_difference(ends[0][1], ends[1][1]) < 1e-6


@pytest.mark.parametrize(
    ("patterns", "number"),
    [
        (("*/block_*",), 2),
        (("block_*", "block_*/*"), 2),  # The outermost alone.
        (("*/linear",), 4),  # One is called twice.
        (("twice", "*/block_?"), 4),
        ((), 0),
    ],
)
def test_the_outermost_modules_that_fit_are_computed_again(patterns, number):
    assert recomputed(remat(model(), patterns)) == (number, 0)
    twice = remat(remat(model(), patterns), patterns)
    assert recomputed(twice) == (number, 0)


def test_a_pattern_that_fits_nothing_is_refused_with_the_nearest(one_device):
    words = r"'\*/blokc_1' fits none of the 19 modules.*nearest is block_1.*block_0, "
    with pytest.raises(ConfigError, match=words):
        build(one_device, ("*/block_0", "*/blokc_1"))


def test_a_script_may_add_it_to_its_run(one_device):
    """Step, first parameters and evaluation are what they were."""
    plain, again = build(one_device), build(one_device, ("*/block_*",))
    assert fingerprint.of(plain) == fingerprint.of(again)


def test_the_blocks_of_a_model_are_those_whose_names_differ_in_a_number():
    class Stage(hk.Module):
        def __call__(self, x):
            for i in range(2):
                x = hk.nets.MLP([8, 8], name=f"block_{i}")(x)
            return x

    def forward(x):
        for name in ("layer", "layer", "single"):
            x = hk.nets.MLP([8, 8], name=name)(x)
        for i in range(2):
            x = Stage(name=f"stage_{i}")(x)
        return hk.Linear(2)(x)

    made = hk.transform(forward)
    found = repeated_blocks(lambda: jax.eval_shape(made.init, jax.random.key(0), X))
    assert found == [("layer*", "stage_*"), ("stage_*/block_*",)]
    normed = jax.tree_util.Partial(model().init, jax.random.key(0), X, True)
    assert repeated_blocks(lambda: jax.eval_shape(normed)) == [("block_*",)]


def test_it_is_inside_the_map_over_examples():
    def forward(x):
        for i in range(2):
            x = hk.nets.MLP([8, 8], name=f"block_{i}")(x)
        return x + hk.dropout(hk.next_rng_key(), 0.5, x)

    plain, again = (
        in_form(hk.transform(forward), {"per_example": True, "remat": patterns})
        for patterns in (True, ("block_?",))  # True is a key of the model's own.
    )
    key = jax.random.key(0)
    params, state = again.init(key, X, True)

    def loss(params, model):
        return (model.apply(params, state, key, X, True)[0] ** 2).mean()

    gradients = [jax.grad(loss)(params, model) for model in (plain, again)]
    assert largest_difference(*gradients) < 1e-6
    jaxpr = jax.make_jaxpr(lambda p: loss(p, again))(params)
    assert str(jaxpr).count("prevent_cse") == 2


class Named(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Fields:
    first: Any
    second: Any

    def __iter__(self):
        return iter((self.first, self.second))


@pytest.mark.parametrize("pair", [lambda *x: x, lambda *x: [*x], Named, Fields])
@pytest.mark.parametrize("kind", [dict, OrderedDict, partial(defaultdict, list)])
def test_dictionaries_have_the_order_that_the_model_gives_them(pair, kind):
    class Parts(hk.Module):
        def __call__(self, parts):
            joined = jnp.concatenate([*parts.values()], axis=1)
            made = kind({name: hk.Linear(8, name=name)(joined) for name in parts})
            return pair(made, pair(2 * parts["b"], {**made}))

    def forward(x):
        first, (_, second) = Parts(name="parts")({"b": x, "a": 2 * x})
        return jnp.concatenate([*first.values(), *second.values()], axis=1)

    plain = hk.transform(forward)
    again, key = remat(plain, ("parts",)), jax.random.key(0)
    params = plain.init(key, X)
    outputs = [made.apply(params, key, X) for made in (plain, again)]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("used", [False, True])
def test_what_a_module_adds_to_its_arguments_is_used_by_none_outside(used):
    """No number is another one in silence: an array that leaves its trace is told."""

    class Noting(hk.Module):
        def __call__(self, x, seen):
            seen["last"] = 2 * x
            return hk.Linear(8)(x)

    def forward(x):
        seen = {"last": x}
        made = Noting(name="noting")(x, seen)
        return made + seen["last"] if used else made

    plain = hk.transform(forward)
    again, key = remat(plain, ("noting",)), jax.random.key(0)
    params = again.init(key, X)
    leaks = pytest.raises(ConfigError, match=r"remat=\('noting',\): .* in an attribute")
    with leaks if used else contextlib.nullcontext():
        outputs = [made.apply(params, key, jnp.array(X)) for made in (plain, again)]
        np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6)


@jax.tree_util.register_pytree_node_class
class OnceKey:
    """A key that notes its use, as AlphaFold's."""

    def __init__(self, key, used=False):
        self.key, self.used = key, used

    def tree_flatten(self):
        return (self.key,), self.used

    @classmethod
    def tree_unflatten(cls, used, leaves):
        return cls(*leaves, used)


def test_a_key_that_notes_its_use_is_an_argument_like_others():
    class Drawing(hk.Module):
        def __call__(self, x, key):
            key.used = True
            return hk.Linear(8)(x) * jax.random.uniform(key.key)

    def forward(x):
        return Drawing(name="drawing")(x, OnceKey(hk.next_rng_key()))

    plain = hk.transform(forward)
    again, key = remat(plain, ("drawing",)), jax.random.key(0)
    params = again.init(key, X)
    outputs = [made.apply(params, key, X) for made in (plain, again)]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("keys", [{"remat": (3,)}, {"remat": ("a", None)}])
def test_what_is_no_pattern_is_refused(keys):
    with pytest.raises(ConfigError, match="possible are a tuple of patterns"):
        in_form(model(), keys)


def test_one_pattern_is_a_tuple_of_one_and_another_text_is_the_models_own():
    assert own_keys({"remat": "*/block_*", "width": 8}) == {"width": 8}
    assert own_keys({"remat": "dots"}) == {"remat": "dots"}
    with pytest.raises(ConfigError, match=r"'\*/nothing' fits"):
        in_form(model(), {"remat": "*/nothing"}).init(jax.random.key(0), X, True)
