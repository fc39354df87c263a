"""A model's arithmetic next to what the devices can do."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict

from haiku_template.config import default_config
from haiku_template.data import Data
from haiku_template.models import gpt_flops_per_token
from haiku_template.reporting.perf import UNKNOWN, Work, matmul_peak, rate_text, rates
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, train


class Tokens:
    def batch(self, step):
        tokens = np.random.default_rng(step).integers(0, 16, (8, 9))
        return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def tokens(spec):
    return Data(Tokens(), None, 16)


def config(**model):
    made = default_config()
    made.batch_size, made.log_every, made.num_steps = 8, 2, 4
    made.task = config_dict.ConfigDict({"name": "language_model"})
    made.data = config_dict.ConfigDict({"name": f"{__name__}:tokens"})
    made.model = config_dict.ConfigDict({"name": "gpt", **model})
    return made


def test_a_language_model_reports_tokens_and_utilisation(tmp_path, devices, capsys):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8}
    trainer = Experiment.from_config(config(**sizes), devices).trainer(devices)
    assert trainer.experiment.work.tokens == 8
    assert trainer.experiment.work.flops == 8 * gpt_flops_per_token(16, 8, **sizes)
    train(trainer, num_steps=4, workdir=tmp_path, log_every=2)
    for row in read(tmp_path / "metrics.jsonl"):
        speed = row["perf/examples_per_second"]
        assert row["perf/tokens_per_second"] == pytest.approx(8 * speed)
        flops = row["perf/model_flops_per_second"]
        assert flops == pytest.approx(speed * trainer.experiment.work.flops)
        assert 0 < row["perf/utilisation"] < 1.5
    shown = capsys.readouterr().out
    assert "tokens/s (" in shown and "of matmul peak)" in shown
    assert "examples/s" not in shown


def test_the_peak_is_that_of_all_devices(one_device, four_devices):
    peaks = [matmul_peak(d, jnp.float32) for d in (one_device, four_devices)]
    # Simulated devices share the cores: more of them are no faster machine.
    assert peaks[0] > 1e8 and peaks[0] / 20 < peaks[1] < 20 * peaks[0]


def test_what_is_not_known_is_not_reported():
    assert rates(UNKNOWN, 10.0, None) == {"perf/examples_per_second": 10.0}
    assert rate_text(rates(UNKNOWN, 1234.4, None)) == "1,234 examples/s"
    known = rates(Work(tokens=5, flops=100.0), 10.0, 4000.0)
    assert known["perf/utilisation"] == 0.25
    assert rate_text(known) == "50 tokens/s (25% of matmul peak)"
    assert "perf/utilisation" not in rates(Work(5, 100.0), 10.0, None)
