"""Worker processes: the same batches in the same order, whatever happens to them."""

import gc
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import worker_sets
from absl import flags

from haiku_template.data import BatchSpec, ahead, by_name, workers
from haiku_template.data.worker import digests
from haiku_template.data.workers import in_workers
from haiku_template.errors import ConfigError, DataError

SPEC = BatchSpec(16, seed=3)


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No process, no open file; nor a thread that waits."""
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()  # Batches are files, too.
    assert not children()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads


def children():
    """Process ids of the workers of this process."""
    listing = ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="]
    lines = subprocess.run(listing, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "data.worker" in line]


def is_alive(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def read(dataset, start, stop):
    with ahead(dataset, start, stop):
        return [dataset.batch(step) for step in range(start, stop)]


def check_same(batches, expected):
    for one, other in zip(batches, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        assert digests(one) == digests(other)
        kinds = jax.tree.map(type, one)
        assert kinds == jax.tree.map(type, other)


@pytest.mark.parametrize(
    ("count", "function", "args"),
    [
        (1, worker_sets.images, (SPEC,)),
        pytest.param(3, worker_sets.images, (SPEC,), marks=pytest.mark.slow),
        pytest.param(2, worker_sets.lengths, (SPEC,), marks=pytest.mark.slow),
        (2, worker_sets.kinds, ()),
        (2, by_name, ({"name": "digits"}, SPEC)),
    ],
)
def test_batches_have_the_same_bits_in_the_same_order_from_any_step(
    count, function, args
):
    """Also while all of them are held: none is written over."""
    train, expected = in_workers(count, function, *args).train, function(*args).train
    start = 3 * count
    batches = read(train, start, start + 15)
    check_same(batches, map(expected.batch, range(start, start + 15)))
    for leaf in [batch["inputs"] for batch in batches if "labels" in batch]:
        assert leaf.flags.writeable and leaf.ctypes.data % 64 == 0


def test_each_process_of_a_run_reads_its_share():
    specs = [BatchSpec(8, 3, "classes", index, 2) for index in range(2)]
    data = [in_workers(2, worker_sets.images, spec).train for spec in specs]
    expected = worker_sets.images(BatchSpec(8, 3)).train
    for step, rows in enumerate(zip(*(read(x, 0, 6) for x in data), strict=True)):
        joined = jax.tree.map(lambda *x: np.concatenate(x), *rows)
        check_same([joined], [expected.batch(step)])


def test_all_evaluation_sets_are_read_by_the_same_processes_as_the_training_set():
    data = in_workers(2, worker_sets.steps)
    with ahead(data.train, 0, 8):
        first = data.train.batch(0)
        pids = children()
        evaluated = read(data.evaluation, 0, data.evaluation.num_batches)
        assert children() == pids and len(pids) == 2
        batches = [first, *(data.train.batch(step) for step in range(1, 8))]
    check_same(evaluated, map(data.evaluation.dataset.batch, range(10)))
    check_same(batches, map(data.train.dataset.batch, range(8)))
    check_same(read(data.evaluation, 0, 10), evaluated)  # Alone, too.


def test_what_is_asked_for_out_of_order_is_made_in_the_run():
    train = in_workers(2, worker_sets.steps).train
    with ahead(train, 2, 9):
        for step in (2, 7, 3, 0, 4, 4, 5, 6, 7, 8, 9):
            assert train.batch(step)["inputs"][0, 0] == step
    assert train.batch(3)["inputs"][0, 0] == 3
    with ahead(train, 0, 3):  # And nobody reads any.
        pass


def test_workers_import_no_jax():
    train = in_workers(1, worker_sets.at, worker_sets.without_jax).train
    assert len(read(train, 0, 3)) == 3


@pytest.mark.parametrize("noise", [3, 5])
def test_data_may_ask_for_flags_of_its_module(noise, monkeypatch):
    """Published code does; the run's own process has parsed the command's line."""
    given, parsed = flags.FLAGS["noise_of_worker_sets"], flags.FLAGS.is_parsed()
    monkeypatch.setattr(given, "value", noise)
    flags.FLAGS.mark_as_parsed()
    try:
        batches = read(in_workers(2, worker_sets.noisy).train, 0, 5)
    finally:
        if not parsed:
            flags.FLAGS.unparse_flags()
    assert [x["inputs"][0] for x in batches] == [noise * step for step in range(5)]


def test_an_error_in_a_worker_comes_with_its_traceback_at_its_step():
    train = in_workers(2, worker_sets.at, worker_sets.raises).train
    with ahead(train, 2, 9), pytest.raises(ZeroDivisionError) as caught:
        for step in range(2, 9):
            assert train.batch(step)["inputs"][0, 0] == step
    assert step == 5 and str(caught.value) == "no such picture"
    assert caught.value.__notes__ == [
        "in data worker 2, of the training batch of step 6"
    ]
    assert "worker_sets.py" in str(caught.value.__cause__)
    assert 'raise ZeroDivisionError("no such picture")' in str(caught.value.__cause__)


def test_an_error_that_cannot_be_sent_is_told_in_words():
    train = in_workers(2, worker_sets.at, worker_sets.raises_oddly).train
    with pytest.raises(RuntimeError, match="^OddError: this and that") as caught:
        read(train, 0, 9)
    assert "worker_sets.py" in str(caught.value.__cause__)


def test_a_users_mistake_stays_a_sentence():
    train = in_workers(2, worker_sets.at, worker_sets.refuses).train
    with pytest.raises(ConfigError) as caught:
        read(train, 0, 9)
    assert str(caught.value) == "picture 5 is no picture; remove it"


def test_data_that_a_worker_cannot_make_is_an_error():
    train = in_workers(2, worker_sets.fails_in_a_worker).train
    with pytest.raises(FileNotFoundError, match="no pictures here") as caught:
        read(train, 0, 9)
    assert caught.value.__notes__ == ["in data worker 1, which makes the data again"]


@pytest.mark.parametrize(
    ("number", "end"),
    [
        (signal.SIGKILL, "was ended by SIGKILL, as the system does where memory is"),
        (signal.SIGSEGV, "was ended by SIGSEGV at the"),
        pytest.param(0, "ended with exit code 3 at the", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_replaced_and_named(number, end, tmp_path, caplog, capfd):
    train = in_workers(
        2, worker_sets.at, worker_sets.dies_once, str(tmp_path), int(number)
    ).train
    with caplog.at_level(logging.WARNING):
        batches = read(train, 1, 12)
    check_same(batches, map(train.dataset.batch, range(1, 12)))
    (line,) = caplog.messages
    assert line.startswith("data worker 1, process ") and end in line
    assert line.endswith("at the training batch of step 7; another one takes its place")
    is_fault = number == signal.SIGSEGV  # Python's stack, in the user's code.
    assert ("in dies_once" in capfd.readouterr().err) == is_fault


def test_a_worker_that_goes_on_each_time_may_die_often(tmp_path, caplog):
    """As one whose memory grows, in a run of weeks."""
    train = in_workers(1, worker_sets.at, worker_sets.dies_each_time, str(tmp_path))
    batches = read(train.train, 1, 6)
    check_same(batches, map(train.train.dataset.batch, range(1, 6)))
    assert [x.endswith("takes its place") for x in caplog.messages] == [True] * 4


def test_a_worker_that_dies_again_and_again_ends_the_run(caplog):
    train = in_workers(2, worker_sets.at, worker_sets.dies).train
    with caplog.at_level(logging.WARNING), pytest.raises(DataError) as caught:
        read(train, 0, 9)
    assert len(caplog.messages) == 3
    assert str(caught.value).startswith("data worker 1, process ")
    assert str(caught.value).endswith(
        "was ended by SIGKILL, as the system does where memory is short, at "
        "the training batch of step 7; it is not replaced again, after 3 times"
    )


def test_workers_leave_the_signals_of_a_run_to_the_run(caplog):
    """Ctrl-C comes to all processes of a terminal, and Slurm's SIGTERM to all."""
    train = in_workers(2, worker_sets.steps).train
    with caplog.at_level(logging.WARNING), ahead(train, 0, 20):
        for pid in children():  # They have hardly started.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
        for step in range(20):
            assert train.batch(step)["inputs"][0, 0] == step
    assert not caplog.messages


