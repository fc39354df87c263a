"""Inputs of several arrays: wherever one array may be, a dictionary or a tuple may."""

import csv
import functools
import json
import tracemalloc
import zipfile

import jax
import numpy as np
import optax
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save_file

from haiku_template.data import DATASETS, ArrayDataset, BatchSpec, Split, from_split
from haiku_template.data import rows as tables
from haiku_template.data.examples import read_examples
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, train
from haiku_template.training import Experiment, classification
from tests.runs import ROOT, run_command
from tests.several_inputs import arrays, by_name, model, split

KINDS = [dict, tuple]
INPUTS, LABELS = arrays()
NEW = {name: array[:11] for name, array in INPUTS.items()}


def as_kind(kind, inputs):
    return inputs if kind is dict else tuple(inputs.values())


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow(but="host")
@pytest.mark.parametrize("placement", ["host", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_evaluates_and_predicts(kind, devices, placement, tmp_path):
    experiment = Experiment(
        model=model(2, None),
        task=classification,
        data=from_split(split(kind), BatchSpec(8)),
        optimizer=optax.adam(1e-2),
        placement=placement,
        steps_per_call=2,
    )
    train(experiment.trainer(devices), num_steps=4, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", devices, experiment=experiment)
    function, variables = run.model()
    expected = jax.jit(function)(variables, as_kind(kind, NEW))
    outputs = run.predict(as_kind(kind, NEW))
    np.testing.assert_allclose(outputs, expected, atol=1e-6)
    accuracy = (expected.argmax(axis=1) == LABELS[:11]).mean()
    labelled = {"inputs": as_kind(kind, NEW), "labels": LABELS[:11]}
    assert run.evaluate(labelled)["eval/accuracy"] == pytest.approx(accuracy)
    assert run.evaluate()["eval/loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_comes_once_in_an_epoch(kind):
    data = from_split(split(kind), BatchSpec(7))
    batches = [data.train.batch(step) for step in range(10)]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    order = [
        np.flatnonzero((x == INPUTS["numbers"]).all(axis=1))[0]
        for x in jax.tree.leaves(joined["inputs"])[0]
    ]
    assert sorted(order) == [*range(70)]
    rows = {"inputs": as_kind(kind, INPUTS), "labels": LABELS}
    equal(joined, jax.tree.map(lambda x: x[order], rows))
    assert data.num_outputs == 2 and data.train.num_examples == 70
    shares = [
        from_split(split(kind), BatchSpec(8, 0, "classes", i, 2)).train.batch(3)
        for i in range(2)
    ]
    whole = from_split(split(kind), BatchSpec(8)).train.batch(3)
    equal(jax.tree.map(lambda *x: np.concatenate(x), *shares), whole)


def augment(inputs, rng):
    return inputs | {"numbers": inputs["numbers"] + rng.normal()}


def test_augmentation_gets_the_tree():
    data = ArrayDataset(INPUTS, LABELS, BatchSpec(8), augment)
    plain = ArrayDataset(INPUTS, LABELS, BatchSpec(8)).batch(2)["inputs"]
    inputs = data.batch(2)["inputs"]
    moved = inputs["numbers"] - plain["numbers"]
    assert np.ptp(moved) < 1e-5 and abs(moved[0, 0]) > 1e-5
    np.testing.assert_array_equal(inputs["town"], plain["town"])


def test_without_labels_an_output_is_as_large_as_all_inputs():
    unlabelled = Split(INPUTS, None, INPUTS, None)
    assert from_split(unlabelled, BatchSpec(8, labels="any")).num_outputs == 3 + 1
    targets = {"price": LABELS[:, None] * 1.0, "days": np.ones((70, 2))}
    both = Split(INPUTS, targets, INPUTS, targets)
    assert from_split(both, BatchSpec(8, labels="any")).num_outputs == 1 + 2
    with pytest.raises(ConfigError, match="labels labels/days, labels/price, and the"):
        from_split(both, BatchSpec(8))


FORMATS = {
    "npz": lambda folder, named: np.savez(folder / "data.npz", **named),
    "safetensors": lambda folder, named: save_file(named, folder / "data.safetensors"),
    "npy": lambda folder, named: [
        ((folder / name).parent.mkdir(parents=True, exist_ok=True))
        or np.save(folder / f"{name}.npy", array)
        for name, array in named.items()
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_files_name_each_array(name, kind, tmp_path):
    FORMATS[name](tmp_path, by_name(split(kind)))
    path = tmp_path if name == "npy" else tmp_path / f"data.{name}"
    data = DATASETS[name](BatchSpec(8), path=str(path))
    expected = from_split(split(kind), BatchSpec(8))
    for read, made in ((data.train, expected.train), (data.evaluation,) * 2):
        assert read.batch(1).keys() == made.batch(1).keys()
    equal(data.train.batch(1), expected.train.batch(1))
    equal(data.evaluation.batch(1), expected.evaluation.batch(1))


X, Y = INPUTS["numbers"], LABELS
REFUSED = {
    "rows": ({"a": X, "b": X[:9]}, Y, "70 inputs/a and 9 inputs/b; each array"),
    "a list": ({"a": X, "b": [1, 2]}, Y, "inputs/b/0 of .* is a int, and an array"),
    "text": ({"a": X, "b": "text"}, Y, "inputs/b of .* is a str, and an array"),
    "nothing": ({}, Y, "the inputs of .* is a empty tree, and an array"),
    "none": (None, Y, "the inputs of .* is a empty tree, and an array"),
    "labels alone": ({}, {"a": Y}, "the inputs of .* is a empty tree, and an array"),
    "examples": ([*X], Y, "3 inputs/0 and 70 labels; each array"),
}


def test_arrays_of_tokens_are_told_how_they_are_given():
    """It was said that classification takes one whole number an example."""
    x = np.zeros((8, 6), np.int32)
    spec = BatchSpec(4, labels="tokens")
    with pytest.raises(ConfigError, match=r'takes tokens.*labels="any"'):
        from_split(Split(x, x, x, x), spec)
    assert from_split(Split(x, x, x, x), spec._replace(labels="any")).num_outputs == 6


@pytest.mark.parametrize("name", REFUSED)
def test_trees_that_are_no_examples_are_refused_in_a_sentence(name):
    inputs, labels, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        from_split(Split(inputs, labels, inputs, labels), BatchSpec(8))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"numbers": X}, "has inputs/numbers, inputs/town, labels, and the test part"),
        ({"numbers": X[:, :2], "town": Y}, "inputs/numbers in .*shape .3. and in the"),
        ({"numbers": X, "town": X[:, 0]}, "inputs/town in .*int32 and in .* float32"),
    ],
)
def test_parts_that_differ_are_refused_by_name(other, words):
    with pytest.raises(ConfigError, match=words):
        from_split(Split(INPUTS, Y, other, Y), BatchSpec(8))


def lines_of(header=True, label=True, town_first=False):
    names = ["a", "b", "c", "town"]
    rows = [[*map(float, x), int(t)] for x, t in zip(*NEW.values(), strict=True)]
    if town_first:
        names, rows = names[::-1], [row[::-1] for row in rows]
    if label:
        names = ["label", *names]
        rows = [[int(y), *row] for y, row in zip(Y, rows, strict=False)]
    return [names] * header + rows


def write_csv(path, **kinds):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines_of(**kinds))


def records():
    rows = zip(X[:11].tolist(), INPUTS["town"][:11].tolist(), Y[:11].tolist(), strict=1)
    return [{"label": y, "town": t, "numbers": x} for x, t, y in rows]


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.Table.from_pylist(rows), path
    )


