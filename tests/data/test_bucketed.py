"""Trees of arrays of different lengths, in batches of few lengths."""

from typing import NamedTuple

import numpy as np
import pytest

from haiku_template.data import BatchSpec, bucketed, each_shape
from haiku_template.errors import ConfigError

SIZES = (4, 8, 16)


class Structure(NamedTuple):
    """Not a dictionary, as a user's own class of batches may be."""

    places: np.ndarray
    score: float


def examples(count, longest=16, seed=0):
    """Arrays of 1 to `longest` rows, all of one example with its number from 1 on."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        length = int(rng.integers(1, longest + 1))
        features = np.full((length, 3), i, np.float32)
        kinds = {"kind": np.full(length, i, np.int32)}
        yield {"features": features, "more": kinds, "score": np.float32(i)}


def numbers(batch):
    return batch["score"].astype(int).tolist()


def test_each_batch_has_the_least_length_that_holds_its_examples():
    made = list(examples(50))
    lengths = {int(x["score"]): len(x["features"]) for x in made}
    data = bucketed(made, BatchSpec(8), SIZES, mask="mask")
    seen = set()
    for step in range(18):
        batch = data.train.batch(step)
        rows, length, _ = batch["features"].shape
        assert rows == 8
        longest = max(lengths[i] for i in numbers(batch))
        assert length == min(size for size in SIZES if size >= longest)
        for row, i in enumerate(numbers(batch)):
            inside = np.arange(length) < lengths[i]
            np.testing.assert_array_equal(batch["mask"][row], inside)
            np.testing.assert_array_equal(batch["more"]["kind"][row], inside * i)
            np.testing.assert_array_equal(batch["features"][row, :, 2], inside * i)
        seen.add(length)
    assert seen == set(SIZES)
    told = [batch["features"].shape for batch in each_shape(data.train)]
    assert told == [(8, n, 3) for n in reversed(SIZES)]


@pytest.mark.parametrize(("length", "shapes"), [(4, [8, 4]), (6, [8])])
def test_a_length_that_holds_no_example_is_of_no_batch(length, shapes):
    data = bucketed([np.ones((length, 1))] * 3, BatchSpec(2), (4, 8))
    assert [x.shape[1] for x in each_shape(data.train)] == shapes


def test_a_batch_depends_on_the_step_alone_and_no_example_is_dropped():
    def train():
        return bucketed(list(examples(24)), BatchSpec(8, seed=3), SIZES).train

    forwards, backwards = train(), train()
    batches = {step: backwards.batch(step) for step in reversed(range(9))}
    seen = []
    for step in range(9):
        batch = forwards.batch(step)
        np.testing.assert_array_equal(batch["features"], batches[step]["features"])
        seen += numbers(batch)
    assert np.bincount(seen)[1:].tolist() == [3] * 24
    assert "mask" not in batch


def test_processes_share_a_batch_of_one_length():
    made = list(examples(30))
    whole = bucketed(made, BatchSpec(8), SIZES).train
    shares = [
        bucketed(made, BatchSpec(8, 0, "any", i, 2), SIZES).train for i in range(2)
    ]
    for step in range(6):
        parts = [share.batch(step)["features"] for share in shares]
        np.testing.assert_array_equal(
            np.concatenate(parts), whole.batch(step)["features"]
        )


def test_every_example_is_evaluated_once_short_ones_first():
    made = list(examples(21))
    held_out = bucketed(made, BatchSpec(4), SIZES, evaluation=made).evaluation
    batches = [held_out.batch(i) for i in range(held_out.num_batches)]
    assert sorted(sum(map(numbers, batches), [])) == list(range(1, 22))
    lengths = [batch["features"].shape[1] for batch in batches]
    assert lengths == sorted(lengths) and len(set(lengths)) > 1
    assert [len(batch["score"]) for batch in batches] == [4] * 5 + [1]
    told = [batch["features"].shape for batch in each_shape(held_out)]
    assert told == [(4, n, 3) for n in sorted(set(lengths), reverse=True)]


def test_any_tree_of_arrays_is_an_example():
    made = [Structure(np.arange(n + 1), 0.5 * n) for n in range(3)]
    batch = bucketed(made, BatchSpec(3), (4,)).train.batch(0)
    assert type(batch) is Structure
    assert batch.places.shape == (3, 4) and sorted(batch.score) == [0, 0.5, 1]
    alone = bucketed([np.ones((2, 5))], BatchSpec(2), (3,)).train.batch(0)
    assert alone.shape == (2, 3, 5) and alone.sum() == 20


A = {"a": np.ones((2, 3)), "b": np.ones(2)}


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, "no examples to train on"),
        ([A], {"sizes": ()}, "sizes=.*that rise"),
        ([A], {"sizes": (8, 4)}, r"sizes=\(8, 4\).*that rise"),
        ([A], {"sizes": (0, 4)}, "lengths of 1 or more"),
        ([A], {"sizes": (1,)}, "example 0 has length 2, .* largest of sizes is 1"),
        ([A, A | {"a": np.ones((2, 4))}], {}, r"^a of example 1 is float64\[L, 4\]"),
        ([A, {"a": A["a"]}], {}, "b of example 1 is not there"),
        ([A, A | {"c": 1}], {}, "c of example 1 is int64.*example 0 not there"),
        ([A, A | {"b": "no"}], {}, "b of example 1 is of type str"),
        ([A, A | {"b": np.ones(3)}], {}, r"example 1 have the lengths .*'b': 3"),
        ([{"a": np.ones((0, 3))}], {}, "one length of 1 or more"),
        ([{"a": np.float32(1)}], {}, r"example 0 has no array \[L, ...\] but a; "),
        ([{"a": [1, 2]}], {}, "but a/0, a/1; np.asarray makes one of a list"),
        ([A], {"mask": "b"}, "mask='b' is an array of the examples already"),
        ([np.ones(2)], {"mask": "b"}, "dictionary, and example 0 is a ndarray"),
        ([A], {"evaluation": [{"a": np.ones((9, 3))}]}, "evaluation example 0 has len"),
        ([A], {"evaluation": 5}, "evaluation examples are a int; possible is a list"),
        ([A], {"sizes": 64}, "sizes=64.*that rise"),
        ([A], {"sizes": "ab"}, "sizes=ab.*that rise"),
        ([A], {"sizes": (4.5, 8)}, r"sizes=\(4.5, 8\).*that rise"),
        (iter([A]), {}, "examples are a list_iterator; possible is a list"),
        ({"a": np.ones((4, 3))}, {}, "examples are a dict; possible is a list"),
    ],
)
def test_examples_that_do_not_fit_are_refused_by_name(given, options, words):
    with pytest.raises(ConfigError, match=words):
        bucketed(given, BatchSpec(2), **{"sizes": (4, 8)} | options)


def test_an_array_is_as_good_as_a_list_of_its_rows():
    rows, sizes = np.arange(24.0).reshape(4, 3, 2), np.array([4, 8])
    batches = [
        bucketed(made, BatchSpec(2), sizes, evaluation=made).evaluation.batch(0)
        for made in (rows, list(rows))
    ]
    np.testing.assert_array_equal(*batches)
