"""What watches a run: metric writers, hooks, early stopping."""

import json
import signal

import pytest

from configs import digits
from haiku_template.config import check
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, Interrupted
from haiku_template.preflight.checks import check_evaluation
from haiku_template.runs import early_stop, start, train
from haiku_template.storage.metrics import read
from haiku_template.training.experiment import Experiment
from tests.runs import with_data

CPU = DeviceManager.create("cpu", num_devices=1)


class Lines:
    """A writer of a user's own; `make` is what a config names."""

    def __init__(self, workdir, step):
        self.file = (workdir / "own.jsonl").open("a")
        self.file.write(f"from {step}\n")

    def __call__(self, step, metrics):
        self.file.write(json.dumps([step, sorted(metrics)[0]]) + "\n")

    def close(self):
        self.file.write("closed\n")
        self.file.close()


def broken(workdir, step):
    def write(step, metrics):
        raise OSError("the service is gone")

    return write


def config(**changes):
    made = digits.get_config()
    made.model.width, made.batch_size = 8, 16
    made.num_steps, made.log_every, made.eval_every, made.save_every = 8, 4, 2, 4
    made.optimizer.warmup_steps = 0
    for key, value in changes.items():
        made[key] = value
    check(made)
    return made


def trainer(**changes):
    return Experiment.from_config(config(**changes), CPU).trainer(CPU)


def test_a_writer_that_a_config_names_gets_all_metrics_and_is_closed(tmp_path):
    writers = (f"{__name__}:Lines",)
    start.run(config(writers=writers), CPU, str(tmp_path))
    first, *lines, last = (tmp_path / "own.jsonl").read_text().splitlines()
    assert (first, last) == ("from 0", "closed")
    steps = [json.loads(line)[0] for line in lines]
    assert steps == [row["step"] for row in read(tmp_path / "metrics.jsonl")]


def worse(workdir, step):
    """A writer that keeps what it is given, and changes it."""
    return lambda step, metrics: (metrics.pop("eval/loss", None), metrics.clear())


@pytest.mark.slow(but="hook")
@pytest.mark.parametrize("what", ["writer", "hook"])
def test_what_a_hook_or_writer_does_with_its_metrics_changes_no_run(tmp_path, what):
    def hook(event):
        if event.what == "evaluation":
            event.values["eval/loss"] *= -1  # The first would be the best.

    options = {"writers": [worse]} if what == "writer" else {"hooks": [hook]}
    every = {"num_steps": 8, "log_every": 2, "eval_every": 2, "save_every": 2}
    for name, more in (("a", {}), ("b", options)):
        train(trainer(), workdir=tmp_path / name, keep_last=1, **every, **more)
    for name in ("metrics.jsonl", "checkpoints"):
        a, b = (tmp_path / x / name for x in "ab")
        if name == "checkpoints":
            assert [x.name for x in a.iterdir()] == [x.name for x in b.iterdir()]
        else:
            a, b = ([row.get("eval/loss") for row in read(x)] for x in (a, b))
            assert a == b


def test_a_writer_that_fails_is_a_warning_and_the_run_ends_well(tmp_path, caplog):
    start.run(config(writers=(f"{__name__}:broken",)), CPU, str(tmp_path))
    said = "writer broken is not written, and the run continues: the service is gone"
    assert said in caplog.text
    assert read(tmp_path / "metrics.jsonl")[-1]["step"] == 8


