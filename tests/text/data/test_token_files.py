"""Token files as streams: exact tokens in bounded memory, and what is refused."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from streams import TOKENS, load, refuses, stream_of, write

from haiku_template.data import BatchSpec
from haiku_text.data import tokens as token_data
from haiku_text.data.files import open_tokens

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "uint8", "int64"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".bin"])
def test_every_format_gives_back_what_was_written(tmp_path, suffix, dtype):
    tokens = (TOKENS % 250).astype(dtype)
    path = write(tmp_path / f"a{suffix}", tokens)
    stream = open_tokens(path, dtype=dtype, random=True)
    assert (len(stream), stream.dtype) == (997, dtype)
    np.testing.assert_array_equal(stream.windows(np.array([0]), 997)[0], tokens)


def test_big_endian_files_are_read_in_the_byte_order_of_this_machine(tmp_path):
    np.save(tmp_path / "a.npy", TOKENS.astype(">u2"))
    windows = open_tokens(tmp_path / "a.npy", random=True).windows(np.array([5]), 9)
    assert windows.dtype == np.dtype("uint16")
    assert windows.dtype.isnative
    np.testing.assert_array_equal(windows[0], TOKENS[5:14])


def test_a_tensor_at_an_odd_offset_is_read(tmp_path):
    # safetensors orders tensors by alignment; other writers need not.
    body = b"\x07" + TOKENS.tobytes()
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "U16", "shape": [997], "data_offsets": [1, len(body)]},
    }
    write_safetensors(tmp_path / "a.safetensors", header, body)
    stream = open_tokens(tmp_path / "a.safetensors", tensor="b", random=True)
    np.testing.assert_array_equal(stream.windows(np.array([3]), 990)[0], TOKENS[3:993])


def test_of_two_lines_of_tokens_one_must_be_named(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": TOKENS, "y": TOKENS + 1, "z": np.ones(3, np.float32)}, path)
    stream = open_tokens(path, tensor="y", random=True)
    np.testing.assert_array_equal(stream.windows(np.array([0]), 5)[0], TOKENS[:5] + 1)
    with refuses(path, "not one line of whole numbers", "x U16[997]", "data.tensor"):
        open_tokens(path, random=True)
    with refuses(path, "no tensor 'tokens', but", "y U16[997]"):
        open_tokens(path, tensor="tokens", random=True)
    with refuses("tensor 'z'", path, "is F32[3]", "U16"):
        open_tokens(path, tensor="z", random=True)


def test_windows_cross_the_borders_of_shards(tmp_path):
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.choice(np.arange(1, 997), 30, replace=False))
    for i, part in enumerate(np.split(TOKENS, cuts)):
        write(tmp_path / f"part_{i:03}{['.npy', '.bin', '.safetensors'][i % 3]}", part)
    (tmp_path / "README.md").write_text("no tokens")
    stream = open_tokens(tmp_path, random=True)
    assert len(stream) == 997
    for length in (1, 2, 50, 997):
        starts = rng.integers(997 - length + 1, size=40)
        expected = [TOKENS[s : s + length] for s in starts]
        np.testing.assert_array_equal(stream.windows(starts, length), expected)


def test_a_part_of_a_stream_is_a_stream_and_knows_its_places():
    stream = stream_of(TOKENS[:100], TOKENS[100:101], TOKENS[101:])
    part = stream.section(40, 900).section(10, 850)
    assert len(part) == 840
    np.testing.assert_array_equal(part.windows(np.array([0]), 840)[0], TOKENS[50:890])
    assert part.locate(0) == "shard 0, token 50"
    assert part.locate(50) == "shard 1, token 0"
    assert part.locate(839) == "shard 2, token 788"


def memory_flags(path):
    """For each mapping of a file, the kernel's flags."""
    blocks = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    own = [block for block in blocks if block.splitlines()[0].endswith(str(path))]
    return [re.search(r"VmFlags: (.*)", block)[1].split() for block in own]


def test_training_is_advised_as_random_and_evaluation_is_not(tmp_path):
    path = write(tmp_path / "a.bin")
    data = load(path, context=8, validation_tokens=100)
    assert sorted("rr" in flags for flags in memory_flags(path)) == [False, True]
    del data
    assert memory_flags(path) == []


# What cannot be read


def write_safetensors(path, header, body, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(raw) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + raw + body)


def entry(**changes):
    return {"t": {"dtype": "U16", "shape": [4], "data_offsets": [0, 8]} | changes}


