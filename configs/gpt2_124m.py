"""GPT-2 124M on a token file of any size; it stays on the host, and batches travel.

    python -m haiku_template.train --config=configs/gpt2_124m.py \
        --workdir=runs/gpt2 --config.data.path=train.safetensors

A file of 10,248,871,837 uint16 tokens (19.1 GiB) is mapped, not read. Token files are
.safetensors, .npy, nanoGPT's .bin, or folders of them; text becomes one with

    python -m haiku_template.prepare --input=DIRECTORY \
        --tokenizer=tokenizer.json --output=train.safetensors

Lab record: not run as a whole yet. Sizes, batch, rates and schedule are
nanoGPT's for GPT-2 124M (0.5 million tokens a step, 600,000 steps, loss 2.85 on
OpenWebText with eight A100).
"""

from ml_collections import config_dict
from ml_collections.config_dict import placeholder

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps = 600_000
    config.batch_size = 480  # Windows, over all devices; 491,520 tokens in each step.
    config.accumulate_steps = 5  # Micro-batches of 12 windows on each of eight devices.
    config.precision = "bfloat16"
    config.log_every = 10
    config.eval_every = 1000
    config.save_every = 1000

    config.task = {
        "name": "language_model",
        "bytes_per_token": placeholder(float),
        "chunk": placeholder(int),  # Logits of about 8,192 tokens exist at a time.
    }
    config.data = {
        "name": "tokens",
        "path": "",
        "context": 1024,
        "order": "random",
        "vocab_size": 50257,
        "dtype": "uint16",  # Of .bin files.
        "tensor": placeholder(str),  # Of .safetensors files with several.
        "validation_path": placeholder(str),
        "validation_fraction": 0.001,
        "validation_tokens": placeholder(int),
        "eval_windows": 960,
        "placement": "host",
    }
    config.model = {
        "name": "gpt",
        "preset": "124M",
        "num_layers": placeholder(int),
        "width": placeholder(int),
        "num_heads": placeholder(int),
        "context": placeholder(int),
        "dropout": 0.0,
        "attention": "auto",
        "remat": False,
    }
    config.optimizer.learning_rate = 6e-4
    config.optimizer.warmup_steps = 2000
    config.optimizer.final_fraction = 0.1
    config.optimizer.weight_decay = 0.1
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0
    return config