def test_a_writer_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="config.writers='nowhere:writer'"):
        start.run(config(writers=("nowhere:writer",)), CPU, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_hooks_see_steps_evaluations_and_saves_in_order(tmp_path):
    seen = []
    hooks = [lambda event: seen.append((event.what, event.step, int(event.state.step)))]
    options = {"eval_every": 2, "save_every": 4, "hooks": hooks}
    train(trainer(), num_steps=4, workdir=tmp_path, **options)
    steps = [("step", n) for n in (1, 2)] + [("evaluation", 2)]
    steps += [("step", n) for n in (3, 4)] + [("evaluation", 4), ("save", 4)]
    assert seen == [(what, step, step) for what, step in steps]


def test_an_error_in_a_hook_ends_the_run(tmp_path):
    def hook(event):
        raise KeyError("a defect of mine")

    with pytest.raises(KeyError, match="a defect of mine"):
        train(trainer(), num_steps=4, workdir=tmp_path, hooks=[hook])


@pytest.mark.parametrize(
    ("values", "mode", "stops"),
    [
        ([3, 2, 1], "min", False),
        ([1, 2], "min", False),
        ([1, 2, 3], "min", True),
        ([1, 2, 3], "max", False),
        ([3, 1, 2], "max", True),
        ([], "min", False),
    ],
)
def test_early_stopping_waits_for_its_patience(values, mode, stops):
    rows = [{"step": i, "eval/x": value} for i, value in enumerate(values)]
    rows += [{"step": 9, "train/loss": 1.0}]
    assert early_stop("eval/x", 2, mode)(rows) is stops


def test_early_stopping_by_what_is_never_measured_is_refused():
    made = trainer()
    check_evaluation(made, "eval/loss", early_stop("train/loss", 2))
    rows = [{"step": 1, "train/loss": 1.0}, {"step": 1, "eval/loss": 1.0}]
    assert not early_stop("train/los", 2)(rows[:1])  # Nothing is evaluated yet.
    with pytest.raises(ConfigError, match="early_stop.metric=train/los is not.*loss"):
        early_stop("train/los", 2)(rows)
    unseen = with_data(made, evaluation=None)
    check_evaluation(unseen, "eval/loss")
    with pytest.raises(ConfigError, match="possible are none without data"):
        check_evaluation(unseen, "eval/loss", early_stop("eval/loss", 2))


def test_the_last_step_of_a_run_that_stops_early_is_logged(tmp_path, capsys):
    stop = {"metric": "eval/loss", "mode": "max", "patience": 1}  # It falls at once.
    every = {"num_steps": 100, "log_every": 3, "eval_every": 4}
    for _ in range(2):
        start.run(config(**every, early_stop=stop), CPU, str(tmp_path))
        assert "done      step 8;" in capsys.readouterr().out
    rows = [x["step"] for x in read(tmp_path / "metrics.jsonl") if "train/loss" in x]
    assert rows == [3, 6, 8]


def test_the_last_line_of_a_run_that_stopped_early_does_not_count_as_before():
    """It comes after the evaluation of its step: a resumed run stays stopped."""
    rows = [{"step": 3, "train/loss": 2.0}, {"step": 4, "eval/loss": 1.0}]
    rows += [{"step": 6, "train/loss": 3.0}, {"step": 8, "eval/loss": 1.0}]
    stops = early_stop("train/loss", 1)
    assert stops(rows) and stops([*rows, {"step": 8, "train/loss": 1.0}])


def test_a_run_that_stops_early_as_a_signal_comes_has_all_of_its_lines(tmp_path):
    """The start after the signal makes no step, and has no scalars to log."""

    def come(event):
        if event.what == "evaluation" and event.step == 6:
            signal.raise_signal(signal.SIGTERM)

    def rows(name, hooks=()):
        options = {"num_steps": 100, "log_every": 4, "eval_every": 2, "hooks": hooks}
        stop = early_stop("eval/loss", 2, mode="max")
        train(trainer(), workdir=tmp_path / name, stop_when=stop, **options)
        kept = read(tmp_path / name / "metrics.jsonl")
        return [[row["step"], *sorted(row)[:2]] for row in kept]

    expected = rows("undisturbed")
    assert [6, "perf/bytes_from_devices"] in [row[:2] for row in expected]
    with pytest.raises(Interrupted, match="step 6 is saved"):
        rows("run", [come])
    assert rows("run") == expected


def test_a_run_that_stops_early_is_saved_and_stays_stopped_when_resumed(
    tmp_path, capsys
):
    stop = {"metric": "eval/loss", "mode": "max", "patience": 2}  # It falls at once.
    start.run(config(num_steps=100, early_stop=stop), CPU, str(tmp_path))
    rows = [row for row in read(tmp_path / "metrics.jsonl") if "eval/loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert "stopped   early" in capsys.readouterr().out
    start.run(config(num_steps=100, early_stop=stop), CPU, str(tmp_path))
    shown = capsys.readouterr().out
    assert "stopped   early" in shown and "done      step 6" in shown
    stop["patience"] = None
    start.run(config(num_steps=10, early_stop=stop), CPU, str(tmp_path))
    assert read(tmp_path / "metrics.jsonl")[-1]["step"] == 10