OTHER = {"u": {"dtype": "U16", "shape": [4], "data_offsets": [4, 12]}}


@pytest.mark.parametrize(
    ("header", "body", "length", "words"),
    [
        (entry(), b"12345678", 2**63, "header too large"),
        (entry(), b"12345678", 2**64 - 1, "header too large"),
        (entry(), b"12345678", 5000, "invalid header length"),
        (entry(), b"12345", None, "not fully covered"),
        (entry(), b"123456789", None, "not fully covered"),
        (entry(data_offsets=[-8, 0]), b"12345678", None, "expected usize"),
        (entry(data_offsets=[2**40, 2**40 + 8]), b"12345678", None, "invalid offset"),
        (entry() | OTHER, b"123456789012", None, "invalid offset"),
        (entry(shape=[5]), b"12345678", None, "invalid shape"),
        (entry(shape=[2**62]), b"12345678", None, "invalid shape|overflow"),
        (entry(dtype="X9"), b"12345678", None, "unknown variant"),
        (b"{not JSON", b"12345678", None, "invalid JSON"),
        (b"[" * 10_000, b"12345678", None, "invalid JSON"),
        (b"\xff\xfe\xfd", b"12345678", None, "header"),
        (entry(dtype="F16"), b"12345678", None, "not one line of whole numbers"),
        (entry(dtype="BOOL", shape=[8]), b"12345678", None, "not one line of whole"),
        (entry(shape=[2, 2]), b"12345678", None, "not one line of whole numbers"),
        ({}, b"", None, "not one line of whole numbers"),
        (entry(shape=[0], data_offsets=[0, 0]), b"", None, "holds no tokens"),
    ],
)
def test_a_hostile_safetensors_header_is_refused(tmp_path, header, body, length, words):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, header, body, length)
    with refuses(path) as raised:
        load(path, context=1)
    assert re.search(words, str(raised.value))


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("a.safetensors", b"", "header too small"),
        ("a.safetensors", b"1234567", "header too small"),
        ("a.npy", b"", "damaged, or of another kind"),
        ("a.npy", b"\x93NUMPY\x01\x00", "damaged, or of another kind"),
        ("a.npy", b"no numpy file at all", "damaged, or of another kind"),
        ("a.npy", b"\x93NUMPY\x03\x00", "version (3, 0)"),
        ("a.bin", b"", "holds no tokens"),
        ("a.bin", b"123", "3 bytes are no whole number of uint16 tokens"),
        ("a.txt", b"12", "no token file; possible are .safetensors, .npy, .bin"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, name, contents, words):
    path = tmp_path / name
    path.write_bytes(contents)
    with refuses(path, words):
        load(path, context=1)


def test_a_truncated_npy_file_is_refused(tmp_path):
    path = write(tmp_path / "a.npy")
    path.write_bytes(path.read_bytes()[:-1])
    with refuses(path, "its header promises", "bytes and it has"):
        load(path, context=8)


@pytest.mark.parametrize(
    "array", [np.ones(9), np.ones((3, 3), np.uint16), np.array(["a", "b"])]
)
def test_an_npy_file_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    with refuses(tmp_path / "a.npy", "whole numbers in one dimension"):
        load(tmp_path / "a.npy", context=8)


@pytest.mark.parametrize("dtype", ["float32", "gpt2", "bool", ""])
def test_a_dtype_that_is_no_token_is_refused(tmp_path, dtype):
    with refuses(f"dtype={dtype!r} is no type of token"):
        load(write(tmp_path / "a.bin"), context=8, dtype=dtype)


def test_a_missing_path_is_named(tmp_path):
    with refuses(tmp_path / "a.npy", "does not exist", "nothing is there"):
        load(tmp_path / "a.npy")
    with refuses("tokens needs", "--config.data.path=PATH"):
        token_data(BatchSpec(4), vocab_size=10)
    with refuses(tmp_path / "val.npy", "does not exist"):
        train = write(tmp_path / "a.npy")
        load(train, context=8, validation_path=str(tmp_path / "val.npy"))
    with refuses("tokens needs", "--config.data.validation_path=PATH"):
        load(train, context=8, validation_path="")


@pytest.mark.parametrize("suffix", [".safetensors", ".npy"])
def test_a_file_that_may_not_be_read_is_named(tmp_path, suffix):
    # Even root may open this one and not read it.
    (tmp_path / f"a{suffix}").symlink_to("/proc/self/mem")
    with refuses(tmp_path / f"a{suffix}"):
        load(tmp_path / f"a{suffix}")


