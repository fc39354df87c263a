"""The data: scikit-learn's digits; replace the arrays with yours, mapped ones too."""

import numpy as np
from sklearn import datasets

from haiku_template.data import BatchSpec, Data, Split, from_split


def data(spec: BatchSpec, *, num_test: int) -> Data:
    """Images float32 [N, 8, 8, 1] in [0, 1] and labels int32 [N], on the host.

    Args:
      spec: batch size, seed and kind of labels, as the config says.
      num_test: examples to evaluate on; a key of `config.data`.
    """
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [num_test])
    split = Split(images[train], labels[train], images[test], labels[test])
    return from_split(split, spec, num_classes=10, augment=shift)


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Moves a training batch by up to a pixel; `rng` depends on seed and step alone."""
    return np.roll(images, rng.integers(-1, 2, size=2), axis=(1, 2))
