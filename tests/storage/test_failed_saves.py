"""Saves that fail: full disks, errors of a disk, a folder that may not be written.

Rows C11, C12 and C44 of the reliability bench. Limits of a file's size are the system's
own, and so are full disks; other errors are raised where Orbax asks the system.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager
from haiku_template.devices.layout import device_bytes
from haiku_template.errors import StorageError
from haiku_template.models import mlp
from haiku_template.runs import train
from haiku_template.runs.loop import Event
from haiku_template.storage import checkpoint
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.files import append_whole
from haiku_template.storage.workdir import saved_steps
from haiku_template.training import Experiment, classification
from tests.runs import ROOT
from tests.test_commands import digest, numbers

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(32, 60)).astype(np.float32)
LABELS = RNG.integers(0, 3, 32).astype(np.int32)
STATE = {"w": RNG.normal(size=(400, 100)), "step": np.int32(0)}
SAVES = {"num_steps": 12, "log_every": 3, "save_every": 3, "keep_best": 0}


@contextlib.contextmanager
def small_files(size):
    """Files of this process may have so many bytes: writing more is EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def failing(name, number):
    """One function of the system fails, for each checkpoint that is half-written."""
    function = getattr(os, name)

    def fail(path, *args, **kwargs):
        if "checkpoint-tmp" in os.fspath(path):
            raise OSError(number, os.strerror(number), os.fspath(path))
        return function(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, fail)
        yield


FAULTS = {
    "a file that grows too large": lambda: small_files(1000),
    "a folder that may not be written": lambda: failing("mkdir", errno.EROFS),
    "a full disk": lambda: failing("mkdir", errno.ENOSPC),
    "an error of the disk": lambda: failing("rename", errno.EIO),
}
SAID = {
    "a file that grows too large": "File too large",
    "a folder that may not be written": "Read-only file system",
    "a full disk": "No space left on device",
    "an error of the disk": "Input/output error",
}


@pytest.fixture(autouse=True)
def retries(monkeypatch):
    """Seconds before the last save is tried again: never, but in the tests of it."""
    monkeypatch.setattr(checkpoint, "RETRY_SECONDS", ())
    return lambda *seconds: monkeypatch.setattr(checkpoint, "RETRY_SECONDS", seconds)


