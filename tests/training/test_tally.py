"""Which classes are taken for which: exact counts, and the metrics that they give."""

import json
import sys

import numpy as np
import optax
import pytest
from sklearn.metrics import confusion_matrix, f1_score

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.models import mlp
from haiku_template.models.losses import confusion, macro_f1
from haiku_template.reporting import plots
from haiku_template.training import Experiment, classification

RNG = np.random.default_rng(0)


def example():
    """43 examples of 4 classes, of which the last has none to evaluate on."""
    inputs = RNG.normal(size=(43, 5)).astype(np.float32)
    labels = RNG.integers(0, 3, 43).astype(np.int32)
    train = ArrayDataset(inputs, labels, BatchSpec(8))
    return Data(train, EvaluationSet(inputs, labels, 16), 4)


@pytest.mark.slow(but="four devices")
def test_counts_are_those_of_scikit_learn_on_any_number_of_devices(devices):
    data = example()
    model = mlp(4, width=8)
    trainer = Experiment(
        model=model,
        task=classification,
        data=data,
        optimizer=optax.sgd(0.1),
    ).trainer(devices)
    state = trainer.init()
    with devices.explicit_transfers():
        metrics, counts = trainer.measure(state)
    inputs, labels = data.evaluation.inputs, data.evaluation.labels
    logits = model.apply(devices.fetch(state.params), None, inputs, False)
    predicted = np.argmax(np.asarray(logits), axis=1)
    expected = confusion_matrix(labels, predicted, labels=range(4))
    np.testing.assert_array_equal(counts["confusion"], expected)
    assert expected.sum() == 43 and len(set(predicted)) > 1
    wanted = f1_score(labels, predicted, average="macro")
    assert metrics["eval/macro_f1"] == pytest.approx(wanted, abs=1e-12)
    assert metrics == trainer.evaluate(state)


def test_classes_that_never_occur_do_not_count():
    matrix = np.array([[3, 0, 0], [1, 2, 0], [0, 0, 0]])
    expected = (2 * 3 / 7 + 2 * 2 / 5) / 2
    assert macro_f1({}, {"confusion": matrix})["macro_f1"] == pytest.approx(expected)


def test_very_many_classes_are_not_counted():
    batch = {"labels": np.zeros(2, np.int32)}
    counts = confusion(np.zeros((2, 1001), np.float32), batch, np.ones(2, bool))
    assert counts == {} and macro_f1({}, counts) == {}


def test_the_picture_is_replaced_and_nothing_else_is_left(tmp_path):
    matrix = np.array([[3.0, 0], [1, 2]])
    for classes in (["costs $5", "free"], ["a", "b"]):
        path = plots.write_confusion(tmp_path, matrix, classes, "step 1")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "confusion.png"]


DRAWN = {
    "report": lambda path, text: plots.write(path, ROWS),
    "comparison": lambda path, text: plots.write_comparison(
        path / "c.png", {text: ROWS, "b": ROWS}, [f"train/{text}"]
    ),
    "confusion": lambda path, text: plots.write_confusion(
        path, np.eye(2), [text, "b"], text
    ),
    "pictures": lambda path, text: plots.write_pictures(
        path / "p.png", np.eye(4)[None, ..., None], [text]
    ),
}
ROWS = [{"step": step, "train/$x^$": 1.0} for step in (1, 2)]


@pytest.mark.parametrize("kind", DRAWN)
def test_texts_of_a_user_are_no_formulas(tmp_path, kind):
    path = tmp_path / "$x^$"
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    assert DRAWN[kind](path, "$x^$").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", DRAWN)
def test_letters_that_no_font_has_are_drawn_without_a_warning(tmp_path, kind):
    path = tmp_path / (letters := "走क")
    path.mkdir()
    assert DRAWN[kind](path, letters).read_bytes().startswith(b"\x89PNG")


def test_a_run_is_in_the_legend_whatever_its_name_begins_with(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_save", lambda figure, path: figure)
    (legend,) = DRAWN["comparison"](tmp_path, "_baseline").legends
    assert [x.get_text().strip() for x in legend.texts] == ["_baseline", "b"]


def test_a_picture_that_is_too_large_is_a_warning(tmp_path, caplog):
    figure = plots._figure("a.png", 1e6, 1)
    assert plots._save_if_possible(figure, tmp_path / "a.png") is None
    assert "a.png: Image size of" in caplog.text


def test_without_matplotlib_or_a_place_there_is_a_warning(
    tmp_path, monkeypatch, caplog
):
    matrix = np.eye(2)
    assert plots.write_confusion(tmp_path / "none", matrix, "ab", "") is None
    assert "no " in caplog.text and "confusion.png: " in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plots.write_confusion(tmp_path, matrix, "ab", "") is None
    assert "no confusion.png: matplotlib is not installed" in caplog.text
    assert not list(tmp_path.iterdir())
