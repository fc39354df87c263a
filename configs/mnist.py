"""An MLP on MNIST or Fashion-MNIST.

    python -m haiku_template.train --config=configs/mnist.py --workdir=runs/mnist \
        --config.data.path=DIRECTORY

The directory holds the four idx files, plain or as .gz, under their usual names.

Lab record: none yet on the real images. Reading and training are tested on files of
the same format.
"""

from ml_collections import config_dict

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps = 4700  # 10 epochs of 60,000 images.
    config.batch_size = 128
    config.log_every = 100
    config.eval_every = 470
    config.save_every = 470
    config.best_metric = "eval/accuracy"
    config.best_mode = "max"

    config.data = {"name": "mnist", "path": ""}
    config.model = {"name": "mlp", "width": 512, "num_layers": 2, "dropout": 0.2}
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 200
    config.optimizer.weight_decay = 1e-2
    return config
