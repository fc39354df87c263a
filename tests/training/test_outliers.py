"""A gradient far beyond the usual is one warning that names step, row and value."""

import logging
import re
from types import SimpleNamespace

import haiku as hk
import numpy as np
import optax
import pytest

from haiku_template.data import Data, from_iterator
from haiku_template.devices import DeviceManager
from haiku_template.devices.compiled import Scalars, pack
from haiku_template.errors import NonFiniteError
from haiku_template.runs import guards as watch
from haiku_template.runs import outliers, train
from haiku_template.runs.guards import Guards
from haiku_template.runs.scalars import PENDING
from haiku_template.training import Experiment

INPUTS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
LABELS = (INPUTS.sum(1) > 0).astype(np.int32)


class Set:
    """One batch for ever, but for some steps, which count from 1."""

    def __init__(self, batches):
        self.batches = batches

    def batch(self, step):
        inputs = self.batches.get(step + 1, INPUTS)
        return {"inputs": inputs.copy(), "labels": LABELS.copy()}


def with_value(value, row=3):
    inputs = INPUTS.copy()
    inputs[row, 1] = value
    return inputs


def squares(outputs, batch):
    return {"loss": (outputs[:, 0] - batch["labels"]) ** 2}


def trainer(train_set, num_devices=1, optimizer=None):
    return Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=squares,
        data=Data(train_set, None, 2),
        optimizer=optimizer or optax.sgd(0.0),
    ).trainer(DeviceManager.create("cpu", num_devices=num_devices))


def warnings(caplog):
    return [x for x in caplog.messages if "the gradient of step" in x]


@pytest.mark.parametrize(
    ("step", "value", "num_devices", "log_every", "num_steps"),
    [
        (58, 1e8, 1, 50, 120),
        (58, 1e15, 2, 50, 120),
        (2, 1e5, 1, 50, 120),
        (120, 1e8, 1, None, 120),
        (300, 1e8, 1, None, 600),  # Before the first line of all.
    ],
)
@pytest.mark.slow(but="58")
def test_one_pixel_is_named_between_the_logs(
    tmp_path, caplog, step, value, num_devices, log_every, num_steps
):
    data = Set({step: with_value(value), step + 1: with_value(value)})
    train(
        trainer(data, num_devices),
        num_steps=num_steps,
        workdir=tmp_path,
        log_every=log_every,
    )
    (said,) = warnings(caplog)
    device = f"cpu:{3 * num_devices // 8}"
    magnitude = re.escape(f"{value:.3g}")
    words = (
        f"of step {step} has norm .* {magnitude} in its .*inputs.*, row 3,.*{device}"
    )
    assert re.search(words, said)


def test_a_whole_batch_and_one_without_an_odd_value_are_told_apart(tmp_path, caplog):
    data = Set({58: INPUTS * np.float32(1e6)})
    train(trainer(data), num_steps=80, workdir=tmp_path / "a", log_every=50)
    assert "row 0" in warnings(caplog)[0]
    caplog.clear()

    class Labels(Set):
        def batch(self, step):
            labels = LABELS * (10**6 if step == 57 else 1)
            return super().batch(step) | {"labels": labels}

    train(trainer(Labels({})), num_steps=80, workdir=tmp_path / "b", log_every=50)
    assert "of step 58" in warnings(caplog)[0]
    assert "no value of its batch stands out" in warnings(caplog)[0]


def test_data_that_go_only_forward_are_not_read_again_for_a_warning(tmp_path, caplog):
    def make():
        for step in range(1, 201):
            yield Set({58: with_value(1e8)}).batch(step - 1)

    train(trainer(from_iterator(make)), num_steps=80, workdir=tmp_path, log_every=50)
    assert "cannot be read again" in warnings(caplog)[0]
    assert "reading past" not in caplog.text


@pytest.mark.slow
def test_the_batch_of_a_nan_is_found_in_data_that_go_only_forward(tmp_path):
    def make():
        for step in range(1, 201):
            yield Set({8: with_value(np.nan)}).batch(step - 1)

    words = "loss of step 8 .*batch of step 8 .*nan in its .*, row 3,"
    for i in range(3):
        with pytest.raises(NonFiniteError, match=words):
            train(
                trainer(from_iterator(make), optimizer=optax.sgd(0.1)),
                num_steps=100,
                workdir=tmp_path / str(i),
                log_every=9,
            )


