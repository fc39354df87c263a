"""Rows C21 and C22 of the reliability bench: steps that are not finite are skipped."""

import contextlib
import logging
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.config import check, default_config
from haiku_template.data import ArrayDataset, BatchSpec, Data, from_iterator
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, NonFiniteError, ReplicaError
from haiku_template.params import leaves_by_path
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 8, 6)).astype(np.float32)
LABELS = (INPUTS.sum(2) > 0).astype(np.int32)
PLACES = [(1, 1), (1, 7), (4, 1), (4, 7)]
each_place = pytest.mark.parametrize("num_devices, count", PLACES)


class Set:
    """Batches with a value in two rows of some steps, which count from 1.

    One of them has the wrong label, so that a huge value has a huge gradient.
    """

    def __init__(self, values):
        self.values = values

    def batch(self, step):
        inputs = INPUTS[step % 40].copy()
        inputs[5:7, 2] = self.values.get(step + 1, inputs[5:7, 2])
        labels = LABELS[step % 40].copy()
        labels[5:7] = 0, 1
        return {"inputs": inputs, "labels": labels}


def forward(inputs, is_training):
    """Keeps a mean of its inputs, without BatchNorm's axis, which is averaged here."""
    del is_training
    hk.get_state("lowest", [2], init=lambda *_: jnp.full(2, jnp.inf))
    mean = hk.get_state("mean", [], init=jnp.zeros)
    new = jnp.mean(inputs[:, 0])
    with contextlib.suppress(NameError):  # Without the axis, on one device.
        new = jax.lax.pmean(new, "data")
    hk.set_state("mean", 0.9 * mean + 0.1 * jnp.log1p(jnp.abs(new)))
    return hk.Linear(2)(jax.nn.relu(hk.Linear(16)(inputs)))


def trainer(values, num_devices=1, count=1, **options):
    parts = {
        "model": hk.transform_with_state(forward),
        "task": classification,
        "optimizer": optax.adamw(1e-2),
        "ema_decay": 0.9,
        "steps_per_call": count,
    }
    data = values if isinstance(values, Data) else Data(Set(values), None, 2)
    experiment = Experiment(data=data, **parts | options)
    return experiment.trainer(DeviceManager.create("cpu", num_devices=num_devices))


def leaves(state):
    with jax.transfer_guard("allow"):
        saved = jax.device_get(state.saved() | {"step": 0})
    return {k: np.asarray(x) for k, x in leaves_by_path(saved).items()}


def same(first, second):
    return [k for k, x in first.items() if x.tobytes() != second[k].tobytes()] == []


def after(made, num_steps, start=0, state=None):
    """The state after steps, made in calls that end as those of a run may."""
    state = made.init() if state is None else state
    with made.calls(start, num_steps, lambda step: step in (1, 9)) as calls:
        for steps, arrays in calls:
            state, scalars = made.advance(state, steps, arrays)
    return state, {k: float(scalars[k][len(steps) - 1]) for k in scalars}


def warnings(caplog):
    return [x for x in caplog.messages if "is skipped" in x]


@pytest.mark.slow(but="4-7")
@each_place
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e25])
def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(
    num_devices, count, value
):
    """C21: parameters, moments, averages, network state and counts, bit for bit."""
    made = trainer({6: value}, num_devices, count, skips=True)
    before, _ = after(made, 5)
    before = leaves(before)
    skipped, scalars = after(made, 6)
    assert int(skipped.step) == 6
    assert same(before, leaves(skipped))
    assert scalars["skipped_steps"] == 1
    later, scalars = after(made, 7)
    assert scalars["skipped_steps"] == 0
    assert not same(before, leaves(later))
    assert all(
        np.isfinite(x).all() for k, x in leaves(later).items() if "lowest" not in k
    )


@pytest.mark.slow(but="4-7")
@each_place
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_finite_steps_are_those_of_a_run_without_skips(num_devices, count, precision):
    """Up to XLA's rounding."""
    options = {"model": hk.transform(lambda x: hk.nets.MLP([16, 2])(x))}
    options |= {"ema_decay": None, "precision": precision}
    without, with_skips = (
        leaves(after(trainer({}, num_devices, count, skips=x, **options), 20)[0])
        for x in (False, True)
    )
    for name, leaf in without.items():
        np.testing.assert_allclose(with_skips[name], leaf, 1e-4, 1e-6, err_msg=name)


def test_by_default_no_step_is_selected():
    texts = []
    for skips in (False, True):
        made = trainer({}, 1, ema_decay=None).replace(skips=skips)
        texts.append(made.trace(made.feed.host_shapes()[0]).lower().as_text())
        _, scalars = after(made, 2)
        assert ("skipped_steps" in scalars) == skips
    assert texts[0].count("stablehlo.select") < texts[1].count("stablehlo.select")
    made = trainer({}, 1, ema_decay=None)
    assert made.replace(skips=False) is made