def test_workers_that_hang_end_with_the_run():
    train = in_workers(2, worker_sets.at, worker_sets.hangs).train
    with ahead(train, 0, 9):
        assert train.batch(0)["inputs"][0, 0] == 0
        waiting = threading.Thread(
            target=lambda: [train.batch(step) for step in range(1, 9)], daemon=True
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda *_: None)
            waiting.start()
            while train._next < 4:
                time.sleep(0.01)
            for worker in train._workers._workers:
                worker.tell_to_end()
            waiting.join(60)
    assert not waiting.is_alive()


def test_a_batch_that_takes_long_is_named(monkeypatch, caplog):
    monkeypatch.setattr(workers, "SLOW_SECONDS", 0.25)
    train = in_workers(1, worker_sets.at, worker_sets.is_slow).train
    with caplog.at_level(logging.WARNING):
        assert len(read(train, 0, 6)) == 6
    lines = [line for line in caplog.messages if "of step 6 for " in line]
    assert lines[1].endswith("is at the training batch of step 6 for 0.5 s")


def test_more_batches_than_files_may_be_open_are_told_in_a_sentence():
    train, batches = in_workers(2, worker_sets.steps).train, []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ahead(train, 0, 999), pytest.raises(DataError, match="too many files are op"):
        batches.append(train.batch(0))
        free = os.dup(0)
        os.close(free)
        few = free + 5
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        try:
            batches.extend(train.batch(step) for step in range(1, 99))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 1 <= len(batches) < 10


