"""What examples and labels must be before anything is trained on them."""

import numpy as np

from haiku_template.errors import ConfigError

MANY_CLASSES = 10**6  # More than any classifier has; one wrong label shows more.


def check_examples(
    inputs: np.ndarray, labels: np.ndarray, where: str = "the data set"
) -> None:
    """Raises `ConfigError` unless there are examples, each with its label."""
    if inputs.ndim == 0 or labels.ndim == 0 or len(inputs) == 0:
        raise ConfigError(
            f"{where} is empty: inputs have shape {list(inputs.shape)} and labels "
            f"{list(labels.shape)}; at least one example is needed"
        )
    if len(inputs) != len(labels):
        raise ConfigError(
            f"{where} has {len(inputs)} inputs and {len(labels)} labels; each input "
            "needs one label"
        )


def check_targets(labels: np.ndarray, where: str) -> None:
    """Raises `ConfigError` unless `labels` are numbers."""
    if labels.dtype.kind not in "fiub":
        raise ConfigError(
            f"{where} has labels of type {labels.dtype}; regression takes numbers"
        )


def count_classes(labels: np.ndarray, where: str) -> int:
    """How many classes the labels show: the largest and one more.

    Raises:
      ConfigError: so many that it is likely a mistake.
    """
    if labels.dtype.kind not in "iu":
        return 0
    classes = max(int(labels.max()) + 1, 1)
    if classes > MANY_CLASSES:
        raise ConfigError(
            f"{where} has labels up to {classes - 1}; if there are so many classes, "
            "say so with --config.data.num_classes"
        )
    return classes


def check_classes(labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raises `ConfigError` unless `labels` are whole numbers in [0, num_classes)."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ConfigError(
            f"{where} has labels of type {labels.dtype} and shape "
            f"{list(labels.shape)}; classification takes one whole number an example"
        )
    outside = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(outside):
        raise ConfigError(
            f"{where} has {len(outside)} labels outside the {num_classes} classes "
            f"(0 to {num_classes - 1}); the first is {labels[outside[0]]}, of example "
            f"{outside[0]}"
        )