@pytest.mark.parametrize("num_devices", [1, 4])
def test_the_memory_of_the_state_is_taken_over(num_devices):
    sizes = []
    for skips in (False, True):
        options = {"model": hk.transform(lambda x: hk.nets.MLP([512, 256, 2])(x))}
        made = trainer({}, num_devices, skips=skips, **options)
        analysis = (
            made.trace(made.feed.host_shapes()[0]).lower().compile().memory_analysis()
        )
        state = sum(x.size * 4 for x in jax.tree.leaves(made.abstract.saved()))
        assert analysis.alias_size_in_bytes >= state - 64
        sizes.append((analysis.temp_size_in_bytes, state))
    (without, state), (with_skips, _) = sizes
    assert with_skips - without < state / 100


@pytest.mark.slow(but="4-7")
@each_place
def test_a_run_goes_on_after_a_nan(tmp_path, caplog, num_devices, count):
    """C21: it is one sentence with step, leaf and device, and it is counted."""
    made = trainer({13: np.nan, 25: 1e25}, num_devices, count)
    run = {"num_steps": 40, "workdir": tmp_path, "log_every": 10, "save_every": 20}
    with caplog.at_level(logging.WARNING):
        result = train(made, **run, max_consecutive_nonfinite=2)
    first, second = warnings(caplog)
    device = f"cpu:{5 * num_devices // 8}"
    assert re.search(
        r"step 13 is skipped, as its loss is infinite or NaN, and the state stays as "
        rf"after step 12: .*nan in its \['inputs'\], row 5, which is on {device} "
        r"\(value 2 of 0 to 5\); the run ends after 2 in a row",
        first,
    )
    assert "step 25 is skipped, as its gradient's norm is" in second
    assert "magnitude 1e+25 in its ['inputs'], row 5" in second
    rows = {row["step"]: row for row in read(tmp_path / "metrics.jsonl")}
    counts = [row.get("train/skipped_steps") for row in rows.values()]
    assert counts == [None, 1, 2, 2]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))


@pytest.mark.parametrize("log_every", [1, 7, None])
@pytest.mark.parametrize("count", [1, 7])
def test_so_many_in_a_row_end_a_run(tmp_path, caplog, count, log_every):
    """C22: the same steps, whenever a run looks; what was saved is finite."""
    made = trainer(dict.fromkeys(range(11, 30), np.nan), 1, count)
    run = {"num_steps": 40, "workdir": tmp_path, "log_every": log_every}
    words = r"the loss of step 11 \(and of the 2 after it\) is .*; it was not saved .* "
    words += r"the newest is of step 8: .*batch of step 11 .*\['inputs'\], row 5"
    with pytest.raises(NonFiniteError, match=words) as caught:
        train(made, **run, save_every=8, max_consecutive_nonfinite=3)
    assert caught.value.exit_code == 70
    assert [x.name for x in (tmp_path / "checkpoints").iterdir()] == ["8"]
    assert len(warnings(caplog)) == 2


def test_others_between_them_end_no_run(tmp_path, caplog):
    made = trainer(dict.fromkeys(range(2, 30, 2), np.nan))
    train(made, num_steps=30, workdir=tmp_path, max_consecutive_nonfinite=2)
    assert len(warnings(caplog)) == 14


def test_the_first_step_always_ends_a_run(tmp_path):
    made = trainer({1: np.nan})
    with pytest.raises(NonFiniteError, match="the loss of step 1 is"):
        train(made, num_steps=3, workdir=tmp_path, max_consecutive_nonfinite=9)


@pytest.mark.parametrize(
    "model, leaf",
    [
        (
            lambda x: jnp.sqrt(hk.Linear(2, w_init=jnp.zeros)(x)),
            r"\.params\['linear'\]",
        ),
        (
            lambda x: (
                hk.set_state("log", jnp.log(jnp.min(x)))
                or hk.Linear(2)(x) + 0 * hk.get_state("log", [], init=jnp.zeros)
            ),
            r"\.net_state\['~'\]\['log'\] \(NaN\)",
        ),
    ],
    ids=["gradient", "net_state"],
)
def test_the_leaf_of_a_state_that_was_not_taken_is_named(tmp_path, model, leaf):
    """C22: an infinite gradient and a NaN in the network state, of a finite loss."""

    def apply(inputs, is_training):
        return model(inputs)

    made = trainer({}, model=hk.transform_with_state(apply), ema_decay=None)
    words = rf"the state after step 1 is infinite or NaN in {leaf}.*; it was not saved"
    with pytest.raises(NonFiniteError, match=words):
        train(made, num_steps=3, workdir=tmp_path, max_consecutive_nonfinite=9)