FILES = {
    "named.csv": lambda path: write_csv(path),
    "order.csv": lambda path: write_csv(path, header=False, label=False),
    "a.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, records()))),
    "a.parquet": lambda path: write_parquet(path, records()),
    "b.parquet": lambda path: write_parquet(
        path, [dict(zip(lines_of()[0], row, strict=True)) for row in lines_of()[1:]]
    ),
    "inputs.npz": lambda path: np.savez(
        path, **{f"inputs/{k}": x for k, x in NEW.items()}, labels=Y[:11]
    ),
    "x_test.npz": lambda path: np.savez(
        path,
        **by_name(split())
        | {f"x_test/{k}": x for k, x in NEW.items()}
        | {"y_test": Y[:11]},
    ),
}


# Arrays of a tuple have no names but their places.
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, dict) for name in FILES), ("order.csv", tuple)]
)
def test_new_examples_are_read_from_each_kind_of_file(name, kind, tmp_path):
    FILES[name](tmp_path / name)
    data = from_split(split(kind), BatchSpec(8))
    batch = read_examples(str(tmp_path / name), data, 16).dataset.batch(0)
    labels = {} if name == "order.csv" else {"labels": Y[:11]}
    equal(batch, {"inputs": as_kind(kind, NEW)} | labels)


def test_one_array_is_read_from_lines_and_parquet_too(tmp_path):
    data = from_split(Split(X, Y, X[:16], Y[:16]), BatchSpec(8))
    rows = [
        {"a": x[0], "b": x[1], "class": y, "c": x[2]}
        for x, y in zip(X[:11].tolist(), Y.tolist(), strict=False)
    ]
    listed = [{"inputs": x} for x in X[:11].tolist()]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, listed)))
    write_parquet(tmp_path / "a.parquet", rows)
    for name in ("a.jsonl", "b.jsonl", "a.parquet"):
        batch = read_examples(str(tmp_path / name), data, 16).dataset.batch(0)
        labels = {} if name == "b.jsonl" else {"labels": Y[:11]}
        equal(batch, {"inputs": X[:11]} | labels)


