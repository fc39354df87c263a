"""Language models trained on token files and bytes: whole runs."""

import json
import re
import struct
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import gpt2_124m, gpt_bytes
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, Interrupted
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment
from haiku_text.data.windows import TokenDataset
from tests.runs import with_data, with_step

NUM_TOKENS = 10_248_871_837  # 19.1 GiB of uint16.
MIDDLE = NUM_TOKENS // 2


@pytest.fixture(scope="module")
def large_file(tmp_path_factory):
    """A sparse file with tokens at both ends and in the middle."""
    path = tmp_path_factory.mktemp("tokens") / "train.safetensors"
    entry = {"dtype": "U16", "shape": [NUM_TOKENS], "data_offsets": [0, 2 * NUM_TOKENS]}
    header = json.dumps({"tokens": entry}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        begin = file.tell()
        file.truncate(begin + 2 * NUM_TOKENS)
        for position in (0, MIDDLE, NUM_TOKENS - 3):
            file.seek(begin + 2 * position)
            file.write(np.array([11, 12, 13], "<u2").tobytes())
    return path


def small(config, context=16, **data):
    """The config with a model of a few thousand parameters."""
    config.batch_size, config.accumulate_steps, config.precision = 8, 1, "float32"
    config.num_steps, config.log_every, config.save_every = 12, 1, 4
    config.eval_every = None
    config.optimizer.warmup_steps, config.optimizer.learning_rate = 2, 1e-3
    config.data.context = config.model.context = context
    config.data.eval_windows = 16
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2}
    for name, size in sizes.items():
        config.model[name] = size
    for name, value in ({"validation_fraction": 0.1} | data).items():
        config.data[name] = value
    return config


def losses(workdir):
    rows = read(workdir / "metrics.jsonl")
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.slow
def test_a_file_larger_than_memory_is_trained_on_from_the_host(tmp_path, large_file):
    config = small(gpt2_124m.get_config(), path=str(large_file), vocab_size=256)
    trainer = Experiment.from_config(
        config, DeviceManager.create("cpu", num_devices=1)
    ).trainer(DeviceManager.create("cpu", num_devices=1))
    largest, before = [], jax.live_arrays()

    def train_step(state, batch):
        known = {id(x) for x in (*before, *jax.tree.leaves(state))}
        others = [x.nbytes for x in jax.live_arrays() if id(x) not in known]
        largest.append(max(others))
        return trainer.step(state, batch)

    train(with_step(trainer, train_step), num_steps=6, workdir=tmp_path)
    assert len(largest) == 6 and set(largest) == {8 * 16 * 2}  # The batch, as uint16.
    ends = [
        trainer.experiment.data.train.tokens.windows(np.array([n]), 3)[0]
        for n in (0, MIDDLE)
    ]
    assert np.array_equal(ends, [[11, 12, 13]] * 2)


@pytest.mark.slow
def test_batches_of_a_file_larger_than_memory_stay_in_little(large_file):
    """C24: 500 random batches grow a process by less than 256 MB."""
    config = small(gpt2_124m.get_config(), path=str(large_file), vocab_size=256)
    devices = DeviceManager.create("cpu", num_devices=1)
    data = Experiment.from_config(config, devices).data
    train_set = data.train
    before, far = memory(), 0
    for step in range(500):
        far += int((2 * train_set.rows(step) > 2**32).sum())  # Bytes.
        batch = train_set.batch(step)
        assert sum(x.nbytes for x in jax.tree.leaves(batch)) == 2 * 8 * 16 * 2
    assert far > 2000 and memory() - before < 256 * 2**20
    last = data.evaluation.tokens
    ends = train_set.tokens.windows(np.array([0, MIDDLE]), 3)
    ends = [*ends, *last.windows(np.array([len(last) - 3]), 3)]
    assert np.array_equal(ends, [[11, 12, 13]] * 3)