@pytest.mark.parametrize("skips", [False, True])
def test_a_nan_in_one_devices_copy_names_the_device(tmp_path, skips):
    """Its share of the gradient makes all others NaN: every device skips alike."""
    made = trainer({}, 4, skips=skips)
    advance = made.advance

    def damaging(state, steps, arrays):
        state, scalars = advance(state, steps, arrays)
        if steps[-1] == 4:
            with jax.transfer_guard("allow"):
                state = on_device_2(state, np.nan)
        return state, scalars

    made.advance = damaging
    run = {"num_steps": 20, "workdir": tmp_path, "log_every": 2}
    with pytest.raises(
        (ReplicaError, NonFiniteError), match=r"another on cpu:2|loss of step 5"
    ) as caught:
        train(made, **run, max_consecutive_nonfinite=1 + 2 * skips)
    assert isinstance(caught.value, ReplicaError) == skips
    assert not any((tmp_path / "checkpoints").iterdir())


def on_device_2(state, value):
    leaf = state.params["linear"]["b"]
    copies = [
        jax.device_put(
            np.full(leaf.shape, value if i == 2 else 0, leaf.dtype), x.device
        )
        for i, x in enumerate(leaf.addressable_shards)
    ]
    leaf = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)
    return state._replace(
        params=state.params | {"linear": {**state.params["linear"], "b": leaf}}
    )


def test_a_step_of_ones_own_is_skipped_by_its_loss(tmp_path, caplog):
    def step(state, batch, rng, axis_name):
        del rng, axis_name
        loss = lambda w: jnp.square(batch["inputs"] @ w - batch["labels"]).mean()  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state.params)
        return state._replace(params=state.params - 1e-2 * grad), {"loss": value}

    own = {"model": None, "task": None, "optimizer": None, "ema_decay": None}
    own |= {"init": lambda rng, batch: {"params": jnp.ones(6)}, "step": step}
    result = train(
        trainer({4: np.nan}, **own),
        num_steps=9,
        workdir=tmp_path,
        max_consecutive_nonfinite=2,
    )
    assert len(warnings(caplog)) == 1
    assert np.isfinite(np.asarray(result.state.params)).all()


def test_data_that_go_only_forward_are_not_read_again(tmp_path, caplog):

    def make():
        for step in range(60):
            yield Set({8: np.nan}).batch(step)

    made = trainer(Data(from_iterator(make), None, 2))
    train(made, num_steps=30, workdir=tmp_path, max_consecutive_nonfinite=2)
    (message,) = warnings(caplog)
    assert "its batch cannot be read again" in message


def test_a_run_that_ended_resumes_with_another_number(tmp_path):
    """The number is no part of a run's identity."""
    run = {"num_steps": 20, "workdir": tmp_path, "save_every": 5}
    with pytest.raises(NonFiniteError, match="loss of step 8 is"):
        train(trainer({8: np.nan}), **run)
    train(trainer({8: np.nan}), **run, max_consecutive_nonfinite=2)
    assert (tmp_path / "checkpoints" / "20").is_dir()


def test_the_number_is_checked():

    config = default_config()
    config.max_consecutive_nonfinite = 0
    with pytest.raises(
        ConfigError, match="max_consecutive_nonfinite=0; possible is 1 or"
    ):
        check(config)


@pytest.mark.parametrize("rule", ["*", "opt_state/*"])
def test_a_sharded_state_is_left_alone_too(rule):
    made = trainer({4: np.nan}, 4, sharding=((rule, "data"),), skips=True)
    before, _ = after(made, 3)
    before = leaves(before)
    skipped, scalars = after(made, 4)
    assert scalars["skipped_steps"] == 1 and same(before, leaves(skipped))


@pytest.mark.parametrize("log_every", [1, 4, None])
def test_overflows_of_float16_are_none_of_them(tmp_path, caplog, log_every):
    """Four in a row end no run whose limit is two: a smaller scale mends them."""
    model = hk.transform(lambda x: hk.Linear(2)(jnp.square(x)))
    made = trainer(
        dict.fromkeys((3, 4, 5, 6), 250.0),
        model=model,
        precision="float16",
        ema_decay=None,
    )
    run = {"num_steps": 9, "workdir": tmp_path, "log_every": log_every}
    result = train(made, **run, max_consecutive_nonfinite=2)
    assert not warnings(caplog)
    assert read(tmp_path / "metrics.jsonl")[-1]["train/skipped_steps"] >= 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(result.state.params))


def test_a_leaf_is_named_with_data_on_the_device(tmp_path):
    """The step is made again from the staged set."""
    data = ArrayDataset(INPUTS[0], LABELS[0], BatchSpec(8))
    model = hk.transform(lambda x: jnp.sqrt(hk.Linear(2, w_init=jnp.zeros)(x)))
    made = trainer(Data(data, None, 2), placement="device", model=model, ema_decay=None)
    with pytest.raises(NonFiniteError, match=r"after step 1 is .* in \.params\["):
        train(made, num_steps=2, workdir=tmp_path, max_consecutive_nonfinite=2)
