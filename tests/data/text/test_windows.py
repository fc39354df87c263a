"""Token files as streams, and windows of them as functions of the step."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from haiku_template.data import DATASETS, BatchSpec, TokenDataset, TokenEvaluationSet
from haiku_template.data.text import Tokenizer
from haiku_template.data.text.files import open_tokens
from haiku_template.data.text.stream import Shard, TokenStream
from haiku_template.data.text.windows import permute
from haiku_template.errors import ConfigError

ROOT = Path(__file__).parents[3]
TOKENS = np.random.default_rng(0).integers(1000, size=997).astype(np.uint16)


def stream_of(*arrays):
    shards = [Shard(np.asarray(a), f"shard {i}") for i, a in enumerate(arrays)]
    return TokenStream(shards)


def counting(size, dtype=np.uint16):
    return stream_of(np.arange(size, dtype=dtype))


def write(path, tokens=TOKENS):
    """Writes tokens in the format that the name says."""
    if path.suffix == ".safetensors":
        save_file({"anything": tokens, "more": np.ones((2, 2), np.float32)}, path)
    elif path.suffix == ".npy":
        np.save(path, tokens)
    else:
        tokens.tofile(path)
    return path


def load(path, **keys):
    keys = {"path": str(path), "vocab_size": 1000} | keys
    return DATASETS["tokens"](BatchSpec(4), **keys)


def refuses(*words):
    """Expects one line that says all `words`, in this order."""
    pattern = ".*".join(re.escape(str(word)) for word in words)
    return pytest.raises(ConfigError, match=f"^[^\\n]*{pattern}[^\\n]*$")


# Files


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
    part = stream.part(40, 900).part(10, 850)
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


# Windows


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_labels_are_the_tokens_after_the_inputs(order):
    data = TokenDataset(counting(500), 7, BatchSpec(6, seed=3), 500, order)
    for step in range(30):
        batch, rows = data.batch(step), data.rows(step)
        assert rows.dtype == np.int64
        expected = rows[:, None] + np.arange(7)
        np.testing.assert_array_equal(batch["inputs"], expected)
        np.testing.assert_array_equal(batch["labels"], expected + 1)
        assert batch["inputs"].dtype == batch["labels"].dtype == np.uint16


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_batch_depends_on_seed_and_step_alone(order):
    def make(seed=3):
        return TokenDataset(counting(500), 7, BatchSpec(6, seed=seed), 500, order)

    used = make()
    forward = [used.rows(step) for step in range(40)]
    for step in (39, 0, 17):
        np.testing.assert_array_equal(make().rows(step), forward[step])
    assert len({rows.tobytes() for rows in forward}) == 40
    assert not np.array_equal(make(seed=4).rows(0), forward[0])


def test_batches_are_new_arrays(tmp_path):
    data = load(write(tmp_path / "a.npy"), context=8).train
    first = data.batch(0)
    kept = {name: array.copy() for name, array in first.items()}
    for array in first.values():
        assert array.flags.owndata
        assert array.flags.c_contiguous
    first["inputs"][:] = 0
    np.testing.assert_array_equal(first["labels"], kept["labels"])
    for name, array in data.batch(0).items():
        np.testing.assert_array_equal(array, kept[name])


@pytest.mark.parametrize("size", [9, 10, 12])
def test_random_windows_start_everywhere_and_end_inside(size):
    data = TokenDataset(counting(size), 8, BatchSpec(20), size)
    starts = np.concatenate([data.rows(step) for step in range(10)])
    assert set(starts) == set(range(size - 8))
    assert data.batch(0)["labels"].max() <= size - 1


@pytest.mark.parametrize("batch_size", [1, 4, 62, 63, 150])
def test_every_epoch_has_each_window_once_in_an_order_of_its_own(batch_size):
    # 63 windows of 8 inputs; the last label of one is the first input of the next.
    data = TokenDataset(
        counting(63 * 8 + 6), 8, BatchSpec(batch_size, seed=5), 2**16, "epochs"
    )
    steps = -(-63 * 4 // batch_size)
    rows = np.concatenate([data.rows(step) for step in range(steps)])
    epochs = rows[: 63 * 4].reshape(4, 63)
    for epoch in epochs:
        assert sorted(epoch) == [8 * i for i in range(63)]
    assert len({epoch.tobytes() for epoch in epochs}) == 4


@pytest.mark.parametrize("order", ["random", "epochs"])
@pytest.mark.parametrize("processes", [2, 3, 6])
def test_shares_of_processes_make_up_the_batch(order, processes):
    def rows(step, **share):
        spec = BatchSpec(12, seed=1, **share)
        return TokenDataset(counting(700), 9, spec, 700, order).rows(step)

    for step in (0, 5, 6, 100):
        shares = [
            rows(step, process_index=i, process_count=processes)
            for i in range(processes)
        ]
        assert {len(share) for share in shares} == {12 // processes}
        np.testing.assert_array_equal(np.concatenate(shares), rows(step))


@pytest.mark.parametrize("size", [*range(1, 40), 99, 100, 101, 1000, 4097, 10_007])
def test_permutations_are_permutations(size):
    for epoch in range(3):
        image = permute(np.arange(size), size, (0, 0, epoch))
        np.testing.assert_array_equal(np.sort(image), np.arange(size))


def test_permutations_of_billions_stay_inside_and_never_meet():
    for size in (2**31 - 1, 10_248_871_836, 2**40, 2**62 - 57):
        indices = np.random.default_rng(0).integers(size, size=50_000)
        indices = np.unique(np.append(indices, [0, size - 1]))
        image = permute(indices, size, (7,))
        assert image.min() >= 0
        assert image.max() < size
        assert len(np.unique(image)) == len(indices)


def test_permutations_look_random():
    size, seeds = 200, 3000
    images = [permute(np.arange(size), size, (1, seed)) for seed in range(seeds)]
    counts = np.zeros((size, size))
    for image in images:
        counts[np.arange(size), image] += 1
    # Each index goes everywhere alike: chi-square, five standard deviations around.
    expected, freedom = seeds / size, (size - 1) ** 2
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
    # Neighbours stay neighbours as rarely as chance has it, once a permutation.
    kept = [np.sum(np.diff(image) == 1) for image in images]
    assert abs(np.mean(kept) - (size - 1) / size) < 5 / np.sqrt(seeds)


# Evaluation


def test_evaluation_has_each_window_once_and_in_order():
    data = TokenEvaluationSet(counting(8 * 10 + 3), 8, 4, 2**16)
    batches = [data.batch(i) for i in range(data.num_batches)]
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
    inputs = np.concatenate([batch["inputs"] for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    np.testing.assert_array_equal(inputs.ravel(), np.arange(80))
    np.testing.assert_array_equal(labels.ravel(), np.arange(1, 81))


@pytest.mark.parametrize("limit", [1, 3, 7, 10, 11])
def test_evaluation_windows_are_spread_evenly(limit):
    data = TokenEvaluationSet(counting(8 * 10 + 3), 8, 4, 2**16, limit)
    rows = np.concatenate([data.rows(i) for i in range(data.num_batches)])
    number = min(limit, 10)
    assert list(rows) == [8 * (i * 10 // number) for i in range(number)]


def test_evaluation_windows_of_a_large_set_do_not_overflow(tmp_path):
    path = tmp_path / "a.bin"
    with path.open("wb") as f:
        f.truncate(2 * 10_248_871_837)
    data = TokenEvaluationSet(open_tokens(path, random=False), 1, 10**6, 1, None)
    last = data.rows(data.num_batches - 1)
    assert last[-1] == 10_248_871_835
    assert np.all(np.diff(last) == 1)


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"validation_fraction": 0.1}, 99),
        ({"validation_tokens": 50}, 50),
        ({"validation_tokens": 50, "validation_fraction": 0.5}, 50),
    ],
)
def test_what_is_evaluated_on_is_not_trained_on(tmp_path, keys, count):
    path = write(tmp_path / "a.npy", np.arange(997, dtype=np.uint16))
    data = load(path, context=8, eval_windows=None, **keys)
    trained = {int(t) for s in range(2000) for t in data.train.batch(s)["labels"].flat}
    assert max(trained) == 996 - count
    evaluation = data.evaluation.batch(0)
    assert evaluation["inputs"][0, 0] == 997 - count
    windows = sum(len(data.evaluation.rows(i)) for i in range(50))
    assert windows == (count - 1) // 8


def test_a_validation_file_leaves_the_whole_of_the_other_to_train_on(tmp_path):
    train = write(tmp_path / "train.bin", np.full(100, 1, np.uint16))
    held_out = write(tmp_path / "val.bin", np.full(20, 2, np.uint16))
    data = load(train, context=8, validation_path=str(held_out))
    assert len(data.train.tokens) == 100
    assert set(data.evaluation.batch(0)["inputs"].flat) == {2}


@pytest.mark.parametrize("keys", [{"validation_fraction": 0}, {"validation_tokens": 0}])
def test_without_validation_there_is_no_evaluation(tmp_path, keys):
    data = load(write(tmp_path / "a.npy"), context=8, **keys)
    assert data.evaluation is None
    assert len(data.train.tokens) == 997


def test_inputs_are_widened_on_the_device(tmp_path):
    data = load(write(tmp_path / "a.npy"), context=8)
    batch = data.train.batch(0)
    on_device = data.preprocess(jnp.asarray(batch["inputs"]))
    assert on_device.dtype == jnp.int32
    np.testing.assert_array_equal(on_device, batch["inputs"])


# Vocabulary


def write_tokenizer(folder, size, unigram=False, added=()):
    names = [f"t{i}" for i in range(size)]
    vocab = (
        [[n, -1.0] for n in names] if unigram else {n: i for i, n in enumerate(names)}
    )
    contents = {
        "model": {"vocab": vocab},
        "added_tokens": [{"id": i, "content": f"<{i}>"} for i in added],
    }
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("unigram", [False, True])
@pytest.mark.parametrize(("added", "size"), [((), 1000), ((1000, 1001), 1002)])
def test_the_vocabulary_is_the_tokenizers(tmp_path, unigram, added, size):
    file = write_tokenizer(tmp_path, 1000, unigram, added)
    assert Tokenizer(file).size == size
    for path in (write(tmp_path / "a.npy"), tmp_path):
        data = load(path, context=8, vocab_size=None)
        assert data.num_outputs == size
        assert data.text == str(file)


@pytest.mark.parametrize(("given", "right"), [(1000, True), (1024, True), (1127, True)])
def test_a_vocabulary_may_be_padded(tmp_path, given, right):
    write_tokenizer(tmp_path, 1000)
    path = write(tmp_path / "a.npy")
    assert load(path, context=8, vocab_size=given).num_outputs == given


@pytest.mark.parametrize("given", [0, 999, 1128, 50257])
def test_a_vocabulary_that_is_not_the_tokenizers_is_refused(tmp_path, given):
    file = write_tokenizer(tmp_path, 1000)
    with refuses(f"vocab_size={given}", file, "has 1000 tokens"):
        load(write(tmp_path / "a.npy"), context=8, vocab_size=given)


@pytest.mark.parametrize("given", [None, 0, -5])
def test_without_a_tokenizer_the_vocabulary_must_be_given(tmp_path, given):
    path = write(tmp_path / "a.npy")
    with refuses(f"vocab_size={given}", path, "--config.data.vocab_size", "50257"):
        load(path, context=8, vocab_size=given)


@pytest.mark.parametrize("contents", ["", "[]", "{}", '{"model": {"vocab": {}}}'])
def test_a_damaged_tokenizer_is_named(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(contents)
    with refuses(tmp_path / "tokenizer.json", "damaged, or of another kind"):
        load(write(tmp_path / "a.npy"), context=8, vocab_size=None)


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path):
    for i, part in enumerate(np.split(TOKENS, [400])):
        tokens = part.copy()
        tokens[123] = 1000 if i else tokens[123]
        write(tmp_path / f"part_{i}.npy", tokens)
    data = load(tmp_path, context=8, order="epochs", vocab_size=1000)
    wrong = f"{tmp_path / 'part_1.npy'}, token 123, is 1000"
    places = []
    for step in range(-(-len(data.train.tokens) // 32)):
        rows = data.train.rows(step)
        holds = np.any((rows <= 523) & (rows + 8 >= 523))
        if not holds:
            data.train.batch(step)
            continue
        places.append(step)
        with refuses(wrong, "the vocabulary has 1000 tokens, 0 to 999"):
            data.train.batch(step)
    assert places


@pytest.mark.parametrize("value", [-1, 1000, 2**31 - 1])
def test_wide_tokens_are_not_clipped_either(value):
    tokens = np.array([1, 2, 3, value, 5, 6], np.int32)
    for data in (
        TokenDataset(stream_of(tokens), 5, BatchSpec(1), 1000),
        TokenEvaluationSet(stream_of(tokens), 5, 1, 1000),
    ):
        with refuses(f"shard 0, token 3, is {value}"):
            data.batch(0)


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
        DATASETS["tokens"](BatchSpec(4), vocab_size=10)
    with refuses(tmp_path / "val.npy", "does not exist"):
        train = write(tmp_path / "a.npy")
        load(train, context=8, validation_path=str(tmp_path / "val.npy"))


@pytest.mark.parametrize("suffix", [".safetensors", ".npy"])
def test_a_file_that_may_not_be_read_is_named(tmp_path, suffix):
    # Even root may open this one and not read it.
    (tmp_path / f"a{suffix}").symlink_to("/proc/self/mem")
    with refuses(tmp_path / f"a{suffix}"):
        load(tmp_path / f"a{suffix}")


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


@pytest.mark.parametrize("name", ["val.bin", "web_val_000.bin", "a.validation.bin"])
def test_validation_files_are_no_shards_of_what_is_trained_on(tmp_path, name):
    held_out = write(tmp_path / name)
    assert len(open_tokens(tmp_path, random=False)) == 997
    write(tmp_path / "evaluations_train.bin")
    with refuses(tmp_path, held_out.name, "--config.data.validation_path"):
        load(tmp_path)


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_of_no_tokens_is_refused(tmp_path, context):
    with refuses(f"context={context}; possible is 1 or more"):
        load(write(tmp_path / "a.npy"), context=context)


def test_a_context_longer_than_the_file_is_refused(tmp_path):
    path = write(tmp_path / "a.npy")
    load(path, context=996, validation_fraction=0)
    with refuses("windows of 998 tokens", "there are 997 to train on", path):
        load(path, context=997, validation_fraction=0)


def test_a_context_longer_than_the_validation_part_is_refused(tmp_path):
    path = write(tmp_path / "a.npy")
    with refuses("windows of 11 tokens", "9 to evaluate on", f"{path}, token 988"):
        load(path, context=10)


@pytest.mark.parametrize(
    "keys",
    [
        {"validation_fraction": 1.0},
        {"validation_fraction": -0.1},
        {"validation_tokens": 997},
        {"validation_tokens": -1},
    ],
)
def test_a_validation_part_that_leaves_nothing_is_refused(tmp_path, keys):
    with refuses("=".join(map(str, *keys.items())), "the 997 tokens"):
        load(write(tmp_path / "a.npy"), context=8, **keys)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"order": "sorted"}, "order='sorted' is not known; possible are random"),
        ({"eval_windows": 0}, "eval_windows=0; possible is 1 or more"),
    ],
)
def test_keys_out_of_range_are_refused(tmp_path, keys, words):
    with refuses(words):
        load(write(tmp_path / "a.npy"), context=8, **keys)


def test_processes_that_cannot_share_a_batch_are_refused():
    with refuses("a batch of 5 examples", "by 2 processes"):
        TokenDataset(counting(99), 8, BatchSpec(5, process_count=2), 99)


# A file larger than memory

READ_SPARSE = """
import sys
from pathlib import Path
import numpy as np
from haiku_template.data import (DATASETS, BatchSpec)
from haiku_template.data.text.files import (open_tokens)

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
    data = DATASETS["tokens"](
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
from haiku_template.data.text.files import (open_tokens)

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
