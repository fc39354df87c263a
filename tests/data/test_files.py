"""Readers of files: exact values, and a `ConfigError` that names what is damaged."""

import gzip
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from haiku_template.data import ArrayDataset, BatchSpec, dataset, files
from haiku_template.errors import ConfigError

ARRAYS = {
    "x_train": np.arange(24, dtype=np.float32).reshape(6, 4) / 7,
    "y_train": np.arange(6, dtype=np.int64) - 3,
    "x_test": np.arange(8, dtype=np.uint8).reshape(2, 4),
    "y_test": np.array([[0.5, -1.0], [2.5, 1e300]]),
}
IDX_TYPES = ["u1", "i1", "i2", "i4", "f4", "f8"]


def write_npy(directory, arrays):
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)


def assert_split(split, arrays):
    for name, array in zip(files.Split._fields, split, strict=True):
        np.testing.assert_array_equal(array, arrays[name])
        assert array.dtype == arrays[name].dtype


def refuses(path, *words):
    """Expects a `ConfigError` that names the file and says all `words`."""
    pattern = ".*".join(re.escape(word) for word in (str(path), *words))
    return pytest.raises(ConfigError, match=pattern)


def damage(path, change):
    path.write_bytes(change(path.read_bytes()))


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_gives_back_what_was_written(tmp_path, save):
    save(tmp_path / "a.npz", **ARRAYS)
    assert_split(files.read_npz(tmp_path / "a.npz"), ARRAYS)


def test_npy_gives_back_what_was_written(tmp_path):
    write_npy(tmp_path, ARRAYS)
    assert_split(files.read_npy(tmp_path), ARRAYS)


INPUTS = {name: ARRAYS[name] for name in ("x_train", "x_test")}


of_each_kind = pytest.mark.parametrize(
    ("save", "read", "name"),
    [
        (lambda path, arrays: np.savez(path, **arrays), files.read_npz, "a.npz"),
        (lambda path, arrays: save_file(arrays, path), files.read_safetensors, "a"),
        (write_npy, files.read_npy, ""),
    ],
    ids=["npz", "safetensors", "npy"],
)


@of_each_kind
def test_labels_may_be_missing_of_both_parts_alone(tmp_path, save, read, name):
    save(tmp_path / name, INPUTS)
    x_train, *labels_and_test = read(tmp_path / name)
    np.testing.assert_array_equal(x_train, ARRAYS["x_train"])
    assert labels_and_test[0] is labels_and_test[2] is None
    save(tmp_path / name, INPUTS | {"y_train": ARRAYS["y_train"]})
    with refuses(tmp_path, "y_test"):
        read(tmp_path / name)


@of_each_kind
def test_labels_by_another_name_are_not_left_out(tmp_path, save, read, name):
    save(tmp_path / name, INPUTS | {"Y_train": ARRAYS["y_train"]})
    with refuses(tmp_path, "y_train"):
        read(tmp_path / name)


def test_hidden_files_are_no_arrays(tmp_path):
    """Such as a file manager of macOS leaves beside each file."""
    write_npy(tmp_path, {k: x for k, x in ARRAYS.items() if k != "x_train"})
    for name, array in (("a", np.ones((4, 2))), ("b", np.ones((4, 3)))):
        (tmp_path / "x_train").mkdir(exist_ok=True)
        np.save(tmp_path / "x_train" / f"{name}.npy", array)
        (tmp_path / "x_train" / f"._{name}.npy").write_bytes(b"\0\5\x16\7" * 10)
    assert sorted(files.read_npy(tmp_path).x_train) == ["a", "b"]


def test_npy_files_are_mapped_and_not_read(tmp_path):
    write_npy(tmp_path, ARRAYS)
    split = files.read_npy(tmp_path)
    # What is written to the file later shows in an array that is mapped.
    np.load(tmp_path / "x_train.npy", mmap_mode="r+")[2, 3] = 55
    assert split.x_train[2, 3] == 55
    assert not any(array.flags.writeable for array in split)


def test_batches_of_mapped_files_are_copies(tmp_path):
    write_npy(tmp_path, ARRAYS)
    split = files.read_npy(tmp_path)
    batch = ArrayDataset(split.x_train, split.y_train, BatchSpec(4)).batch(0)
    batch["inputs"][:] = 55
    batch["labels"][:] = 55
    assert_split(files.read_npy(tmp_path), ARRAYS)


@pytest.mark.parametrize("name", ["plain", "packed.gz"])
@pytest.mark.parametrize("dtype", IDX_TYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4)])
def test_idx_gives_back_what_was_written(tmp_path, write_idx, shape, dtype, name):
    array = (np.arange(np.prod(shape)) * 4.75 - 3).astype("i4").astype(dtype)
    write_idx(tmp_path / name, array.reshape(shape))
    found = files.read_idx(tmp_path / name)
    np.testing.assert_array_equal(found, array.reshape(shape))
    assert found.dtype == np.dtype(dtype)