def test_hidden_files_are_no_token_files(tmp_path):
    """Such as a file manager of macOS leaves beside each file."""
    np.arange(300, dtype=np.uint16).tofile(tmp_path / "a.bin")
    for name in ("._a.bin", ".b.bin"):
        (tmp_path / name).write_bytes(b"\0\5\x16\7" * 100)
    assert len(open_tokens(tmp_path, random=False)) == 300


def test_a_folder_without_token_files_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    with refuses(tmp_path, "holds no .safetensors, .npy, .bin file"):
        load(tmp_path)


def test_an_empty_shard_is_named(tmp_path):
    write(tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(b"")
    with refuses(tmp_path / "b.bin", "holds no tokens"):
        load(tmp_path)


def test_shards_of_different_dtypes_are_refused(tmp_path):
    write(tmp_path / "a.npy")
    write(tmp_path / "b.npy", TOKENS.astype(np.uint32))
    with refuses(tmp_path / "b.npy", "uint32", tmp_path / "a.npy", "uint16"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["val.bin", "web_val_000.bin", "a.validation.bin", "held_out.bin"]
)
def test_validation_files_are_no_shards_of_what_is_trained_on(tmp_path, name):
    held_out = write(tmp_path / name)
    assert len(open_tokens(tmp_path, random=False)) == 997
    write(tmp_path / "evaluations_train.bin")
    with refuses(tmp_path, held_out.name, "--config.data.validation_path"):
        load(tmp_path)


# A file larger than memory

READ_SPARSE = """
import sys
from pathlib import Path
import numpy as np
from haiku_template.data import BatchSpec
from haiku_text.data import tokens as token_data
from haiku_text.data.files import open_tokens

def status(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024

path, size = sys.argv[1], int(sys.argv[2])
stream = open_tokens(Path(path), random=True)
assert len(stream) == size
middle = 2**32 + 12345
ends = stream.windows(np.array([0, middle, size - 1000]), 1000)
np.testing.assert_array_equal(ends, np.arange(3000).reshape(3, 1000) + 7)
assert stream.windows(np.array([middle - 2**32]), 1000).max() == 0
before = {name: status(name) for name in ("RssAnon", "VmRSS")}
for order in ("random", "epochs"):
    data = token_data(
        BatchSpec(16), path=path, context=1024, order=order, vocab_size=50257
    )
    furthest = 0
    for step in range(250):
        assert data.train.batch(step)["inputs"].shape == (16, 1024)
        furthest = max(furthest, data.train.rows(step).max())
    assert furthest > 2**33
    sum(data.evaluation.batch(i)["labels"].sum() for i in range(8))
for name, limit in {"RssAnon": 256, "VmRSS": 256}.items():
    growth = status(name) - before[name]
    assert growth < limit, f"{name} grew by {growth} MB"
assert "jax" not in sys.modules
"""


def test_a_file_larger_than_memory_is_read_beyond_32_bits(tmp_path):
    size = 10_248_871_837
    path = tmp_path / "train.safetensors"
    header = json.dumps(
        {"tokens": {"dtype": "U16", "shape": [size], "data_offsets": [0, 2 * size]}}
    ).encode()
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(header)) + header)
        begin = f.tell()
        for i, position in enumerate((0, 2**32 + 12345, size - 1000)):
            f.seek(begin + 2 * position)
            f.write((np.arange(1000, dtype="<u2") + 1000 * i + 7).tobytes())
    assert path.stat().st_blocks * 512 < 2**20
    command = [sys.executable, "-c", READ_SPARSE, path, str(size)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


READ_MUCH = """
import sys
from pathlib import Path
import numpy as np
from haiku_text.data.files import open_tokens

def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return int(line.split()[1]) / 1024

stream = open_tokens(Path(sys.argv[1]), random=True)
before, starts = resident(), np.arange(0, len(stream) - 1024, 4096)
np.random.default_rng(0).shuffle(starts)
most = 0
for part in np.array_split(starts, 200):
    stream.windows(part, 1025)
    most = max(most, resident() - before)
assert most < 200, f"{most} MB of the file were resident"
"""


def test_resident_memory_does_not_grow_up_to_the_size_of_the_file(tmp_path):
    # 512 MiB, all of which is read.
    with (tmp_path / "a.bin").open("wb") as f:
        f.truncate(2**29)
    command = [sys.executable, "-c", READ_MUCH, tmp_path / "a.bin"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
