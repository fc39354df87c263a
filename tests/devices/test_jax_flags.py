"""Flags of JAX that a user may have set: a run goes on, or says why not."""

import haiku as hk
import jax
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.devices import DeviceManager
from haiku_template.errors import DeviceError
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from tests.runs import run_command

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 6)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)


def noisy(inputs, is_training):
    x = hk.LayerNorm(-1, True, True)(hk.Linear(8)(inputs))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
    return hk.Linear(2)(x)


def losses(devices, folder, num_steps=4, **options):
    data = from_split(Split(X, Y, X[:20], Y[:20]), BatchSpec(16))
    options = {"optimizer": optax.adam(1e-2)} | options
    trainer = Experiment(
        model=hk.transform(noisy), task=classification, data=data, **options
    ).trainer(devices)
    train(trainer, num_steps=num_steps, workdir=folder, log_every=1, eval_every=2)
    rows = read(folder / "metrics.jsonl")
    return [x.get("train/loss", x.get("eval/loss")) for x in rows]


OPTIONS = {
    "plain": {},
    "accumulation": {"accumulate_steps": 2},
    "sharded": {"sharding": (("*", "data"),), "accumulate_steps": 2},
}


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_key_is_used_twice(devices, tmp_path, options):
    expected = losses(devices, tmp_path / "a", **options)
    with jax.debug_key_reuse(True):
        found = losses(devices, tmp_path / "b", **options)
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--config.accumulate_steps=2"]])
def test_a_run_without_compiling_is_the_same(tmp_path, options):
    """By which users look into their models."""
    flags = ["--config=configs/digits.py", "--device=cpu", "--config.num_steps=2"]
    flags += ["--num_devices=1"]
    flags += ["--config.log_every=1", "--config.optimizer.warmup_steps=0", *options]
    found = []
    for value in ("0", "1"):
        workdir = f"--workdir={tmp_path / value}"
        done = run_command("train", *flags, workdir, JAX_DISABLE_JIT=value)
        assert done.returncode == 0, done.stderr
        rows = read(tmp_path / value / "metrics.jsonl")
        found.append([x.get("train/loss", x.get("eval/loss")) for x in rows])
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_several_devices_without_compiling_are_refused():
    with jax.disable_jit():
        DeviceManager.create("cpu", num_devices=1)
        with pytest.raises(DeviceError, match="on 2 devices .* --num_devices=1"):
            DeviceManager.create("cpu", num_devices=2)


FLAGS = ("debug_nans", "enable_checks", "check_tracer_leaks", "explain_cache_misses")


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("flag", FLAGS)
def test_a_debugging_flag_changes_no_number(devices, tmp_path, flag):
    expected = losses(devices, tmp_path / "a")
    before = getattr(jax.config, f"jax_{flag}")
    jax.config.update(f"jax_{flag}", True)
    try:
        found = losses(devices, tmp_path / "b")
    finally:
        jax.config.update(f"jax_{flag}", before)
    assert found == expected