def memory():
    """Bytes of this process that are of no file."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024


def test_it_cannot_be_staged_and_the_sizes_say_why(large_file):
    config = small(gpt2_124m.get_config(), path=str(large_file), placement="device")
    devices = DeviceManager.create("cpu", num_devices=1)
    with pytest.raises(ConfigError, match=r"rows \(17.18 GiB\).*2,147,483,647"):
        Experiment.from_config(config, devices).trainer(devices)


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16))
    return path


@pytest.mark.slow(but="7")
@pytest.mark.parametrize("count", [1, 7])
def test_no_call_reads_more_of_a_file_than_its_windows(
    tmp_path, token_file, monkeypatch, one_device, count
):
    """Staging a set reads, and checks, all of its tokens."""
    monkeypatch.delattr(TokenDataset, "staged")
    config = small(gpt2_124m.get_config(), path=str(token_file), vocab_size=50)
    config.steps_per_call, config.num_steps = count, 12
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    train(trainer, num_steps=12, workdir=tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [pytest.param("random", marks=pytest.mark.long), "epochs"]
)
def test_placements_and_devices_agree(tmp_path, token_file, order):
    found = {}
    for placement, num_devices in (("host", 1), ("device", 1), ("device", 4)):
        config = small(
            gpt2_124m.get_config(),
            path=str(token_file),
            vocab_size=50,
            order=order,
            placement=placement,
        )
        devices = DeviceManager.create("cpu", num_devices=num_devices)
        workdir = tmp_path / f"{placement}{num_devices}"
        train(
            Experiment.from_config(config, devices).trainer(devices),
            num_steps=12,
            workdir=workdir,
            log_every=1,
        )
        found[placement, num_devices] = losses(workdir)
    assert found["device", 1] == found["host", 1]
    np.testing.assert_allclose(found["device", 4], found["host", 1], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_in_the_middle_of_an_epoch_with_the_next_window(
    tmp_path, token_file
):
    options = {"path": str(token_file), "vocab_size": 50, "order": "epochs"}
    config = small(gpt2_124m.get_config(), **options)
    devices = DeviceManager.create("cpu", num_devices=1)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    times = {"num_steps": 12, "log_every": 1, "save_every": 4}
    train(trainer, workdir=tmp_path / "whole", **times)
    dataset = trainer.experiment.data.train
    seen = []

    class Stops:
        def batch(self, step):
            seen.append(step)
            if seen.count(10) == 1 and step == 10:
                raise Interrupted("stopped", 75)
            return dataset.batch(step)

    stopping = with_data(trainer, train=Stops())
    with pytest.raises(Interrupted):
        train(stopping, workdir=tmp_path / "parts", **times)
    seen[:] = [10]
    train(stopping, workdir=tmp_path / "parts", **times)
    assert seen[-4:] == [8, 9, 10, 11]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_token_beyond_the_vocabulary_stops_the_run_with_its_place(
    tmp_path, token_file
):
    options = {"path": str(token_file), "vocab_size": 49}
    devices = DeviceManager.create("cpu", num_devices=1)
    words = r"tokens.npy, token \d+, is 49; the vocabulary has 49 tokens"
    with pytest.raises(ConfigError, match=words):
        Experiment.from_config(
            small(gpt2_124m.get_config(), **options), devices
        ).trainer(devices)
    with pytest.raises(ConfigError, match=words):
        staged = small(gpt2_124m.get_config(), placement="device", **options)
        Experiment.from_config(staged, devices).trainer(devices)


@pytest.mark.slow
def test_the_default_text_trains_and_reports_bits_per_byte(tmp_path):
    config = small(gpt_bytes.get_config())
    trainer = Experiment.from_config(
        config, DeviceManager.create("cpu", num_devices=1)
    ).trainer(DeviceManager.create("cpu", num_devices=1))
    result = train(trainer, num_steps=4, workdir=tmp_path, log_every=1)
    assert 5 < result.metrics["eval/bits_per_byte"] < 9
    assert result.metrics["eval/perplexity"] == pytest.approx(
        np.exp(result.metrics["eval/loss"])
    )
