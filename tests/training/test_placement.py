"""Training data staged on the devices: the same run, and no bytes in a step."""

import functools
import re
import threading

import haiku as hk
import jax
import numpy as np
import optax
import pytest

from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    from_iterator,
    staging,
)
from haiku_template.data.images import scale_pixels
from haiku_template.errors import ConfigError, Interrupted
from haiku_template.models import mlp
from haiku_template.preflight.budget import memory_budget
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from tests.runs import changed, placed

RNG = np.random.default_rng(0)
INPUTS = RNG.integers(0, 255, size=(50, 8, 8, 1)).astype(np.uint8)
LABELS = RNG.integers(0, 3, 50)
CASTS = hk.transform(lambda x: hk.Linear(3)(hk.Flatten()(x.astype("float32"))))


@functools.cache
def made(devices, augment=None, **options):
    """A trainer, which compiles its step once for all tests."""
    data = Data(
        ArrayDataset(INPUTS, LABELS, BatchSpec(8), augment),
        EvaluationSet(INPUTS, LABELS, 16),
        3,
        scale_pixels,
    )
    return Experiment(
        model=mlp(3, width=8),
        task=classification,
        data=data,
        optimizer=optax.adam(1e-3),
        **options,
    ).trainer(devices)


@pytest.mark.parametrize("where", ["host", "device"])
def test_the_first_lines_say_what_inputs_pass_through(one_device, where):
    trainer = placed(made(one_device), where)
    words = "; uint8 inputs pass through scale_pixels on the device"
    assert trainer.feed.placement.endswith(words)
    data = trainer.experiment.data
    plain = Data(data.train, data.evaluation, 3)
    assert "inputs" not in changed(trainer, data=plain, model=CASTS).feed.placement


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_step_takes_batches_of_the_trainer_and_of_shard(one_device, where):
    """The latter where the data are not staged; it was an error of arguments."""
    trainer = placed(made(one_device), where)
    with trainer.batches(0, 1) as batches:
        state, _ = trainer.step(trainer.init(), next(iter(batches)))
    batch = one_device.shard(trainer.experiment.data.train.batch(1))
    if where == "host":
        assert trainer.step(state, batch)[0].step == 2
        return
    with pytest.raises(ConfigError, match="staged, and a step takes .*batches"):
        trainer.step(state, batch)


def test_a_loop_over_batches_without_a_with_ends_their_thread(one_device):
    trainer, before = made(one_device), threading.active_count()
    assert len([*trainer.batches(0, 3)]) == 3
    for _ in trainer.batches(0, 100):
        assert threading.active_count() == before + 1
        break
    assert threading.active_count() == before
    batches = trainer.batches(0, 3)  # Each loop has its own, from the first step on.
    with batches as outer:
        assert len([*batches]) == len([*batches]) == len([*outer]) == 3
    assert threading.active_count() == before


def losses(workdir):
    rows = read(workdir / "metrics.jsonl")
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