WRONG = {
    "few.csv": (
        "a,b,town\n1,2,3\n",
        r"2 columns of inputs .a, b. beside town, and .* 4 values .numbers 3, town 1.$",
    ),
    "many.csv": (
        "a,b,c,price,town\n1,2,3,4,5\n",
        "4 columns of inputs .a, b, c and 1 more. beside town, .*; a column of labels",
    ),
    "other.csv": ("a,b,c,d\n1,2,3,0\n", "has no columns numbers, town, and an example"),
    "half.csv": ("a,b,c,town\n1,2,3,0.5\n", "town of .* is float64, and the run was"),
    "word.csv": ("a,b,c,town\n1,2,3,Rome\n", "line 2 of .* is not one number in each"),
    "short.csv": ("a,b,c,town\n1,2,3\n", "line 2 of .* has 3 values, and .* 4 columns"),
    "empty.csv": ("", "it has no rows"),
    "null.jsonl": (
        '{"numbers": [1, 2, null], "town": 1}',
        "is not 3 numbers as numbers",
    ),
    "long.jsonl": ('{"numbers": [1, 2, 3, 4], "town": 1}', "not 3 numbers as numbers"),
    "none.jsonl": (
        '{"numbers": [1, 2, 3], "town": 1}\n{"town": 1}',
        "line 2 of .* has other columns than numbers, town",
    ),
}


