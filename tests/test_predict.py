"""New examples for a finished run: every kind of file, by a command and in Python."""

import csv
import functools
import inspect
import io
import json
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, Data, Split, dataset, from_split
from haiku_template.data.examples import (
    Examples,
    as_dataset,
    as_labelled,
    read_examples,
)
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.models import losses, mlp
from haiku_template.registry import check_takes
from haiku_template.runs import Run, predictions, train
from haiku_template.runs.predictions import print_predictions, write_predictions
from haiku_template.training import Experiment, Task
from tests.runs import ROOT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 2, 3)).astype(np.float32)
Y = (X.sum(axis=(1, 2)) > 0).astype(np.int32)
NEW = X[:11]  # No multiple of the batch size, nor of four devices.


def config_of(folder, x=X, y=Y, **data):
    np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:16], y_test=y[:16])
    config = default_config()
    config.num_steps, config.batch_size = 6, 8
    config.model = {"name": "mlp", "width": 8}
    config.data = {"name": "npz", "path": str(folder / "data.npz"), **data}
    return config


def fit(config, workdir, num_devices=1):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    train(trainer, num_steps=config.num_steps, workdir=workdir)
    return workdir


def evaluate(run, path):
    data, size = run.trainer.experiment.data, run.trainer.feed.batch_size
    examples = read_examples(str(path), data, size)
    return run.evaluate(examples.dataset, f"--inputs={path}")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    return fit(config_of(folder), folder / "run")


@pytest.fixture
def run(workdir, one_device):
    return Run.open(workdir, one_device)


@pytest.fixture(scope="module")
def expected(workdir):
    """Outputs of the pure function, which knows neither batches nor devices."""
    run = Run.open(workdir, DeviceManager.create("cpu", num_devices=1))
    model, variables = run.model()
    return np.asarray(jax.jit(model)(variables, NEW))


def test_a_run_is_opened_at_a_step_by_its_number(workdir, one_device):
    """It was an error of attributes, later."""
    for which in (2, "2"):
        with pytest.raises(ConfigError, match="--checkpoint=2 is not in"):
            Run.open(workdir, one_device, which).predict(NEW)


def test_a_model_keeps_its_signature_on_any_devices(workdir, devices):
    model, variables = Run.open(workdir, devices).model()
    assert [*inspect.signature(model).parameters] == ["variables", "inputs", "rng"]
    with_key = jax.jit(model)(variables, NEW, rng=jax.random.key(0))
    np.testing.assert_array_equal(with_key, jax.jit(model)(variables, inputs=NEW))


def test_predictions_do_not_depend_on_devices_or_batches(workdir, devices, expected):
    run = Run.open(workdir, devices)
    np.testing.assert_allclose(run.predict(NEW), expected, atol=1e-6)
    np.testing.assert_allclose(run.predict({"inputs": NEW}), expected, atol=1e-6)
    np.testing.assert_allclose(run.predict(NEW[:1]), expected[:1], atol=1e-6)
    np.testing.assert_allclose(run.predict(NEW.astype(float)), expected, atol=1e-6)


