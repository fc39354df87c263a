"""Runs as readers of the code tried them: odd, but plausible."""

import copy
import json
import pickle
import threading
import zipfile
from types import SimpleNamespace

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template import new
from haiku_template.combinations import combinations
from haiku_template.config import default_config
from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    GrainDataset,
    Split,
    from_split,
)
from haiku_template.data.datasets import by_name
from haiku_template.errors import ConfigError, NonFiniteError, StorageError
from haiku_template.preflight import fingerprint
from haiku_template.reporting import report
from haiku_template.runs import Run, early_stop, start, train
from haiku_template.runs.comparison import summarize_run, summarize_runs
from haiku_template.runs.limits import FirstBatches, within
from haiku_template.runs.predictions import _write_arrays, write_predictions
from haiku_template.storage import read
from haiku_template.storage.checkpoint import Checkpoints, metrics_of, restore
from haiku_template.training import Experiment, classification, regression
from haiku_template.training.optimizers import make_optimizer
from tests.runs import ROOT, run_command, run_steps
from tests.test_predict import config_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int32)
SPLIT = Split(X[:48], Y[:48], X[48:], Y[48:])


class Flaky:
    """Batches that cannot be read, once each, at some steps."""

    def __init__(self, *steps):
        self.data, self.steps = from_split(SPLIT, BatchSpec(16)).train, {*steps}

    def batch(self, step):
        if step in self.steps:
            self.steps.remove(step)
            raise OSError("the disk is away for a moment")
        return self.data.batch(step)


def worse(outputs, batch):
    """A loss that the optimizer of `made` makes worse: the first is the best."""
    loss = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return {"loss": loss}


def made(devices, *steps, task=worse, data=None, **options):
    data = data or from_split(SPLIT, BatchSpec(16))._replace(train=Flaky(*steps))
    model = hk.transform(lambda inputs, is_training: hk.nets.MLP([8, 2])(inputs))
    options = {"optimizer": optax.sgd(-0.05)} | options
    return Experiment(model=model, task=task, data=data, **options).trainer(devices)


OPTIONS = {"num_steps": 25, "log_every": None, "eval_every": 5}


def fails_at_evaluation(event):
    if event.what == "evaluation":
        raise OSError("no picture")


def test_an_evaluation_before_an_error_counts_once(tmp_path, one_device):
    stop = early_stop("eval/loss", 4)
    with pytest.raises(OSError, match="the disk is away"):
        train(made(one_device, 10), workdir=tmp_path, stop_when=stop, **OPTIONS)
    train(made(one_device), workdir=tmp_path, stop_when=stop, **OPTIONS)
    rows = read(tmp_path / "metrics.jsonl")
    steps = [row["step"] for row in rows if "eval/loss" in row]
    assert steps == [5, 10, 15, 20, 25]


def test_a_hook_that_fails_at_the_best_evaluation_does_not_lose_it(
    tmp_path, one_device
):
    options = {"workdir": tmp_path, "save_every": 5, **OPTIONS}
    with pytest.raises(OSError, match="no picture"):
        train(made(one_device), hooks=(fails_at_evaluation,), **options)
    train(made(one_device), **options)
    assert (tmp_path / "checkpoints" / "5").is_dir()


class Away:
    """An evaluation set that cannot be read, once, after step 10."""

    def __init__(self):
        self.data, self.is_away = from_split(SPLIT, BatchSpec(16)).evaluation, False
        self.num_batches = self.data.num_batches

    def hook(self, event):
        self.is_away = event.what == "step" and event.step == 10

    def batch(self, index):
        if self.is_away:
            raise OSError("the disk is away for a moment")
        return self.data.batch(index)


def test_a_step_that_is_evaluated_once_its_run_resumes_may_be_the_best(
    tmp_path, one_device
):
    """It was saved as its evaluation failed, without metrics."""
    folders, away = [tmp_path / "run", tmp_path / "mirror"], Away()
    options = {"workdir": folders[0], "mirror": folders[1], "save_every": 5, **OPTIONS}
    data = from_split(SPLIT, BatchSpec(16))._replace(evaluation=away)
    with pytest.raises(OSError, match="the disk is away"):
        train(made(one_device, data=data), hooks=(away.hook,), keep_last=9, **options)
    files = [x / "checkpoints/10/metrics/metrics" for x in folders]
    assert [json.loads(file.read_text()) for file in files] == [{}, {}]
    train(made(one_device), keep_last=9, **options)
    rows = {x["step"]: x for x in read(folders[0] / "metrics.jsonl")}
    saved = {"eval/loss": rows[10]["eval/loss"]}
    assert [metrics_of(x / "checkpoints/10") for x in folders] == [saved, saved]


