"""A text of a few words, which a small model learns in seconds."""

import numpy as np

from haiku_template.config import default_config
from haiku_template.data import ArrayDataset, Data, EvaluationSet

TEXT = "my dog ran off to a café by night. " * 10
CONTEXT = 24


def words(spec, text="bytes"):
    """Windows of the text's bytes at every offset."""
    stream = np.frombuffer(TEXT.encode(), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(stream, CONTEXT + 1)[:200]
    inputs, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
    return Data(
        ArrayDataset(inputs, labels, spec),
        EvaluationSet(inputs[::40], labels[::40], spec.batch_size),
        num_outputs=256,
        text=text,
    )


def mute(spec):
    """The same, but it does not say what its tokens stand for."""
    return words(spec, text=None)


def make_config(**changes):
    """The config of a run on it, with changes."""
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
        "context": CONTEXT,
    }
    config.optimizer.learning_rate = 1e-2
    config.optimizer.clip_norm = 1.0
    with config.unlocked():
        config.update(changes)
    return config
