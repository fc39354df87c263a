import dataclasses

import jax
import numpy as np
import pytest

from configs import digits, digits_resnet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, train
from haiku_template.training.memory import (
    check_budget,
    in_units,
    memory_budget,
    parse_bytes,
)


def build(module, num_devices=1, **changes):
    config = module.get_config()
    for key, value in changes.items():
        config[key] = value
    return Experiment.from_config(
        config, DeviceManager.create("cpu", num_devices=num_devices)
    ).trainer(DeviceManager.create("cpu", num_devices=num_devices))


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("module", [digits, digits_resnet])
def test_the_budget_is_what_the_compiled_step_uses(module, num_devices):
    trainer = Experiment.from_config(module, num_devices).trainer(num_devices)
    devices = trainer.devices
    before = len(jax.live_arrays())
    budget = memory_budget(trainer)
    assert len(jax.live_arrays()) <= before  # From shapes alone.
    state = trainer.init()
    batch = devices.shard(trainer.experiment.data.train.batch(0))
    used = trainer.train_step.lower(state, batch).compile().memory_analysis()
    peak = (
        used.argument_size_in_bytes
        + used.temp_size_in_bytes
        + used.output_size_in_bytes
        - used.alias_size_in_bytes
    )
    assert budget.step_peak == pytest.approx(peak, rel=0.01)

    def on_first_device(tree):
        leaves = jax.tree.leaves(tree)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    assert budget.params == on_first_device(state.params)
    assert budget.opt_state == on_first_device(state.opt_state)
    assert budget.net_state == on_first_device(state.net_state)
    assert budget.batch == on_first_device(batch)
    arguments = on_first_device((state, batch))
    assert budget.step_peak >= arguments + budget.temporaries


def test_what_does_not_fit_is_refused_with_a_setting_that_fits_and_agrees(tmp_path):
    trainer = build(digits_resnet, model=small())
    parted = dataclasses.replace(trainer.experiment, accumulate_steps=4).trainer(
        trainer.devices
    )
    limit = memory_budget(parted).peak
    with pytest.raises(ConfigError) as caught:
        train(trainer, num_steps=10, workdir=tmp_path / "a", memory_limit=limit)
    assert not (tmp_path / "a").exists()
    words = str(caught.value)
    assert "the largest arrays of the state are .params['head']" in words
    parts = int(words.split("--config.accumulate_steps=")[1].split()[0])
    assert 2 <= parts <= 4
    suggested = dataclasses.replace(trainer.experiment, accumulate_steps=parts).trainer(
        trainer.devices
    )
    options = {"num_steps": 10, "log_every": 1}
    train(suggested, workdir=tmp_path / "b", memory_limit=limit, **options)
    train(trainer, workdir=tmp_path / "c", **options)
    losses = [
        [row["train/loss"] for row in read(tmp_path / name / "metrics.jsonl")[:10]]
        for name in "bc"
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)


def small():
    """Without batch statistics, which belong to the parts and not to the whole."""
    return {"name": "tests_models:convolutions"}


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    (tmp_path / "tests_models.py").write_text(
        "import haiku as hk, jax\n"
        "def convolutions(num_outputs, axis_name):\n"
        "    def forward(inputs, is_training):\n"
        "        x = hk.Conv2D(16, 3)(inputs)\n"
        "        x = hk.Conv2D(16, 3)(jax.nn.gelu(x))\n"
        "        return hk.Linear(num_outputs, name='head')(hk.Flatten()(x))\n"
        "    return hk.transform(forward)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_what_can_never_fit_says_the_least():
    trainer = build(digits, batch_size=4)
    parted = [
        dataclasses.replace(trainer.experiment, accumulate_steps=parts).trainer(
            trainer.devices
        )
        for parts in (1, 2, 4)
    ]
    least = min(memory_budget(each).peak for each in parted)
    words = f"no accumulate_steps is enough: the least is {in_units(least)}"
    with pytest.raises(ConfigError, match=words):
        check_budget(trainer, least - 1)


def test_a_state_that_does_not_fit_is_told_at_once(monkeypatch):
    trainer = build(digits)
    budget = memory_budget(trainer)
    kept = budget.params + budget.opt_state + budget.batch + budget.waiting
    monkeypatch.setattr(type(trainer), "with_parts", None)  # Nothing is tried.
    words = rf"is enough: {in_units(kept)} are what the run keeps, its state"
    with pytest.raises(ConfigError, match=words):
        check_budget(trainer, kept - 1)


def test_a_limit_that_is_not_known_stops_nobody():
    assert check_budget(build(digits)).limit is None


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2KiB", 2048), ("1.5MiB", 3 * 2**19), ("24GiB", 24 * 2**30)],
)
def test_amounts_of_memory_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "0", "24GB", "inf", "nan"])
def test_what_is_no_amount_of_memory_is_refused(text):
    with pytest.raises(ConfigError, match="is not an amount of memory"):
        parse_bytes(text)
