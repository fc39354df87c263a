"""What a run does in its directory, and what it refuses there."""

import contextlib
import errno
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning import check_same_frozen
from haiku_template.models import mlp
from haiku_template.params import flatten
from haiku_template.reporting import display
from haiku_template.runs import train
from haiku_template.storage import manifest as manifests
from haiku_template.storage import workdir
from haiku_template.storage.checkpoint import Checkpoints, restore
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from tests.storage.test_verified import edit_manifest

INPUTS = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
LABELS = (np.arange(32) % 3).astype(np.int32)


@functools.cache
def made(train_data=None):
    """A trainer, which compiles its step once for all tests."""
    data = train_data or ArrayDataset(INPUTS, LABELS, BatchSpec(8))
    return Experiment(
        model=mlp(3, width=4),
        task=classification,
        data=Data(data, EvaluationSet(INPUTS, LABELS, 16), 3),
        optimizer=optax.adam(1e-3),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


def run(path, num_steps=4, **options):
    every = {"log_every": 1, "eval_every": 2, "save_every": 2}
    return train(made(), num_steps=num_steps, workdir=path, **every | options)


@pytest.mark.parametrize("name", ["lr[1e-3]", "a[/b]", "what?", "*"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused_at_the_start(tmp_path, name):
    path = tmp_path / name / "run"
    with pytest.raises(ConfigError, match="pattern.*another --workdir"):
        run(path)
    assert not path.exists()


def test_a_path_that_no_array_could_be_saved_in_is_refused(tmp_path):
    """TensorStore takes UTF-8 alone: the saves failed when there was much to lose."""
    path = tmp_path / os.fsdecode("läufe".encode("latin-1"))
    for use in (lambda: workdir.check(path, {}), lambda: restore(path, "latest", None)):
        with pytest.raises(ConfigError, match="is not UTF-8"):
            use()


def test_the_first_save_is_read_back_before_it_is_trusted(tmp_path):
    directory = tmp_path / "lr[1e-3]"  # Where Orbax loses the arrays without a word.
    with (
        pytest.raises(StorageError, match="step 1 .*damaged"),
        Checkpoints(directory) as checkpoints,
    ):
        checkpoints.save(1, {"w": jnp.ones(3)}, None)


@pytest.mark.slow(but="renamed")
@pytest.mark.parametrize("how", ["renamed", "copied", "linked"])
def test_a_checkpoint_under_another_step_s_name_is_passed_by(tmp_path, caplog, how):
    run(tmp_path)
    held, asked = tmp_path / "checkpoints/4", tmp_path / "checkpoints/6"
    if how == "renamed":
        held.rename(asked)
    elif how == "copied":
        shutil.copytree(held, asked)
    else:
        asked.symlink_to(held)
    assert int(run(tmp_path, 8).state.step) == 8
    (line,) = [x for x in caplog.messages if "step 4 of this run" in x]
    start = 2 if how == "renamed" else 4
    assert f"is called 6.damaged now, and the run goes on from step {start}" in line
    assert os.path.lexists(asked.with_name("6.damaged"))


@pytest.mark.slow(but="copied")
@pytest.mark.parametrize("how", ["copied", "linked"])
def test_a_checkpoint_of_another_run_is_passed_by(tmp_path, caplog, how):
    run(tmp_path / "a")
    run(tmp_path / "b", 6)
    theirs, ours = tmp_path / "b/checkpoints/6", tmp_path / "a/checkpoints/6"
    if how == "copied":
        shutil.copytree(theirs, ours)
    else:
        ours.symlink_to(theirs)
    assert int(run(tmp_path / "a", 8).state.step) == 8
    (line,) = [x for x in caplog.messages if "step 6 of another run" in x]
    assert "is called 6.damaged now, and the run goes on from step 4" in line
    assert theirs.is_dir()
    shutil.rmtree(tmp_path / "a/checkpoints")
    shutil.copytree(tmp_path / "b/checkpoints", tmp_path / "a/checkpoints")
    with pytest.raises(StorageError, match="another run") as caught:
        run(tmp_path / "a", 8)
    assert caught.value.exit_code == 74


def test_checkpoints_without_the_run_s_id_are_refused(tmp_path):
    run(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"no run\.json.*whose"):
        run(tmp_path, 8)


def test_checkpoints_of_before_there_were_ids_are_read_and_not_resumed(tmp_path):
    run(tmp_path)
    for step in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(step / "manifest")
        metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
        metadata["custom_metadata"] = {}
        (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))

    def read():
        return restore(tmp_path, "latest", lambda x, step: x.verify(step))

    with pytest.raises(StorageError, match="of step None of another run"):
        read()
    (tmp_path / "run.json").unlink()
    assert read() == (4, False)
    with pytest.raises(ConfigError, match="as the first versions wrote none"):
        run(tmp_path, 8)


@pytest.mark.slow(but="steps gone")
@pytest.mark.parametrize("whole", [True, False], ids=["folder gone", "steps gone"])
def test_a_run_whose_checkpoints_are_all_gone_does_not_start_from_scratch(
    tmp_path, whole
):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    for step in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(step)
    if whole:
        (tmp_path / "checkpoints").rmdir()
    with pytest.raises(ConfigError, match="step 2, and now there is none; restore"):
        run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_run_that_was_killed_before_its_first_save_starts_anew(tmp_path):
    run(tmp_path / "a")
    killed = tmp_path / "b"
    killed.mkdir()
    (killed / "config.json").write_text("{}")
    (killed / "run.json").write_text('{"id": "x"}')
    shutil.copy(tmp_path / "a/metrics.jsonl", killed)
    run(killed)
    assert [r["step"] for r in read(killed / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("count", [None, "0", "2"])
def test_a_job_that_slurm_queued_again_starts_at_step_0_with_a_word(
    tmp_path, caplog, monkeypatch, count
):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    devices = DeviceManager.create("cpu", num_devices=1)
    workdir.open_workdir(tmp_path, {}, devices)
    words = "queued again (SLURM_RESTART_COUNT=2)"
    assert (words in caplog.text) == (count == "2")
    step = tmp_path / workdir.CHECKPOINTS / "10"
    step.mkdir(parents=True)
    (step / workdir.COMMIT).touch()
    caplog.clear()
    workdir.open_workdir(tmp_path, {}, devices)
    assert words not in caplog.text


@pytest.mark.long
def test_four_hundred_saves_leak_no_descriptor_and_no_thread(tmp_path):
    code = f"""
import os, threading
from pathlib import Path
import jax.numpy as jnp
from {workdir.__name__.split(".")[0]}.storage.checkpoint import Checkpoints
counts = set()
with Checkpoints(Path({str(tmp_path)!r})) as checkpoints:
    for step in range(1, 401):
        checkpoints.save(step, {{"w": jnp.ones(3)}}, {{"eval/loss": 1.0}})
        if step % 50 == 0:
            checkpoints.wait()
            counts.add((len(os.listdir("/proc/self/fd")), threading.active_count()))
print(counts)
assert len(counts) == 1
"""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"399", "400"}


NOTES = ["env.json", "metrics.jsonl", "tensorboard", "train.log", "report.png"]


@pytest.mark.slow(but="report.png")
@pytest.mark.usefixtures("with_report")
@pytest.mark.parametrize("note", NOTES)
def test_what_a_run_can_do_without_ends_no_run(tmp_path, caplog, note):
    (tmp_path / "config.json").write_text("{}")
    if note == "train.log":
        (tmp_path / note).symlink_to("/dev/full")
    elif note == "tensorboard":
        (tmp_path / note).touch()
    else:
        (tmp_path / note).mkdir()
    run(tmp_path, 20, log_every=1)
    assert (tmp_path / "checkpoints/20").is_dir()
    told = [r.getMessage() for r in caplog.records if note in r.getMessage()]
    assert len([words for words in told if "the run continues" in words]) == 1


def test_a_disk_that_fills_up_ends_no_notes_and_the_rest_is_written_later(
    tmp_path, caplog
):
    from haiku_template.storage.metrics import MetricsWriter

    values = {f"train/{i}": float(i) for i in range(20)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(MetricsWriter(tmp_path, 0)) as write:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
            for step in range(100):
                write(step, values)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        write(100, values)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and all("the run continues" in words for words in told)
    rows = [
        json.loads(s) for s in (tmp_path / "metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 100
    assert all(len(row) == 21 for row in rows)


def test_a_damaged_base_json_is_told_and_ends_no_run(tmp_path, caplog):
    run(tmp_path)
    (tmp_path / "base.json").write_text("")
    devices = made().devices
    frozen = devices.replicate({"mlp": {"w": np.ones(3, np.float32)}})
    check_same_frozen(devices, frozen, tmp_path)
    assert "base.json cannot be read" in caplog.text


@pytest.mark.slow(but="host")
@pytest.mark.parametrize("text", ["", "[]", '{"host": '])
def test_a_damaged_env_json_does_not_keep_a_run_from_resuming(tmp_path, caplog, text):
    run(tmp_path)
    (tmp_path / "env.json").write_text(text)
    assert int(run(tmp_path, 6).state.step) == 6
    assert "environment changed" not in caplog.text  # Each save has it, too.
    assert json.loads((tmp_path / "env.json").read_text())["num_devices"] == 1


def test_damaged_lines_of_metrics_are_left_out_and_later_ones_stay(tmp_path, caplog):
    run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    lines[1] = lines[1][:20]
    lines[2] = b"\xff\xfe"
    path.write_bytes(b"\n".join([*lines, b"3", b'{"a": 1}', b""]))
    run(tmp_path, 6)
    assert [r["step"] for r in read(path)] == [1, 3, 4, 4, 5, 6, 6]
    assert "lines [2, 3, 7, 8] are damaged" in caplog.text


def evaluated(checkpoints):
    return [step for step, metrics in checkpoints.metrics.items() if metrics]


@pytest.mark.slow(but="loss")
@pytest.mark.parametrize("text", ["", '{"eval/loss": 1.'])
@pytest.mark.parametrize("step", [2, 4])
def test_a_step_whose_metrics_are_damaged_counts_as_not_evaluated(
    tmp_path, caplog, step, text
):
    run(tmp_path)
    (tmp_path / f"checkpoints/{step}/metrics/metrics").write_text(text)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps == [2, 4] and evaluated(checkpoints) == [6 - step]
    assert f"{step}/metrics/metrics is damaged" in caplog.text
    assert int(run(tmp_path, 6, keep_last=9).state.step) == 6
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        # The newest is evaluated again, and has its metrics then.
        assert evaluated(checkpoints) == ([4, 6] if step == 2 else [2, 4, 6])


@pytest.mark.parametrize("inside", [[], ["state"], ["state", "state/d"]])
def test_a_folder_without_its_commit_file_is_no_checkpoint(tmp_path, caplog, inside):
    run(tmp_path)
    for name in ["", *inside]:
        (tmp_path / "checkpoints/5" / name).mkdir()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:  # Who only reads.
        assert checkpoints.steps == [2, 4]
    assert int(run(tmp_path).state.step) == 4  # "A run does not go back", it was.
    assert "5 has no commit_success.txt, so it is no checkpoint" in caplog.text
    (tmp_path / "checkpoints/6").mkdir()
    assert int(run(tmp_path, 6, keep_last=9).state.step) == 6
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps == [2, 4, 6]


def test_what_lies_among_the_checkpoints_changes_nothing(tmp_path, caplog):
    """C10: an empty folder, a foreign one, what a save left, a link, and a file."""
    run(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "5").mkdir()
    (checkpoints / "foo").mkdir()
    (checkpoints / "foo/notes.txt").write_text("mine")
    (checkpoints / "9.orbax-checkpoint-tmp-3/state").mkdir(parents=True)
    (checkpoints / "7").write_text("a file")
    (checkpoints / "6").symlink_to("4")
    assert int(run(tmp_path, 8).state.step) == 8
    assert "goes on from step 4" in caplog.text  # And not from 6, which is none.
    with Checkpoints(checkpoints) as reader:
        assert reader.steps == [6, 8] and not (checkpoints / "6").is_symlink()
    names = {path.name for path in checkpoints.iterdir()}
    assert names >= {"foo", "6.damaged"} and not names & {"5", "7"}
    assert (checkpoints / "foo/notes.txt").read_text() == "mine"
    assert not list(checkpoints.glob("*orbax-checkpoint-tmp*"))


@pytest.mark.parametrize("whose", ["its own", "another run's"])
def test_arrays_of_another_step_are_refused(tmp_path, caplog, whose):
    run(tmp_path / "a")
    if whose != "its own":
        run(tmp_path / "b", 6, keep_last=9)
    source = tmp_path / ("a" if whose == "its own" else "b") / "checkpoints/2/state"
    shutil.rmtree(tmp_path / "a/checkpoints/4/state")
    step = tmp_path / "a/checkpoints/4"
    shutil.copytree(source, step / "state")
    edit_manifest(step, files=manifests.sizes(step))  # Or names alone would tell.
    params = made().abstract.saved()["params"]
    with (
        Checkpoints(tmp_path / "a/checkpoints") as checkpoints,
        pytest.raises(StorageError, match="its arrays are of step 2"),
    ):
        checkpoints.restore(4, params, "params")

    run(tmp_path / "a", 6)  # What it goes on from: `test_verified.py`.
    assert "4 is not" in caplog.text and "goes on from step 2" in caplog.text
    assert (tmp_path / "a/checkpoints/4.damaged").is_dir()


def test_a_run_that_lost_its_checkpoints_and_its_id_is_not_started_anew(tmp_path):
    run(tmp_path)
    (tmp_path / "run.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"neither run\.json nor checkpoints are"):
        run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "profile", "processes"])
def test_nothing_is_written_or_removed_through_a_linked_folder(tmp_path, name):
    run(tmp_path / "a")
    run(tmp_path / "b", 6)
    if name == "checkpoints":
        shutil.copy(tmp_path / "b/run.json", tmp_path / "a/run.json")
    (tmp_path / "b" / name).mkdir(exist_ok=True)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "b").rglob("*")}
    shutil.rmtree(tmp_path / "a" / name, ignore_errors=True)
    (tmp_path / "a" / name).symlink_to(tmp_path / "b" / name)
    with pytest.raises(
        ConfigError, match=f"{name} is a link to .*/b/{name}, and a run"
    ):
        run(tmp_path / "a", 20)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "b").rglob("*")} == before


@pytest.mark.parametrize("name", ["train.log", ".lock", "metrics.jsonl", "run.json"])
def test_a_linked_file_is_not_written_through(tmp_path, name):
    run(tmp_path / "a")
    target = tmp_path / "target"
    shutil.copy(tmp_path / "a" / name, target)
    before = target.read_bytes()
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).symlink_to(target)
    # A temporary file's name can be guessed.
    (tmp_path / f"a/.env.json.{os.getpid()}").symlink_to(target)
    with contextlib.suppress(ConfigError):
        run(tmp_path / "a", 6)
    assert target.read_bytes() == before


