"""Readers of array files: .npz, .safetensors, .npy, MNIST's idx, CIFAR-10's binary.

Each returns a `Split`. A missing or damaged file is a `ConfigError` that names it. Of
inputs or labels that are several arrays each has a name, as in `x_train/NAME`.
"""

import gzip
import io
import math
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from safetensors import safe_open

from haiku_template.bounded import at_home, exists, is_dir, is_file
from haiku_template.data.dataset import check_memory
from haiku_template.data.trees import nested
from haiku_template.errors import ConfigError

IDX_DTYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
DEFLATE_MOST = 1032  # Bytes, at most, of one compressed byte.
PIECE = 2**22  # Bytes unpacked at a time.
NPY_HEADER = 2**16 + 12  # The longest that NumPy writes without being asked to.
CIFAR_RECORD = 1 + 3 * 32 * 32
INPUTS, LABELS = ("x_train", "x_test"), ("y_train", "y_test")
T = TypeVar("T")


class Split(NamedTuple):
    """Training and test examples: inputs [N, ...], labels [N, ...] or None for both.

    Each is an array, or a dictionary, a tuple or another tree of arrays.
    """

    x_train: Any
    y_train: Any
    x_test: Any
    y_test: Any


def _split(names: Iterable[str], read: Callable[[str], np.ndarray]) -> Split:
    """Reads the arrays of a split, and all below a name: `x_train/NAME`.

    Labels may be missing, of both parts; other arrays may be labels by another name.
    """
    names = [*names]
    has_labels = any(x.partition("/")[0] not in INPUTS for x in names)

    def part(name: str) -> Any:
        if name in LABELS and not has_labels:
            return None
        inner = [x for x in names if x.startswith(f"{name}/")]
        if name not in names and not inner:
            raise ValueError(f"it has no array {name}, only {', '.join(names)}")
        if name in names and inner:
            raise ValueError(f"it has {name} and {inner[0]}, and one is needed")
        return nested({x.partition("/")[2]: read(x) for x in inner}) or read(name)

    return Split(*map(part, Split._fields))


def check_names(names: Iterable[str], where: str, what: str = "a column") -> None:
    """Raises `ConfigError` for a name that stands twice: one of both would be lost."""
    names = [*names]
    if len(set(names)) < len(names):
        raise ConfigError(f"{where} names {what} twice: {', '.join(names)}")


def data_path(path: str | None, name: str, description: str, key: str = "path") -> Path:
    """Expands the path of a data set, which must not be None or empty."""
    if not path:
        raise ConfigError(
            f"the data set {name} needs {description}: --config.data.{key}=PATH "
            "(nothing is downloaded)"
        )
    return at_home(str(path))  # `--config.data.path=2024` is a number.


def read_with(path: Path, reader: Callable[[Path], T]) -> T:
    """Runs a reader on a file; turns any error into a `ConfigError` that names it."""
    try:
        if is_file(path):
            return reader(path)
    except ConfigError:
        raise
    except Exception as error:  # zipfile, zlib, tokenize, struct: each has its own.
        reason = str(error).split("\n")[0] or type(error).__name__
        problem = f"is damaged, or of another kind: {reason}"
        if isinstance(error, OSError) and error.strerror:
            problem = f"cannot be read: {error.strerror}"
        raise ConfigError(f"the data file {path} {problem}") from error
    near = sorted(p.name for p in path.parent.glob("*"))[:8]
    there = f"{path.parent} holds {', '.join(near)}" if near else "nothing is there"
    problem = "is no regular file" if exists(path) else "does not exist"
    problem = "is a directory" if is_dir(path) else problem
    raise ConfigError(f"the data file {path} {problem}; {there}")


def read_npz(path: Path) -> Split:
    """Reads x_train, y_train, x_test and y_test from a .npz file, as Keras has them."""

    def arrays(file: Path) -> Split:
        with zipfile.ZipFile(file) as archive:
            check_names(archive.namelist(), str(file), "an array")
            members = {key.removesuffix(".npy"): key for key in archive.namelist()}
            read = lambda name: _read_member(archive, name, members[name], file)  # noqa: E731
            return _split(members, read)

    return read_with(path, arrays)


