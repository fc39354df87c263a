"""Data sets in memory: what batches hold, and that they are functions of the step."""

import gc
import re
import weakref

import grain
import numpy as np
import pytest

from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    EvaluationSet,
    GrainDataset,
    bucketed,
)
from haiku_template.data.staging import RowBlocks
from haiku_template.errors import ConfigError

# (examples, batch size): divides, does not, is larger, is the set, one example.
SIZES = [(12, 4), (10, 4), (7, 3), (5, 12), (5, 5), (1, 4)]


def numbered(count):
    """Examples that carry their number in the inputs [N, 2] and in the label [N]."""
    labels = np.arange(count, dtype=np.int32)
    return np.stack([labels, -labels], axis=1).astype(np.float32), labels


def add_noise(inputs, rng):
    return inputs + rng.random(inputs.shape)


def training_set(inputs, labels, batch_size, *, augment=None, **spec):
    return ArrayDataset(inputs, labels, BatchSpec(batch_size, **spec), augment)


def array_dataset(count, batch_size, **options):
    return training_set(*numbered(count), batch_size, **options)


def grain_pipeline(count):
    inputs, labels = numbered(count)
    examples = [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]
    return grain.MapDataset.source(examples)


def assert_same(batch, other):
    assert batch.keys() == other.keys() == {"inputs", "labels"}
    for name in batch:
        np.testing.assert_array_equal(batch[name], other[name])


def read_labels(dataset, steps):
    return np.concatenate([dataset.batch(step)["labels"] for step in range(steps)])


@pytest.mark.parametrize("augment", [None, add_noise])
def test_a_batch_depends_on_seed_and_step_alone(augment):
    steps = np.random.default_rng(0).permutation(40)
    forwards = array_dataset(10, 4, seed=3, augment=augment)
    at_random = array_dataset(10, 4, seed=3, augment=augment)
    batches = {step: at_random.batch(step) for step in steps}
    for step in sorted(steps):
        assert_same(forwards.batch(step), batches[step])


@pytest.mark.parametrize(
    "dataset",
    [
        array_dataset(10, 4),
        array_dataset(10, 5, augment=lambda inputs, rng: inputs),
        array_dataset(4, 4, process_count=2),
        EvaluationSet(*numbered(10), 4),
        GrainDataset(grain_pipeline(10).batch(4)),
    ],
    ids=["array", "augmented", "shared", "evaluation", "grain"],
)
def test_writing_into_a_batch_changes_no_other_batch(dataset):
    expected = [dataset.batch(step) for step in range(3)]
    expected = [{k: v.copy() for k, v in batch.items()} for batch in expected]
    for step in range(3):
        for array in dataset.batch(step).values():
            array[:] = 77
    for step in range(3):
        assert_same(dataset.batch(step), expected[step])