@pytest.mark.parametrize("part", ["a" * 300, "file/run"])
def test_a_path_that_cannot_be_is_one_sentence(tmp_path, part):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written to: .*; use another"):
        run(tmp_path / part)


@pytest.mark.parametrize("part", ["runs", "runs/digits"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, part):
    """As that of a scratch disk that was cleared."""
    (tmp_path / "runs").symlink_to("gone/runs")
    with pytest.raises(ConfigError, match="runs is a link to gone/runs, and leads"):
        run(tmp_path / part)
    assert not (tmp_path / "gone").exists()


def test_a_path_that_may_not_be_looked_at_is_one_sentence(tmp_path):
    """Whether a link above it leads nowhere is not known, then."""
    path = tmp_path / ("x" * 300)
    words = "too long: .*; use another"
    with pytest.raises(ConfigError, match=words), workdir.usable(path):
        path.mkdir()


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EIO])
def test_a_file_system_that_takes_no_lock_file_is_one_sentence(
    tmp_path, monkeypatch, error
):
    opened = os.open

    def refuse(path, *args, **kwargs):
        if Path(path).name == ".lock":
            raise OSError(error, os.strerror(error))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="cannot be written to: .*; use another"):
        run(tmp_path)


def test_who_asks_for_the_lock_keeps_nobody_from_it(tmp_path):
    """`is_locked` holds a shared lock for a moment, in which a run may start."""
    with (tmp_path / workdir.LOCK).open("w") as file:
        workdir.fcntl.flock(file, workdir.fcntl.LOCK_SH)
        # As long as one that asks may be kept from its processor, or by a slow disk.
        threading.Timer(0.5, file.close).start()
        with workdir.locked(tmp_path):
            assert workdir.is_locked(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog, error):
    def flock(*_):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(workdir.fcntl, "flock", flock)
    assert int(run(tmp_path).state.step) == 4
    assert "cannot be locked" in caplog.text
    assert not workdir.is_locked(tmp_path)


