"""LoRA: the GPT of gpt_bytes, which knows Python source, adapted to English help texts.

    python -m haiku_template.train --config=configs/gpt_bytes.py --workdir=runs/bytes
    python -m haiku_template.train --config=configs/finetune_gpt_bytes_lora.py \
        --workdir=runs/help --config.init_from=runs/bytes

The text is that of Python's `help()` topics (pydoc_data.topics); nothing is downloaded.
Lab record: none yet; it has only been started.
"""

from ml_collections import config_dict

from configs import gpt_bytes


def get_config() -> config_dict.ConfigDict:
    """The whole experiment."""
    config = gpt_bytes.get_config()
    config.num_steps = 400
    config.eval_every = 200
    config.save_every = 200

    config.data.path = "pydoc"
    config.init_from = "runs/bytes"
    config.finetuning.lora.rank = 8
    config.finetuning.lora.alpha = 16.0
    config.optimizer.learning_rate = 5e-3
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.0
    return config