def guards(devices):
    """Guards of a run without parameters, the scalars of whose steps are made up."""
    experiment = SimpleNamespace(data=Data(Set({}), None, 2))
    feed = SimpleNamespace(read=experiment.data.train.batch)
    made_up = SimpleNamespace(
        devices=devices, experiment=experiment, feed=feed, left_out=()
    )
    return Guards(made_up, {}, SimpleNamespace(latest=None))


def said(norms, caplog, look_every=50, scaled=False):
    """Steps that are warned of when these norms are those of steps 1, 2, ..."""
    caplog.clear()
    run = guards(DeviceManager.create("cpu", num_devices=1))
    watch = run._scalars
    with caplog.at_level(logging.WARNING):
        for step, norm in enumerate(norms, 1):
            scalars = {"grad_norm": np.float32(norm), "loss_scale": np.float32(2)}
            scalars["loss"] = np.float32(1)
            if not scaled:
                del scalars["loss_scale"]
            watch.note(range(step, step + 1), pack(scalars))
            if look_every and step % look_every == 0:
                watch.look(step)
        assert len(watch.pending) <= PENDING
        watch.look(step)
    return [int(re.search(r"step (\d+)", x)[1]) for x in warnings(caplog)]


@pytest.mark.slow(but="[7")
@pytest.mark.parametrize("look_every", [1, 7, 50, None])
def test_what_is_an_outlier_does_not_depend_on_when_norms_are_read(caplog, look_every):
    rng = np.random.default_rng(0)
    noise = rng.lognormal(0, 0.5, 1000)
    decay = np.exp(-np.arange(1000) / 50)
    late = np.arange(1000) >= 40
    cases = [
        (noise, []),
        (noise * decay, []),  # A model that learns all by heart ...
        (np.where(np.arange(1000) == 900, 1.0, noise * decay), []),  # ... but one.
        (np.where(late, noise * 1e6, noise), [41]),  # Ruined from here on.
        (np.where(np.arange(1000) % 100 == 58, 1e4, noise), [59]),
        (np.zeros(100), []),
        ([*noise[:40], np.nan, np.inf, *noise[:40]], [42]),
        (noise[:3], []),
    ]
    for norms, steps in cases:
        assert said(norms, caplog, look_every) == steps
    skipped = [*noise[:40], np.inf, *noise[:40]]
    assert said(skipped, caplog, look_every, scaled=True) == []


def test_tables_of_long_calls_do_not_pile_up(caplog):
    """Of `PENDING` steps they may, and not of as many calls."""
    watch = guards(DeviceManager.create("cpu", num_devices=1))._scalars
    for first in range(1, 20_001, 1000):
        norms = np.ones((1000, 64), np.float32)
        norms[700] = 1e6 if first == 15_001 else 1
        ones = np.ones_like(norms)
        scalars = Scalars((norms, ones), (("grad_norm",), ("loss",)))
        watch.note(range(first, first + 1000), scalars)
        assert not watch.pending and len(watch.stacks) <= 1
    watch.look(20_000)
    (message,) = warnings(caplog)
    assert "step 15701 has norm 1e+06" in message


def test_a_step_of_ones_own_may_report_no_norm(caplog):
    watch = guards(DeviceManager.create("cpu", num_devices=1))._scalars
    for step in range(100):
        watch.note(range(step, step + 1), pack({"loss": np.float32(1)}))
    watch.look(100)
    assert not watch.pending and not caplog.messages


def test_the_magnitude_of_a_complex_value_is_of_both_its_parts():
    batch = {"inputs": np.array([[3 + 4j, 1j]], np.complex64)}
    feed = SimpleNamespace(read=lambda step: batch)
    (sizes,) = outliers._magnitudes(SimpleNamespace(feed=feed), 1).values()
    assert sizes.tolist() == [[5, 1]]


def test_many_leaves_are_tested_some_at_a_time(monkeypatch, one_device):
    """XLA takes far longer than twice as long for a program of twice as many."""
    sizes, real = [], watch._faults
    monkeypatch.setattr(watch, "_faults", lambda x: sizes.append(len(x)) or real(x))
    leaves = {f"{i:03}": np.zeros(2, np.float32) for i in range(520)}
    leaves["007"], leaves["519"] = leaves["007"] + np.inf, leaves["519"] + np.nan
    tree = one_device.replicate(leaves | {"step": np.int32(1)})
    names = {"['007']": "infinite", "['519']": "NaN"}
    assert watch.faulty_leaves(one_device, tree) == names
    assert sizes == [250, 250, 20]
