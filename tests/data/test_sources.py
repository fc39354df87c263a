"""Batches of other libraries: exact where they have random access, else read again."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from typing import NamedTuple

import grain
import jax
import numpy as np
import pytest
from test_dataset import assert_same, grain_pipeline, read_labels

from haiku_template.data import GrainDataset, from_iterator
from haiku_template.data.worker import digests
from haiku_template.errors import ConfigError
from haiku_template.training.feed import Prefetcher
from tests.runs import Probe


class Passes:
    """Counts the passes over five batches, and what was read in each."""

    def __init__(self):
        self.read = []

    def __call__(self):
        self.read.append(0)
        for i in range(5):
            self.read[-1] += 1
            yield {"inputs": np.full((4, 2), i, np.float32), "labels": np.full(4, i)}


# Its name is no array, which only JAX has been told.
@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["name"]
)
@dataclasses.dataclass
class Named:
    name: str
    data: np.ndarray


class Tensor:
    """An array of another library, such as torch: no copy, no sharding."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None):
        return self.array


@contextlib.contextmanager
def logged(caplog, *counts):
    """Expects a line for each time that batches are read past."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        yield
    lines = [record.getMessage() for record in caplog.records]
    assert [int(line.split()[2]) for line in lines] == list(counts), lines


def test_an_iterator_goes_forward_and_begins_again_at_its_end(caplog):
    make = Passes()
    with logged(caplog):
        labels = read_labels(from_iterator(make), 12)
    np.testing.assert_array_equal(labels[::4], [*range(5), *range(5), 0, 1])
    assert make.read == [5, 5, 2]


def test_the_first_batch_of_an_iterator_can_be_asked_for_again_and_again(caplog):
    make = Passes()
    data = from_iterator(make)
    with logged(caplog):
        for _ in range(3):
            data.batch(0)["inputs"][:] = 77
        assert data.batch(0)["inputs"].max() == 0
        assert data.batch(1)["labels"][0] == 1
        assert data.batch(0)["labels"][0] == 0
        assert data.batch(2)["labels"][0] == 2
    assert make.read == [3]


def test_resuming_reads_past_the_batches_before_it_and_says_so(caplog):
    make = Passes()
    data = from_iterator(make)
    data.batch(0)
    with logged(caplog, 11, 3):
        with Prefetcher(data.batch, range(12, 16)) as batches:
            assert [batch["labels"][0] for batch in batches] == [2, 3, 4, 0]
        assert data.batch(3)["labels"][0] == 3
    assert make.read == [5, 5, 5, 1, 4]


def test_two_threads_may_ask_for_batches_and_the_one_ahead_is_not_set_back(caplog):
    """The run's, while the prefetcher reads on, for a batch with a NaN, say."""
    buffer = np.zeros((4, 2))  # Which a generator may share between its passes.

    def make():
        for i in range(40):
            buffer[:] = i
            time.sleep(0.0005)
            yield {"inputs": buffer}

    data = from_iterator(make)
    data.batch(0)
    with logged(caplog, 3, 2, 4), Prefetcher(data.batch, range(1, 40)) as batches:
        for step, batch in enumerate(batches, 1):
            assert set(batch["inputs"].flat) == {step}
            again = {10: 3, 11: 6, 12: 4}.get(step, step)
            if again != step:
                assert set(data.batch(again)["inputs"].flat) == {again}


def test_arrays_of_other_libraries_become_numpy_arrays_of_their_own():
    buffer = np.zeros(4)

    def make():
        for i in range(3):
            buffer[:] = i
            inputs = {"a": Tensor(buffer), "b": (buffer, buffer[:2])}
            yield {"inputs": inputs}

    data = from_iterator(make)
    batches = [data.batch(step)["inputs"] for step in range(3)]
    for i, batch in enumerate(batches):
        for array in (batch["a"], *batch["b"]):
            assert type(array) is np.ndarray and set(array) == {i}


class Images(NamedTuple):
    image: np.ndarray
    kind: np.ndarray


@pytest.mark.parametrize(
    "make", [Images, lambda *x: x, lambda *x: {"a": x}, lambda *x: x[0]]
)
def test_batches_may_be_other_trees_of_arrays(make):
    batch = make(np.ones((4, 2)), np.arange(4))
    dataset = from_iterator(lambda: [batch])
    given = GrainDataset(grain.MapDataset.source([batch])), dataset, dataset
    for found in (each.batch(0) for each in given):
        assert type(found) is type(batch)
        jax.tree.map(np.testing.assert_array_equal, found, batch)