@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_every_epoch_is_a_permutation(count, batch_size):
    epochs = 5
    dataset = array_dataset(count, batch_size)
    labels = read_labels(dataset, -(-epochs * count // batch_size))
    for epoch in labels[: epochs * count].reshape(epochs, count):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(count))


@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_every_batch_is_full_and_labels_stay_with_their_inputs(count, batch_size):
    dataset = array_dataset(count, batch_size)
    inputs, labels = numbered(count)
    for step in range(10):
        batch = dataset.batch(step)
        assert batch["labels"].shape == (batch_size,)
        np.testing.assert_array_equal(batch["inputs"], inputs[batch["labels"]])
        assert batch["inputs"].dtype == inputs.dtype
        assert batch["labels"].dtype == labels.dtype


def test_epochs_differ_in_order():
    epochs = read_labels(array_dataset(20, 20), 5).reshape(5, 20)
    assert len(np.unique(epochs, axis=0)) == 5


def test_another_seed_gives_another_order():
    orders = [read_labels(array_dataset(20, 20, seed=seed), 1) for seed in range(5)]
    assert len(np.unique(orders, axis=0)) == 5


def test_augmentation_differs_between_steps_and_between_seeds():
    drawn = [
        array_dataset(1, 1, seed=seed, augment=add_noise).batch(step)["inputs"][0, 0]
        for seed in range(3)
        for step in range(3)
    ]
    assert len(set(drawn)) == 9


@pytest.mark.parametrize("augment", [None, add_noise])
@pytest.mark.parametrize("processes", [2, 4])
def test_shares_of_processes_make_up_the_batch_of_one(processes, augment):
    whole = array_dataset(10, 8, augment=augment)
    shares = [
        array_dataset(10, 8, augment=augment, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    for step in range(5):
        parts = [share.batch(step) for share in shares]
        assert {len(part["labels"]) for part in parts} == {8 // processes}
        joined = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        assert_same(joined, whole.batch(step))


@pytest.mark.parametrize(("count", "batch_size"), SIZES)
def test_an_evaluation_set_holds_every_example_once_in_order(count, batch_size):
    dataset = EvaluationSet(*numbered(count), batch_size)
    batches = [dataset.batch(i) for i in range(dataset.num_batches)]
    joined = {k: np.concatenate([batch[k] for batch in batches]) for k in batches[0]}
    assert_same(joined, dict(zip(("inputs", "labels"), numbered(count), strict=True)))
    assert all(len(batch["labels"]) == batch_size for batch in batches[:-1])
    assert len(batches[-1]["labels"]) == (count % batch_size or batch_size)


def test_without_labels_batches_hold_inputs_alone():
    inputs = numbered(10)[0]
    train, evaluation = training_set(inputs, None, 4), EvaluationSet(inputs, None, 4)
    assert train.staged_size == (10, inputs.nbytes)
    augmented = training_set(inputs, None, 4, augment=add_noise)
    for dataset in (train, evaluation, augmented):
        for step in range(3):
            assert dataset.batch(step).keys() == {"inputs"}
    expected = array_dataset(10, 4).batch(7)["inputs"]
    np.testing.assert_array_equal(train.batch(7)["inputs"], expected)
    np.testing.assert_array_equal(evaluation.batch(2)["inputs"], inputs[8:])


@pytest.mark.parametrize("make", [training_set, EvaluationSet])
def test_an_empty_set_is_refused_with_its_shapes(make):
    words = re.escape("inputs [0, 2] and labels [0]")
    with pytest.raises(ConfigError, match=words):
        make(*numbered(0), 4)


@pytest.mark.parametrize("make", [training_set, EvaluationSet])
def test_unequal_lengths_are_refused_with_both(make):
    with pytest.raises(ConfigError, match="5 inputs and 3 labels"):
        make(numbered(5)[0], numbered(3)[1], 2)
    inputs = {name: numbered(4 if name == "d" else 5)[0] for name in "abcdefg"}
    with pytest.raises(ConfigError, match="5 inputs/a and 4 inputs/d; each array has"):
        make(inputs, None, 2)


@pytest.mark.parametrize("size", [0, -1, 8.0, "8"])
def test_what_is_no_number_of_rows_is_refused(size):
    examples = [{"inputs": np.ones((3, 2), np.float32)}] * 9
    for make in (
        lambda: EvaluationSet(*numbered(5), size),
        lambda: bucketed(examples, BatchSpec(size), (4,)),
    ):
        with pytest.raises(ConfigError, match=f"a batch of {size!r} examples cannot"):
            make()


def test_a_batch_that_processes_cannot_share_is_refused_with_the_figures():
    with pytest.raises(ConfigError, match="batch of 10 .* by 4 processes"):
        array_dataset(20, 10, process_count=4)


def in_buckets():
    examples = [{"inputs": np.ones((n, 2), np.float32)} for n in (3, 4, 4)]
    return bucketed(examples, BatchSpec(2), (4,)).train


@pytest.mark.parametrize(
    "make", [in_buckets, lambda: RowBlocks(array_dataset(10, 4), 4)]
)
def test_a_data_set_is_not_held_after_its_run(make):
    dataset = make()
    dataset.batch(0)
    held = weakref.ref(getattr(dataset, "dataset", dataset))
    del dataset
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("steps", [1, 7, 50])
@pytest.mark.parametrize(("size", "batch_size"), SIZES)
def test_a_block_has_the_rows_of_each_step(size, batch_size, steps, processes):
    for process in range(processes):
        share = {"process_index": process, "process_count": processes}
        if batch_size % processes:
            continue
        dataset = array_dataset(size, batch_size, **share)
        for index in (0, 3):
            expected = [dataset.rows(index * steps + n) for n in range(steps)]
            found = dataset.row_block(index, steps)
            np.testing.assert_array_equal(found, np.stack(expected, axis=1))
