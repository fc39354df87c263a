"""A small ResNet on scikit-learn's digits.

    make train CONFIG=first

Lab record, two CPU cores, Python 3.11, jax 0.10.2: half a minute, 99.4 % test accuracy
(358 of 360).
"""

from ml_collections import config_dict

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment; `default_config` has every key, with its meaning."""
    config = default_config()
    config.num_steps = 400
    config.batch_size = 128  # Over all devices.
    config.eval_every = 100
    config.save_every = 100
    config.best_metric = "eval/accuracy"
    config.best_mode = "max"

    # `name` is module:function; the other keys are its arguments.
    config.data = {"name": "my_project.data:data", "num_test": 360}
    config.task = {"name": "my_project.task:task", "smoothing": 0.1}
    config.model = {"name": "my_project.model:model", "width": 32, "num_blocks": 2}
    config.optimizer.update(
        learning_rate=2e-3, warmup_steps=100, weight_decay=1e-2, clip_norm=1.0
    )
    return config
