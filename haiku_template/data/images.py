"""Image preprocessing on the device, and augmentation on the host.

Shapes: B images in a batch, H x W pixels, C channels.
"""

from typing import Any

import numpy as np

from haiku_template.data.trees import leaves_by_path, map_leaves
from haiku_template.errors import ConfigError, some

CIFAR10_MEAN = np.array((0.4914, 0.4822, 0.4465), np.float32)
CIFAR10_STD = np.array((0.2470, 0.2435, 0.2616), np.float32)


def scale_pixels(images: Any) -> Any:
    """Scales bytes [B, H, W, C] to float32 in [0, 1]; on the device: bytes travel.

    Of several arrays it scales those of bytes with three dimensions or more: others may
    be classes. `ConfigError` without any.
    """
    leaves = leaves_by_path(images)
    least = 3 if len(leaves) > 1 else 0

    def is_image(x: Any) -> bool:
        return x.dtype == np.uint8 and x.ndim >= least

    if not any(map(is_image, leaves.values())):
        kinds = [f"{x.dtype}{list(x.shape)}" for x in leaves.values()]
        raise ConfigError(
            "scale_pixels divides images of bytes by 255, and the inputs are "
            f"{some(kinds) or 'none'}; give uint8, or scale them in the model"
        )
    share = lambda x: x.astype(np.float32) / np.float32(255)  # noqa: E731
    return map_leaves(lambda _, x: share(x) if is_image(x) else x, images)


def standardize_cifar10(images: Any) -> Any:
    """Standardizes bytes [B, 32, 32, 3] by the training set's mean and deviation."""
    return (scale_pixels(images) - CIFAR10_MEAN) / CIFAR10_STD


def crop_and_flip(
    images: np.ndarray, rng: np.random.Generator, padding: int = 4
) -> np.ndarray:
    """Shifts images [B, H, W, C] by up to `padding`, over zeros, and mirrors half."""
    b, h, w, _ = images.shape
    edge = (padding, padding)
    padded = np.pad(images, ((0, 0), edge, edge, (0, 0)))
    y, x = rng.integers(0, 2 * padding + 1, (2, b))
    rows = y[:, None] + np.arange(h)
    columns = x[:, None] + np.arange(w)
    mirrored = rng.random(b) < 0.5
    columns[mirrored] = columns[mirrored, ::-1]
    return padded[np.arange(b)[:, None, None], rows[:, :, None], columns[:, None, :]]
