"""Replay of steps: a healthy run finds nothing, and wrong bits are found and named."""

import functools

import haiku as hk
import jax
import numpy as np
import optax
import pytest

from haiku_template import xla_flags
from haiku_template.config import check, default_config
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager, device_name
from haiku_template.devices.replay import CHECKSUMS, DETERMINISTIC, Replay
from haiku_template.errors import ConfigError, ReplayError
from haiku_template.models import mlp, resnet
from haiku_template.runs import train
from haiku_template.storage.workdir import saved_steps
from haiku_template.training import Experiment, classification
from haiku_template.training.feed import STACK
from haiku_template.training.trainer import Trainer
from tests.runs import placed

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 48)


def resnet_with_dropout(axis_name):
    """A ResNet of one block, with dropout of its inputs."""
    inner = resnet(3, axis_name=axis_name, channels=(4,), blocks=1, norm_decay=0.9)

    def apply(params, state, rng, inputs, is_training):
        if is_training:
            inputs = hk.dropout(rng, 0.2, inputs)
        return inner.apply(params, state, rng, inputs, is_training)

    return inner._replace(apply=apply)


MODELS = {
    "mlp": lambda axis_name: mlp(3, width=8),
    "resnet": resnet_with_dropout,
}


@functools.cache
def made(num_devices, model="mlp", steps_per_call=1, **options):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment(
        model=MODELS[model](devices.axis_name),
        task=classification,
        data=Data(
            ArrayDataset(INPUTS, LABELS, BatchSpec(8)),
            EvaluationSet(INPUTS, LABELS, 16),
            3,
        ),
        optimizer=optax.adam(1e-3),
        steps_per_call=steps_per_call,
        **options,
    ).trainer(devices)