# Each is what a run that was just opened may be asked for first.
FIRST = {
    "print": lambda run, folder: print_predictions(run),
    "write": lambda run, folder: write_predictions(run, folder / "new.npz"),
    "lines": lambda run, folder: write_predictions(run, folder / "new.jsonl"),
    "predict": lambda run, folder: run.predict(NEW),
    "evaluate": lambda run, folder: run.evaluate(),
    "others": lambda run, folder: run.evaluate({"inputs": NEW, "labels": Y[:11]}),
    "model": lambda run, folder: run.model()[0](run.model()[1], NEW),
    "parameters": lambda run, folder: run.parameters(),
    "step": lambda run, folder: run.step,
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    config = config_of(folder)
    config.sharding = (("*", "data"),)
    return fit(config, folder / "run", 4)


@pytest.mark.parametrize("first", FIRST)
def test_shares_of_a_run_are_read_whatever_is_asked_for_first(
    sharded, four_devices, tmp_path, first
):
    FIRST[first](Run.open(sharded, four_devices), tmp_path)


def test_what_only_a_loss_takes_is_not_needed_for_outputs():
    batch = {"inputs": np.zeros((8, 4), np.int32), "loss_mask": np.ones((8, 4), bool)}
    data = Data(SimpleNamespace(batch=lambda step: batch | {"labels": X[:8]}), None, 4)
    made = as_dataset(np.ones((3, 4), np.int32), data, 8)
    assert made.batch(0).keys() == {"inputs"}
    new = {"inputs": batch["inputs"]}
    made = as_dataset(new, data, 8, whole_batch=True)
    assert made.batch(0).keys() == {"inputs"}
    with pytest.raises(
        ConfigError, match="of examples has .* the run inputs; the names"
    ):
        as_dataset({"inputs": batch["inputs"], "token": X[:8]}, data, 8)


WEIGHTED = {"inputs": X[:8], "labels": Y[:8], "example_weight": np.ones(8)}
WHOLE = {"inputs": X[:8], "targets": X[:8], "labels": Y[:8]}


@pytest.mark.parametrize("left_out", [["example_weight"], ["example_weight", "labels"]])
def test_what_the_model_does_not_take_is_not_needed_for_outputs(tmp_path, left_out):
    data = Data(SimpleNamespace(batch=lambda step: WEIGHTED), None, 4)
    new = {k: x for k, x in WEIGHTED.items() if k not in left_out}
    assert as_dataset(new, data, 8).batch(0).keys() == new.keys()
    np.savez(tmp_path / "new.npz", **new)
    read = read_examples(str(tmp_path / "new.npz"), data, 8).dataset
    assert read.batch(0).keys() == new.keys()
    words = "names must agree" if "labels" in new else "has no labels, which"
    for examples in (new, read):  # To evaluate, all of it is needed.
        with pytest.raises(ConfigError, match=words):
            as_labelled(examples, data, 8, "new")


def test_columns_of_a_table_are_those_of_what_the_model_takes(tmp_path):
    data = Data(SimpleNamespace(batch=lambda step: WEIGHTED), None, 4)
    header, row = "a,b,c,d,e,f", "1,1,1,1,1,1"
    for names, values in ((header, row), (f"{header},example_weight", f"{row},2")):
        (tmp_path / "new.csv").write_text(f"{names}\n{values}\n")
        batch = read_examples(str(tmp_path / "new.csv"), data, 8).dataset.batch(0)
        assert ("example_weight" in batch) == ("weight" in names)
        np.testing.assert_array_equal(batch["inputs"], np.ones((1, 2, 3)))


def test_a_model_that_takes_the_whole_batch_needs_all_but_labels():
    data = Data(SimpleNamespace(batch=lambda step: WHOLE), None, 4)
    with pytest.raises(ConfigError, match="has inputs, and a batch of the run inputs"):
        as_dataset({"inputs": X[:8]}, data, 8, whole_batch=True)
    new = {"inputs": X[:8], "targets": X[:8]}
    assert as_dataset(new, data, 8, whole_batch=True).batch(0).keys() == new.keys()


def test_a_run_opens_without_devices(workdir):
    assert Run.open(workdir).devices.num_devices == 8  # All of the tests'.


def save(path, kind):
    if kind == "npy":
        np.save(path, NEW)
    elif kind == "npz":
        np.savez(path, x=NEW, y=Y[:11])
    elif kind == "alone.npz":
        np.savez(path, anything=NEW)
    else:
        names = [f"v{i}" for i in range(6)]
        header = ",".join([*names[:2], "label", *names[2:]])
        rows = np.insert(NEW.reshape(11, 6).astype(object), 2, Y[:11], axis=1)
        lines = [",".join(map(str, row)) for row in rows]
        if kind == "bare.csv":
            header, lines = None, [",".join(map(str, x)) for x in NEW.reshape(11, 6)]
        path.write_text("\n".join(filter(None, [header, *lines])) + "\n")
    return path


KINDS = ["npy", "npz", "alone.npz", "csv", "bare.csv"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_is_read(run, expected, tmp_path, kind):
    file = save(tmp_path / f"new.{kind}", kind)
    experiment = run.trainer.experiment
    examples = read_examples(str(file), experiment.data, 8)
    assert write_predictions(run, tmp_path / "out.npz", examples) == 11
    saved = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(saved["outputs"], expected, atol=1e-6)
    assert (saved["class"] == expected.argmax(axis=1)).all()
    assert ("labels" in saved) == (kind in ("npz", "csv"))
    if "labels" in saved:
        accuracy = (expected.argmax(axis=1) == Y[:11]).mean()
        assert evaluate(run, file)["eval/accuracy"] == pytest.approx(accuracy)
    else:
        with pytest.raises(ConfigError, match="has no labels"):
            evaluate(run, file)


def test_the_command_prints_a_class_and_its_probability(
    workdir, expected, tmp_path, command
):
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        f"def fresh():\n    return np.load({str(tmp_path / 'new.npy')!r})\n"
        "def data(spec):\n    return spec\n"
    )
    np.save(tmp_path / "new.npy", NEW)
    flags = [f"--workdir={workdir}", "--simulate_devices=4"]
    called = functools.partial(command, PYTHONPATH=str(ROOT), cwd=tmp_path)
    done = called("predict", *flags, "--inputs=mine:fresh")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    shares = np.asarray(jax.nn.softmax(expected)).max(axis=1)
    assert [row["class"] for row in rows] == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose([r["probability"] for r in rows], shares, atol=1e-4)
    assert done.stderr == ""
    done = called("predict", *flags, "--inputs=new.pny")
    assert done.returncode == 64 and done.stderr.startswith("error: --inputs=new.pny")
    assert "new.npy" in done.stderr and "Traceback" not in done.stderr
    for flag in ("--inputs=mine:data", "--experiment=mine:fresh"):
        done = called("predict", *flags, flag)
        name, value = flag.split("=")
        assert done.stderr.startswith(f"error: {name}={value!r} takes (")
        assert done.returncode == 64 and "called with (" in done.stderr


def test_a_function_that_takes_other_arguments_is_a_sentence():
    check_takes("it", max, "a", "b")  # In C, without a signature.
    check_takes("it", lambda *all: None, "a", "b")
    with pytest.raises(ConfigError, match=r"^it takes \(a\), .* called with \(\)$"):
        check_takes("it", lambda a: None)


def test_names_of_many_arrays_are_counted():
    """A list of rows is a tree, whose names are as many as its cells."""
    rows = [{"area": np.ones(8), "rooms": np.ones(8)} for _ in range(300)]
    data = Data(SimpleNamespace(batch=lambda step: {"inputs": X[:8]}), None, 4)
    with pytest.raises(ConfigError, match="area.* and 592 more, and a batch"):
        as_dataset(rows, data, 8)


@pytest.mark.slow
def test_head_ends_the_command_quietly(workdir, tmp_path):
    np.save(tmp_path / "many.npy", np.repeat(X, 200, axis=0))
    command = (
        f"{sys.executable} -m haiku_template.predict --workdir={workdir} --device=cpu "
        f"--inputs={tmp_path / 'many.npy'} | head -1"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


REFUSED = {
    "shape": (X[:, :1], "shape .70, 1, 3., and the run was trained on .N, 2, 3."),
    "one": (X[0], "the first axis of an array is that of the examples"),
    "bytes": (X.astype(np.uint8), "uint8, and the run was trained on float32"),
    "none": (X[:0], "one at least"),
    "names": ({"a": X, "b": X}, "has a, b, and a batch of the run inputs;"),
    "rows": ({"inputs": X, "labels": Y[:3]}, "70 inputs, 3 labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_arrays_are_refused_in_a_sentence(run, tmp_path, name):
    arrays, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        run.predict(arrays)


FILES = {
    "text.npy": ("no array", "damaged, or of another kind"),
    "few.csv": ("1,2\n", "2 columns of inputs.*6 values"),
    "words.csv": (
        "1,2,3,4,5,six\n1,2,3,4,5,6\n,,,,,\n",
        "line 3 of .* is not one number",
    ),
    "a.txt": ("text", "of no kind that is read here; possible are .npy"),
    "a.jsonl": ("{}", "0 columns of inputs, and an example of the run has 6 values"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_named(run, tmp_path, name):
    text, words = FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_examples(str(tmp_path / name), run.trainer.experiment.data, 8)


def test_a_workdir_without_a_name_is_refused(command):
    """As of a shell's variable that is not set, and not the current folder."""
    done = command("predict", "--workdir=")
    assert (done.returncode, done.stderr) == (
        64,
        "error: --workdir is needed; --help shows all flags\n",
    )


def test_examples_without_a_name_are_refused(workdir, command):
    done = command("predict", f"--workdir={workdir}", "--inputs=")
    assert done.returncode == 64 and "Traceback" not in done.stderr
    assert "--inputs= is empty; possible are .npy" in done.stderr


def own(outputs, batch):
    """A loss of one's own, which says nothing of its labels or outputs."""
    labels = batch["labels"].reshape(len(outputs), -1)
    return {"loss": jnp.square(outputs - labels).sum(axis=1)}


def printed(data, workdir, capsys, num_outputs=2):
    model = mlp(num_outputs, width=8)
    experiment = Experiment(model=model, task=own, data=data, optimizer=optax.sgd(0.1))
    devices = DeviceManager.create("cpu", num_devices=1)
    if not workdir.exists():
        train(experiment.trainer(devices), num_steps=1, workdir=workdir)
        capsys.readouterr()
    print_predictions(Run.open(workdir, devices, experiment=experiment))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_loss_of_one_s_own_predicts_names_of_classes(tmp_path, capsys):
    data = from_split(Split(X, Y, X[:16], Y[:16]), BatchSpec(8, labels="any"))
    named = data._replace(class_names=("cat", "dog"))
    rows = printed(named, tmp_path / "run", capsys)
    assert len(rows) == 16
    for row in rows:
        assert row["class"] == ["cat", "dog"][int(np.argmax(row["outputs"]))]
        assert "probability" not in row  # Its outputs need not be logits.
    assert "class" not in printed(data, tmp_path / "run", capsys)[0]
    uncounted = data._replace(num_outputs=None)  # As of data without classes.
    assert "class" not in printed(uncounted, tmp_path / "run", capsys)[0]
    both = np.stack([Y, 1 - Y], axis=1).astype(np.float32)
    several = from_split(Split(X, both, X[:16], both[:16]), BatchSpec(8, labels="any"))
    several = several._replace(class_names=("cat", "dog"))
    assert "class" not in printed(several, tmp_path / "several", capsys)[0]
    assert "class" not in printed(named, tmp_path / "three", capsys, 3)[0]


def write_table(path, column, labels):
    rows = zip(labels, NEW.reshape(11, 6), strict=False)
    lines = [",".join(map(str, [y, *x])) for y, x in rows]
    path.write_text("\n".join([f"{column},a,b,c,d,e,f", *lines]) + "\n")
    return str(path)


def test_labels_are_numbers_or_names_of_the_run_s_classes(run, tmp_path):
    data = run.trainer.experiment.data
    named = data._replace(class_names=("cat", "dog"))
    rows = [(data, "01"), (data, [0, 1]), (named, [0, 1]), (named, ["cat", "dog"])]
    for known, labels in rows:
        table = write_table(tmp_path / "a.csv", "class", labels)
        np.savez(tmp_path / "a.npz", x=NEW[:2], y=np.array([*labels]))
        for file in (table, str(tmp_path / "a.npz")):
            batch = read_examples(file, known, 8).dataset.batch(0)
            assert batch["labels"].tolist() == [0, 1], file


REFUSED_LABELS = {
    "cow": (["0", "cow"], "has the label 'cow', and the classes of the run are 0, 1"),
    "outside": (["0", "7"], "1 label outside the 2 classes .*the first is 7"),
    "half": (["0", "0.5"], "float64, and the run was trained on int32"),
}


@pytest.mark.parametrize("name", REFUSED_LABELS)
def test_labels_of_another_kind_are_refused_in_a_sentence(run, tmp_path, name):
    labels, words = REFUSED_LABELS[name]
    with pytest.raises(ConfigError, match=words):
        evaluate(run, write_table(tmp_path / "a.csv", "label", labels))


def test_whole_numbers_are_labels_of_a_regression_too(tmp_path, one_device):
    config = config_of(tmp_path, y=X.sum(axis=(1, 2)))
    config.task = {"name": "regression"}
    run = Run.open(fit(config, tmp_path / "run"), one_device)
    table = write_table(tmp_path / "a.csv", "y", range(11))
    errors = run.predict(NEW)[:, 0] - np.arange(11)
    loss = evaluate(run, table)["eval/loss"]
    assert loss == pytest.approx(np.square(errors).mean(), rel=1e-5)


class Broken:
    """A set whose second batch a disk does not give."""

    num_batches = 2

    def batch(self, index):
        if index:
            raise OSError(5, "Input/output error") from KeyError("the disk")
        return {"inputs": NEW}


@pytest.mark.parametrize("ending", ["npz", "jsonl", "csv"])
def test_an_error_of_the_data_is_none_of_the_file(run, tmp_path, ending):
    file = tmp_path / f"out.{ending}"
    examples = SimpleNamespace(dataset=Broken(), files=())
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_predictions(run, file, examples)
    assert any(x.name == "batch" for x in caught.traceback)
    assert caught.value.__cause__.args == ("the disk",)
    assert not [*tmp_path.iterdir()]


def test_a_table_has_the_rows_and_numbers_of_the_lines(run, tmp_path):
    np.save(tmp_path / "new.npy", NEW)
    data = run.trainer.experiment.data
    examples = read_examples(str(tmp_path / "new.npy"), data, 4)
    kinds = ("jsonl", "csv")
    counts = [write_predictions(run, tmp_path / f"a.{x}", examples) for x in kinds]
    lines = [*map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())]
    header, *rows = csv.reader((tmp_path / "a.csv").read_text().splitlines())
    columns = [f"outputs/{i}" for i in range(len(lines[0]["outputs"]))]
    assert counts == [len(NEW)] * 2 and header == ["class", *columns]
    for row, line in zip(rows, lines, strict=True):
        assert row[0] == str(line["class"])
        assert [*map(float, row[1:])] == line["outputs"]


def test_columns_have_the_names_of_the_classes_that_they_score():
    one = ["file", "labels/0", "labels/1", "outputs/0", "outputs/1"]
    names = predictions._of_classes(one, ["cat", "a,b"])
    assert names == [*one[:3], "outputs/cat", "outputs/a,b"]
    assert predictions._of_classes(one, ["cat"]) == one
    two = [f"outputs/{part}/{i}" for part in "ab" for i in range(2)]
    assert predictions._of_classes(two, ["cat", "dog"]) == two


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_outputs_of_several_lengths_are_lines_alone(kind, tmp_path, monkeypatch):
    batches = [{"outputs": np.zeros((2, n))} for n in (3, 4)]
    monkeypatch.setattr(predictions, "_batches", lambda *_: iter(batches))
    devices = DeviceManager.create("cpu", num_devices=1)
    data = SimpleNamespace(class_names=())
    trainer = SimpleNamespace(experiment=SimpleNamespace(data=data))
    run = SimpleNamespace(devices=devices, check_outputs=lambda: None, trainer=trainer)
    with pytest.raises(ConfigError, match="several lengths.*=a.jsonl has a line"):
        write_predictions(run, tmp_path / f"a.{kind}")
    assert not [*tmp_path.iterdir()]
    assert write_predictions(run, tmp_path / "a.jsonl") == 4


def test_a_set_without_batches_is_refused(run, tmp_path, capsys):
    empty = SimpleNamespace(num_batches=0, batch=None)
    examples = SimpleNamespace(dataset=empty, files=())
    for predict in (
        lambda: write_predictions(run, tmp_path / "out.npz", examples),
        lambda: write_predictions(run, tmp_path / "out.jsonl", examples),
        lambda: print_predictions(run, examples),
        lambda: run.predict(empty),
    ):
        with pytest.raises(ConfigError, match="no examples to predict"):
            predict()
    assert not [*tmp_path.iterdir()]


def test_a_run_is_evaluated_on_arrays(run, expected):
    metrics = run.evaluate({"inputs": NEW, "labels": Y[:11]})
    accuracy = (expected.argmax(axis=1) == Y[:11]).mean()
    assert metrics["eval/accuracy"] == pytest.approx(accuracy)
    assert not (run.workdir / "confusion.png").exists()
    with pytest.raises(ConfigError, match="the set of examples has no labels"):
        run.evaluate(NEW)


def test_classes_of_data_without_their_number_are_numbered(tmp_path, one_device):
    """`Data(train, evaluation, None)`, with a task that counts them."""
    data = from_split(Split(X, Y, X[:16], Y[:16]), BatchSpec(8))
    data = data._replace(num_outputs=None)
    counting = Task(lambda outputs, batch: losses.classification(outputs, batch))
    counting = counting._replace(labels="classes", count=losses.confusion)
    parts = {"model": mlp(2, width=8), "data": data, "optimizer": optax.sgd(0.1)}
    trainer = Experiment(task=counting, **parts).trainer(one_device)
    train(trainer, num_steps=1, workdir=tmp_path)
    Run.open(tmp_path, one_device, experiment=trainer.experiment).evaluate()
    assert (tmp_path / "confusion.png").exists()
    plain = Experiment(task=losses.classification, **parts).trainer(one_device)
    with pytest.raises(ConfigError, match=r"0 classes; .* logits \[B, num_outputs\]"):
        train(plain, num_steps=1, workdir=tmp_path / "plain")


def test_more_outputs_than_a_terminal_has_room_for_are_not_printed(
    run, monkeypatch, capsys
):
    """Logits of each token went on for minutes."""
    monkeypatch.setattr(predictions, "MOST_PRINTED", 1)
    examples = SimpleNamespace(dataset=run.evaluation_set(), files=())
    print_predictions(run, examples)
    assert len(capsys.readouterr().out.splitlines()) == 16
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(ConfigError, match="outputs, which no terminal has room for"):
        print_predictions(run, examples)


def test_a_trainer_takes_the_arrays_that_a_run_takes(run, expected):
    """It ended in an AttributeError: a dict has no `num_batches`."""
    trainer, state, arrays = run.trainer, run.state, {"inputs": NEW, "labels": Y[:11]}
    assert trainer.evaluate(state, arrays) == run.evaluate(arrays)
    outputs = np.concatenate([*trainer.predict(state, NEW)])
    np.testing.assert_array_equal(outputs, run.predict(NEW))
    with pytest.raises(ConfigError, match="the set of examples has no labels"):
        trainer.evaluate(state, NEW)
    with pytest.raises(ConfigError, match="uint8, and the run was trained on float32"):
        [*trainer.predict(state, NEW.astype(np.uint8))]


def test_where_labels_come_from_is_said_for_the_run_s_own_labels():
    """Numbers have no folders of pictures, and ten classes are not eight."""
    for labels, end in ((Y, " 7 and 2 more\\)"), (X[:, 0], "a column `label`")):
        batch = {"inputs": X[:8], "labels": labels[:8]}
        data = Data(SimpleNamespace(batch=lambda step, batch=batch: batch), None, 10)
        with pytest.raises(ConfigError, match=f"new has no labels, .*{end}$"):
            as_labelled(X[:8], data, 8, "new")


def test_the_command_evaluates_new_examples(workdir, expected, tmp_path, command):
    np.savez(tmp_path / "new.npz", x=NEW, y=Y[:11])
    np.save(tmp_path / "new.npy", NEW)
    flags = [f"--workdir={workdir}", "--simulate_devices=4"]
    called = functools.partial(command, PYTHONPATH=str(ROOT), cwd=tmp_path)
    done = called("evaluate", *flags, "--inputs=new.npz")
    accuracy = (expected.argmax(axis=1) == Y[:11]).mean()
    assert json.loads(done.stdout)["eval/accuracy"] == pytest.approx(accuracy)
    done = called("evaluate", *flags, "--inputs=new.npy")
    assert done.returncode == 64 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --inputs=new.npy has no labels")


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    x = RNG.integers(0, 256, (32, 4, 5, 3)).astype(np.uint8)
    y = (x.mean(axis=(1, 2, 3)) > 127).astype(np.int32)
    return fit(config_of(folder, x, y, scale_pixels=True), folder / "run"), x


def test_a_folder_of_pictures_is_read_by_name(of_pictures, one_device, tmp_path):
    workdir, x = of_pictures
    for i in (2, 0, 1):
        Image.fromarray(x[i]).save(tmp_path / f"{i}.png")
    run = Run.open(workdir, one_device)
    examples = read_examples(str(tmp_path), run.trainer.experiment.data, 8)
    assert examples.files == ("0.png", "1.png", "2.png")
    np.testing.assert_array_equal(examples.dataset.batch(0)["inputs"], x[:3])
    write_predictions(run, tmp_path / "out.jsonl", examples)
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png"]
    outputs = [row["outputs"] for row in rows]
    np.testing.assert_allclose(outputs, run.predict(x[:3]), atol=1e-6)


def test_pictures_of_another_size_are_resized_and_said(
    of_pictures, one_device, tmp_path, caplog
):
    run = Run.open(of_pictures[0], one_device)
    Image.new("L", (50, 40), 200).save(tmp_path / "grey.png")
    data = run.trainer.experiment.data
    read = read_examples(str(tmp_path), data, 8).dataset.batch(0)["inputs"]
    assert read.shape == (1, 4, 5, 3) and (read == 200).all()
    assert "1 of 1 pictures were resized to 4 x 5, the first grey.png" in caplog.text
    with pytest.raises(ConfigError, match="holds no pictures"):
        (tmp_path / "empty").mkdir()
        read_examples(str(tmp_path / "empty"), data, 8)
    named = data._replace(class_names=("cat", "dog"))
    for name in ("dog", "cat"):
        (tmp_path / "sorted" / name).mkdir(parents=True)
        Image.new("RGB", (5, 4)).save(tmp_path / "sorted" / name / "a.png")
    labelled = read_examples(str(tmp_path / "sorted"), named, 8).dataset.batch(0)
    assert labelled["labels"].tolist() == [0, 1]
    for name in ("1", "0"):
        (tmp_path / "numbered" / name).mkdir(parents=True)
        Image.new("RGB", (5, 4)).save(tmp_path / "numbered" / name / "a.png")
    examples = read_examples(str(tmp_path / "numbered"), data, 8)
    assert examples.dataset.batch(0)["labels"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"pictures for each class \(0, 1"):
        evaluate(run, tmp_path / "sorted")


def test_memory_holds_numbers_of_a_table_and_not_their_text(tmp_path):
    pixels = RNG.integers(0, 256, (200, 784))
    lines = [",".join(map(str, row)) for row in pixels.tolist()]
    head = ",".join(f"pixel{i}" for i in range(784))
    (tmp_path / "new.csv").write_text("\n".join([head, *lines]))
    x, y = np.zeros((4, 28, 28, 1), np.uint8), np.zeros(4, np.int32)
    data = from_split(Split(x, y, x, y), BatchSpec(2))
    tracemalloc.start()
    inputs = read_examples(str(tmp_path / "new.csv"), data, 2).dataset.arrays["inputs"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(inputs.reshape(200, 784), pixels)
    assert peak < 5 * 8 * pixels.size  # In float64; as text they take 11 times that.


ROWS = {
    "float32": np.arange(60, dtype=np.float32).reshape(5, 3, 4),
    "bfloat16": np.arange(5).astype(jnp.bfloat16),
    "bool": np.array([True, False, True, True, False]),
    "text": np.array(["a", "bc", "", "def", "é"]),
    "strided": np.arange(40).reshape(5, 8)[:, ::2],
    "transposed": np.arange(20).reshape(4, 5).T,
}


@pytest.mark.parametrize("kind", ROWS)
def test_an_array_of_predictions_is_written_as_numpy_writes_it(kind):
    array, files = ROWS[kind], (io.BytesIO(), io.BytesIO())
    predictions._write_array(files[0], [array[:2], array[2:4], array[4:]])
    np.lib.format.write_array(files[1], np.ascontiguousarray(array))
    assert files[0].getvalue() == files[1].getvalue()


def test_parts_of_predictions_need_not_be_of_one_dtype():
    file, parts = io.BytesIO(), [np.array(["a"]), np.array(["bcd", "e"])]
    predictions._write_array(file, parts)
    file.seek(0)
    np.testing.assert_array_equal(np.load(file), ["a", "bcd", "e"])


def test_memory_holds_predictions_once(tmp_path):
    batches = [{"outputs": np.ones((100, 1000), np.float32)} for _ in range(40)]
    tracemalloc.start()
    assert predictions._write_arrays(tmp_path / "new.npz", batches) == 4000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4e6  # Of 16e6 bytes, which are there before.
    assert np.load(tmp_path / "new.npz")["outputs"].shape == (4000, 1000)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_memory_holds_pictures_once(tmp_path, dtype, monkeypatch):
    for i in range(24):
        Image.new("RGB", (128, 128), (i, 0, 0)).save(tmp_path / f"{i:02}.png")
    x, y = np.zeros((4, 128, 128, 3), dtype), np.zeros(4, np.int32)
    data = from_split(Split(x, y, x, y), BatchSpec(2))
    read_examples(str(tmp_path), data, 2)  # Imports Pillow's formats.
    tracemalloc.start()
    inputs = read_examples(str(tmp_path), data, 2).dataset.arrays["inputs"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert inputs.shape == (24, 128, 128, 3) and inputs.dtype == dtype
    assert inputs.nbytes <= peak < 1.5 * inputs.nbytes
    monkeypatch.setattr(dataset, "host_memory", lambda: inputs.nbytes - 1)
    with pytest.raises(ConfigError, match=f"24 pictures have {inputs.nbytes:,} bytes"):
        read_examples(str(tmp_path), data, 2)


def test_pictures_for_a_run_of_fractions_are_scaled(tmp_path, caplog):
    x = RNG.random(size=(16, 4, 5, 1)).astype(np.float32)
    config = config_of(tmp_path, x, (x.mean(axis=(1, 2, 3)) > 0.5).astype(np.int32))
    devices = DeviceManager.create("cpu", num_devices=1)
    data = Experiment.from_config(config, devices).data
    (tmp_path / "new").mkdir()
    Image.new("L", (5, 4), 51).save(tmp_path / "new" / "a.png")
    read = read_examples(str(tmp_path / "new"), data, 8).dataset.batch(0)["inputs"]
    assert read.dtype == np.float32 and np.allclose(read, 0.2)
    assert "scaled from bytes to [0, 1]" in caplog.text


def test_new_texts_need_no_label_and_get_their_class_s_name(
    tmp_path, one_device, capsys
):
    lines = [{"text": "good " * n, "label": "praise"} for n in range(1, 9)]
    lines += [{"text": "bad " * n, "label": "blame"} for n in range(1, 9)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = default_config()
    config.num_steps, config.batch_size = 2, 4
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2}
    config.model = {"name": "bert", "context": 64, **sizes}
    config.data = {"name": "jsonl", "path": str(tmp_path / "t.jsonl"), "context": 64}
    run = Run.open(fit(config, tmp_path / "run"), one_device)
    texts = [{"text": "good good good"}, {"text": "bad"}, {"text": "good"}]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, texts)))
    data = run.trainer.experiment.data
    examples = read_examples(str(tmp_path / "new.jsonl"), data, 4)
    write_predictions(run, tmp_path / "out.jsonl", examples)
    rows = [
        json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 3 and "labels" not in rows[0]
    for row in rows:
        assert row["class"] == ["blame", "praise"][int(np.argmax(row["outputs"]))]
    # In the order of the file: each alone gets the same.
    for text, row in zip(texts, rows, strict=True):
        (tmp_path / "one.jsonl").write_text(json.dumps(text))
        one = read_examples(str(tmp_path / "one.jsonl"), data, 4)
        outputs = next(iter(run.trainer.predict(run.state, one.dataset)))
        np.testing.assert_allclose(outputs[0], row["outputs"], atol=1e-5)
    with pytest.raises(ConfigError, match="has no labels"):
        evaluate(run, tmp_path / "new.jsonl")
    assert evaluate(run, tmp_path / "t.jsonl")["eval/loss"] > 0
    capsys.readouterr()
    print_predictions(run, read_examples(str(tmp_path / "t.jsonl"), data, 4))
    shown = [
        json.loads(line)["labels"] for line in capsys.readouterr().out.splitlines()
    ]
    assert shown == ["praise"] * 8 + ["blame"] * 8
    batch = one.dataset.batch(0) | {"labels": np.array([-1])}
    print_predictions(run, Examples(as_dataset(batch, data, 4)))
    batch = {k: np.concatenate([x, x]) for k, x in batch["inputs"].items()}
    batch = {"inputs": batch, "labels": np.array([-1, 0])}
    print_predictions(run, Examples(as_dataset(batch, data, 4)))
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert [x["labels"] for x in lines] == [-1, -1, "blame"]