def enter(path):
    with workdir.locked(path):
        return


@pytest.mark.parametrize("start", [enter, lambda path: workdir.check(path, {})])
@pytest.mark.parametrize("count", [1, 2])
def test_several_processes_wait_for_the_lock_of_a_run_that_is_not_quite_gone(
    tmp_path, monkeypatch, start, count
):
    monkeypatch.setattr(workdir, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(workdir.jax, "process_count", lambda: count)
    with contextlib.ExitStack() as other:
        other.enter_context(workdir.locked(tmp_path))
        with pytest.raises(ConfigError, match="another run is writing") as caught:
            start(tmp_path)
        # Where it need not come again, launchers start the run again.
        assert caught.value.exit_code == (75 if count == 2 else 64)
        if count == 2:
            monkeypatch.setattr(workdir, "LOCK_SECONDS", 20.0)
            threading.Timer(0.3, other.close).start()
            start(tmp_path)


def test_brackets_in_what_is_shown_are_shown_as_they_are(tmp_path, capsys):
    with display.Display(tmp_path, 1) as shown:
        shown.print("data in a[/b]", "[red]x")
    for text in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        assert "data in a[/b]" in text and "[red]x" in text


def test_a_system_without_proc_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(display, "MEMORY", "/nowhere/statm")
    run(tmp_path)
    assert "memory unknown" in (tmp_path / "train.log").read_text()


def test_a_permission_that_the_data_lacks_is_not_blamed_on_the_workdir(tmp_path):
    class Forbidden:
        def batch(self, step):
            if step == 2:
                raise PermissionError(13, "Permission denied", "/data/x")
            return {"inputs": INPUTS[:8].copy(), "labels": LABELS[:8].copy()}

    with pytest.raises(PermissionError, match="/data/x"):
        train(made(Forbidden()), num_steps=4, workdir=tmp_path)


def test_a_second_run_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    trainer = made()

    def lower(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(trainer, "trace", lower)
    monkeypatch.setattr(trainer.initializer, "lower", lower)
    with (
        workdir.locked(tmp_path),
        pytest.raises(ConfigError, match="another run is writing"),
    ):
        train(trainer, num_steps=4, workdir=tmp_path)


WORKER = """
import os, signal, time
from pathlib import Path
import sys
from PACKAGE.runs.stopping import StopSignals
from PACKAGE.storage.workdir import locked
with locked(Path(sys.argv[1])), StopSignals() as signals:
    signals.listen()
    ready, told = os.pipe()
    worker = os.fork()
    if worker == 0:
        print(os.getpid(), flush=True)  # What a fork calls in the child is done.
        os.write(told, b".")
        time.sleep(60)
        os._exit(0)
    if sys.argv[2] == "die":
        signal.pause()
    os.read(ready, 1)
    os.kill(worker, signal.SIGINT)
    time.sleep(0.2)
    os.kill(worker, signal.SIGTERM)
    _, status = os.waitpid(worker, 0)
    print(os.WTERMSIG(status))
"""


def worker_run(tmp_path, what):
    package = workdir.__name__.split(".")[0]
    return subprocess.run(
        [
            sys.executable,
            *("-W", "ignore", "-c", WORKER.replace("PACKAGE", package)),
            *(str(tmp_path), what),
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=50,
        check=False,
    ).stdout.split()


def test_a_forked_worker_that_outlives_its_run_does_not_keep_the_lock(tmp_path):
    code = WORKER.replace("PACKAGE", workdir.__name__.split(".")[0])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path), "die"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    worker = int(process.stdout.readline())
    process.kill()
    try:
        assert process.wait(timeout=50) == -signal.SIGKILL
        os.kill(worker, 0)  # It lives.
        with workdir.locked(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_a_forked_worker_ends_when_it_is_told_and_outlives_ctrl_c(tmp_path):
    assert worker_run(tmp_path, "stop")[1:] == [str(int(signal.SIGTERM))]


@pytest.mark.parametrize("kind", ["link", "copy", "other name"])
def test_what_is_named_beyond_the_last_step_and_is_another_is_set_aside(
    tmp_path, caplog, kind
):
    expected = flatten(run(tmp_path).state.params)
    checkpoints = tmp_path / "checkpoints"
    if kind == "link":
        (checkpoints / "9").symlink_to("4")
    elif kind == "copy":
        shutil.copytree(checkpoints / "4", checkpoints / "9")
    else:
        (checkpoints / "4").rename(checkpoints / "9")
    params = flatten(run(tmp_path).state.params)
    assert "9.damaged now, and the run goes on from step" in caplog.text
    assert sorted(x.name for x in checkpoints.iterdir()) == ["2", "4", "9.damaged"]
    assert params.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(params[name], value), name


@pytest.mark.slow
def test_git_may_be_slow_in_a_large_repository_on_a_network_disk(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nsleep 6\necho 1234567\n")
    (tmp_path / "git").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert workdir._commit() == "1234567"
