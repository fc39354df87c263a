"""Data sets by name: what they hold, and which labels they refuse."""

import functools
import importlib.util
import re

import numpy as np
import pytest

from haiku_template.data import (
    DATASETS,
    ArrayDataset,
    BatchSpec,
    EvaluationSet,
    Split,
    digits,
    from_split,
    images,
)
from haiku_template.errors import ConfigError


def read(dataset, steps):
    """The first `steps` batches, joined: inputs, labels."""
    batches = [dataset.batch(step) for step in range(steps)]
    return [np.concatenate([b[name] for b in batches]) for name in ("inputs", "labels")]


def read_all(data):
    """Each training example once, then each evaluation example once."""
    steps = len(data.train.labels)
    return read(data.train, steps), read(data.evaluation, data.evaluation.num_batches)


def examples(inputs, labels):
    """Examples in an order of their own: list of (bytes, label)."""
    return sorted((x.tobytes(), int(y)) for x, y in zip(inputs, labels, strict=True))


def split_of(y_train, y_test=(0, 1)):
    y_train, y_test = np.array(y_train), np.array(y_test)
    return Split(
        np.zeros((len(y_train), 3), np.float32),
        y_train,
        np.zeros((len(y_test), 3), np.float32),
        y_test,
    )


def test_digits_are_split_without_loss_or_overlap():
    from sklearn.datasets import load_digits

    data = digits(BatchSpec(1))
    train, test = read_all(data)
    assert (len(train[1]), len(test[1])) == (1437, 360)
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32)
    together = [np.concatenate(parts) for parts in zip(train, test, strict=True)]
    assert examples(*together) == examples(pixels, labels)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        digits(BatchSpec(1))


def test_digits_are_float32_images_from_0_to_1_of_ten_classes():
    data = digits(BatchSpec(1))
    for inputs, labels in read_all(data):
        assert inputs.shape[1:] == (8, 8, 1)
        assert inputs.dtype == np.float32
        assert (inputs.min(), inputs.max()) == (0, 1)
        assert labels.dtype == np.int32
        assert set(labels) == set(range(10))
    assert data.num_outputs == 10


def test_digits_are_split_alike_for_every_seed():
    tests = [read(digits(BatchSpec(360, seed=seed)).evaluation, 1) for seed in range(2)]
    np.testing.assert_array_equal(tests[0][0], tests[1][0])
    np.testing.assert_array_equal(tests[0][1], tests[1][1])


