"""A text of a few words, which a small model learns in seconds."""

import numpy as np

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