def test_early_stopping_counts_what_is_no_number(tmp_path, one_device):
    rows = [{"step": i, "eval/x": None if i > 1 else 1.0} for i in range(1, 6)]
    stop = early_stop("eval/x", 3)
    assert not stop(rows[:3]) and stop(rows[:4])
    assert "eval/x was best at step 1, 1, and not better in 3 evaluations" in (
        stop.reason
    )
    assert early_stop("eval/x", 3)(rows[1:])


def test_early_stopping_by_what_never_was_a_number_says_so():
    stop = early_stop("eval/x", 2)
    assert stop([{"step": i, "eval/x": None} for i in (1, 2, 3)])
    assert stop.reason.startswith("eval/x was never a number, and not better in 2")


@pytest.mark.parametrize(
    "function", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_the_first_batches_of_a_set_can_be_copied(function):
    assert function(FirstBatches(SimpleNamespace(num_batches=4, size=3), 2)).size == 3


def test_early_stopping_waits_for_the_first_metrics_of_training():
    stop = early_stop("train/loss", 3)
    assert not stop([{"step": 50, "eval/loss": 1.0}])
    with pytest.raises(ConfigError, match="train/los is not measured.*train/loss"):
        early_stop("train/los", 3)([{"step": 50, "train/loss": 1.0, "eval/loss": 1.0}])


@pytest.mark.parametrize("best_mode", ["min", "max"])
def test_the_best_of_a_script_s_run_is_by_its_options(
    tmp_path, one_device, monkeypatch, best_mode
):
    options = {"best_metric": "eval/loss", "best_mode": best_mode, "save_every": 5}
    # Nothing but early stopping reads lines at an evaluation.
    monkeypatch.setattr(report, "Reader", lambda path: None)
    train(made(one_device), workdir=tmp_path, keep_last=9, **OPTIONS, **options)
    best = {"min": 5, "max": 25}[best_mode]
    assert restore(tmp_path, "best", lambda *_: None)[0] == best
    (summary,) = summarize_runs(tmp_path)
    assert summary.metric == "eval/loss" and summary.best[1] == best
    train(made(one_device), workdir=tmp_path, keep_last=9, **OPTIONS)
    assert restore(tmp_path, "best", lambda *_: None)[0] == 5  # A script may change.


def test_an_evaluation_without_the_best_metric_ends_no_run(tmp_path, caplog):
    """As where a derived one is not defined, now and then."""
    with Checkpoints(tmp_path, best_metric="eval/precision", keep_best=1) as saves:
        saves.warn_of_no_rank({"eval/loss": 1.0})
        metrics = {1: {"eval/loss": 1.0}, 2: {"eval/precision": 1.0}}
        assert saves.best_first(metrics) == [2]
    assert "has no best_metric=eval/precision, and its step counts" in caplog.text


def test_a_step_that_may_be_the_best_and_is_not_saved_is_said(
    tmp_path, one_device, caplog
):
    config = config_of(tmp_path)
    config.eval_every, config.early_stop.patience = 2, 9
    start.run(config, one_device, str(tmp_path / "run"))
    assert "save_every=None: the step whose eval/loss is best may not" in caplog.text


def test_each_run_of_a_sweep_has_a_mirror_of_its_own(tmp_path):
    config = default_config()
    config.mirror = str(tmp_path / "mirror")
    members = combinations(config, tmp_path, ["seed=0,1"])
    mirrors = [member.config.mirror for member in members]
    assert mirrors == [str(tmp_path / "mirror" / f"seed={i}") for i in range(2)]


def test_the_mirror_of_another_run_is_not_copied(tmp_path, one_device):
    config = config_of(tmp_path)
    config.mirror = str(tmp_path / "mirror")
    start.run(config, one_device, str(tmp_path / "a"))
    config.seed = 1
    with pytest.raises(ConfigError, match="mirror belongs to a run with another conf"):
        start.run(config, one_device, str(tmp_path / "b"))
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_a_limit_in_minutes_ends_a_run_of_another_thread(tmp_path, one_device):
    config = config_of(tmp_path)
    config.num_steps, config.max_minutes = 100_000, 1 / 600
    run = lambda: start.run(config, one_device, str(tmp_path / "run"))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert summarize_run(tmp_path / "run").state.startswith("stopped at")


def test_a_script_that_was_stopped_is_not_done(tmp_path, one_device):
    with pytest.raises(OSError, match="the disk is away"):
        train(made(one_device, 10), workdir=tmp_path, **OPTIONS)
    assert summarize_run(tmp_path).state == "stopped at 10"
    train(made(one_device), workdir=tmp_path, **OPTIONS)
    assert summarize_run(tmp_path).state == "done"


@pytest.mark.parametrize("name", ["skipped_steps", "grad_norm", "loss_scale"])
def test_values_with_names_of_a_step_are_refused(one_device, name):
    task = lambda outputs, batch: {"loss": outputs[:, 0], name: outputs[:, 1]}  # noqa: E731
    with pytest.raises(ConfigError, match=f"returns '{name}', which a step has"):
        run_steps(made(one_device, task=task))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_in_half_precision_are_added_up_in_float32(one_device, dtype):
    def task(outputs, batch):
        value = jnp.arange(len(outputs)) % 3 == 0
        return worse(outputs, batch) | {"x": 1000 * value.astype(dtype)}

    inputs, labels = np.tile(X, (16, 1)), np.tile(Y, 16)
    rows = ArrayDataset(inputs, labels, BatchSpec(1024))
    data = Data(rows, EvaluationSet(inputs, labels, 1024), 2)
    trainer = made(one_device, task=task, data=data)
    expected = 1000 * (np.arange(1024) % 3 == 0).mean()
    assert trainer.evaluate(trainer.init())["eval/x"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("task", "labels", "words"),
    [
        (
            classification,
            Y[:, None],
            r"int32\[16, 1\] and the outputs \[16, 2\]; class",
        ),
        (classification, Y.astype(np.float32), "labels are float32.* one whole number"),
        (classification, np.eye(2)[Y].astype(bool), r"labels are bool\[16, 2\]"),
        (
            regression,
            np.ones((64, 3), np.float32),
            r"\[16, 3\] and the .*\[16, 2\]; reg",
        ),
    ],
)
def test_labels_of_another_shape_are_refused_in_a_sentence(
    one_device, task, labels, words
):
    data = Data(ArrayDataset(X, labels, BatchSpec(16)), None, 2)
    with pytest.raises(ConfigError, match=words):
        run_steps(made(one_device, task=task, data=data))


def test_a_label_beyond_the_outputs_is_among_the_causes(tmp_path, one_device):
    data = Data(ArrayDataset(X, Y + 1, BatchSpec(16)), None, 2)
    trainer = made(one_device, task=classification, data=data)
    with pytest.raises(NonFiniteError, match="a label that is no class .0 to below"):
        train(trainer, num_steps=3, workdir=tmp_path)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("prodigy", 1.0), ("madgrad", 0.01), ("schedule_free_adamw", 0.01)],
)
def test_an_optimizer_without_a_mask_decays_by_itself(name, rate, caplog):
    schedule = optax.constant_schedule(rate)
    own = make_optimizer(name, schedule, weight_decay=0.1)
    of_optax = getattr(optax.contrib, name)(schedule, weight_decay=0.1)
    params, ends = {"m": {"w": jnp.full((3, 1), 2.0)}}, []
    for optimizer in (own, of_optax):
        values, state = params, optimizer.init(params)
        for i in range(20):
            gradients = {"m": {"w": values["m"]["w"] - i}}
            updates, state = optimizer.update(gradients, state, values)
            values = optax.apply_updates(values, updates)
        ends.append(values["m"]["w"])
    np.testing.assert_array_equal(*ends)
    assert f"{name} takes no mask: it decays biases and norms, too" in caplog.text


