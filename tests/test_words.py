"""Limits in the units that people come with, a check of a config, others' words."""

import json

import numpy as np
import optax
import pytest
from ml_collections import config_dict

from haiku_template.config import check, default_config
from haiku_template.data import (
    BatchSpec,
    Data,
    Split,
    bucketed,
    from_iterator,
    from_split,
)
from haiku_template.devices import DeviceManager, checks
from haiku_template.errors import ConfigError, DeviceError, counted
from haiku_template.models import mlp
from haiku_template.runs import Run, early_stop, start, train
from haiku_template.runs.trial import check_run
from haiku_template.storage import read
from haiku_template.training import Experiment, classification
from tests import test_words
from tests.runs import evaluated
from tests.test_predict import config_of

CPU = DeviceManager.create("cpu", num_devices=1)


@pytest.fixture
def config(tmp_path):
    return config_of(tmp_path)  # 70 examples in batches of 8, 16 to evaluate on.


def test_epochs_are_steps_and_the_first_lines_say_both(config, tmp_path, capsys):
    config.num_epochs = 2.0
    start.run(config, CPU, str(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "; 18 steps = 2.057 epochs" in shown and "done      step 18" in shown
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (saved["num_steps"], saved["num_epochs"]) == (18, 2.0)
    # A longer run is the same one, and `evaluate` knows its steps.
    config.num_epochs = 3.0
    start.run(config, CPU, str(tmp_path / "run"))
    assert "resumed at step 18" in capsys.readouterr().out
    assert evaluated(tmp_path / "run", CPU)[0] == 27


def endless(spec):
    x, y = np.zeros((8, 3), np.float32), np.zeros(8, np.int32)
    return Data(from_iterator(lambda: iter([{"inputs": x, "labels": y}] * 99)), None, 2)


def test_epochs_of_data_without_a_size_are_refused(config, tmp_path):
    assert not hasattr(endless(BatchSpec(8)).train, "num_examples")
    config.data = {"name": "tests.test_words:endless"}
    config.num_epochs = 2.0
    with pytest.raises(ConfigError, match="num_epochs=2 needs a training set of a"):
        start.run(config, CPU, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_evaluations_of_a_few_batches_are_of_the_first(config, tmp_path):
    config.eval_batches = 1
    start.run(config, CPU, str(tmp_path / "run"))
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    _, metrics = evaluated(tmp_path / "run", CPU)  # Of all.
    assert last["eval/loss"] != pytest.approx(metrics["eval/loss"], abs=1e-4)
    data = np.load(tmp_path / "data.npz")
    x, y = data["x_test"][:8], data["y_test"][:8]
    from haiku_template.runs import Run

    outputs = Run.open(tmp_path / "run", CPU).predict(x)
    losses = np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(8), y]
    assert last["eval/loss"] == pytest.approx(losses.mean(), abs=1e-5)


def test_minutes_end_a_run_saved_and_the_same_command_goes_on(config, tmp_path, capsys):
    config.num_steps, config.max_minutes, config.log_every = 10**6, 0.1 / 60, 1000
    config.optimizer.schedule = "constant"
    start.run(config, CPU, str(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert (
        "stopped   after 0.00166667 minutes, as config.max_minutes says: step " in shown
    )
    step = int(shown.rpartition(": step ")[2].split()[0])
    config.num_steps, config.max_minutes = step + 1, None
    start.run(config, CPU, str(tmp_path / "run"))
    assert f"resumed at step {step}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "mode", "delta", "stops"),
    [
        ([3, 2, 1.9, 1.85], "min", 0.0, False),
        ([3, 2, 1.9, 1.85], "min", 0.2, True),
        ([1, 2, 2.1, 2.15], "max", 0.2, True),
        ([1, 2, 2.1, 2.5], "max", 0.2, False),
        ([2, 2, 2], "min", 0.0, True),
    ],
)
def test_early_stopping_needs_an_improvement_by_more_than_min_delta(
    values, mode, delta, stops
):
    rows = [{"step": 10 * n, "eval/x": value} for n, value in enumerate(values, 1)]
    rule = early_stop("eval/x", 2, mode, delta)
    assert rule(rows) is stops
    if stops:
        step = 10 if len(values) == 3 else 20
        assert f"eval/x was best at step {step}, 2" in rule.reason
        assert "(patience 2)" in rule.reason
        assert ("by more than 0.2" in rule.reason) == (delta > 0)


def test_a_check_overfits_one_batch_evaluates_and_saves(config, tmp_path, capsys):
    config.optimizer.learning_rate = 1e-2
    config.optimizer.warmup_steps = 500
    before = set(tmp_path.iterdir())
    check_run(config, CPU)
    shown = capsys.readouterr().out
    line = shown.strip().splitlines()[-1]
    assert line.startswith("check     loss ") and "in 20 steps on one batch" in line
    assert "eval/loss" in line and "saved, and resumed" in line
    assert set(tmp_path.iterdir()) == before
    first, last = (float(x) for x in line.split()[2:5:2])
    assert last < first


def test_a_check_refuses_a_loss_that_does_not_fall(config):
    config.optimizer.learning_rate = 0.0
    with pytest.raises(ConfigError, match="does not fall: does it depend"):
        check_run(config, CPU)


MADE = []


def remembered(trainer, workdir):
    MADE.append(workdir)
    return MADE.append


def test_a_check_calls_hooks_and_no_writers(config, capsys):
    made = test_words.MADE  # Of the module that the config names.
    config.hooks, config.writers = ("tests.test_words:remembered",), ("csv",)
    check_run(config, CPU)
    steps = [x.step for x in made if getattr(x, "what", "") == "evaluation"]
    assert steps == [20, 21] and not made[0].parent.exists()


def eights(spec):
    x, y = np.zeros((64, 3), np.float32), np.zeros(64, np.int32)
    return from_split(Split(x, y, x, y), BatchSpec(8), num_classes=2)


ENDLESS, EIGHTS = ({"name": f"tests.test_words:{x}"} for x in ("endless", "eights"))
# What a run refuses before its first step, and a part of the sentence.
REFUSED = [
    ({"hooks": ("histogram",)}, "did you mean"),
    ({"hooks": ("tests.test_words:absent",)}, "absent"),
    ({"writers": ("cvs",)}, "did you mean"),
    ({"best_metric": "eval/acuracy"}, "acuracy is not measured"),
    ({"early_stop": {"metric": "eval/acuracy", "patience": 1}}, "not measured"),
    ({"early_stop": {"mode": "least", "patience": 1}}, "least"),
    ({"loop": "tests.test_wrds"}, "test_wrds"),
    ({"data": ENDLESS, "num_epochs": 2.0}, "needs a training set of a known size"),
    ({"data": ENDLESS, "eval_batches": 2}, "nothing to evaluate on"),
    ({"data": EIGHTS, "batch_size": 7, "num_epochs": 2.0}, "the data's are of 8"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=str)
def test_what_a_run_refuses_is_refused_by_its_trials(config, tmp_path, changes, words):
    config = config.copy_and_resolve_references()
    for key, value in changes.items():
        if key == "early_stop":
            value = config.early_stop.to_dict() | value
        config[key] = (
            config_dict.ConfigDict(value) if isinstance(value, dict) else value
        )

    def refusal(trial, *words, **options):
        with pytest.raises(ConfigError) as raised:
            check(config)
            trial(config, CPU, *words, **options)
        return str(raised.value)

    sentence = refusal(start.run, str(tmp_path / "run"))
    assert words in sentence and not (tmp_path / "run").exists()
    assert refusal(start.run, str(tmp_path / "run"), dry_run=True) == sentence
    assert refusal(check_run) == sentence


def test_the_check_is_a_flag_that_needs_no_workdir(command):
    done = command("train", "--config=configs/digits.py", "--check")
    assert done.returncode == 0, done.stderr
    assert "\ncheck     loss " in done.stdout and "Parameters" in done.stdout


WORDS = {
    "--epochs=3": "did you mean --config.num_epochs?",
    "--gpus=2": "did you mean --num_devices=2, or --device=gpu:0,1?",
    "--lr=1": "did you mean --config.optimizer.learning_rate?",
    "--resume": "the same command again, which resumes",
    "--output_dir=x": "did you mean --workdir=DIR?",
    "--fallbak=cpu": "Did you mean: fallback",
    "--config.lr=0.1": "did you mean --config.optimizer.learning_rate?",
    "--config.max_epochs=3": "did you mean --config.num_epochs?",
    "--config.optimizer.name=adamW": "did you mean adamw?",
    "--device=cuda:0": "did you mean --device=gpu:0?",
}


# Processes of a second each; the tables behind them are tested below.
@pytest.mark.slow(but="gpus")
@pytest.mark.parametrize("flag", WORDS)
def test_words_of_others_are_answered_with_the_right_name(command, flag, tmp_path):
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}", "--dry_run", flag]
    done = command("train", *flags)
    assert done.returncode in (64, 69) and WORDS[flag] in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_of_others_are_answered(tmp_path):
    for key, name in (("lr", "optimizer.learning_rate"), ("epochs", "num_epochs")):
        config = default_config()
        config[key] = 1
        with pytest.raises(ConfigError, match=f"did you mean --config.{name}"):
            check(config)


@pytest.mark.parametrize(
    ("spec", "name"), [("cuda:0", "gpu:0"), ("CUDA", "gpu"), ("0,1", "gpu:0,1")]
)
def test_devices_of_others_are_answered(spec, name):
    with pytest.raises(DeviceError, match=f"did you mean --device={name}"):
        DeviceManager.create(spec)


def test_help_lists_the_keys_of_the_config(command):
    flags = ["--config=configs/digits.py", "--config.num_steps=7", "--help"]
    shown = command("train", *flags).stdout
    assert "keys of configs/digits.py, and their values" in shown
    assert "\n  --config.num_steps=7\n" in shown and "--device" in shown
    assert "--[no]fit" in shown and "(default: 'true')" not in shown  # None is on.


def test_help_lists_the_keys_of_the_data_that_the_config_leaves_out(command):
    shown = command("train", "--config=configs/gpt_bytes.py", "--help").stdout
    lines = [x.strip() for x in shown.splitlines() if "--config.data." in x]
    assert "--config.data.validation_fraction=0.1" in lines
    assert "--config.data.workers=0" in lines and "--config.data.context=128" in lines
    assert lines == sorted(lines) and "--config.data.name=bytes" in lines


def test_help_of_a_config_without_data_lists_its_keys(command, tmp_path):
    text = "import ml_collections as ml\nget_config = lambda: ml.ConfigDict({'a': 3})"
    (tmp_path / "own.py").write_text(text)
    shown = command("train", f"--config={tmp_path / 'own.py'}", "--help").stdout
    assert "--config.a=3" in shown and "--device" in shown


def test_parts_of_others_are_sentences(tmp_path):
    x, y = np.zeros((16, 3), np.float32), np.zeros(16, np.int32)
    split = Split(x, y, x, y)
    parts = {
        "model": mlp(2, None, width=4),
        "task": classification,
        "optimizer": optax.adam(1e-3),
        "data": from_split(split, BatchSpec(8)),
    }
    with pytest.raises(ConfigError, match="optax.adam\\(1e-3\\)"):
        Experiment(**parts | {"optimizer": "adam"})
    with pytest.raises(ConfigError, match="is a Split, and Data.*from_split\\(split"):
        Experiment(**parts | {"data": split})
    with pytest.raises(
        ConfigError, match="is a list, and Data is needed.*from_split, or"
    ):
        Experiment(**parts | {"data": [x]})
    with pytest.raises(ConfigError, match="train\\(experiment.trainer\\(devices\\)"):
        train(Experiment(**parts), num_steps=1, workdir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def of_32(spec):
    x, y = np.zeros((64, 3), np.float32), np.zeros(64, np.int32)
    return from_split(Split(x, y, x, y), BatchSpec(32))


def test_epochs_are_of_the_batches_that_the_data_makes(config, tmp_path):
    config.data, config.num_epochs = {"name": "tests.test_words:of_32"}, 2.0
    with pytest.raises(ConfigError, match="batch_size=8, and the data's are of 32"):
        start.run(config, CPU, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_one_epoch_holds_each_example(config, tmp_path):
    config.num_epochs = 1.0
    assert start.in_steps(config, CPU).num_steps == 9  # 70 examples in batches of 8.


def of_lengths(spec):
    """70 examples, each of its own number."""
    lengths = np.random.default_rng(0).integers(1, 17, 70)
    made = [
        {"inputs": np.full((n, 1), i, np.float32), "labels": np.int32(i)}
        for i, n in enumerate(lengths)
    ]
    return bucketed(made, spec, (4, 8, 16), num_outputs=70)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.5, 5), (1, 9), (2, 18), (2.5, 22), (7, 63)]
)
def test_each_example_of_buckets_is_in_as_many_batches_as_whole_epochs(
    config, epochs, steps
):
    config.data, config.num_epochs = {"name": "tests.test_words:of_lengths"}, epochs
    assert start.in_steps(config, CPU).num_steps == steps
    train = of_lengths(BatchSpec(8)).train
    seen = [train.batch(step)["labels"] for step in range(steps)]
    assert np.bincount(np.concatenate(seen), minlength=70).min() >= int(epochs)


def test_epochs_of_random_windows_are_told_to_leave_tokens_out(
    config, tmp_path, caplog
):
    (tmp_path / "text.txt").write_text("To be, or not to be. " * 40)
    data = {"name": "bytes", "path": str(tmp_path / "text.txt"), "context": 8}
    config.data, config.num_epochs = data, 1.0
    for order, words in (("epochs", 0), ("random", 1)):
        config.data.order = order
        start.in_steps(config, CPU)
        assert caplog.text.count("leaves out about a third of the tokens") == words


def test_patience_without_evaluations_is_told(config, tmp_path, caplog):
    config.num_steps, config.early_stop.patience = 2, 1
    start.run(config, CPU, str(tmp_path / "run"))
    assert "patience counts evaluations, and config.eval_every=None" in caplog.text


def test_a_function_that_returns_a_trainer_is_no_experiment_s(tmp_path):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", None, CPU, "latest", lambda devices: "a trainer")
    with pytest.raises(ConfigError, match="--experiment returned a str, and no Exp"):
        _ = run.trainer


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "examples", "1 example"),
        (1, "batches", "1 batch"),
        (1, "classes", "1 class"),
        ("1", "minutes", "1 minute"),
        (0, "files", "0 files"),
        ("1.0", "epochs", "1.0 epochs"),
        (1200, "processes", "1,200 processes"),
    ],
)
def test_one_of_a_thing_is_in_the_singular(number, noun, text):
    assert counted(number, noun) == text


def test_what_a_run_says_of_one_thing_is_in_the_singular():
    rows = [{"step": step, "eval/loss": float(step)} for step in (1, 2)]
    stops = early_stop("eval/loss", 1)
    assert stops(rows) and " in 1 evaluation since then" in stops.reason
    assert "of 1 example cannot be sharded evenly over 4 devices" in str(
        checks._uneven(1, 4, 1)
    )