@pytest.mark.slow(but="four devices-1-3")
@pytest.mark.parametrize("accumulate_steps, block_steps", [(1, 3), (2, 1000)])
def test_staged_and_host_are_bitwise_the_same_run(
    tmp_path, devices, monkeypatch, accumulate_steps, block_steps
):
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4 * 8 * block_steps)
    trainer = made(devices, accumulate_steps=accumulate_steps)
    options = {"num_steps": 8, "log_every": 1}
    host = train(trainer, workdir=tmp_path / "host", **options)
    staged = train(placed(trainer, "device"), workdir=tmp_path / "device", **options)
    assert losses(tmp_path / "host") == losses(tmp_path / "device")
    for x, y in zip(*map(jax.tree.leaves, (host.state, staged.state)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("steps_per_call", [1, 50])
def test_no_bytes_travel_in_a_step(tmp_path, devices, capsys, steps_per_call):
    trainer = placed(made(devices, steps_per_call=steps_per_call), "device")
    before = devices.ledger.totals()["bytes_to_devices"]
    train(trainer, num_steps=30, workdir=tmp_path, log_every=10)
    rows = [r for r in read(tmp_path / "metrics.jsonl") if "train/loss" in r]
    # Numbers of steps, each once: 1 before it is measured, then perhaps 9 and 10.
    count, others = 4 * devices.num_devices, 2 if steps_per_call > 1 else 0
    travelled = [row["perf/bytes_to_devices"] for row in rows]
    assert travelled == [others * count / 9, 0, 0]
    size = INPUTS.nbytes + 4 * len(LABELS)  # int64 becomes int32 there.
    staged_once = size * devices.num_devices + 4 * 8 * trainer.feed._source.steps
    travelled = devices.ledger.totals()["bytes_to_devices"] - before
    evaluations = 4 * (16 * 64 + 16 * 4 + 16 * 4)  # Inputs, labels and places.
    # And the seed, once.
    assert travelled == staged_once + evaluations + (1 + others + 1) * count
    assert f"staged on each device, {INPUTS.nbytes + LABELS.nbytes:,}" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_staged_run_goes_on_with_the_next_batch(tmp_path, devices, monkeypatch):
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4 * 8 * 3)
    trainer = placed(made(devices, steps_per_call=1), "device")
    options = {"num_steps": 8, "log_every": 1, "save_every": 1}
    train(trainer, workdir=tmp_path / "whole", **options)
    whole = trainer.advance

    def stops(state, steps, arrays):
        if int(state.step) == 5:
            raise Interrupted("stopped", 75)
        return whole(state, steps, arrays)

    monkeypatch.setattr(trainer, "advance", stops)
    with pytest.raises(Interrupted):
        train(trainer, workdir=tmp_path / "parts", **options)
    monkeypatch.undo()
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4 * 8 * 3)
    train(trainer, workdir=tmp_path / "parts", **options)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_auto_stages_what_fits_and_says_so(devices):
    trainer = made(devices)
    need = memory_budget(placed(trainer, "device")).peak
    assert placed(trainer, "auto", need).feed.placement.startswith("staged")
    refused = placed(trainer, "auto", need - 1)
    assert re.match(
        "on the host, because staged it would make a run", refused.feed.placement
    )
    assert refused.feed.staged is None
    words = placed(trainer, "auto").feed.placement
    unknown = "on the host, because a device's memory is not known here"
    assert words == f"{unknown}; uint8 inputs pass through scale_pixels on the device"


def test_the_budget_counts_what_is_staged(devices):
    trainer = made(devices)
    budget = memory_budget(placed(trainer, "device"))
    assert budget.data == INPUTS.nbytes + 4 * len(LABELS)
    assert budget.step_peak > memory_budget(trainer).step_peak
    assert memory_budget(trainer).data == 0


def test_what_the_host_augments_is_not_staged(devices):
    trainer = made(devices, augment=lambda inputs, rng: inputs)
    with pytest.raises(ConfigError, match="batches are made on the host"):
        placed(trainer, "device")
    assert "made on the host" in placed(trainer, "auto", 2**40).feed.placement


class _Own:
    """A data set that has what extend.md asks of it, and no more."""

    def batch(self, step):
        return {"inputs": INPUTS[:8], "labels": LABELS[:8]}


@pytest.mark.parametrize(
    "make",
    [_Own, lambda: from_iterator(lambda: [_Own().batch(0)])],
    ids=["batch(step)", "from_iterator"],
)
def test_batches_of_ones_own_are_not_staged(one_device, make):
    trainer = changed(made(one_device), data=Data(make(), None, 3, scale_pixels))
    with pytest.raises(ConfigError, match="made on the host; possible are host and au"):
        placed(trainer, "device")
    assert "made on the host" in placed(trainer, "auto", 2**40).feed.placement


def test_more_rows_than_devices_count_are_refused_with_the_sizes(devices):
    class Large:
        staged_size = 10_248_871_837, 2 * 10_248_871_837

    with pytest.raises(ConfigError, match=r"10,248,871,837 rows \(19.09 GiB\)"):
        staging.RowBlocks(Large(), 8)


def test_an_unknown_placement_is_refused(devices):
    with pytest.raises(ConfigError, match="possible are host, device, auto"):
        placed(made(devices), "gpu")
