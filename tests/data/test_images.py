"""Images: what scaling gives, and that crops are windows of the padded image."""

import jax
import numpy as np
import pytest

from haiku_template.data import images
from haiku_template.errors import ConfigError

BYTES = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)


def random_images(count, dtype=np.uint8, height=3, width=2, channels=2):
    """Images whose pixels are neither alike nor zero; higher than wide."""
    values = 1 + np.arange(count * height * width * channels) % 100
    values = np.random.default_rng(0).permutation(values)
    return values.astype(dtype).reshape(count, height, width, channels)


def windows(image, padding):
    """What a shift by up to `padding` pixels, mirrored or not, makes of one image."""
    height, width, _ = image.shape
    edge = (padding, padding)
    padded = np.pad(image, (edge, edge, (0, 0)))
    found = []
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            window = padded[top : top + height, left : left + width]
            found += [window.tobytes(), window[:, ::-1].tobytes()]
    return found


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["host", "device"])
def test_scaled_pixels_are_float32_shares_of_255(run):
    scaled = np.asarray(run(images.scale_pixels)(BYTES))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled, np.float64(BYTES) / 255, rtol=1e-6)
    assert (scaled.min(), scaled.max()) == (0, 1)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["host", "device"])
def test_of_several_inputs_those_of_bytes_are_scaled(run):
    others = np.float32([[3, 300]]), np.uint8([9]), np.int32([[[300]]])
    inputs = {"image": BYTES, "more": (BYTES[:, :2], *others)}
    scaled = run(images.scale_pixels)(inputs)
    np.testing.assert_allclose(scaled["image"], BYTES / 255, rtol=1e-6)
    np.testing.assert_allclose(scaled["more"][0], BYTES[:, :2] / 255, rtol=1e-6)
    for before, after in zip(others, scaled["more"][1:], strict=True):
        np.testing.assert_array_equal(before, after)
        assert before.dtype == after.dtype


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_what_is_no_byte_is_not_divided_in_silence(dtype):
    """Numbers in [0, 1] would become at most 1 / 255."""
    words = rf"images of bytes by 255, and the inputs are {dtype}\[1, 16, 16, 1\];"
    with pytest.raises(ConfigError, match=words):
        jax.eval_shape(images.scale_pixels, {"image": BYTES.astype(dtype)})


@pytest.mark.parametrize("images_of", [lambda x: x, lambda x: {"pixels": x}])
def test_bytes_of_flat_images_are_scaled_where_they_are_the_only_inputs(images_of):
    (scaled,) = jax.tree.leaves(images.scale_pixels(images_of(BYTES.reshape(1, 256))))
    np.testing.assert_allclose(scaled, BYTES.reshape(1, 256) / 255, rtol=1e-6)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["host", "device"])
def test_standardized_pixels_of_mean_and_deviation_become_zero_and_one(run):
    pixels = np.broadcast_to(BYTES, (1, 16, 16, 3))
    standard = np.asarray(run(images.standardize_cifar10)(pixels))
    assert standard.dtype == np.float32
    flat = standard.reshape(256, 3)
    for channel in range(3):
        mean, std = images.CIFAR10_MEAN[channel], images.CIFAR10_STD[channel]
        at = np.interp(255 * np.array([mean, mean + std]), range(256), flat[:, channel])
        np.testing.assert_allclose(at, [0, 1], atol=1e-5)
        np.testing.assert_allclose(np.diff(flat[:, channel]), 1 / 255 / std, rtol=1e-3)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_every_crop_is_a_window_of_its_own_padded_image(padding):
    batch = random_images(200)
    crops = images.crop_and_flip(batch, np.random.default_rng(1), padding)
    assert crops.shape == batch.shape
    for crop, image in zip(crops, batch, strict=True):
        assert crop.tobytes() in windows(image, padding)


def test_every_window_occurs_and_half_of_them_mirrored():
    image = random_images(1)
    rng = np.random.default_rng(2)
    crops = images.crop_and_flip(np.repeat(image, 4000, axis=0), rng, padding=1)
    counts = dict.fromkeys(windows(image[0], 1), 0)
    for crop in crops:
        counts[crop.tobytes()] += 1
    # 18 windows, each expected 222 times with a deviation of 15.
    assert len(counts) == 18
    assert min(counts.values()) > 140
    assert max(counts.values()) < 310


def test_crops_depend_on_the_generator_alone():
    batch = random_images(50)

    def crop(seed):
        return images.crop_and_flip(batch, np.random.default_rng(seed))

    np.testing.assert_array_equal(crop(1), crop(1))
    assert np.any(crop(1) != crop(2))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.float64])
def test_crops_keep_the_type_and_share_no_memory_with_the_images(dtype):
    batch = random_images(20, dtype)
    before = batch.copy()
    batch.flags.writeable = False
    crops = images.crop_and_flip(batch, np.random.default_rng(0), padding=0)
    assert crops.dtype == dtype
    crops[:] = 0
    np.testing.assert_array_equal(batch, before)