def same_bits(first, second):
    leaves = zip(*map(jax.tree.leaves, (first, second)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize(
    ("model", "count", "options", "placement"),
    [
        ("mlp", 7, {}, "host"),
        slow("mlp", 7, {"accumulate_steps": 2}, "device"),
        slow("resnet", 1, {}, "host"),
        slow("mlp", 1, {"sharding": (("*", "data"),)}, "host"),
        slow("mlp", 1, {"sharding": (("opt_state/*", "data", "pinned_host"),)}, "host"),
    ],
    ids=["calls", "staged", "resnet", "sharded", "pinned"],
)
def test_a_healthy_run_has_the_same_bits(
    tmp_path, monkeypatch, num_devices, model, count, options, placement
):
    made_steps = []
    advance = Trainer.advance

    def counted(self, state, steps, arrays):
        made_steps.extend(steps)
        return advance(self, state, steps, arrays)

    trainer = placed(made(num_devices, model, count, **options), placement)
    every = {"log_every": 5, "save_every": 6, "num_steps": 12}
    plain = train(trainer, workdir=tmp_path / "plain", **every)
    monkeypatch.setattr(Trainer, "advance", counted)
    every["sdc_replay"] = "first:2,every:4"
    replayed = train(trainer, workdir=tmp_path / "replayed", **every)
    assert same_bits(plain.state.saved(), replayed.state.saved())
    twice = {step for step in made_steps if made_steps.count(step) == 2}
    assert twice == {1, 2, 4, 8, 12} and {*made_steps} == {*range(1, 13)}


def flipped(x, device, steps=1):
    """Flips a bit of the copy, or the shard, that one device has of an array.

    Or of each batch in a stack of them, [1, B, steps, ...] on a device.
    """
    shards = []
    for shard in sorted(x.addressable_shards, key=lambda shard: shard.device.id):
        data = np.array(shard.data)
        if shard.device.id == device:
            batches = data if steps == 1 else data[0, 0]
            batches.reshape(steps, -1).view(np.uint8)[:, 1] ^= 4
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def with_fault(monkeypatch, fault):
    """Lets `fault(call, params)` change the parameters of calls, which count from 0."""
    calls, advance = [], Trainer.advance

    def faulty(self, state, steps, arrays):
        state, scalars = advance(self, state, steps, arrays)
        params = fault(len(calls), state.params)
        calls.append(steps)
        return state._replace(params=params), scalars

    monkeypatch.setattr(Trainer, "advance", faulty)


@pytest.mark.slow(but="-0")
@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize(
    ("num_devices", "sharding"), [(1, ()), (4, ()), (4, (("*", "data"),))]
)
def test_a_flipped_bit_is_found_before_it_is_saved(
    tmp_path, monkeypatch, num_devices, sharding, run
):
    device = num_devices - 1

    def fault(call, params):  # Steps 1 to 4 take a call, the fifth two or three.
        flip = functools.partial(flipped, device=device)
        return jax.tree.map(flip, params) if call == 4 + run else params

    with_fault(monkeypatch, fault)
    trainer = made(num_devices, sharding=sharding)
    options = {"num_steps": 10, "save_every": 3, "sdc_replay": "every:5"}
    with pytest.raises(ReplayError) as caught:
        train(trainer, workdir=tmp_path, **options)
    name = device_name(trainer.devices.devices[device])
    assert f"{name} computed wrongly 1 of 3 times (transient)" in str(caught.value)
    assert "step 5 was made twice" in str(caught.value)
    assert "['params']" in str(caught.value) or ".params" in str(caught.value)
    assert saved_steps(tmp_path / "checkpoints") == [3]
    assert caught.value.exit_code == 72
    monkeypatch.undo()
    again = train(trainer, workdir=tmp_path, **options)
    plain = train(trainer, workdir=tmp_path / "plain", num_steps=10)
    assert same_bits(again.state.saved(), plain.state.saved())


def test_a_wrong_gradient_of_one_run_has_no_device(tmp_path, monkeypatch):
    def fault(call, params):
        if call != 1:
            return params
        flips = (functools.partial(flipped, device=i) for i in range(4))
        return functools.reduce(lambda x, flip: jax.tree.map(flip, x), flips, params)

    with_fault(monkeypatch, fault)
    words = r"1 of 3 runs differ on all devices alike \(transient\)"
    with pytest.raises(ReplayError, match=words):
        train(made(4), num_steps=4, workdir=tmp_path, sdc_replay="first:1")
    assert not saved_steps(tmp_path / "checkpoints")


def test_a_program_that_is_not_deterministic_is_called_so(tmp_path, monkeypatch):
    def fault(call, params):
        return jax.tree.map(lambda x: x + np.float32(call), params)

    with_fault(monkeypatch, fault)
    words = f"each run gives other bits, .* XLA_FLAGS={DETERMINISTIC}=true mends that"
    with pytest.raises(ReplayError, match=words):
        train(made(1), num_steps=4, workdir=tmp_path, sdc_replay="first:1")


def with_bad_device(monkeypatch, device, is_bad=lambda call: True):
    """Lets a device read a flipped bit of each share that it gets."""
    roll, calls = Replay.__dict__["_roll"].func, []

    def bad_roll(self):
        def rolled(batch, shift):
            calls.append(shift)
            batch = roll(self)(batch, shift)
            if not is_bad(len(calls) - 1):
                return batch
            return batch | {"inputs": flipped(batch["inputs"], device, steps=STACK)}

        return rolled

    monkeypatch.setattr(Replay, "_roll", property(bad_roll))


def test_a_device_that_is_always_wrong_is_named(tmp_path, monkeypatch):
    with_bad_device(monkeypatch, 2)
    words = r"gradients of a share: cpu:2 computed wrongly 6 of 6 times \(persistent\)"
    with pytest.raises(ReplayError, match=words):
        train(made(4), num_steps=4, workdir=tmp_path, sdc_replay="every:2")


def test_a_device_that_was_wrong_once_is_named(tmp_path, monkeypatch):
    with_bad_device(monkeypatch, 2, lambda call: call == 3)  # Of the second replay.
    words = r"cpu:2 computed wrongly 1 of 6 times \(transient\).*agreed: 2;"
    with pytest.raises(ReplayError, match=words):
        train(made(4), num_steps=4, workdir=tmp_path, sdc_replay="every:2")


def test_of_two_devices_neither_is_accused_alone(tmp_path, monkeypatch):
    with_bad_device(monkeypatch, 1)
    words = r"cpu:0 and cpu:1 differ, each alike each time \(persistent\)"
    with pytest.raises(ReplayError, match=words):
        train(made(2), num_steps=4, workdir=tmp_path, sdc_replay="every:2")


def test_the_message_has_the_option_that_names_a_kernel(tmp_path, monkeypatch):
    assert xla_flags.known(CHECKSUMS, DETERMINISTIC) == [CHECKSUMS, DETERMINISTIC]
    assert xla_flags.known("--xla_gpu_no_such_option") == []
    with_bad_device(monkeypatch, 1)
    words = f"XLA_FLAGS='{CHECKSUMS} --xla_dump_to=FOLDER' logs"
    with pytest.raises(ReplayError, match=words):
        train(made(2), num_steps=4, workdir=tmp_path, sdc_replay="first:1")


@pytest.mark.parametrize(
    "text", ["", "8", "first:0", "every:3,first:1", "first:8,", "every:-1", "last:2"]
)
def test_steps_that_are_not_understood_are_refused(tmp_path, text):
    words = (
        r"config\.sdc_replay=.*possible is None, or text such as 'first:8,every:1000'"
    )
    config = default_config()
    config.sdc_replay = text
    with pytest.raises(ConfigError, match=words):
        check(config)
    with pytest.raises(ConfigError, match=words):
        train(made(1), num_steps=2, workdir=tmp_path, sdc_replay=text)
    assert not any(tmp_path.iterdir())


def test_a_second_state_that_does_not_fit_is_refused(tmp_path):
    trainer = made(1)
    from haiku_template.preflight.budget import memory_budget

    limit = memory_budget(trainer).peak + 100
    train(trainer, num_steps=1, workdir=tmp_path / "fits", memory_limit=limit)
    with pytest.raises(ConfigError, match="keeps a second state of .* leave it out"):
        train(
            trainer,
            num_steps=1,
            workdir=tmp_path / "not",
            memory_limit=limit,
            sdc_replay="first:1",
        )