def test_an_optimizer_of_one_s_own_is_code_that_may_be_edited():
    config = default_config().to_dict() | {"step": None}
    for key in ("model", "data", "task"):
        config[key] = {"name": "mlp"}
    assert not fingerprint.needed(config)
    config["optimizer"]["name"] = "mine:optimizer"
    assert fingerprint.needed(config)


def test_outputs_of_several_lengths_are_lines_and_no_arrays(tmp_path, one_device):
    class Lengths:
        num_batches = 2

        def batch(self, index):
            return {"inputs": np.ones((2, 3 + index, 1), np.float32)}

    model = hk.transform(lambda inputs, is_training: hk.Linear(2)(inputs))
    loss = lambda outputs, batch: {"loss": outputs.mean((1, 2))}  # noqa: E731
    rows = ArrayDataset(
        np.ones((8, 3, 1), np.float32), None, BatchSpec(2, labels="any")
    )
    experiment = Experiment(
        model=model, task=loss, data=Data(rows, Lengths(), 2), optimizer=optax.sgd(0.1)
    )
    train(experiment.trainer(one_device), num_steps=1, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=experiment)
    with pytest.raises(ConfigError, match="several lengths.*--output=.*out.jsonl has"):
        write_predictions(run, tmp_path / "out.npz")
    assert not (tmp_path / "out.npz").exists()
    assert write_predictions(run, tmp_path / "out.jsonl") == 4
    assert len(json.loads((tmp_path / "out.jsonl").read_text().split("\n")[2])) == 1


