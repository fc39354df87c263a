"""Runs that resume with other intervals, or for more steps."""

import json

import pytest

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.storage.metrics import read
from haiku_template.training import experiment

CPU = DeviceManager.create("cpu", num_devices=1)


def run(workdir, **changes):
    config = digits.get_config()
    config.model.width, config.batch_size, config.log_every = 8, 16, 5
    config.num_steps, config.optimizer.warmup_steps = 10, 5
    for key, value in changes.items():
        config[key] = value
    experiment.run(config, CPU, str(workdir))


@pytest.mark.slow
def test_a_run_goes_on_longer_and_says_what_its_schedule_becomes(tmp_path, caplog):
    run(tmp_path)
    run(tmp_path, num_steps=20, log_every=2, eval_every=4, save_every=8, keep_last=3)
    assert "num_steps: 10 there, 20 now" in caplog.text
    assert "the schedule cosine of the learning rate now ends at step 20" in caplog.text
    rows = read(tmp_path / "metrics.jsonl")
    trained = [row["step"] for row in rows if "train/loss" in row]
    assert trained == [5, 10, 12, 14, 16, 18, 20]
    assert [row["step"] for row in rows if "eval/loss" in row] == [10, 12, 16, 20]
    assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 20
    caplog.clear()
    run(tmp_path, num_steps=20, log_every=2, eval_every=4, save_every=8, keep_last=3)
    assert "another config" not in caplog.text


def test_the_mathematics_of_a_run_does_not_change_when_it_resumes(tmp_path):
    run(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="another config.*seed: 0 there, 1 now"):
        run(tmp_path, num_steps=20, seed=1)
    with pytest.raises(ConfigError, match="a run does not go back"):
        run(tmp_path, num_steps=5)
    assert (tmp_path / "config.json").read_bytes() == before