@pytest.mark.parametrize("dtype", ["u1", "i4"])
@pytest.mark.parametrize("name", ["plain", "packed.gz"])
def test_memory_holds_an_idx_file_once(tmp_path, write_idx, monkeypatch, name, dtype):
    array = np.tile(np.arange(2**10), 2**14).astype(dtype)
    write_idx(tmp_path / name, array)
    tracemalloc.start()
    try:
        files.read_idx(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes + 4 * files.PIECE
    monkeypatch.setattr(dataset, "host_memory", lambda: array.nbytes - 1)
    with pytest.raises(
        ConfigError, match=f"{array.nbytes:,} bytes of values, and this"
    ):
        files.read_idx(tmp_path / name)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_gives_back_what_was_written(tmp_path, write_mnist, suffix):
    arrays = write_mnist(suffix=suffix)
    arrays = {
        k: v[..., None] if k.startswith("x") else v.astype(np.int32)
        for k, v in arrays.items()
    }
    assert_split(files.read_mnist(tmp_path), arrays)


def test_cifar10_gives_back_what_was_written(tmp_path, write_cifar10):
    arrays = write_cifar10()
    arrays = {
        k: v if k.startswith("x") else v.astype(np.int32) for k, v in arrays.items()
    }
    assert_split(files.read_cifar10(tmp_path), arrays)


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (files.read_npy, "x_train.npy"),
        (files.read_mnist, "train-images-idx3-ubyte"),
        (files.read_cifar10, "data_batch_1.bin"),
        (lambda directory: files.read_npz(directory / "a.npz"), "a.npz"),
        (lambda directory: files.read_idx(directory / "a.idx"), "a.idx"),
    ],
)
def test_a_missing_file_is_named_with_what_is_there(tmp_path, read, missing):
    (tmp_path / "stray.txt").touch()
    with refuses(tmp_path / missing, "does not exist", "stray.txt"):
        read(tmp_path)


def test_a_missing_array_is_named_with_those_that_are_there(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, **{k: v for k, v in ARRAYS.items() if k != "y_test"})
    with refuses(path, "no array y_test", "x_train, y_train, x_test"):
        files.read_npz(path)


# np.load leaves a file that turns out to be no archive to the garbage collector.
@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: raw[:3],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: b"no archive at all",
        lambda raw: raw.replace(ARRAYS["x_test"].tobytes(), b"damaged!"),
    ],
    ids=["empty", "magic only", "half", "one byte short", "text", "bad checksum"],
)
def test_a_damaged_npz_file_is_refused(tmp_path, change):
    path = tmp_path / "a.npz"
    np.savez(path, **ARRAYS)
    damage(path, change)
    with refuses(path, "is damaged"):
        files.read_npz(path)


def test_a_damaged_compressed_npz_file_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **ARRAYS)
    # The compressed bytes of the first array begin after its name and extra field.
    name, extra = struct.unpack("<HH", path.read_bytes()[26:30])
    start = 30 + name + extra
    damage(path, lambda raw: raw[:start] + b"\xff" * 20 + raw[start + 20 :])
    with refuses(path, "is damaged"):
        files.read_npz(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: raw[:5],
        lambda raw: raw[:60],
        lambda raw: raw[:-1],
        lambda raw: b"\x93NUMPX" + raw[6:],
        lambda raw: raw.replace(b"(2, 4)", b"(9, 4)"),
    ],
    ids=["empty", "magic", "header", "one byte short", "wrong magic", "false promise"],
)
def test_a_damaged_npy_file_is_refused(tmp_path, change):
    write_npy(tmp_path, ARRAYS)
    damage(tmp_path / "x_test.npy", change)
    with refuses(tmp_path / "x_test.npy", "is damaged"):
        files.read_npy(tmp_path)


