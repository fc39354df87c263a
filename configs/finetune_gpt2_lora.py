"""LoRA: GPT-2, from a Hugging Face folder, taught to complete prompts.

    python -m haiku_template.train --config=configs/finetune_gpt2_lora.py \
        --workdir=runs/answers --config.init_from=FOLDER \
        --config.data.path=answers.jsonl

FOLDER is that of gpt2, gpt2-medium, gpt2-large or gpt2-xl: config.json,
model.safetensors, tokenizer.json, which `pip install "haiku_template[text]"` reads. A
line of answers.jsonl is {"prompt": "Capital of France?", "completion": " Paris"}.
`python -m haiku_template.export --format=adapters` writes the adapters alone;
`--format=safetensors` merges them into a folder like FOLDER, and
`--config.finetuning.adapters=EXPORTED` starts from exported adapters.

Lab record: run only on a small GPT-2 with random parameters. Memory of a step of GPT-2
124M on one device, from `--dry_run` (micro-batches of 8 examples of 512 tokens,
compiled for the CPU, jax 0.12.0.1):

    10.3 GB  all parameters train, float32      (lora.rank=None, lora.patterns=(),
                                                 base_dtype=float32, remat=False)
     7.7 GB  LoRA, float32 frozen parameters    (base_dtype=float32, remat=False)
     7.3 GB  LoRA, bfloat16 frozen parameters   (remat=False)
     1.4 GB  and rematerialization, as here     (4.2 GB with accumulate_steps=1)
"""

from ml_collections import config_dict
from ml_collections.config_dict import placeholder

from haiku_template.config import default_config


def get_config() -> config_dict.ConfigDict:
    """Configures the experiment."""
    config = default_config()
    config.num_steps = 1000
    config.batch_size = 32
    config.accumulate_steps = 4
    config.precision = "bfloat16"
    config.eval_every = 250
    config.save_every = 250

    config.task = {
        "name": "language_model",
        "bytes_per_token": placeholder(float),
        "chunk": placeholder(int),  # Tokens whose logits are in memory at a time.
    }
    config.data = {
        "name": "jsonl",
        "path": placeholder(str),
        "tokenizer": config.get_oneway_ref("init_from"),  # FOLDER's own.
        "context": 512,
        "truncate": True,  # Longer examples lose the beginnings of their prompts.
        "num_buckets": 4,
        "packing": False,  # Or short examples share windows of `context` tokens.
        "vocab_size": placeholder(int),
        "validation_path": placeholder(str),
        "validation_fraction": 0.1,
        "placement": "host",
    }
    # Its sizes are FOLDER's.
    config.model = {"name": "gpt", "dropout": 0.0, "attention": "auto", "remat": True}
    config.finetuning.base_dtype = "bfloat16"
    config.finetuning.lora.rank = 8
    config.finetuning.lora.alpha = 16.0
    config.finetuning.lora.patterns = ("*/qkv/w", "*/projection/w")
    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 50
    config.optimizer.clip_norm = 1.0
    return config
