"""A model's arithmetic next to what the devices can do."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import config_dict

from haiku_template.config import default_config
from haiku_template.data import Data
from haiku_template.errors import ConfigError
from haiku_template.reporting.display import rate_text
from haiku_template.reporting.perf import Work, matmul_peak, rates
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment
from haiku_template.training.tasks import Task, as_task
from haiku_text.models import gpt_flops_per_token
from haiku_text.tasks import language_model, perplexity


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


@pytest.mark.slow
def test_a_language_model_reports_tokens_and_utilisation(tmp_path, devices, capsys):
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8}
    trainer = Experiment.from_config(config(**sizes), devices).trainer(devices)
    assert trainer.work.tokens == 8
    assert trainer.work.flops == 8 * gpt_flops_per_token(16, 8, **sizes)
    train(trainer, num_steps=4, workdir=tmp_path, log_every=2)
    for row in read(tmp_path / "metrics.jsonl"):
        speed = row["perf/examples_per_second"]
        assert row["perf/tokens_per_second"] == pytest.approx(8 * speed)
        flops = row["perf/model_flops_per_second"]
        assert flops == pytest.approx(speed * trainer.work.flops)
        assert 0 < row["perf/utilisation"] < 1.5
    shown = capsys.readouterr().out
    assert "tokens/s (" in shown and "of matmul peak)" in shown
    assert "examples/s" not in shown


own_task = Task(
    lambda outputs, batch: language_model(outputs, batch), "tokens", derive=perplexity
)
partial_task = functools.partial(language_model, chunk=4)


def unlike(outputs, batch):
    return {"loss": outputs.embedding.sum() * jnp.ones(len(batch["labels"]))}


@pytest.mark.parametrize("name", ["own_task", "partial_task"])
def test_the_kind_of_a_task_and_not_its_name_says_what_is_reported(one_device, name):
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "context": 8}
    made = config(**sizes)
    built_in = Experiment.from_config(made, one_device).trainer(one_device)
    made.task.name = f"{__name__}:{name}"
    own = Experiment.from_config(made, one_device).trainer(one_device)
    assert own.work == built_in.work and own.work.tokens == 8
    assert own.recipe.task.derive is perplexity
    assert built_in.recipe.task.derive is perplexity
    made.task.name = f"{__name__}:unlike"
    assert Experiment.from_config(made, one_device).trainer(one_device).work == Work()


def test_a_kind_of_labels_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="labels='masked'; possible are classes"):
        as_task(Task(unlike, "masked"))


@pytest.mark.parametrize("task", ["own_task", "unlike"])
def test_a_task_of_one_s_own_trains_on_jsonl(tmp_path, one_device, task):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"say {i}", "completion": "yes"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config(num_layers=1, width=16, num_heads=2, context=16)
    made.task.name = f"{__name__}:{task}"
    made.data = config_dict.ConfigDict(
        {"name": "jsonl", "path": str(path), "context": 16}
    )
    trainer = Experiment.from_config(made, one_device).trainer(one_device)
    assert "loss_mask" in trainer.experiment.data.train.batch(0)
    metrics = trainer.evaluate(trainer.init())
    assert ("eval/perplexity" in metrics) == (task == "own_task")


def test_what_is_frozen_costs_no_gradients(one_device):
    """By hand, of a GPT of two blocks: 2 a parameter for each pass that there is."""
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "context": 8}
    made = config(**sizes)

    def flops(**finetuning):
        with made.unlocked():
            made.finetuning.update(finetuning)
        return (
            Experiment.from_config(made, one_device).trainer(one_device).work.flops / 8
        )

    block, ends = 12 * 16**2 + 13 * 16, 16 * 16 + 2 * 16
    n, attention = 2 * block + ends, 16 * 8
    whole = flops()
    assert whole == 6 * n + 12 * 2 * attention
    head = flops(train=("gpt/block_1/*",))
    through = 2 * (block + ends) + 8 * attention
    assert head == 2 * n + 4 * 2 * attention + through + 2 * block
    adapters = 2 * 4 * (16 + 48)
    lora = flops(train=(), lora={"rank": 4, "patterns": ("*/qkv/w",)})
    assert lora == 4 * n + 12 * 2 * attention + 6 * adapters
    assert head < lora < whole
    assert flops(lora={"rank": 0}) == 2 * n + 4 * 2 * attention


def test_the_peak_is_that_of_all_devices(one_device, four_devices):
    peaks = [matmul_peak(d, jnp.float32) for d in (one_device, four_devices)]
    # Simulated devices share the cores: more of them are no faster machine.
    assert peaks[0] > 1e8 and peaks[0] / 20 < peaks[1] < 20 * peaks[0]


def test_what_is_not_known_is_not_reported():
    assert rates(Work(), 10.0, None) == {"perf/examples_per_second": 10.0}
    assert rate_text(rates(Work(), 1234.4, None)) == "1,234 examples/s"
    assert rate_text(rates(Work(), 0.318, None)) == "0.32 examples/s"
    known = rates(Work(tokens=5, flops=100.0), 10.0, 4000.0)
    assert known["perf/utilisation"] == 0.25
    assert rate_text(known) == "50 tokens/s (25% of matmul peak)"
    assert "perf/utilisation" not in rates(Work(5, 100.0), 10.0, None)