def test_an_archive_of_outputs_has_the_files_of_pictures(tmp_path):
    """And is NumPy's own, but for that name."""
    batch = {"class": np.array(["a", "b"]), "outputs": np.eye(2)}
    np.savez(tmp_path / "own.npz", **batch)
    _write_arrays(tmp_path / "here.npz", [batch])
    own, here = (zipfile.ZipFile(tmp_path / f"{x}.npz") for x in ("own", "here"))
    assert own.namelist() == here.namelist()
    assert all(own.read(x) == here.read(x) for x in own.namelist())
    _write_arrays(tmp_path / "files.npz", [batch | {"file": batch["class"]}])
    assert np.load(tmp_path / "files.npz")["file"].tolist() == ["a", "b"]


def test_batches_without_numbers_are_for_an_iterator():
    class Iterable:
        def __iter__(self):
            return iter(())

    with pytest.raises(ConfigError, match="a Iterable has no batches by number; from_"):
        GrainDataset(Iterable())


@pytest.mark.parametrize(
    ("profile", "is_possible"),
    [("2:5", True), ("2:8", False), ("200:210", False), ("", False)],
)
def test_a_profile_is_of_the_steps_that_epochs_make(
    tmp_path, one_device, profile, is_possible
):
    config = config_of(tmp_path)  # 70 examples: seven steps of 8 hold 0.7 epochs.
    config.num_epochs, config.num_steps = 0.7, 1000
    options = {"profile": profile, "dry_run": True}
    if is_possible:
        return start.run(config, one_device, str(tmp_path / "run"), **options)
    with pytest.raises(ConfigError, match="0 <= START < STOP <= 7, such as"):
        start.run(config, one_device, str(tmp_path / "run"), **options)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--check", "--dry_run"], "--dry_run does nothing beside --check"),
        (["--check", "--profile=1:2"], "--profile does nothing beside --check"),
        (["--dry_run", "--rewind=5"], "--rewind does nothing beside --dry_run"),
        (
            ["--dry_run", "--target=t4,l4", "--profile=1:2"],
            "--profile does nothing beside --dry_run",
        ),
        (
            ["--dry_run", "--device_memory_limit="],
            "--device_memory_limit= is not an amount of memory; possible are a number "
            "of bytes, and amounts such as 500MiB or 24GiB",
        ),
        (
            ["--against=a:b", "--checkpoint=best"],
            "--checkpoint does nothing beside --config",
        ),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags, words, command):
    name = "verify" if "--against=a:b" in flags else "train"
    done = command(name, "--config=configs/digits.py", *flags)
    assert (done.returncode, done.stderr) == (64, f"error: {words}\n")


