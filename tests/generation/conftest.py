import pytest
import words

from haiku_template.config import default_config
from haiku_template.devices import DeviceManager
from haiku_template.training import experiment


def make_config(**changes):
    config = default_config()
    config.num_steps = 100
    config.batch_size = 16
    config.log_every = 50
    config.eval_every = config.save_every = 50
    config.ema_decay = 0.5
    config.task = {"name": "language_model"}
    config.data = {"name": "words:words"}
    config.model = {
        "name": "gpt",
        "num_layers": 1,
        "width": 32,
        "num_heads": 2,
        "context": words.CONTEXT,
    }
    config.optimizer.learning_rate = 1e-2
    config.optimizer.clip_norm = 1.0
    with config.unlocked():
        config.update(changes)
    return config


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The config and the workdir of a run that knows its text by heart."""
    config = make_config()
    workdir = tmp_path_factory.mktemp("trained") / "run"
    experiment.run(config, DeviceManager.create("cpu", num_devices=1), str(workdir))
    return config, workdir
