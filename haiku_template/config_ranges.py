"""What numbers and texts make sense in a config."""

from collections.abc import Callable
from typing import Any


def _texts(value: tuple) -> bool:
    return all(isinstance(item, str) for item in value)


# What numbers make sense; a key that may be None is asked only when it is not.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "num_steps",
            "batch_size",
            "accumulate_steps",
            "log_every",
            "eval_every",
            "save_every",
            "keep_last",
        ),
        # A step is an int32.
        (lambda value: 1 <= value < 2**31, "1 or more, up to 2**31 - 1"),
    ),
    **dict.fromkeys(
        (
            "keep_best",
            "optimizer.learning_rate",
            "optimizer.warmup_steps",
            "optimizer.final_fraction",
            "optimizer.weight_decay",
        ),
        (lambda value: value >= 0, "0 or more"),
    ),
    "seed": (lambda value: 0 <= value < 2**32, "0 to 2**32 - 1"),
    "optimizer.b1": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "optimizer.b2": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "ema_decay": (lambda value: 0 <= value < 1, "None, or from 0 to below 1"),
    "optimizer.clip_norm": (lambda value: value > 0, "None, or more than 0"),
    "finetuning.lora.rank": (lambda value: value >= 0, "None, or 0 or more"),
    "finetuning.lora.alpha": (lambda value: value > 0, "more than 0"),
    "finetuning.lora.dropout": (lambda value: 0 <= value < 1, "from 0 to below 1"),
    **dict.fromkeys(
        ("finetuning.train", "finetuning.fresh", "finetuning.lora.patterns"),
        (_texts, "a tuple of patterns, such as ('*/head/*',)"),
    ),
    "best_mode": (lambda value: value in ("min", "max"), "min or max"),
}