def test_a_generator_without_batches_is_refused():
    with pytest.raises(ConfigError, match="gave no batch"):
        from_iterator(lambda: []).batch(0)
    once = Passes()()
    data = from_iterator(lambda: once)
    with pytest.raises(ConfigError, match="a new iterable at each call"):
        read_labels(data, 6)
    with pytest.raises(ConfigError, match="function .* not a list: write lambda: bef"):
        from_iterator([{"inputs": np.zeros((4, 2))}])
    with pytest.raises(ConfigError, match="generator: give the function that made it"):
        from_iterator(Passes()())


def test_a_list_in_a_batch_is_named():
    batch = {"ids": np.zeros((2, 3)), "label": [0, 1]}
    with pytest.raises(ConfigError, match="and no array of rows at label/0"):
        from_iterator(lambda: [batch]).batch(0)


def test_batches_of_a_generator_that_is_returned_again_are_not_others():
    endless = itertools.cycle(list(Passes()()))
    data = from_iterator(lambda: endless)
    read_labels(data, 4)
    with pytest.raises(ConfigError, match="returned the same cycle again"):
        data.batch(1)


def test_a_grain_pipeline_gives_a_permutation_every_epoch():
    pipeline = grain_pipeline(10).shuffle(seed=1).repeat().batch(4)
    epochs = read_labels(GrainDataset(pipeline), 10).reshape(4, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(10), (4, 1)))
    assert len(np.unique(epochs, axis=0)) > 1


def test_a_grain_batch_depends_on_the_step_alone():
    def make():
        return GrainDataset(grain_pipeline(10).shuffle(seed=1).repeat().batch(4))

    backwards, forwards = make(), make()
    batches = {step: backwards.batch(step) for step in reversed(range(12))}
    for step in range(12):
        assert_same(forwards.batch(step), batches[step])


def test_a_grain_evaluation_set_holds_every_example_once():
    dataset = GrainDataset(grain_pipeline(10).batch(4))
    assert dataset.num_batches == 3
    np.testing.assert_array_equal(read_labels(dataset, 3), np.arange(10))


@pytest.mark.parametrize(
    "pipeline",
    [
        grain.MapDataset.source([]),
        grain.MapDataset.source([]).repeat().batch(4),
        grain_pipeline(3).batch(4, drop_remainder=True),
    ],
    ids=["no examples", "repeated", "less than one batch"],
)
def test_an_empty_grain_pipeline_is_refused(pipeline):
    with pytest.raises(ConfigError, match="no elements"):
        GrainDataset(pipeline)


@pytest.mark.parametrize(
    ("element", "found"),
    [
        ((np.zeros(2), 1), "tuple"),
        ({"labels": np.zeros(2)}, r"\['labels'\]"),
        ({"image": np.zeros(2), "label": 1}, r"\['image', 'label'\]"),
    ],
)
def test_elements_that_are_no_batches_are_refused(element, found):
    words = f"inputs and labels.* is {found}"
    with pytest.raises(ConfigError, match=words):
        GrainDataset(grain.MapDataset.source([element]))
    with pytest.raises(ConfigError, match=words):
        from_iterator(lambda: [element]).batch(0)


def test_grain_batches_without_labels_are_batches():
    source = grain.MapDataset.source([{"inputs": np.zeros(2)}])
    assert GrainDataset(source).batch(0).keys() == {"inputs"}


def test_a_loader_that_is_returned_again_is_iterated_once_an_epoch():
    class Loader:
        epoch = -1

        def __iter__(self):
            self.epoch += 1
            return iter([{"inputs": np.full(2, 10 * self.epoch + i)} for i in range(2)])

    loader = Loader()
    data = from_iterator(lambda: loader)
    numbers = [int(data.batch(step)["inputs"][0]) for step in range(6)]
    assert numbers == [0, 1, 10, 11, 20, 21]


@pytest.mark.parametrize("kind", [Probe, Named])
def test_what_jax_alone_knows_as_a_tree_is_a_batch(kind):
    buffer = np.zeros((4, 2), np.float32)

    def make():
        for i in range(3):
            buffer[:] = i
            yield {"inputs": [kind("pos", buffer)]}

    dataset = from_iterator(make)
    read = [dataset.batch(step)["inputs"][0] for step in (0, 1, 2, 0)]
    assert [x.name for x in read] == ["pos"] * 4
    assert [x.data.max() for x in read] == [0, 1, 2, 0]
    bits = [[*digests({"inputs": [x]}).values()] for x in read]  # Workers compare them.
    assert bits[0] == bits[3] and bits[0] != bits[1]
