"""Moments of which each device keeps a share: the numbers of a run without it."""

import jax
import numpy as np
import pytest

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, train
from haiku_template.training.memory import check_budget
from tests.runs import run_steps


def build(num_devices, shard=True, **keys):
    config = digits.get_config()
    keys = {"clip_norm": 0.1, "weight_decay": 0.1, "shard_moments": shard} | keys
    config.ema_decay = 0.9
    config.optimizer.update(keys)
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment.from_config(config, devices).trainer(devices)


def bytes_on(device, tree):
    shards = (s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def test_four_devices_keep_a_quarter_each_and_compute_the_same():
    whole, shared = build(4, shard=False), build(4)
    ends = [run_steps(trainer, 5) for trainer in (whole, shared)]
    states = [state for state, _ in ends]
    shared.devices.check(states[1])
    for device in shared.devices.devices:
        moments, share = (bytes_on(device, state.opt_state) for state in states)
        assert share == pytest.approx(moments / 4, rel=1e-3)  # [10] is whole.
        assert bytes_on(device, states[1].params) == bytes_on(device, states[0].params)
    for one, other in zip(*(shared.devices.fetch(end) for end in ends), strict=True):
        leaves = map(jax.tree.leaves, (one, other))
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
    assert shared._step.compiled._cache_size() == 1
    found = [check_budget(trainer) for trainer in (whole, shared)]
    assert found[1].saved == {"shard_moments": found[0].opt_state - found[1].opt_state}
    assert found[1].opt_state == bytes_on(
        shared.devices.devices[0], states[1].opt_state
    )


@pytest.mark.slow
def test_on_one_device_it_changes_nothing_and_says_so(caplog):
    ends = [run_steps(build(1, shard), 3) for shard in (False, True)]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    assert check_budget(build(1)).saved == {}
    assert "shard_moments changes nothing: there is one device" in caplog.text


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_a_checkpoint_resumes_on_any_number_of_devices(tmp_path, num_devices):
    """On the same number bitwise."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = {"log_every": 1, "keep_best": 0}
    ends = [train(build(4), num_steps=4, workdir=straight, **options).state]
    train(build(4), num_steps=2, workdir=stopped, **options)
    resumed = build(num_devices)
    end = train(resumed, num_steps=4, workdir=stopped, **options).state
    resumed.devices.check(end)
    ends.append(end)
    for a, b in zip(*map(jax.tree.leaves, map(jax.device_get, ends)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if num_devices == 4 else 1e-6)
    losses = [
        [
            row["train/loss"]
            for row in read(folder / "metrics.jsonl")
            if "train/loss" in row
        ]
        for folder in (straight, stopped)
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=0 if num_devices == 4 else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"mu_dtype": "bfloat16"},
        {"name": "lion"},
        {"name": "sgd", "clip_norm": None},
        {"name": "rmsprop"},
    ],
)
def test_other_optimizers_compute_the_same(keys):
    ends = [run_steps(build(4, shard, **keys), 4)[1] for shard in (False, True)]
    np.testing.assert_allclose(
        *([scalars["loss"] for scalars in end] for end in ends), rtol=0, atol=1e-6
    )