def save(checkpoints, step):
    return checkpoints.save(step, STATE | {"step": np.int32(step)}, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_save_is_a_sentence_and_the_next_one_is_made(
    tmp_path, caplog, capfd, fault
):
    """C11, C12, C44: the only checkpoint stays until another is on disk."""
    with Checkpoints(tmp_path, keep_last=1, max_failed_saves=3) as checkpoints:
        assert save(checkpoints, 1)
        with FAULTS[fault]():
            save(checkpoints, 2)
            with pytest.raises(StorageError, match=SAID[fault]) as caught:
                checkpoints.wait()
            assert f"step 2 could not be saved in {tmp_path}: [Errno" in str(
                caught.value
            )
            assert checkpoints.steps == [1]
        assert save(checkpoints, 3)
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["3"]
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def test_what_comes_back_after_a_failed_save_is_removed_again(tmp_path, monkeypatch):
    """C11: TensorStore's threads may make the folders again that were removed."""
    removed, rmtree = [], shutil.rmtree

    def remove(path, *args, **kwargs):
        rmtree(path, *args, **kwargs)
        if "checkpoint-tmp" in os.fspath(path) and not removed:
            removed.append(threading.Timer(0.05, os.makedirs, [f"{path}/state/d"]))
            removed[0].start()

    fault = pytest.raises(StorageError, match="step 2 could not be saved")
    with fault, Checkpoints(tmp_path, max_failed_saves=3) as checkpoints:
        save(checkpoints, 1)
        monkeypatch.setattr(shutil, "rmtree", remove)
        with small_files(1000):
            save(checkpoints, 2)
            checkpoints.wait()
    removed[0].join()
    assert os.listdir(tmp_path) == ["1"]


@pytest.mark.parametrize("first", [True, False])
def test_the_last_save_is_tried_again_before_it_is_an_error(
    tmp_path, caplog, retries, monkeypatch, first
):
    """C12: also where it is the first, which fails before `save` returns."""
    retries(1, 2, 4)
    limits, waits, folder = contextlib.ExitStack(), [], tmp_path / "saves"
    run, saved = tmp_path / "run.json", {"saved": 2 if first else 1}
    run.write_text('{"id": "one"}')

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 2:
            limits.close()

    monkeypatch.setattr(checkpoint.time, "sleep", wait)
    with Checkpoints(folder, max_failed_saves=3) as checkpoints, limits:
        if not first:
            save(checkpoints, 1)
        limits.enter_context(small_files(1000))
        save(checkpoints, 2)
        checkpoints.wait()
        assert waits == [1, 2] and checkpoints.latest == 2
        assert json.loads(run.read_text()) == {"id": "one"} | saved
        assert checkpoints.restore(2, STATE | {"step": np.array(2, np.int32)})
        limits.enter_context(small_files(1000))
        save(checkpoints, 3)
        with pytest.raises(StorageError, match="step 3 could not be saved"):
            checkpoints.wait()
        assert waits == [1, 2, 1, 2, 4]
        limits.close()
        assert save(checkpoints, 4)
    assert "; it is tried again in 2 s" in caplog.text


def test_a_last_save_whose_workdir_is_gone_is_an_error(tmp_path, retries):
    """C12: where each try is refused before it begins."""
    retries(0)
    (tmp_path / "run.json").write_text('{"id": "one"}')
    fault = pytest.raises(StorageError, match="step 2 is not saved: .* was moved")
    with fault, Checkpoints(tmp_path / "saves", max_failed_saves=3) as checkpoints:
        save(checkpoints, 1)
        (tmp_path / "run.json").unlink()
        save(checkpoints, 2)
        checkpoints.wait()


def test_a_run_without_room_for_its_saves_does_not_begin(tmp_path, monkeypatch):
    """C11, C12: and one that has room for a save at its end alone begins."""
    size = device_bytes(trainer().abstract.saved())

    def disk_usage(_):
        return SimpleNamespace(free=5 * size // 2)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with pytest.raises(StorageError) as caught:
        train(trainer(), workdir=tmp_path, **SAVES)
    sentence = str(caught.value)
    assert f"need {3 * size:,} bytes" in sentence and "are free there" in sentence
    assert f"{5 * size // 2:,}" in sentence and caught.value.exit_code == 74
    assert saved_steps(tmp_path / "checkpoints") == []
    train(trainer(), workdir=tmp_path, **SAVES | {"save_every": None})
    # On resume what is there needs no more room.
    train(trainer(), workdir=tmp_path, **SAVES | {"num_steps": 30})


@pytest.mark.parametrize(
    ("start", "stop", "every", "timer", "count"),
    [
        (0, 40, None, None, 1),
        (0, 40, None, object(), 3),
        (0, 2, None, object(), 2),
        (5, 13, 6, None, 3),
        (12, 12, 5, None, 0),
    ],
)
def test_room_is_for_the_saves_that_a_run_makes(
    tmp_path, monkeypatch, start, stop, every, timer, count
):
    """C11: by the clock it may make one at each step."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=-1))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.timer = timer
        with pytest.raises(StorageError, match=rf"\({count} of 4\), and -1 are free"):
            checkpoints.check_room({"x": np.float32(0)}, start, stop, every)


def test_checkpoints_that_no_context_closes_fail_in_a_sentence(tmp_path):
    checkpoints = Checkpoints(tmp_path, max_failed_saves=2)
    assert save(checkpoints, 1)
    with small_files(1000):
        save(checkpoints, 2)
        with pytest.raises(StorageError, match="step 2 could not be saved"):
            checkpoints.wait()
    assert save(checkpoints, 3)
    checkpoints.wait()
    assert checkpoints.steps == [1, 3]


def test_the_first_save_may_fail_too(tmp_path, caplog):
    with Checkpoints(tmp_path, max_failed_saves=3) as checkpoints:
        with small_files(1000):
            assert not save(checkpoints, 1)
        assert save(checkpoints, 2)
    assert caplog.text.count("step 1 could not be saved") == 1
    assert os.listdir(tmp_path) == ["2"]


def test_a_save_that_cannot_be_read_back_does_not_stay(tmp_path, monkeypatch):
    def unreadable(*_):
        raise OSError(errno.EIO, "Input/output error")

    with Checkpoints(tmp_path, max_failed_saves=3) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "_load", unreadable)
            assert not save(checkpoints, 1)
        assert os.listdir(tmp_path) == []
        assert save(checkpoints, 2) and checkpoints.steps == [2]


def test_so_many_failures_in_a_row_are_an_error_and_a_success_counts_anew(tmp_path):
    """C12: those before are warnings."""
    with Checkpoints(tmp_path, max_failed_saves=2) as checkpoints:
        for step in (1, 3):
            with small_files(1000):
                save(checkpoints, step)
                join_saves()
            assert save(checkpoints, step + 1)
        checkpoints.wait()
        many = pytest.raises(StorageError, match="step 6.*; 2 saves in a row failed")
        with many, small_files(1000):
            for step in (5, 6, 7):
                save(checkpoints, step)
                join_saves()
    assert saved_steps(tmp_path) == [2, 4]


def test_an_older_checkpoint_that_cannot_be_removed_is_tried_again(tmp_path, caplog):
    """C12: the save is on disk, and no failed one."""
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: os.stat("/nowhere"))
            save(checkpoints, 2)
            checkpoints.wait()
        assert "an older checkpoint in" in caplog.text
        assert checkpoints.steps == [2] and len(os.listdir(tmp_path)) == 2
        save(checkpoints, 3)
    assert os.listdir(tmp_path) == ["3"]


@pytest.mark.parametrize("years", [20, -20])
def test_a_clock_that_jumps_does_not_end_a_save(tmp_path, monkeypatch, years):
    """C46: at each look at the clock, as Orbax's limits go by it."""
    now, looks = time.time, iter(range(10**9))
    with Checkpoints(tmp_path) as checkpoints:
        save(checkpoints, 1)
        jumps = lambda: now() + years * 365 * 86400 * (next(looks) % 2)  # noqa: E731
        monkeypatch.setattr(time, "time", jumps)
        save(checkpoints, 2)
        checkpoints.wait()
        assert checkpoints.steps == [1, 2] and next(looks) > 2


def trainer():
    data = Data(ArrayDataset(INPUTS, LABELS, BatchSpec(8)), None, 3)
    return Experiment(
        model=mlp(3, width=64),
        data=data,
        task=classification,
        optimizer=optax.adam(1e-2),
    ).trainer(DeviceManager.create("cpu", num_devices=1))


def join_saves():
    """Waits until no save is under way, whether it fails or not."""
    for thread in threading.enumerate():
        if thread.name == "async_save":
            thread.join()


def within(context, first, last):
    """A hook: `context` holds from the step `first` until `last` is done."""
    stack = contextlib.ExitStack()

    def hook(event):
        if event.what == "step" and event.step in (first, last):
            join_saves()
            stack.close() if event.step == last else stack.enter_context(context())

    return hook


def test_a_run_with_a_passing_error_ends_bitwise_as_an_undisturbed_one(
    tmp_path, caplog
):
    """C11: two of its four saves fail."""
    plain, disturbed = tmp_path / "plain", tmp_path / "disturbed"
    train(trainer(), workdir=plain, **SAVES)
    hook = within(lambda: small_files(10_000), 1, 8)
    train(trainer(), workdir=disturbed, hooks=[hook], **SAVES)
    for step in (3, 6):
        assert f"step {step} could not be saved" in caplog.text
    assert "and the next save tries again (2 of 3" in caplog.text
    assert digest(disturbed) == digest(plain)
    assert numbers(disturbed) == numbers(plain)
    names = [sorted(os.listdir(x / "checkpoints")) for x in (plain, disturbed)]
    assert names == [["12", "9"]] * 2


@pytest.mark.parametrize(("first", "steps"), [(10, [6, 9]), (4, [3])])
def test_a_run_whose_last_save_fails_ends_with_an_error(tmp_path, first, steps):
    """C12: its state is nowhere else. At the next start the run goes on from before."""
    hook = within(lambda: small_files(10_000), first, 13)
    try:
        with pytest.raises(StorageError, match="step 12 could not be saved"):
            train(trainer(), workdir=tmp_path, hooks=[hook], **SAVES)
    finally:
        hook(Event("step", 13, None, None))
    assert saved_steps(tmp_path / "checkpoints") == steps
    train(trainer(), workdir=tmp_path, **SAVES)
    assert saved_steps(tmp_path / "checkpoints")[-1] == 12


def test_a_save_for_a_signal_that_fails_ends_the_run_with_an_error(tmp_path):
    """C12: at once, and not after three."""
    limit = within(lambda: small_files(10_000), 4, 13)

    def hook(event):
        limit(event)
        if (event.what, event.step) == ("step", 5):
            signal.raise_signal(signal.SIGTERM)

    try:
        with pytest.raises(StorageError, match="step 5 could not be saved") as caught:
            train(trainer(), workdir=tmp_path, hooks=[hook], **SAVES)
    finally:
        limit(Event("step", 13, None, None))
    assert caught.value.exit_code == 74
    assert saved_steps(tmp_path / "checkpoints") == [3]


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_process(*command):
    """Runs a command in the project's root; its text, and its exit code."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=ROOT, check=False
    )


@pytest.mark.slow
def test_a_command_whose_saves_all_fail_says_four_lines_and_ends_with_74(tmp_path):
    """C12, C11: a process that may write no file as large as a checkpoint's."""
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}"]
    flags += ["--config.num_steps=40", "--config.save_every=8", "--config.log_every=8"]
    command = [sys.executable, "-c", LIMITED, "-m", "haiku_template.train", *flags]
    run = run_process(*command)
    assert run.returncode == 74, run.stderr
    lines = [x for x in run.stderr.splitlines() if "could not be saved" in x]
    assert len(lines) == 3 and "Traceback" not in run.stderr
    assert lines[-1].startswith(f"error: step 24 could not be saved in {tmp_path}")
    assert lines[-1].endswith("File too large; 3 saves in a row failed")
    assert os.listdir(tmp_path / "checkpoints") == []


FULL_DISK = """
import os, sys
sys.path.insert(0, ".")
from pathlib import Path
from tests.storage.test_failed_saves import digest, full_disk, train, trainer
from tests.storage.test_failed_saves import SAVES, within
disk = Path(sys.argv[1])
hook = within(lambda: full_disk(disk), 4, 8)
train(trainer(), workdir=disk / "plain", **SAVES)
train(trainer(), workdir=disk / "run", hooks=[hook], **SAVES)
assert digest(disk / "run") == digest(disk / "plain")
assert sorted(os.listdir(disk / "run/checkpoints")) == ["12", "9"]
"""


@contextlib.contextmanager
def full_disk(folder):
    """No byte is free on the disk of a folder, but what files there have room for."""
    file = folder / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    yield
    file.unlink()


MOUNT = "mount -t tmpfs -o size=4m none {0} && exec {1} -c '{2}' {0}"
MAY_MOUNT = shutil.which("unshare") and not subprocess.call(["unshare", "-m", "true"])


@pytest.mark.slow
@pytest.mark.skipif(not MAY_MOUNT, reason="a disk of its own needs a mount namespace")
def test_a_disk_that_is_full_for_a_while(tmp_path):
    """C11: a disk of 4 MB, full at the save of step 6 alone."""
    shell = MOUNT.format(tmp_path, sys.executable, FULL_DISK)
    run = run_process("unshare", "-m", "sh", "-c", shell)
    assert run.returncode == 0, run.stderr
    assert "step 6 could not be saved" in run.stderr and "Traceback" not in run.stderr
    assert "[Errno 28] No space left on device" in run.stderr


def test_what_is_appended_is_whole_or_not_there(tmp_path):
    file = tmp_path / "events"
    append_whole(file, b"a" * 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, limits[1]))  # As a full disk.
    try:
        with pytest.raises(OSError):
            append_whole(file, b"b" * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    append_whole(file, b"c" * 10)
    assert file.read_bytes() == b"a" * 10 + b"c" * 10
