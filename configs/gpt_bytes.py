"""A small GPT on the bytes of Python's standard library; needs no data but Python.

    python -m haiku_template.train --config=configs/gpt_bytes.py --workdir=runs/bytes
    python -m haiku_template.generate --workdir=runs/bytes --prompt="def main("

Lab record, two CPU cores, Python 3.11, jax 0.10.2: 2 minutes 34 seconds for the whole
command, 2.35 bits per byte on files that were held out (1.63 nats), 15,700 bytes/s.
`generate` then writes lines with the look of Python:

    def main(value, are_size, not_paramy)


    import = 'Remainits gsperter
"""

from ml_collections import config_dict
from ml_collections.config_dict import placeholder

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps = 1100
    config.batch_size = 16  # Windows; 2,048 bytes in each step.
    config.log_every = 50
    config.eval_every = 550
    config.save_every = 550
    config.best_metric = "eval/bits_per_byte"

    config.task = {
        "name": "language_model",
        "bytes_per_token": 1.0,
        "chunk": placeholder(int),
    }
    config.data = {
        "name": "bytes",
        "path": placeholder(str),  # Python's own source; or a folder of text.
        "context": 128,
        "order": "random",
        "eval_windows": 512,
        "placement": "host",
    }
    config.model = {
        "name": "gpt",
        "num_layers": 4,
        "width": 128,
        "num_heads": 4,
        "context": 128,
        "dropout": 0.0,
        "attention": "auto",
        "remat": False,
    }
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 50
    config.optimizer.final_fraction = 0.1
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.99
    config.optimizer.clip_norm = 1.0
    return config
