"""Metrics in the trackers of others, by their real packages: `make test-trackers`."""

import contextlib
import csv
import errno
import importlib.util
import json
import math
import shutil

import pytest

from configs import digits
from haiku_template.config import default_config
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.reporting import trackers
from haiku_template.runs import start
from haiku_template.storage import read
from haiku_template.storage.workdir import run_id
from tests.runs import ROOT, run_command

CPU = DeviceManager.create("cpu", num_devices=1)


def train(workdir, num_steps, writer, *more, **variables):
    flags = ["--config=configs/digits.py", f"--workdir={workdir}", "--device=cpu"]
    flags += [f"--config.num_steps={num_steps}", "--config.log_every=5"]
    flags += ["--config.optimizer.schedule=constant", f"--config.writers=('{writer}',)"]
    flags += ["--config.optimizer.warmup_steps=0", *more]
    variables |= {"PYTHONPATH": str(ROOT), "HOME": str(workdir.parent)}
    done = run_command("train", *flags, **variables)
    assert done.returncode == 0, done.stderr
    assert "not written" not in done.stderr
    return done


def expected(workdir):
    """Values of each metric by step, as metrics.jsonl has them."""
    values = {}
    for row in read(workdir / "metrics.jsonl"):
        for name, value in row.items():
            if name != "step":
                values.setdefault(name, {})[row["step"]] = value
    return values


def config(**values):
    made = default_config()
    made.update_from_flattened_dict(values | {"writers": ("csv",), "log_every": 2})
    made.optimizer.schedule = "constant"
    return made


def test_the_table_has_each_metric_of_a_resumed_run_once(tmp_path):
    for num_steps in (4, 8):
        start.run(config(num_steps=num_steps), CPU, str(tmp_path))
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = read(tmp_path / "metrics.jsonl")
    assert len(rows) == len(lines) == 6
    for row, line in zip(rows, lines, strict=True):
        assert {k: float(x) for k, x in row.items() if x} == line


def test_a_table_that_a_full_disk_cut_is_written_anew(tmp_path, monkeypatch):
    row, write = {"train/a": 0.5}, trackers.csv_writer(tmp_path, 0)

    def log(step):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step} | row) + "\n")
        write(step, row)

    log(1)

    def is_full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trackers, "append_whole", is_full)
        patch.setattr(trackers.workdirs, "write_atomically", is_full)
        for step in (2, 3):
            with pytest.raises(OSError, match="No space"):
                log(step)
    log(4)
    log(5)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["step,train/a", *(f"{step},0.5" for step in range(1, 6))]


