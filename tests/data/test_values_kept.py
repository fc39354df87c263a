"""New examples keep their values, and their rows, or are refused in a sentence."""

import numpy as np
import optax
import pytest

from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    from_split,
)
from haiku_template.data.examples import read_examples
from haiku_template.errors import ConfigError
from haiku_template.models import mlp
from haiku_template.runs import train
from haiku_template.training import Experiment, classification


def data(dtype, label_dtype=np.int32):
    inputs, labels = np.ones((8, 3), dtype), (np.arange(8) % 3).astype(label_dtype)
    rows = ArrayDataset(inputs, labels, BatchSpec(4))
    return Data(rows, EvaluationSet(inputs, labels, 4), 3)


@pytest.mark.parametrize(
    ("value", "dtype", "run_dtype"),
    [
        (300, "uint16", "uint8"),
        (300, "uint32", "uint8"),
        (200, "uint8", "int8"),
        (2**32 + 5, "int64", "int32"),
        (2**31 + 1, "uint32", "int32"),
        (300, "int64", "uint8"),
        (-1, "int32", "uint8"),
        (1e300, "float64", "float32"),
        (1e5, "float32", "float16"),
    ],
)
def test_a_value_that_would_be_another_is_refused(tmp_path, value, dtype, run_dtype):
    path = tmp_path / "new.npy"
    for new in (np.array([[1, 2, value]], dtype), np.array([[1, 2, 3]], dtype)):
        np.save(path, new)
        if new[0, 2] == 3:
            read = read_examples(str(path), data(run_dtype), 4).dataset.batch(0)[
                "inputs"
            ]
            np.testing.assert_array_equal(read, np.array([[1, 2, 3]], run_dtype))
        else:
            with pytest.raises(ConfigError, match="in which it would be other values"):
                read_examples(str(path), data(run_dtype), 4)


def test_a_mapped_file_of_the_runs_dtype_is_not_read_as_a_whole(tmp_path):
    path = tmp_path / "new.npy"
    np.save(path, np.ones((4, 3), np.float32))
    arrays = read_examples(str(path), data("float32"), 4).dataset.arrays["inputs"]
    while not isinstance(arrays, np.memmap) and arrays.base is not None:
        arrays = arrays.base
    assert isinstance(arrays, np.memmap)


@pytest.mark.parametrize("text", ["0.5,,0.25\n1,2,3\n", "NA,-1,2\n1,2,3\n"])
def test_a_first_row_with_a_gap_is_no_header(tmp_path, text):
    path = tmp_path / "gap.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1 is neither names of columns nor one"):
        read_examples(str(path), data("float32"), 4)


@pytest.mark.parametrize(("dtype", "count"), [("int8", 128), ("uint8", 256)])
def test_labels_of_one_byte_may_be_of_as_many_classes(
    tmp_path, one_device, dtype, count
):
    labels = np.arange(count).astype(dtype)
    inputs = np.ones((count, 4), np.float32)
    trainer = Experiment(
        model=mlp(count, width=4),
        task=classification,
        data=from_split(Split(inputs, labels, inputs[:9], labels[:9]), BatchSpec(8)),
        optimizer=optax.sgd(0.1),
    ).trainer(one_device)
    result = train(trainer, num_steps=2, workdir=tmp_path)
    assert 0 <= result.metrics["eval/accuracy"] <= 1


@pytest.mark.parametrize("placement", ["host", "device"])
def test_numbers_of_another_byte_order_are_the_same(one_device, placement):
    losses = []
    for inputs, labels in ((">f4", ">i4"), ("<f4", "<i4")):
        trainer = Experiment(
            model=mlp(3, width=4),
            task=classification,
            data=data(inputs, labels),
            optimizer=optax.sgd(0.1),
            placement=placement,
        ).trainer(one_device)
        with trainer.batches(0, 1) as batches:
            _, scalars = trainer.step(trainer.init(), next(batches))
        losses.append(float(scalars["loss"]))
    assert losses[0] == losses[1]