def test_an_error_of_the_run_itself_ends_the_workers(monkeypatch):
    train = in_workers(2, worker_sets.steps).train
    monkeypatch.setattr(train.dataset, "batch", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError), ahead(train, 0, 9):
        pass


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_workers_end_with_a_run_that_is_killed(number, tmp_path):
    """Of a script without `if __name__ == "__main__"`, which they do not import."""
    script = tmp_path / "script.py"
    script.write_text(
        "import worker_sets\n"
        "from haiku_template.data import ahead\n"
        "from haiku_template.data.workers import in_workers\n"
        "train = in_workers(2, worker_sets.steps).train\n"
        "with ahead(train, 0, 10**9):\n"
        "    train.batch(0)\n"
        "    print(*(w._process.pid for w in train._workers._workers), flush=True)\n"
        "    for step in range(1, 10**9):\n"
        "        train.batch(step)\n"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": path}
    env.pop("PROCESS_OF_THE_RUN")
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as run:
        pids = list(map(int, run.stdout.readline().split()))
        assert len(pids) == 2 and all(map(is_alive, pids))
        run.send_signal(number)
        assert run.wait(60) == -number
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


def test_a_batch_for_which_memory_is_short_is_told_in_a_sentence():
    train = in_workers(2, worker_sets.is_short_of_memory).train
    with pytest.raises(DataError) as caught:
        read(train, 0, 9)
    assert re.sub("160,[0-9]{3}", "160,000", str(caught.value)) == (
        "a batch of 160,000 bytes does not fit in the memory that a data worker shares "
        "with the run: File too large; use fewer data.workers, or a smaller "
        "config.batch_size"
    )


def test_batches_that_depend_on_the_process_are_refused():
    train = in_workers(2, worker_sets.of_the_process).train
    with pytest.raises(ConfigError) as caught:
        read(train, 4, 9)
    assert str(caught.value).startswith(
        "inputs of the training batch of step 5 differs in data worker 1 from that of "
        "the run itself; a batch is a function of its number alone"
    )


def test_what_workers_cannot_make_is_refused_before_a_run():
    with pytest.raises(ConfigError, match="batches that only go forward, as from_it"):
        in_workers(2, worker_sets.forward_only)
    with pytest.raises(ConfigError, match="data workers cannot be had: .*; give in_w"):
        in_workers(2, lambda: worker_sets.steps())
    for count in (-1, 2.0, True, "2"):
        with pytest.raises(ConfigError, match="possible is a whole number from 0"):
            in_workers(count, worker_sets.steps)
    assert type(in_workers(0, worker_sets.steps).train) is worker_sets.Steps


def test_functions_of_a_script_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from haiku_template.data.workers import in_workers\n"
        "import worker_sets\n"
        "def data():\n"
        "    return worker_sets.steps()\n"
        "in_workers(2, data)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True
    )
    assert (
        "data workers cannot be had of a function or a class of a script or a "
        "notebook, __main__; give in_workers, or a config, a function of a module"
    ) in result.stderr
