"""Optimizers whose state or updates do not fit, and parameters of other dtypes."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.errors import ConfigError
from haiku_template.training import Experiment, initial, optimizers

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
DATA = from_split(Split(X, Y, X, Y), BatchSpec(16))


def of_dtype(dtype, width=4):
    def forward(x):
        w = hk.get_parameter("w", (8, width), dtype, hk.initializers.RandomNormal(0.3))
        return hk.Linear(2)(jnp.tanh(x @ w).real)

    return hk.transform(forward)


def weighted(outputs, batch):
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return {"loss": loss, "example_weight": batch["labels"] + 1.0}


def trainer(devices, model=None, **parts):
    parts = {"task": weighted, "optimizer": optax.sgd(0.1)} | parts
    model = of_dtype(jnp.float32) if model is None else model
    return Experiment(model=model, data=DATA, **parts).trainer(devices)


def trace(made):
    made.trace(made.feed.host_shapes()[0])


FREE = optax.contrib.schedule_free_adamw(1e-2)


def parts_of(params):
    return {
        m: {n: "matrix" if n == "w" else "others" for n in x} for m, x in params.items()
    }


@pytest.mark.parametrize(
    ("optimizer", "dtype", "words"),
    [
        (optax.contrib.prodigy(1.0), "bfloat16", r"estim_lr is float32\[\] and was bf"),
        (
            optax.chain(optax.sgd(0.1), optax.monitor({"n": optax.tree.norm})),
            "float32",
            r"measurements\['n'\] is float32\[\] and was not there",
        ),
        (
            optax.GradientTransformation(
                lambda params: (), lambda g, s, p: (jax.tree.map(jnp.mean, g), s)
            ),
            "float32",
            r"update of linear/b has the shape \(\), and the parameter \(2,\); both",
        ),
    ],
    ids=["dtype", "leaf", "shape"],
)
@pytest.mark.parametrize("skips", [1, 3])
def test_an_optimizer_that_changes_its_state_or_shapes_is_refused(
    devices, optimizer, dtype, words, skips
):
    model = of_dtype(jnp.dtype(dtype))
    made = trainer(devices, model, optimizer=optimizer, skips=skips > 1)
    with pytest.raises(ConfigError, match=words):
        trace(made)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_each_name_keeps_its_state_whatever_parameters_are_or_is_refused(
    one_device, dtype
):
    """A state of other dtypes after a step is one that no checkpoint restores."""
    refused = []
    for name in optimizers._usable():
        optimizer = optimizers.make_optimizer(name, optax.constant_schedule(0.1))
        try:
            trace(trainer(one_device, of_dtype(jnp.dtype(dtype)), optimizer=optimizer))
        except ConfigError as error:
            assert "of a state must stay" in str(error), (name, error)
            refused.append(name)
    assert len(refused) < 10 and ("prodigy" in refused) == (dtype != "float32")


@pytest.mark.parametrize(
    "task", [weighted, lambda o, b: {"loss": weighted(o, b)["loss"]}]
)
def test_micro_batches_of_half_precision_parameters_sum_in_float32(one_device, task):
    """Beside the gradients of each micro-batch, averaged in double precision."""
    made = trainer(one_device, of_dtype(jnp.bfloat16), task=task, accumulate_steps=8)
    state, batch = made.init(), DATA.train.batch(0)
    before = one_device.fetch(state.params)
    after = one_device.fetch(made.step(state, one_device.shard(batch))[0].params)

    def gradient(rows):
        def loss(params):
            outputs = hk.without_apply_rng(of_dtype(jnp.bfloat16)).apply(
                params, batch["inputs"][rows]
            )
            values = task(outputs, {"labels": batch["labels"][rows]})
            weights = values.get("example_weight", jnp.ones(len(rows)))
            return jnp.sum(values["loss"] * weights) / jnp.sum(weights), jnp.sum(
                weights
            )

        grads, weight = jax.grad(loss, has_aux=True)(before)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), grads), float(weight)

    found = [gradient(np.arange(i, 16, 8)) for i in range(8)]
    total = sum(weight for _, weight in found)
    means = jax.tree.map(
        lambda *x: sum(g * w for g, (_, w) in zip(x, found, strict=True)) / total,
        *(grads for grads, _ in found),
    )
    w, mean = (np.asarray(x["~"]["w"], np.float64) for x in (before, means))
    expected = np.asarray(jnp.asarray(w - 0.1 * mean, jnp.bfloat16), np.float64)
    # One rounding of the mean, one of its share, and one of the sum.
    np.testing.assert_allclose(
        np.asarray(after["~"]["w"], np.float64), expected, rtol=2**-7, atol=1e-3
    )
    assert after["~"]["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_averages_of_half_precision_parameters_are_refused(one_device, dtype):
    """With a decay of 0.999 they would stay at the first parameters for ever."""
    with pytest.raises(ConfigError, match="stand still; possible are float32 parame"):
        trainer(one_device, of_dtype(jnp.dtype(dtype)), ema_decay=0.999)


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize(
    ("optimizer", "free"),
    [
        (optax.partition({"matrix": FREE, "others": optax.sgd(0.1)}, parts_of), "w"),
        (optax.partition({"matrix": FREE, "others": FREE}, parts_of), "wb"),
        (
            optax.chain(
                optax.masked(FREE, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
            ),
            "w",
        ),
    ],
    ids=["one", "both", "masked"],
)
def test_a_schedule_free_optimizer_of_a_part_averages_that_part(
    devices, optimizer, free
):
    made = trainer(devices, optimizer=optimizer)
    state, batch = made.init(), DATA.train.batch(0)
    for _ in range(3):
        state, _ = made.step(state, devices.shard(batch))
    params, averages = map(devices.fetch, (state.params, state.ema_params))
    nodes = jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "b1"))
    states = devices.fetch([x for x in nodes if hasattr(x, "b1")])
    for module, names in params.items():
        for name, x in names.items():
            z = [
                s.z[module][name]
                for s in states
                if isinstance(s.z[module][name], np.ndarray)
            ]
            mean = (x - (1 - 0.9) * z[0]) / 0.9 if name in free else x
            np.testing.assert_allclose(
                averages[module][name], mean, rtol=1e-5, atol=1e-7
            )
            assert (name in free) == bool(len(z))


def test_a_schedule_free_optimizer_of_another_tree_is_refused(one_device):
    """Its averages would be lost, and the points of the gradients evaluated."""
    with pytest.raises(ConfigError, match="averages of '', which is no parameter"):
        trainer(one_device, optimizer=optax.flatten(FREE))


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("noisy_sgd", {}, "rng_key holds key<"),
        (
            "dpsgd",
            {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
            "rng_key holds key<",
        ),
    ],
    ids=["noisy_sgd", "dpsgd"],
)
def test_names_that_no_run_could_train_or_save_are_refused(name, keys, words):
    with pytest.raises(ConfigError, match=f"'{name}' of optax cannot be made.*{words}"):
        optimizers.make_optimizer(name, optax.constant_schedule(0.1), **keys)


@pytest.mark.parametrize("count", [1, 3])
def test_steps_are_traced_where_numbers_have_64_bits(devices, count):
    with jax.enable_x64(True):
        made = trainer(devices, steps_per_call=count)
        trace(made)


def test_what_needs_the_first_batch_is_found_in_few_walks(one_device, monkeypatch):
    """Each walks the whole program, which has as many equations as layers."""

    def forward(x, is_training):
        for _ in range(40):
            x = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training)
        scale = hk.get_parameter("scale", (), init=lambda *_: jnp.std(x))
        return hk.Linear(2)(x * scale)

    walks, whole = [], initial.dce_jaxpr
    monkeypatch.setattr(
        initial, "dce_jaxpr", lambda *args: walks.append(0) or whole(*args)
    )
    made = trainer(one_device, hk.transform_with_state(forward))
    assert made.initializer.from_batch == ("params/~/scale",)
    assert len(walks) < 60  # Of 243 leaves, and two traces.