def test_a_number_that_is_not_finite_is_in_no_row(tmp_path):
    write = trackers.csv_writer(tmp_path, 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/a": null}\n')
    for step in (1, 2):
        write(step, {"train/a": math.inf})
    assert (tmp_path / "metrics.csv").read_text().split() == [
        "step,train/a",
        "1,",
        "2,",
    ]


ALL_FILES = {
    *("checkpoints", "config.json", "env.json", "goodput.jsonl", "images", ".lock"),
    *("metrics.csv", "metrics.jsonl", "program.json", "report.png", "run.json"),
    *("tensorboard", "train.log"),
}


@pytest.fixture(scope="module")
def with_all_files(tmp_path_factory):
    """A run's workdir, with the files of hooks and writers."""
    workdir = tmp_path_factory.mktemp("all") / "run"
    start.run(of_all_files(4), CPU, str(workdir))
    assert {x.name for x in workdir.iterdir()} <= ALL_FILES
    return workdir


def of_all_files(num_steps):
    values = digits.get_config()
    changes = {"writers": ("csv", "hparams"), "hooks": ("images", "histograms")}
    changes |= {"model.width": 4, "save_every": 2, "log_every": 1, "eval_every": 2}
    values.update_from_flattened_dict(changes | {"num_steps": num_steps})
    values.optimizer.update({"schedule": "constant", "warmup_steps": 0})
    return values


@pytest.mark.parametrize("name", sorted(ALL_FILES))
def test_no_file_of_a_run_is_written_through_a_link(tmp_path, with_all_files, name):
    for copy in ("run", "other"):
        shutil.copytree(with_all_files, tmp_path / copy)
    path, target = tmp_path / "run" / name, tmp_path / "other" / name
    if not target.exists():  # Drawn by commands alone.
        target.write_text("of another run")
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(target)
    files = [x for x in [target, *target.rglob("*")] if x.is_file()]
    before = {x: x.read_bytes() for x in files}
    with contextlib.suppress(ConfigError):
        start.run(of_all_files(6), CPU, str(tmp_path / "run"))
    files = [x for x in [target, *target.rglob("*")] if x.is_file()]
    assert {x: x.read_bytes() for x in files} == before and before


def test_a_writer_that_is_not_there_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, words in (
        ("wandb", "needs the package wandb, which is not installed: pip install"),
        ("wandbb", "did you mean wandb.*possible are csv, hparams, mlflow, wandb"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=words):
            trackers.by_name((name,))


def test_hyper_parameters_are_in_a_file_that_is_read_first(tmp_path):
    values = config(num_steps=2, **{"data.workers": 0})
    values.writers = ("hparams",)
    start.run(values, CPU, str(tmp_path))
    files = sorted(x.name for x in (tmp_path / "tensorboard").iterdir())
    assert len(files) == 2 and files[0] == "events.out.tfevents.0.hparams"
    data = (tmp_path / "tensorboard" / files[0]).read_bytes()
    assert b"_hparams_/session_start_info" in data and b"optimizer.warmup_steps" in data


@pytest.mark.trackers
def test_tensorboard_reads_hyper_parameters_pictures_and_distributions(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    flags = ["--config.hooks=('images','histograms')", "--config.eval_every=10"]
    train(tmp_path / "run", 10, "hparams", *flags)
    folder = tmp_path / "run" / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    assert [x.step for x in events.Scalars("train/loss")] == [5, 10]
    metadata = events.SummaryMetadata("_hparams_/session_start_info")
    assert metadata.plugin_data.plugin_name == "hparams"
    content = metadata.plugin_data.content
    data = plugin_data_pb2.HParamsPluginData.FromString(content)
    values = data.session_start_info.hparams
    assert values["optimizer.learning_rate"].number_value == 1e-3
    assert values["optimizer.name"].string_value == "adamw"
    assert values["compat"].bool_value is False
    (image,) = EventAccumulator(str(folder / "images")).Reload().Images("evaluation")
    assert image.step == 10 and (image.width, image.height) == (1100, 330)
    histograms = EventAccumulator(str(folder / "histograms")).Reload()
    (weights,) = histograms.Histograms("mlp/~/linear_0/w")
    assert weights.step == 10


def records(data):
    """Records of a .wandb file: LevelDB's log, in blocks of 32 KiB, after 7 bytes."""
    place, parts = 7, []
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # Too short for a header: padding.
            place += 2**15 - place % 2**15
            continue
        size, kind = (
            int.from_bytes(data[place + 4 : place + 6], "little"),
            data[place + 6],
        )
        parts.append(data[place + 7 : place + 7 + size])
        place += 7 + size
        if kind in (1, 4):  # A whole record, or its last part.
            yield b"".join(parts)
            parts = []


@pytest.mark.trackers
def test_weights_and_biases_offline_resumes_under_the_same_id(tmp_path):
    from wandb.proto import wandb_internal_pb2

    workdir = tmp_path / "run"
    for num_steps in (10, 20):
        train(workdir, num_steps, "wandb", WANDB_MODE="offline")
    files = sorted((workdir / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    values, ids, keys = {}, set(), {}
    for file in files:
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                for item in record.run.config.update:
                    keys[item.key] = json.loads(item.value_json)
            elif kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in row.items():
                    values.setdefault(name, {})[row["step"]] = value
    assert ids == {run_id(workdir)}
    assert keys["optimizer"]["learning_rate"] == 1e-3
    for name, points in expected(workdir).items():
        assert values[name] == pytest.approx(points), name


@pytest.mark.trackers
def test_mlflow_resumes_under_the_same_id(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    for num_steps in (10, 20):
        train(workdir, num_steps, "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    number = client.get_experiment_by_name(trackers.PROJECT).experiment_id
    (run,) = client.search_runs([number])
    assert run.data.tags[trackers.TAG] == run_id(workdir)
    assert run.data.params["optimizer.learning_rate"] == "0.001"
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    for name, points in expected(workdir).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert {x.step: x.value for x in history} == pytest.approx(points), name
