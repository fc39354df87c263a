"""Windows of token streams as functions of the step, and their vocabulary."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from streams import TOKENS, counting, load, refuses, stream_of, write

from haiku_template.data import BatchSpec
from haiku_text.data import TokenDataset, TokenEvaluationSet, Tokenizer
from haiku_text.data.files import open_tokens
from haiku_text.data.permutation import permute


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


# What is refused


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
        {"validation_fraction": float("nan")},
        {"validation_tokens": 997},
        {"validation_tokens": -1},
    ],
)
def test_a_validation_part_that_leaves_nothing_is_refused(tmp_path, keys):
    with refuses("=".join(map(str, *keys.items())), "the 997 tokens"):
        load(write(tmp_path / "a.npy"), context=8, **keys)


def test_a_single_token_is_not_held_out_alone(tmp_path):
    path = write(tmp_path / "a.npy", TOKENS[:1])
    with refuses("validation_fraction=0.01 of the 1 tokens", "none to train on"):
        load(path, context=1)


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
