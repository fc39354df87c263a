"""A small ResNet with batch normalisation on scikit-learn's digits."""

from ml_collections import config_dict

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """The whole experiment."""
    config = default_config()
    config.num_steps = 400
    config.batch_size = 128
    config.eval_every = 100
    config.save_every = 100
    config.best_metric = "eval/accuracy"
    config.best_mode = "max"

    config.data = {"name": "digits"}
    config.model = {
        "name": "resnet",
        "channels": (16, 32),
        "blocks": 2,
        "norm_decay": 0.9,
    }
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.weight_decay = 1e-2
    return config
