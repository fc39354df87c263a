"""Writers of the file formats that the package only reads."""

import gzip
import struct

import numpy as np
import pytest

IDX_CODES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}
MNIST_FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def _write_idx(path, array):
    """Writes one array as idx, and as .gz when the path ends so."""
    header = struct.pack(">HBB", 0, IDX_CODES[array.dtype.str[1:]], array.ndim)
    header += struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.fixture
def write_idx():
    return _write_idx


@pytest.fixture
def write_mnist(tmp_path):
    """Writes MNIST's four files with random bytes, and returns what is in them."""

    def write(train=20, test=7, suffix="", classes=10):
        rng = np.random.default_rng(0)
        arrays = {
            "x_train": rng.integers(256, size=(train, 28, 28), dtype=np.uint8),
            "y_train": rng.integers(classes, size=train, dtype=np.uint8),
            "x_test": rng.integers(256, size=(test, 28, 28), dtype=np.uint8),
            "y_test": rng.integers(classes, size=test, dtype=np.uint8),
        }
        for name, array in arrays.items():
            _write_idx(tmp_path / f"{MNIST_FILES[name]}{suffix}", array)
        return arrays

    return write


@pytest.fixture
def write_cifar10(tmp_path):
    """Writes CIFAR-10's six files with random bytes, and returns what is in them."""

    def write(rows=3):
        rng = np.random.default_rng(0)
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
        images = rng.integers(256, size=(6, rows, 32, 32, 3), dtype=np.uint8)
        labels = rng.integers(10, size=(6, rows), dtype=np.uint8)
        for i, name in enumerate(names):
            # A record is a label, then the red, the green and the blue pixels.
            pixels = images[i].transpose(0, 3, 1, 2).reshape(rows, -1)
            records = np.concatenate([labels[i][:, None], pixels], axis=1)
            (tmp_path / name).write_bytes(records.tobytes())
        return {
            "x_train": images[:5].reshape(-1, 32, 32, 3),
            "y_train": labels[:5].reshape(-1),
            "x_test": images[5],
            "y_test": labels[5],
        }

    return write
