"""Packing: first fit by lengths alone, each example whole and once an epoch."""

import json

import numpy as np
import pytest

from haiku_template.data import BatchSpec, each_shape
from haiku_template.errors import ConfigError
from haiku_text.data.jsonl import jsonl
from haiku_text.data.packing import PackedDataset, pack
from haiku_text.data.texts import Completions, Tokens

RNG = np.random.default_rng(0)


def first_fit(sizes, context):
    """One example at a time, as textbooks have it."""
    room, windows = [], [0] * len(sizes)
    for example in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = (i for i, left in enumerate(room) if left >= sizes[example])
        window = next(fits, len(room))
        room += [context] * (window == len(room))
        room[window] -= sizes[example]
        windows[example] = window
    return windows


@pytest.mark.parametrize("context", [1, 7, 32, 200])
def test_packing_is_first_fit_the_longest_first(context):
    for count in (1, 5, 300):
        sizes = np.minimum(RNG.geometric(0.1, count), context)
        windows = pack(sizes, context)
        assert windows.tolist() == first_fit(sizes, context)
        assert np.bincount(windows, sizes).max() <= context


@pytest.fixture
def examples():
    """61 examples of 1 to 40 inputs; each begins with a token of its own."""
    texts = [[100 + i, *RNG.integers(1, 99, RNG.integers(1, 41))] for i in range(61)]
    prompts = [int(RNG.integers(1, len(text))) for text in texts]
    return Completions(Tokens.create(texts), np.array(prompts))


def found(batch):
    """Inputs, labels and loss mask of each example in a batch."""
    inputs = batch["inputs"]
    arrays = inputs["tokens"], batch["labels"], batch["loss_mask"]
    for row, segments in enumerate(inputs["segments"]):
        last = segments.max()
        sizes = np.bincount(segments, minlength=last + 1)
        # In a row from the beginning, numbered from 1; nothing counts in what is left.
        in_a_row = np.repeat([*range(1, last + 1), 0], [*sizes[1:], sizes[0]])
        np.testing.assert_array_equal(segments, in_a_row)
        assert not any(x[row][segments == 0].any() for x in arrays)
        for number in range(1, last + 1):
            yield [x[row][segments == number].tolist() for x in arrays]


def test_each_epoch_holds_every_example_once_and_whole(examples):
    train = PackedDataset(examples, 48, BatchSpec(5, seed=3))
    windows = max(pack(examples.sizes, 48)) + 1
    batches = [train.batch(step) for step in range(windows)]  # Five epochs.
    assert {batch["labels"].shape for batch in batches} == {(5, 48)}
    alone = examples.batch(np.arange(61), 41)
    seen = np.zeros(61, int)
    for tokens, labels, mask in (x for batch in batches for x in found(batch)):
        example, size = tokens[0] - 100, len(tokens)
        assert size == examples.sizes[example]
        assert tokens == alone["inputs"][example, :size].tolist()
        assert labels == alone["labels"][example, :size].tolist()
        assert mask == alone["loss_mask"][example, :size].tolist()
        seen[example] += 1
    assert set(seen) == {5}


def equal(a, b):
    for name in ("labels", "loss_mask"):
        np.testing.assert_array_equal(a[name], b[name])
    for name in ("tokens", "segments"):
        np.testing.assert_array_equal(a["inputs"][name], b["inputs"][name])


def test_a_batch_is_a_function_of_seed_and_step_and_processes_share_it(examples):
    wanted = [PackedDataset(examples, 48, BatchSpec(8, 1)).batch(i) for i in range(6)]
    again = PackedDataset(examples, 48, BatchSpec(8, 1))
    for step in reversed(range(6)):
        equal(again.batch(step), wanted[step])
    shares = [
        PackedDataset(examples, 48, BatchSpec(8, 1, "tokens", i, 4)) for i in range(4)
    ]
    for step in range(6):
        own = [share.batch(step)["labels"] for share in shares]
        np.testing.assert_array_equal(np.concatenate(own), wanted[step]["labels"])
    other = PackedDataset(examples, 48, BatchSpec(8, 2)).batch(0)
    assert np.any(other["labels"] != wanted[0]["labels"])


def test_a_batch_larger_than_the_set_holds_its_windows_again():
    examples = Completions(Tokens.create([[1, 2], [3, 4, 5]]), np.array([1, 1]))
    batch = PackedDataset(examples, 4, BatchSpec(3)).batch(0)
    assert batch["inputs"]["tokens"].tolist() == [[1, 3, 4, 0]] * 3
    assert batch["inputs"]["segments"].tolist() == [[1, 2, 2, 0]] * 3


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_of_json_lines_what_is_trained_on_is_packed_and_told(tmp_path):
    rows = [{"prompt": "ab" * (i % 5), "completion": f"{i:02}"} for i in range(40)]
    options = {"path": write(tmp_path / "a.jsonl", rows), "validation_fraction": 0.3}
    spec = BatchSpec(2, labels="tokens")
    packed, plain = (
        jsonl(spec, context=32, packing=packing, **options) for packing in (True, False)
    )
    for i in range(plain.evaluation.num_batches):
        batches = packed.evaluation.batch(i), plain.evaluation.batch(i)
        np.testing.assert_array_equal(*(batch["inputs"] for batch in batches))
    assert len(each_shape(packed.train)) == 1
    sizes = packed.train.examples.sizes
    windows = max(pack(sizes, 32)) + 1
    assert packed.train.num_examples == windows  # So that an epoch is known.
    assert packed.train.note == (
        f"{len(sizes)} examples packed into {windows} windows of 32 tokens, "
        f"{100 * sizes.sum() / (32 * windows):.1f}% full"
    )


def test_texts_with_classes_are_not_packed(tmp_path):
    rows = [{"text": f"{i}", "label": i % 2} for i in range(4)]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match="packing=True is for prompts .* classes"):
        jsonl(BatchSpec(2), path=path, packing=True)
