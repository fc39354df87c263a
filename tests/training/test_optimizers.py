import dataclasses
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.runs import train
from haiku_template.training import Experiment, classification, optimizers
from haiku_template.training.optimizers import (
    make_optimizer,
    make_schedule,
)


def values(schedule, steps):
    return [float(schedule(step)) for step in steps]


def test_schedules_warm_up_to_the_rate_and_end_where_they_should():
    options = {"learning_rate": 2.0, "num_steps": 110, "warmup_steps": 10}
    for name, middle in [("cosine", 1.1), ("linear", 1.1), ("constant", 2.0)]:
        schedule = make_schedule(name, final_fraction=0.1, **options)
        end = 2.0 if name == "constant" else 0.2
        got = values(schedule, [0, 5, 10, 60, 110])
        assert got == pytest.approx([0, 1, 2, middle, end], abs=1e-6), name


def test_without_warm_up_the_first_step_has_the_whole_rate():
    schedule = make_schedule("cosine", learning_rate=0.5, num_steps=10)
    assert float(schedule(0)) == 0.5


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("num_steps", "warmup"), [(20, 100), (20, 20), (1, 100)])
def test_a_warm_up_longer_than_the_run_is_cut_with_a_warning(
    shape, num_steps, warmup, caplog
):
    options = {"learning_rate": 2.0, "num_steps": num_steps, "warmup_steps": warmup}
    schedule = make_schedule(shape, **options)
    words = f"warmup_steps={warmup}.*num_steps={num_steps}.*cut to {num_steps - 1}"
    assert re.search(words, caplog.text)
    rates = values(schedule, range(num_steps))
    assert rates == pytest.approx(
        np.linspace(0, 2, num_steps) if num_steps > 1 else [2]
    )


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor"])
def test_weight_decay_is_a_share_of_the_learning_rate(name):
    """Of the schedule's at that step, whatever the optimizer."""
    params = {"w": jnp.full((4, 4), 2.0)}
    zeros = {"w": jnp.zeros((4, 4))}
    rates = [0.1, 0.01, 0.0]
    optimizer = make_optimizer(
        name, lambda step: jnp.asarray(rates)[step], weight_decay=0.5
    )
    state = optimizer.init(params)
    for rate in rates:
        updates, state = optimizer.update(zeros, state, params)
        np.testing.assert_allclose(updates["w"], -rate * 0.5 * 2.0, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_weight_decay_shrinks_matrices_and_leaves_vectors(name):
    shapes = {"w": (4, 4), "b": (4,), "scale": (1, 1, 1, 4), "mine": (4,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(name, lambda step: 0.1, weight_decay=0.5)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert np.all(after["w"] < 1)
    for kept in ("b", "scale", "mine"):
        np.testing.assert_array_equal(after[kept], params[kept])


def test_clipping_bounds_the_global_norm():
    optimizer = make_optimizer("sgd", lambda step: 1.0, clip_norm=0.5, momentum=0.0)
    params = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    grads = {"a": jnp.full(3, 10.0), "b": jnp.full(2, 10.0)}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert float(optax.tree.norm(updates)) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: make_optimizer("adamW", None), r"'adamW'.*did you mean adamw\?"),
        (lambda: make_optimizer("LION", None), r"'LION'.*did you mean lion\?"),
        (lambda: make_optimizer("adamv", None), "'adamv'.*did you mean adam.*muon"),
        (lambda: make_optimizer("sgd", None, b2=0.9), "sgd takes no b2.*momentum"),
        (lambda: make_optimizer("sgd", None, mu_dtype="bfloat16"), "sgd takes no mu_d"),
        (
            lambda: make_schedule("step", learning_rate=1, num_steps=2),
            "'step'.*cosine, linear, constant",
        ),
        (
            lambda: make_schedule(f"{__name__}:short", learning_rate=1, num_steps=2),
            "optimizer.schedule: .*:short (got|missing).*; it takes rate$",
        ),
    ],
)
def test_unknown_names_and_keys_say_what_is_possible(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


@pytest.mark.slow(but="muon")
@pytest.mark.parametrize("name", ["muon", "adan", "rmsprop", "lamb", "signum"])
def test_any_optimizer_of_optax_learns_and_decays_matrices_alone(name):
    params = {"w": jnp.full((4, 4), 2.0), "b": jnp.full(4, 2.0)}
    optimizer = make_optimizer(name, lambda step: 0.01, weight_decay=0.5)
    state = optimizer.init(params)
    grads = {"w": jnp.eye(4), "b": jnp.ones(4)}
    updates, state = optimizer.update(grads, state, params)
    assert float(updates["w"][0, 0]) < 0 and float(updates["b"][0]) < 0
    zeros = {"w": jnp.zeros((4, 4)), "b": jnp.zeros(4)}
    fresh = optimizer.init(params)
    updates, _ = optimizer.update(zeros, fresh, params)
    assert np.all(np.asarray(updates["w"]) < 0)
    np.testing.assert_array_equal(updates["b"], 0)


def test_warm_up_stable_decay_is_constant_until_the_last_fifth():
    options = {"learning_rate": 2.0, "num_steps": 110, "warmup_steps": 10}
    schedule = make_schedule("wsd", final_fraction=0.1, **options)
    got = values(schedule, [0, 5, 10, 90, 100, 110])
    assert got == pytest.approx([0, 1, 2, 2, 1.1, 0.2], abs=1e-6)


def short(rate):
    return optax.constant_schedule(rate)


def own_schedule(learning_rate, num_steps, **_):
    return lambda step: learning_rate * step / num_steps


def own_optimizer(learning_rate, factor=1.0):
    return optax.sgd(lambda step: factor * learning_rate(step))


def test_optimizers_and_schedules_may_be_a_users_functions():
    schedule = make_schedule(f"{__name__}:own_schedule", learning_rate=2.0, num_steps=4)
    optimizer = make_optimizer(f"{__name__}:own_optimizer", schedule, factor=3.0)
    state = optimizer.init(jnp.zeros(1))
    for step in range(3):
        updates, state = optimizer.update(jnp.ones(1), state)
        assert float(updates[0]) == pytest.approx(-3 * 2.0 * step / 4)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_first_moments_may_be_of_half_precision(name):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    grads = {"w": jnp.full((4, 4), 0.3), "b": jnp.full(4, 0.3)}
    ends = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(name, lambda step: 0.01, mu_dtype=dtype)
        state, ends[dtype] = optimizer.init(params), params
        for _ in range(3):
            updates, state = optimizer.update(grads, state, ends[dtype])
            ends[dtype] = optax.apply_updates(ends[dtype], updates)
        moments = [x for x in jax.tree.leaves(state) if x.ndim]
        assert {str(x.dtype) for x in moments} >= {dtype}
    for one, other in zip(*map(jax.tree.leaves, ends.values()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


UNFIT = {"dpsgd", "lbfgs", "noisy_sgd", "optimistic_adam", "rprop"}
UNFIT |= {"schedule_free", "sm3", "sophia"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
def test_each_name_of_optax_makes_a_step_or_is_refused_in_a_sentence():
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    schedule, refused = make_schedule("cosine", learning_rate=0.1, num_steps=9), {}
    names = optimizers._optimizers()  # All that a config may name.
    assert len(names) > 40
    for name in names:
        try:
            optimizer = make_optimizer(name, schedule, weight_decay=0.1, clip_norm=1.0)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        state = jax.eval_shape(optimizer.init, params)
        update = optax.with_extra_args_support(optimizer).update
        updates, _ = jax.eval_shape(update, params, state, params, value=1.0)
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert refused.keys() == UNFIT
    for name, words in refused.items():
        possible = words.partition("possible are ")[2].split(", ")
        assert f"name={name!r}" in words and "adamw" in possible
        assert not UNFIT & {*possible}
    with pytest.raises(ConfigError, match="'polyak_sgd' is not known") as caught:
        make_optimizer("polyak_sgd", schedule)
    assert not UNFIT & {*re.findall(r"\w+", str(caught.value))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
def test_each_optimizer_but_two_takes_a_first_rate_of_0():
    """Prodigy's error advised a warm-up, which was its cause."""
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    keys = {"learning_rate": 0.1, "num_steps": 9, "warmup_steps": 3}
    broken = set()
    for name in optimizers._usable():
        optimizer = make_optimizer(name, make_schedule("cosine", **keys))
        state = optimizer.init(params)
        update = optax.with_extra_args_support(optimizer).update
        for _ in range(3):
            updates, state = update(params, state, params, value=jnp.float32(1))
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(updates)):
            broken.add(name)
    assert broken == {*optimizers.DIVIDE_BY_RATE}


@pytest.mark.parametrize("name", optimizers.DIVIDE_BY_RATE)
def test_a_warm_up_of_an_optimizer_that_divides_by_its_rate_is_refused(name):
    keys = {"learning_rate": 1.0, "schedule": "constant", "final_fraction": 0.0}
    with pytest.raises(ConfigError, match=f"warmup_steps=3 begins.*{name} divides"):
        optimizers.make_optimization(9, name=name, warmup_steps=3, **keys)
    optimizers.make_optimization(9, name=name, warmup_steps=0, **keys)


@pytest.mark.slow(but="2-2")
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["reduce_on_plateau", "momo"])
def test_an_optimizer_gets_the_loss_of_the_whole_batch(
    tmp_path, name, num_devices, accumulate_steps
):
    """As its `value`: a plateau lowers the rate, momo steps by the loss itself."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(16, 4)).astype(np.float32)
    labels = (inputs.sum(1) > 0).astype(np.int32)
    optimizer = optax.chain(
        optax.adam(1e-2),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5),
    )
    if name == "momo":
        optimizer = make_optimizer("momo", lambda step: 0.1, clip_norm=1.0)
    experiment = Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=classification,
        data=from_split(Split(inputs, labels, inputs, labels), BatchSpec(16)),
        optimizer=optimizer,
        accumulate_steps=accumulate_steps,
    )
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = experiment.trainer(devices)
    params = devices.fetch(trainer.init().params)
    state = train(trainer, num_steps=9, workdir=tmp_path, log_every=None).state

    def loss(params):
        logits = inputs @ params["linear"]["w"] + params["linear"]["b"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean()

    opt_state = optimizer.init(params)
    for _ in range(9):
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        params = optax.apply_updates(params, updates)
    for got, expected in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((params, opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    if name != "momo":
        assert float(state.opt_state[1].scale) < 1


MORE = {
    "no other arguments": optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "several steps": optax.MultiSteps(
        optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1)), 2
    ),
    "no loss": optax.GradientTransformation(
        lambda params: (), lambda grads, state, params: (grads, state)
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_the_loss_is_for_those_that_take_it(tmp_path, one_device, name):
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(16, 4)).astype(np.float32), np.arange(16, dtype="i4") % 2
    experiment = Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=classification,
        data=from_split(Split(*arrays, *arrays), BatchSpec(16)),
        optimizer=MORE[name],
    )
    trainer = experiment.trainer(one_device)
    before = one_device.fetch(trainer.init().params)
    after = train(trainer, num_steps=4, workdir=tmp_path, log_every=None).state.params
    assert np.abs(one_device.fetch(after)["linear"]["w"] - before["linear"]["w"]).max()


@pytest.mark.slow(but="sgd-1")
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_what_a_schedule_free_optimizer_averages_is_the_model(
    tmp_path, name, num_devices
):
    """It is evaluated, kept, exported and resumed; gradients are of other points."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 4)).astype(np.float32)
    arrays = inputs, (inputs.sum(1) > 0).astype(np.int32)
    schedule = make_schedule("constant", learning_rate=0.3, num_steps=9)
    experiment = Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=classification,
        data=from_split(Split(*arrays, *arrays), BatchSpec(16)),
        optimizer=make_optimizer(name, schedule, clip_norm=1.0),
    )
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = experiment.trainer(devices)
    for num_steps in (6, 12):
        result = train(trainer, num_steps=num_steps, workdir=tmp_path, log_every=None)
    state = result.state
    (free,) = (x for x in state.opt_state if hasattr(x, "z"))
    expected = optax.contrib.schedule_free_eval_params(free, state.params)
    got = devices.fetch(trainer.merged(state)[0])
    for path, x in flatten(got).items():
        np.testing.assert_allclose(x, flatten(expected)[path], rtol=1e-5, atol=1e-6)
        assert np.abs(x - flatten(state.params)[path]).max() > 1e-3
    logits = inputs @ got["linear"]["w"] + got["linear"]["b"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, arrays[1]).mean()
    assert result.metrics["eval/loss"] == pytest.approx(float(loss), rel=1e-4)
    twice = dataclasses.replace(experiment, ema_decay=0.9)
    with pytest.raises(ConfigError, match="leave out ema_decay"):
        twice.trainer(devices)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_kernels_of_convolutions_decay(name):
    params = {
        "conv": {"w": jnp.full((3, 3, 4, 4), 2.0)},
        "linear": {"w": jnp.full((4, 4), 2.0)},
    }
    params |= {"norm": {"scale": jnp.ones(4)}}
    optimizer = make_optimizer(name, lambda step: 0.1, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    moved = {k: float(x.ravel()[0]) for k, d in updates.items() for x in d.values()}
    assert moved == pytest.approx({"conv": -0.1, "linear": -0.1, "norm": 0.0})


@pytest.mark.parametrize("name", ["nadam", "nadamw"])
def test_optimizers_that_are_partials_are_there_by_name(name):
    assert hasattr(make_optimizer(name, lambda step: 0.1), "update")


def yours(schedule, weight_decay, clip_norm, b1=0.5):
    yours.got = weight_decay, clip_norm, b1
    return optax.sgd(schedule)


def test_an_optimizer_of_yours_gets_the_keys_that_it_takes():
    keys = {"weight_decay": 0.3, "clip_norm": 2.0, "b1": None}
    optimizer = make_optimizer(f"{__name__}:yours", lambda step: 0.1, **keys)
    assert yours.got == (0.3, 2.0, 0.5)
    grads = {"w": jnp.full((2, 2), 100.0)}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    assert float(updates["w"][0, 0]) == pytest.approx(-10.0)  # Neither again.


def with_defaults(schedule, weight_decay=0.1, clip_norm=1.0):
    with_defaults.got = weight_decay, clip_norm
    return optax.sgd(schedule)


def test_an_optimizer_of_yours_keeps_defaults_that_a_config_leaves():
    make_optimizer(f"{__name__}:with_defaults", lambda step: 0.1)
    assert with_defaults.got == (0.1, 1.0)


@pytest.mark.parametrize(
    ("name", "key"),
    [("adamw", "mask"), ("lars", "weight_decay_mask"), ("lion", "mask")],
)
def test_a_mask_of_ones_own_is_that_of_weight_decay(name, key):
    params = {"linear": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}
    zeros, moved = jax.tree.map(jnp.zeros_like, params), {}
    for mask in (None, True, False):
        optimizer = make_optimizer(
            name, lambda step: 0.1, weight_decay=0.5, **{key: mask}
        )
        updates, _ = optimizer.update(zeros, optimizer.init(params), params)
        moved[mask] = [bool(updates["linear"][x].any()) for x in ("w", "b")]
    assert moved == {None: [True, False], True: [True, True], False: [False, False]}