# No column takes the place of another in silence.
WRONG |= {
    "header.csv": ("a,a,b\n1,2,3\n", "names a column twice: a, a, b"),
    "known.csv": ("a,b,c,town,town\n1,2,3,4,5\n", "names a column twice: a, b, c,"),
    "key.jsonl": ('{"numbers": [1, 2, 3], "town": 1, "town": 2}', "line 1 of .*twice"),
    "labels.csv": ("a,b,c,town,label,y\n1,2,3,4,0,1\n", "of labels: label, y"),
    "unlabelled.jsonl": (
        '{"numbers": [1, 2, 3], "town": 1, "label": 0}\n'
        '{"numbers": [1, 2, 3], "town": 1, "label": null}',
        "line 2 of .* has no label",
    ),
    "more.jsonl": (
        '{"numbers": [1, 2, 3], "town": 1}\n'
        '{"numbers": [1, 2, 3], "town": 1, "class": 1}',
        "line 2 of .* has other columns than numbers, town",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(name, tmp_path):
    text, words = WRONG[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_examples(str(tmp_path / name), from_split(split(), BatchSpec(8)), 16)


def test_a_column_that_stands_twice_in_parquet_is_refused(tmp_path):
    table = pyarrow.table([pyarrow.array([1.0])] * 3, names=["a", "a", "b"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="a.parquet names a column twice: a, a, b"):
        read_examples(
            str(tmp_path / "a.parquet"), from_split(split(), BatchSpec(8)), 16
        )


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_that_stands_twice_in_a_data_set_is_refused(name, tmp_path):
    FORMATS[name](tmp_path, {**by_name(split()), "x_test": INPUTS["town"]})
    path = tmp_path if name == "npy" else tmp_path / f"data.{name}"
    with pytest.raises(ConfigError, match="x_test.* and .*x_test.*, and one is needed"):
        DATASETS[name](BatchSpec(8), path=str(path))


def test_an_array_that_stands_twice_in_new_examples_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=X, inputs=X + 1)
    data = from_split(Split(X, Y, X, Y), BatchSpec(8))
    with pytest.raises(ConfigError, match="names an array twice: inputs, inputs"):
        read_examples(str(path), data, 16)
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train.npy", b"")
        archive.writestr("x_train.npy", b"")
    with pytest.raises(ConfigError, match="names an array twice"):
        DATASETS["npz"](BatchSpec(8), path=str(path))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_memory_holds_a_small_multiple_of_a_table(tmp_path, monkeypatch, kind):
    data = from_split(Split(X, Y, X, Y), BatchSpec(8))
    path = tmp_path / f"new.{kind}"
    columns, row = ["a", "b", "c"], [0.123456789] * 3
    line = ",".join(map(str, row))
    if kind == "jsonl":
        line = json.dumps(dict(zip(columns, row, strict=True)))
    path.write_text(f"{','.join(columns)}\n" * (kind == "csv") + f"{line}\n" * 5000)
    monkeypatch.setattr(tables, "PIECE_BYTES", 2**12)
    tracemalloc.start()
    try:
        read_examples(str(path), data, 8)
        assert tracemalloc.get_traced_memory()[1] < 5 * path.stat().st_size
    finally:
        tracemalloc.stop()


WORKERS = "--config.data.workers=1"


@pytest.mark.slow
def test_commands_take_such_data_from_a_check_to_a_prediction(tmp_path):
    np.savez(tmp_path / "data.npz", **by_name(split()))
    write_csv(tmp_path / "new.csv", town_first=False)
    config = f"--config={ROOT / 'tests/several_inputs.py'}"
    flags = [config, f"--config.data.path={tmp_path / 'data.npz'}"]
    flags += ["--simulate_devices=4"]
    workdir = f"--workdir={tmp_path / 'run'}"
    for extra in (["--dry_run"], ["--check"], [workdir, WORKERS]):
        done = run_command("train", *flags, *extra)
        assert done.returncode == 0, done.stderr
    called = functools.partial(run_command, JAX_PLATFORMS="cpu")
    done = called("evaluate", workdir, f"--inputs={tmp_path / 'new.csv'}")
    accuracy = json.loads(done.stdout)["eval/accuracy"]
    done = called("predict", workdir, f"--inputs={tmp_path / 'new.csv'}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    classes = [row["class"] for row in rows]
    assert [row["labels"] for row in rows] == Y[:11].tolist()
    assert np.mean(classes == Y[:11]) == pytest.approx(accuracy)
    file = tmp_path / "out"
    done = called("export", workdir, "--format=stablehlo", f"--output={file}")
    assert done.returncode == 0, done.stderr
