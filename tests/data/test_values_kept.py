"""New examples keep their values, and their rows, or are refused in a sentence."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from PIL import Image

from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    from_split,
)
from haiku_template.data.examples import as_dataset, read_examples
from haiku_template.errors import ConfigError
from haiku_template.models import mlp
from haiku_template.runs import Run, train
from haiku_template.runs.predictions import print_predictions, write_predictions
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
    with pytest.raises(
        ConfigError, match="the first line is neither names of columns nor one"
    ):
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


def table(folder, text, like, name="new.csv"):
    (folder / name).write_text(text)
    return read_examples(str(folder / name), like, 4).dataset.arrays


NAMED = data("float32")._replace(class_names=("1", "2", "3"))
FOLDED = "f,g,h,label\n1,2,3,%s\n4,5,6,3\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,1,2\n5,6,7\n", "may be an example, or names that pandas gave"),
        ("5,NA,3\n1,2,3\n", "the first line is neither names of columns nor one"),
        ('a,b,c\n1,2,"3\n"\n\n1,2,x\n', "line 5 of .* is not one number in each"),
        ("a,b,c\n", "it has no rows"),
        ("x,z,y\n1,2,3\n", r"2 columns of inputs \(x, z\), .*; y is its column of lab"),
    ],
)
def test_a_table_with_a_doubtful_line_is_refused(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        table(tmp_path, text, data("float32"))


@pytest.mark.parametrize("cell", ["1", "1.0", " 1 "])
def test_a_number_that_is_the_name_of_a_class_is_that_class(tmp_path, cell):
    assert table(tmp_path, FOLDED % cell, NAMED)["labels"].tolist() == [0, 2]
    with pytest.raises(ConfigError, match="has the label '0', and the classes of the"):
        table(tmp_path, FOLDED % 0, NAMED)


@pytest.mark.parametrize(
    ("names", "unclear"), [(("01", "1", "3"), "1.0"), (("true", "1", "3"), "TRUE")]
)
def test_names_that_are_one_number_are_two_classes(tmp_path, names, unclear):
    like = NAMED._replace(class_names=names)
    for i, name in enumerate(names):
        assert table(tmp_path, FOLDED % name, like)["labels"].tolist() == [i, 2]
    with pytest.raises(ConfigError, match=f"has the label '{unclear}', and the classe"):
        table(tmp_path, FOLDED % unclear, like)


NUMBER = np.ones((4, 1), np.float32)


@pytest.mark.parametrize(
    "batch",
    [{"x": NUMBER, "y": 2 * NUMBER}, {"inputs": {"x": NUMBER, "y_train": NUMBER}}],
)
def test_a_run_s_own_names_stand_in_a_file(tmp_path, batch):
    like = Data(SimpleNamespace(batch=lambda step: batch), None, 1)
    np.savez(tmp_path / "new.npz", **batch.get("inputs", batch))
    rows = read_examples(str(tmp_path / "new.npz"), like, 4).dataset.batch(0)
    jax.tree.map(np.testing.assert_array_equal, rows, batch)


def test_a_file_of_what_was_trained_on_alone_is_refused(tmp_path):
    np.savez(tmp_path / "new.npz", x_train=NUMBER, y_train=NUMBER)
    with pytest.raises(ConfigError, match="new.npz has x_train, y_train; new examples"):
        read_examples(str(tmp_path / "new.npz"), data("float32"), 4)


def test_a_table_needs_a_mask_of_the_loss_only_where_it_has_one(tmp_path):
    batch = {"inputs": np.ones((4, 2)), "loss_mask": np.ones(4, bool)}
    like = Data(SimpleNamespace(batch=lambda step: batch), None, 1)
    assert table(tmp_path, "a,b\n1,2\n", like).keys() == {"inputs"}
    rows = table(tmp_path, "a,b,loss_mask\n1,2,0\n", like)
    assert rows["loss_mask"].tolist() == [False]


def test_a_run_of_booleans_reads_tables_of_them(tmp_path):
    rows = table(tmp_path, "a,b,c\nTrue,False,1\n0,1,false\n", data("bool"), "new.CSV")
    assert rows["inputs"].dtype == bool
    assert rows["inputs"].tolist() == [[True, False, True], [False, True, False]]
    with pytest.raises(ConfigError, match="int64, and the run was trained on bool"):
        table(tmp_path, "a,b,c\n2,0,1\n", data("bool"))


@pytest.mark.parametrize("number", ["1e30", str(2**53 + 1)])
def test_a_whole_number_that_a_table_cannot_hold_is_refused(tmp_path, number):
    with pytest.raises(ConfigError, match="in which it would be other values"):
        table(tmp_path, f"a,b,c\n1,2,{number}\n", data("int64"))


def test_names_of_several_labels_keep_their_shape():
    labels = np.array([["b", "a"], ["c", "b"]])
    batch = {"inputs": np.ones((2, 3), np.float32), "labels": labels}
    named = data("float32")._replace(class_names=("a", "b", "c"))
    with pytest.raises(ConfigError, match=r"labels of .* has the shape \[2, 2\]"):
        as_dataset(batch, named, 4)


def of_pictures():
    inputs, labels = np.ones((8, 2, 2, 1), np.uint8), np.arange(8, dtype=np.int32) % 2
    rows = ArrayDataset(inputs, labels, BatchSpec(4))
    return Data(rows, EvaluationSet(inputs, labels, 4), 2, class_names=("cat", "dog"))


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pictures_of_more_than_bytes_are_refused(tmp_path, mode):
    Image.new(mode, (2, 2), 300).save(tmp_path / "a.tiff")
    with pytest.raises(ConfigError, match=f"a.tiff .* of mode {mode}.*, not bytes"):
        read_examples(str(tmp_path), of_pictures(), 4)


def test_hidden_files_are_no_pictures_and_leave_the_labels(tmp_path, caplog):
    for name in ("cat/a.png", "dog/b.png", ".cache/c.png", "dog/._b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name)
    examples = read_examples(str(tmp_path), of_pictures(), 4)
    assert examples.files == ("cat/a.png", "dog/b.png")
    assert examples.dataset.arrays["labels"].tolist() == [0, 1]
    Image.new("L", (2, 2)).save(tmp_path / "z.png")
    assert "labels" not in read_examples(str(tmp_path), of_pictures(), 4).dataset.arrays
    assert "z.png is in no folder of a class, so that none has a label" in caplog.text


class Series(np.ndarray):
    """An array whose rows are found by an index of its own, as pandas' are."""

    def to_numpy(self):
        return np.asarray(self)


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (np.zeros(8, np.int32).view(Series), "Series"),
        (np.ma.masked_array(np.zeros(8, np.int32), np.arange(8) == 3), "MaskedArray"),
    ],
)
def test_arrays_whose_rows_are_others_are_refused(labels, name):
    inputs = np.ones((8, 3), np.float32)
    with pytest.raises(ConfigError, match=f"labels of .* is a {name}, and an array"):
        ArrayDataset(inputs, labels, BatchSpec(4))
    with pytest.raises(ConfigError, match=f"labels of .* is a {name}, and an array"):
        EvaluationSet(inputs, labels, 4)