def _read_member(
    archive: zipfile.ZipFile, name: str, member: str, file: Path
) -> np.ndarray:
    info = archive.getinfo(member)
    with archive.open(info) as packed:
        header = io.BytesIO(packed.read(NPY_HEADER))
    shape, _, dtype = npy_header(header)
    _check_promise(shape, dtype, info.file_size - header.tell())
    fact = f"the data file {file} has {info.file_size:,} bytes of {name}"
    check_memory(info.file_size, fact, "config.data.name=npy maps files of any size")
    with archive.open(info) as packed:
        return np.lib.format.read_array(packed, allow_pickle=False)


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads shape, order (True for Fortran's) and dtype of an .npy file."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of .npy is for other arrays")
    return getattr(np.lib.format, f"read_array_header_{version[0]}_0")(file)


def _check_promise(shape: tuple[int, ...], dtype: np.dtype, follow: int | str) -> None:
    expected = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and (expected != follow or min(shape, default=0) < 0):
        promise = f"{expected} bytes for shape {list(shape)}"
        raise ValueError(f"its header promises {promise} and {follow} follow")


def read_safetensors(path: Path) -> Split:
    """Reads x_train, y_train, x_test and y_test from a .safetensors file."""

    def arrays(file: Path) -> Split:
        with safe_open(file, framework="numpy") as tensors:
            return _split(tensors.keys(), tensors.get_tensor)

    return read_with(path, arrays)


def read_npy(directory: Path) -> Split:
    """Maps x_train.npy, or x_train/*.npy, and so on; nothing is read yet.

    Labels may be missing, of both parts.
    """
    has_labels = any(exists(directory / y) for y in LABELS)
    has_labels |= any(x.stem not in INPUTS for x in directory.glob("[!.]*.npy"))

    def read(file: Path) -> np.ndarray:
        # A plain view: slicing numpy.memmap itself is several times slower.
        return np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)

    def part(name: str) -> Any:
        if name in LABELS and not has_labels:
            return None
        folder = directory / name
        leaves = {x.stem: read_with(x, read) for x in folder.glob("[!.]*.npy")}
        file = directory / f"{name}.npy"
        if leaves and exists(file):
            raise ConfigError(f"there are {file} and {folder}, and one is needed")
        return nested(leaves) or read_with(file, read)

    return Split(*map(part, Split._fields))


def read_idx(path: Path) -> np.ndarray:
    """Reads one array in MNIST's idx format, plain or as .gz.

    Format: two zero bytes, a type byte, the number of dimensions, each dimension as
    big-endian uint32, then the values (http://yann.lecun.com/exdb/mnist).
    """

    def read(file: Path) -> np.ndarray:
        with file.open("rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            most = file.stat().st_size * (DEFLATE_MOST if packed else 1)
            with gzip.open(plain) if packed else plain as data:
                return _read_idx(data, most, file)

    return read_with(path, read)


def _read_idx(data: BinaryIO, most: int, file: Path) -> np.ndarray:
    begin = data.read(4)
    if len(begin) < 4 or begin[:2] != b"\0\0" or begin[2] not in IDX_DTYPES:
        raise ValueError("it does not begin as an idx file does")
    shape = struct.unpack(f">{begin[3]}I", data.read(4 * begin[3]))
    dtype = np.dtype(IDX_DTYPES[begin[2]])
    expected = math.prod(shape) * dtype.itemsize
    if expected > most:
        _check_promise(shape, dtype, "fewer")
    fact = f"the data file {file} has {expected:,} bytes of values"
    check_memory(expected, fact, "config.data.name=npy maps files of any size")
    array, filled = np.empty(shape, dtype), 0
    body = array.reshape(-1).view(np.uint8)  # Filled in place: memory holds it once.
    while count := data.readinto(body[filled : filled + PIECE]):
        filled += count
    surplus = data.read(1) and "more"  # At the end the checksum is compared.
    _check_promise(shape, dtype, surplus or filled)
    if not dtype.isnative:
        array.byteswap(inplace=True)
    return array.view(dtype.newbyteorder("="))


def read_mnist(directory: Path) -> Split:
    """Reads MNIST's or Fashion-MNIST's four files: images uint8 [N, 28, 28, 1]."""

    def array(name: str) -> np.ndarray:
        plain = directory / name
        return read_idx(plain if is_file(plain) else directory / f"{name}.gz")

    return Split(
        array("train-images-idx3-ubyte")[..., None],
        array("train-labels-idx1-ubyte").astype(np.int32),
        array("t10k-images-idx3-ubyte")[..., None],
        array("t10k-labels-idx1-ubyte").astype(np.int32),
    )


def read_cifar10(directory: Path) -> Split:
    """Reads CIFAR-10's binary version: images uint8 [N, 32, 32, 3].

    Format: records of one label byte and 3,072 pixel bytes, channel by channel
    (https://www.cs.toronto.edu/~kriz/cifar.html).
    """

    def records(file: Path) -> np.ndarray:
        data = np.frombuffer(file.read_bytes(), np.uint8)
        if len(data) == 0 or len(data) % CIFAR_RECORD:
            raise ValueError(
                f"its {len(data)} bytes are no whole number of {CIFAR_RECORD}-byte "
                "records"
            )
        return data.reshape(-1, CIFAR_RECORD)

    def examples(*names: str) -> tuple[np.ndarray, np.ndarray]:
        data = np.concatenate([read_with(directory / name, records) for name in names])
        images = data[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), data[:, 0].astype(np.int32)

    train = examples(*(f"data_batch_{i}.bin" for i in range(1, 6)))
    return Split(*train, *examples("test_batch.bin"))