@pytest.mark.parametrize("num_classes", [None, 4])
def test_the_first_label_outside_the_classes_is_named(num_classes):
    # Without num_classes, the training labels show that there are four.
    split = split_of([0, 1, 2, 3], [0, 3, 5, 1, -1])
    words = (
        "the test part of FILE has 2 labels outside the 4 classes (0 to 3); the "
        "first is 5, of example 2"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        from_split(split, BatchSpec(2), num_classes=num_classes, where="FILE")


@pytest.mark.parametrize("num_classes", [0, -1, 3.5, "3", True])
def test_no_number_of_classes_is_refused(num_classes):
    words = re.escape(f"num_classes={num_classes!r} for the training part of FILE;")
    with pytest.raises(ConfigError, match=words):
        from_split(split_of([0]), BatchSpec(2), num_classes=num_classes, where="FILE")


def test_a_number_of_classes_where_labels_are_none_is_refused():
    spec = BatchSpec(2, labels="numbers")
    with pytest.raises(ConfigError, match="num_classes=7, and the labels of FILE are"):
        from_split(split_of([0, 1]), spec, num_classes=7, where="FILE")


def test_training_labels_outside_the_classes_are_refused():
    words = (
        "the training part of FILE has 3 labels outside the 2 classes (0 to 1); the "
        "first is -7, of example 1"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        split = split_of([0, -7, 2, 1, 3])
        from_split(split, BatchSpec(2), num_classes=2, where="FILE")


@pytest.mark.parametrize("num_classes", [None, 2])
@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([0.0, 1.0], "float64 and shape [2]"),
        ([[1, 0], [0, 1]], "int64 and shape [2, 2]"),
        ([False, True], "bool and shape [2]"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(labels, found, num_classes):
    with pytest.raises(ConfigError, match=re.escape(found)):
        from_split(split_of(labels, labels), BatchSpec(2), num_classes=num_classes)
    if np.ndim(labels) == 1:
        with pytest.raises(ConfigError, match=re.escape(found)):
            from_split(split_of([0, 1], labels), BatchSpec(2), num_classes=num_classes)


@pytest.mark.parametrize(
    ("labels", "num_outputs"), [([0, 2, 1], 3), ([0, 0], 1), ([9, 0], 10)]
)
def test_classes_are_as_many_as_the_training_labels_show(labels, num_outputs):
    data = from_split(split_of(labels, [0]), BatchSpec(2))
    assert data.num_outputs == num_outputs


@pytest.mark.parametrize(
    ("shape", "num_outputs"), [((5,), 1), ((5, 1), 1), ((5, 3), 3), ((5, 2, 3), 6)]
)
def test_regression_has_an_output_for_each_target(shape, num_outputs):
    labels = np.linspace(-1.5, 7, np.prod(shape)).reshape(shape)
    data = from_split(split_of(labels, labels), BatchSpec(2, labels="numbers"))
    assert data.num_outputs == num_outputs
    np.testing.assert_array_equal(read(data.evaluation, 3)[1], labels)


def test_training_and_test_inputs_of_two_shapes_are_refused_with_both():
    split = split_of([0, 1])._replace(x_test=np.zeros((2, 4, 5)))
    with pytest.raises(
        ConfigError, match=re.escape("FILE has shape [3] and")
    ) as raised:
        from_split(split, BatchSpec(2), where="FILE")
    assert "[4, 5]" in str(raised.value)


def test_a_split_without_labels_is_for_tasks_that_take_any():
    x = np.zeros((6, 3, 2), np.float32)
    data = from_split(Split(x, None, x[:2], None), BatchSpec(2, labels="any"))
    assert data.num_outputs == 6
    assert data.train.batch(0).keys() == data.evaluation.batch(0).keys() == {"inputs"}
    for kind in ("classes", "numbers", "tokens"):
        words = f"training part of FILE has no labels, and the task needs {kind}"
        with pytest.raises(ConfigError, match=words):
            split = Split(x, None, x, None)
            from_split(split, BatchSpec(2, labels=kind), where="FILE")


@pytest.mark.parametrize(
    ("shape", "dtype"), [((8, 8), np.int32), ((5,), np.uint8), ((5,), bool), ((), bool)]
)
def test_labels_of_a_task_that_takes_any_may_be_maps_and_flags(shape, dtype):
    labels = np.ones((6, *shape), dtype)
    inputs = np.zeros((6, 3), np.float32)
    split = Split(inputs[:4], labels[:4], inputs[4:], labels[4:])
    data = from_split(split, BatchSpec(2, labels="any"))
    assert data.num_outputs == np.prod(shape, dtype=int)
    np.testing.assert_array_equal(data.train.batch(0)["labels"], labels[:2])


@pytest.mark.parametrize("label", [-1, 10**9])
def test_whole_numbers_of_a_task_that_takes_any_are_classes_or_are_said_to_be_none(
    label,
):
    labels, inputs = np.full(6, label), np.zeros((6, 3), np.float32)
    split = Split(inputs[:4], labels[:4], inputs[4:], labels[4:])
    with pytest.raises(ConfigError, match='no classes: Task.*labels="numbers"'):
        from_split(split, BatchSpec(2, labels="any"))
    assert from_split(split, BatchSpec(2, labels="numbers")).num_outputs == 1


@pytest.mark.parametrize("missing", ["y_train", "y_test"])
def test_a_split_with_labels_in_one_part_is_refused(missing):
    split = split_of([0, 1])._replace(**{missing: None})
    with pytest.raises(ConfigError, match="one part of FILE has labels; give both"):
        from_split(split, BatchSpec(2, labels="any"), where="FILE")


@pytest.mark.parametrize("part", ["x_train", "x_test"])
def test_a_split_with_an_empty_part_is_refused(part):
    y = "y" + part[1:]
    split = split_of([0, 1])._replace(**{part: np.zeros((0, 3)), y: np.zeros(0, int)})
    with pytest.raises(ConfigError, match=re.escape("inputs [0, 3]")):
        from_split(split, BatchSpec(2))


@pytest.mark.parametrize(
    "examples", [{"dna": ["ACGT"] * 4}, [1, 2]], ids=["a tree", "a list"]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: ArrayDataset(x, None, BatchSpec(2)),
        lambda x: EvaluationSet(x, None, 2),
        lambda x: from_split(Split(x, None, x, None), BatchSpec(2, labels="any")),
    ],
    ids=["training", "evaluation", "both"],
)
def test_what_is_no_array_is_told_where_trees_come_from(make, examples):
    words = "is a (str|int), and an array is needed; .*`bucketed`"
    with pytest.raises(ConfigError, match=f"inputs/.* of the .*{words}"):
        make(examples)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_read_and_scaled(tmp_path, write_mnist, suffix):
    arrays = write_mnist(suffix=suffix)
    spec = BatchSpec(1, labels="numbers")
    assert DATASETS["mnist"](spec, path=str(tmp_path)).num_outputs == 1
    data = DATASETS["mnist"](BatchSpec(1), path=str(tmp_path))
    train, test = read_all(data)
    assert examples(*train) == examples(arrays["x_train"], arrays["y_train"])
    assert examples(*test) == examples(arrays["x_test"], arrays["y_test"])
    assert data.num_outputs == 10
    # Bytes travel to the device and are scaled there.
    assert test[0].dtype == np.uint8
    expected = arrays["x_test"][..., None] / 255
    np.testing.assert_allclose(data.preprocess(test[0]), expected, rtol=1e-6)


def test_bytes_of_a_user_are_not_scaled_unless_asked_for(tmp_path):
    """A model may divide them itself, and one-hot letters are no pixels."""
    inputs, labels = np.arange(8, dtype=np.uint8).reshape(4, 2), np.arange(4)
    parts = Split(inputs, labels, inputs, labels)
    np.savez(tmp_path / "a.npz", **parts._asdict())
    read = functools.partial(DATASETS["npz"], BatchSpec(2), path=tmp_path / "a.npz")
    for data in (from_split(parts, BatchSpec(2)), read()):
        np.testing.assert_array_equal(data.preprocess(inputs), inputs)
    scaled = read(scale_pixels=True).preprocess(inputs)
    np.testing.assert_allclose(scaled, inputs / 255, rtol=1e-6)


@pytest.mark.parametrize("other", [np.float32, np.int32, np.float64])
def test_inputs_of_two_dtypes_are_refused(other):
    inputs, labels = np.ones((4, 2), np.uint8), np.zeros(4, np.int32)
    split = Split(inputs, labels, inputs.astype(other), labels)
    name = np.dtype(other).name
    with pytest.raises(
        ConfigError, match=f"training part .* uint8 .* test part {name}"
    ):
        from_split(split, BatchSpec(2))


def test_cifar10_is_read_and_standardized(tmp_path, write_cifar10):
    arrays = write_cifar10()
    data = DATASETS["cifar10"](BatchSpec(1), path=str(tmp_path))
    train, test = read_all(data)
    assert examples(*train) == examples(arrays["x_train"], arrays["y_train"])
    assert examples(*test) == examples(arrays["x_test"], arrays["y_test"])
    assert data.num_outputs == 10
    assert test[0].dtype == np.uint8
    expected = (arrays["x_test"] / 255 - images.CIFAR10_MEAN) / images.CIFAR10_STD
    np.testing.assert_allclose(data.preprocess(test[0]), expected, atol=1e-5)


def test_crop_and_flip_changes_training_images_alone(tmp_path, write_cifar10):
    write_cifar10()
    plain, augmented = (
        DATASETS["cifar10"](BatchSpec(15), path=str(tmp_path), crop_and_flip=on)
        for on in (False, True)
    )
    for a, b in zip(read_all(plain)[1], read_all(augmented)[1], strict=True):
        np.testing.assert_array_equal(a, b)
    (a, labels), (b, same_labels) = read(plain.train, 1), read(augmented.train, 1)
    np.testing.assert_array_equal(labels, same_labels)
    assert np.any(a != b)


@pytest.mark.parametrize("name", ["npz", "npy"])
def test_array_files_are_read_for_either_task(tmp_path, name):
    split = split_of([0, 3, 1])._asdict()
    np.savez(tmp_path / "a.npz", **split)
    for part, array in split.items():
        np.save(tmp_path / f"{part}.npy", array)
    path = str(tmp_path / "a.npz" if name == "npz" else tmp_path)
    for labels, num_outputs in {"classes": 4, "numbers": 1}.items():
        data = DATASETS[name](BatchSpec(1, labels=labels), path=path)
        assert data.num_outputs == num_outputs
        assert examples(*read_all(data)[0]) == examples(
            split["x_train"], split["y_train"]
        )
    assert DATASETS[name](BatchSpec(1), path=path, num_classes=7).num_outputs == 7
    with pytest.raises(ConfigError, match=f"training part of {re.escape(path)}"):
        DATASETS[name](BatchSpec(1), path=path, num_classes=3)


@pytest.mark.parametrize("path", [None, ""])
@pytest.mark.parametrize("name", ["npz", "npy", "mnist", "cifar10"])
def test_a_missing_path_is_asked_for_by_its_flag(name, path):
    with pytest.raises(ConfigError, match=f"{name} needs .*--config.data.path=PATH"):
        DATASETS[name](BatchSpec(1), path=path)


@pytest.mark.parametrize("name", ["npz", "npy", "mnist", "cifar10"])
def test_a_path_where_nothing_is_is_named(tmp_path, name):
    path = tmp_path / "nowhere" / "a"
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*does not exist"):
        DATASETS[name](BatchSpec(1), path=str(path))


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "a.npz", **split_of([0, 1])._asdict())
    assert DATASETS["npz"](BatchSpec(1), path="~/a.npz").num_outputs == 2