def test_pickled_arrays_are_refused_and_not_run(tmp_path):
    ran = tmp_path / "ran"
    arrays = {**ARRAYS, "x_test": np.array([Touches(ran)] * 2, object)}
    write_npy(tmp_path, arrays)
    np.savez(tmp_path / "a.npz", **arrays)
    (tmp_path / "bare.npz").write_bytes(pickle.dumps(Touches(ran)))
    with refuses(tmp_path / "x_test.npy"):
        files.read_npy(tmp_path)
    for name in ("a.npz", "bare.npz"):
        with refuses(tmp_path / name):
            files.read_npz(tmp_path / name)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: b"", "does not begin"),
        (lambda raw: raw[:3], "does not begin"),
        (lambda raw: b"\1" + raw[1:], "does not begin"),
        (lambda raw: raw[:2] + b"\x0a" + raw[3:], "does not begin"),
        (lambda raw: raw[:9], "is damaged"),
        (lambda raw: raw[:-1], "promises 12 bytes for shape [3, 4] and 11 follow"),
        (lambda raw: raw + b"\0", "promises 12 bytes for shape [3, 4] and more follow"),
        (
            lambda raw: raw[:4] + struct.pack(">2I", 3, 5) + raw[12:],
            "promises 15 bytes for shape [3, 5] and 12 follow",
        ),
        # The product of these sizes is 0 in 64 bits.
        (lambda raw: raw[:3] + b"\4" + struct.pack(">4I", *[2**16] * 4), "is damaged"),
    ],
    ids=[
        "empty",
        "three bytes",
        "wrong magic",
        "unknown type",
        "half a header",
        "one byte short",
        "one byte more",
        "false promise",
        "overflowing promise",
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_damaged_idx_file_is_refused(tmp_path, write_idx, pack, change, words):
    path = tmp_path / "a.idx"
    write_idx(path, np.arange(12, dtype=np.uint8).reshape(3, 4))
    damage(path, lambda raw: pack(change(raw)))
    with refuses(path, words):
        files.read_idx(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:5],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: raw[:10] + b"\xff" * 8 + raw[18:],
        lambda raw: raw[:-8] + b"\0\0\0\0" + raw[-4:],
        lambda raw: raw + b"rubbish",
    ],
    ids=["header", "half", "one byte short", "bad data", "bad checksum", "rubbish"],
)
def test_a_damaged_gz_file_is_refused(tmp_path, write_idx, change):
    path = tmp_path / "a.gz"
    write_idx(path, np.arange(200, dtype=np.uint8).reshape(20, 10))
    damage(path, change)
    with refuses(path, "is damaged"):
        files.read_idx(path)


def test_the_damaged_one_of_four_mnist_files_is_named(tmp_path, write_mnist):
    write_mnist(suffix=".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    damage(path, lambda raw: raw[:-20])
    with refuses(path, "is damaged"):
        files.read_mnist(tmp_path)


@pytest.mark.parametrize("name", ["data_batch_4.bin", "test_batch.bin"])
@pytest.mark.parametrize("size", [0, 3072, 3 * 3073 - 1])
def test_a_cifar10_file_without_whole_records_is_refused(
    tmp_path, write_cifar10, name, size
):
    write_cifar10(rows=3)
    damage(tmp_path / name, lambda raw: raw[:size])
    with refuses(tmp_path / name, f"its {size} bytes", "3073-byte"):
        files.read_cifar10(tmp_path)


def test_safetensors_come_back_as_written(tmp_path):
    save_file(ARRAYS, tmp_path / "data.safetensors")
    assert_split(files.read_safetensors(tmp_path / "data.safetensors"), ARRAYS)


@pytest.mark.parametrize("damage", ["truncated", "header", "missing"])
def test_a_damaged_safetensors_file_is_named(tmp_path, damage):
    path = tmp_path / "data.safetensors"
    names = files.Split._fields[:-1] if damage == "missing" else files.Split._fields
    save_file({name: ARRAYS[name] for name in names}, path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-7])
    if damage == "header":
        path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(ConfigError, match=re.escape(str(path)) + " is damaged"):
        files.read_safetensors(path)


BOMB = 2**26  # Bytes, of a file of some kilobytes.


def write_zip(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def npy_header(shape, version=1):
    words = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    size = struct.pack("<H" if version == 1 else "<I", len(words))
    return b"\x93NUMPY" + bytes([version, 0]) + size + words


BOMBS = {
    "no array at all": bytes(BOMB),
    "more than it declares": npy_header((3,)) + bytes(BOMB),
    "less than it declares": npy_header((2**40,)) + bytes(3),
    "a header without end": b"\x93NUMPY\2\0" + b"\xff\xff\xff\x03" + b" " * BOMB,
    "sizes below zero": npy_header((-(2**30),)) + bytes(3),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_npz_bomb_takes_no_more_memory_than_its_array_declares(tmp_path, bomb):
    path = tmp_path / "a.npz"
    write_zip(path, x_train=BOMBS[bomb])
    tracemalloc.start()
    with refuses(path, "is damaged"):
        files.read_npz(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOMB / 8


def test_an_array_larger_than_this_machine_is_refused_before_it_is_read(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.npz"
    write_zip(path, x_train=npy_header((BOMB,)) + bytes(BOMB))
    monkeypatch.setattr(dataset, "host_memory", lambda: BOMB - 1)
    with refuses(path, "bytes of x_train", f"has {BOMB - 1:,}"):
        files.read_npz(path)


@pytest.mark.parametrize("shape", [[3, 4], [2**31, 2**31]])
def test_an_idx_bomb_takes_no_more_memory_than_its_header_declares(tmp_path, shape):
    path = tmp_path / "a.idx.gz"
    header = bytes([0, 0, 8, 2]) + struct.pack(">2I", *shape)
    path.write_bytes(gzip.compress(header + bytes(BOMB)))
    tracemalloc.start()
    with refuses(path, "promises"):
        files.read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < BOMB / 8