def test_masked_examples_are_refused():
    inputs = np.ma.masked_array(np.ones((2, 3), np.float32), np.eye(2, 3) > 0)
    with pytest.raises(
        ConfigError, match="inputs of the set of examples has masked values"
    ):
        as_dataset(inputs, data("float32"), 4)


@pytest.mark.parametrize("names", [("a", "b"), (np.int64(3), 7)])
def test_names_of_classes_are_as_many_as_the_outputs(one_device, names):
    words = f"class_names has 2 names, {names[0]}, {names[1]}, and data.num"
    with pytest.raises(ConfigError, match=words):
        Experiment(
            model=mlp(3, width=4),
            task=classification,
            data=data("float32")._replace(class_names=names),
            optimizer=optax.sgd(0.1),
        )


def test_predictions_without_a_number_are_null(tmp_path, one_device, capsys):
    trainer = Experiment(
        model=mlp(3, width=4),
        task=classification,
        data=data("float32"),
        optimizer=optax.sgd(0.1),
    ).trainer(one_device)
    train(trainer, num_steps=1, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=trainer.experiment)
    np.save(tmp_path / "new.npy", np.full((1, 3), np.nan, np.float32))
    examples = read_examples(str(tmp_path / "new.npy"), data("float32"), 4)
    write_predictions(run, tmp_path / "out.jsonl", examples)
    line = (tmp_path / "out.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["outputs"] == [None] * 3
    capsys.readouterr()
    print_predictions(run, examples)
    line = capsys.readouterr().out
    assert json.loads(line, parse_constant=pytest.fail)["probability"] is None