def test_a_metric_that_no_run_has_is_refused(tmp_path, one_device, command):
    train(made(one_device), workdir=tmp_path / "run", **OPTIONS)
    done = command("runs", str(tmp_path), "--metric=eval/los", "--mode=min")
    assert done.returncode == 64
    assert "--metric=eval/los is not measured; nearest is eval/loss;" in done.stderr


def test_a_folder_in_a_word_of_its_own_is_no_name(monkeypatch):
    flags = []
    run = {"main": lambda x: flags.extend(x)}
    monkeypatch.setattr(new.runpy, "run_path", lambda path: run)
    new.main(["--dest", "there", "mine", "--vendor"])
    assert sorted(flags) == ["--dest=there", "--name=mine", "--vendor"]


def test_a_workdir_that_moves_ends_its_run_and_nobody_elses(tmp_path, one_device):
    """Saves of a run go nowhere but into its own workdir, which no other run has."""
    place, away, kept = tmp_path / "run", tmp_path / "away", []

    def moves(event):
        if event.what == "save" and event.step == 5:
            place.rename(away)
            train(made(one_device), workdir=place, save_every=10, **OPTIONS)
            kept.extend(sorted(x.name for x in (place / "checkpoints").iterdir()))

    options = {"save_every": 5, "max_failed_saves": 2, **OPTIONS}
    with pytest.raises(StorageError, match="run was moved or removed, or is another"):
        train(made(one_device), workdir=place, hooks=(moves,), **options)
    assert kept == sorted(x.name for x in (place / "checkpoints").iterdir())
    assert summarize_run(place).state == "done"
    assert train(made(one_device), workdir=away, **OPTIONS).metrics


def test_a_link_to_the_workdir_is_no_mirror(tmp_path, one_device):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match="link is --workdir; use another disk"):
        mirror = str(tmp_path / "link")
        train(made(one_device), workdir=tmp_path / "run", mirror=mirror, **OPTIONS)


def test_a_step_that_is_evaluated_twice_counts_once():
    rows = [{"step": i, "eval/x": 1.0 + i} for i in (1, 2, 2, 2)]
    assert not early_stop("eval/x", 2)(rows)
    assert early_stop("eval/x", 2)([*rows, {"step": 3, "eval/x": 4.0}])


def test_a_time_limit_may_be_infinite(tmp_path, one_device):
    """It is waited for in a thread, and no clock counts so far."""
    errors, options = [], OPTIONS | {"workdir": tmp_path / "run"}
    before, threading.excepthook = threading.excepthook, errors.append
    try:
        within(np.inf, train)(made(one_device), **options)
    finally:
        threading.excepthook = before
    assert not errors


@pytest.mark.parametrize("path", [2024, "2024"])
def test_a_path_may_be_a_number(tmp_path, monkeypatch, path):
    """A flag reads it as one: `--config.data.path=2024`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024").mkdir()
    with pytest.raises(ConfigError, match="2024"):
        by_name({"name": "npz", "path": path}, BatchSpec(8))


def test_none_is_a_value_in_every_form_of_a_flag():
    words = ["--config=digits", "--config.eval_every=None", "-config.ema_decay=None"]
    words += ["--config.optimizer.clip_norm", "None", "--config.seed", "3", "--help"]
    done = run_command("train", *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    for line in (
        "eval_every=None",
        "ema_decay=None",
        "optimizer.clip_norm=None",
        "seed=3",
    ):
        assert f"--config.{line}\n" in done.stdout


def test_flags_may_be_in_a_file(tmp_path):
    file = tmp_path / "flags.txt"
    file.write_text("# Of the lab.\n--config=digits\n--config.eval_every=None\n")
    words = [f"--flagfile={file}", "--config.seed=3", "--help"]
    done = run_command("train", *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    for line in ("eval_every=None", "seed=3", "data.name=digits"):
        assert f"--config.{line}\n" in done.stdout


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ["absent", "binary"])
def test_a_file_of_flags_that_cannot_be_read_is_named(tmp_path, command, kind):
    """With a config, whose keys are looked up as it is defined, and without."""
    file = tmp_path / "flags.txt"
    if kind == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    done = run_command(command, f"--flagfile={file}", PYTHONPATH=str(ROOT))
    assert done.returncode == ConfigError.exit_code
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: a --flagfile cannot be read: ")
    assert kind == "binary" or str(file) in line
