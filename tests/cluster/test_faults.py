"""Runs of two processes, each on a host of its own, one of which is lost."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from haiku_template.devices import DeviceManager
from haiku_template.runs import Run
from tests.cluster import hosts
from tests.cluster.test_several import ENVIRONMENT, ROOT, command, wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(hosts.missing()), reason=hosts.missing()),
]
SECONDS = 60  # In which each survivor ends.
SILENT = r"nothing was heard of process {} on \w+ since [\d:]{{8}}: it is stopped, or"
KILLED = r"process {} on \w+ was killed at [\d:]{{8}}"


@pytest.fixture
def pair():
    with hosts.linked() as names:
        yield names


@contextlib.contextmanager
def training(workdir, names, *flags):
    """A long run, once it has saved: its processes; their output is in files."""
    changes = {"num_steps": 100_000, "eval_every": None, "keep_last": 1}
    runs = []
    for index, name in enumerate(names):
        whole = command(workdir, 2, **changes)
        whole += [f"--coordinator_address={names[0]}:12355", f"--process_id={index}"]
        whole += [f"--num_processes={len(names)}", *flags]
        with output(workdir, index).open("w") as file:
            run = subprocess.Popen(
                hosts.at(name, *whole),
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        runs.append(run)
    try:
        wait_for(lambda: saved(workdir) or any(run.poll() for run in runs))
        before = max(saved(workdir))
        yield runs
        assert_restores(workdir, before)
    finally:
        for run in runs:
            run.kill()
            run.wait()


def output(workdir, index):
    return Path(f"{workdir}.{index}")


def saved(workdir):
    return sorted(
        int(path.name)
        for path in (workdir / "checkpoints").glob("*")
        if path.name.isdecimal()
    )


def assert_restores(workdir, before):
    """No checkpoint is lost: the newest is whole, and not older than before."""
    run = Run.open(workdir, DeviceManager.create("cpu", num_devices=1))
    assert run.step >= before
    assert int(run.state.step) == run.step


def assert_ends(workdir, runs, words):
    """The processes end in time with a sentence that has the words for each."""
    begun = time.monotonic()
    for index, pattern in words.items():
        code = runs[index].wait(timeout=SECONDS)
        printed = output(workdir, index).read_text()
        assert code == 69, printed
        errors = [line for line in printed.splitlines() if "rror" in line]
        assert len(errors) == 1, printed
        assert re.match(f"error: {pattern}", errors[0]), printed
        assert "Traceback" not in printed and "terminat" not in printed
    assert time.monotonic() - begun < SECONDS


def test_a_cut_link_ends_both(tmp_path, pair):
    with training(tmp_path / "run", pair) as runs:
        hosts.cut(pair[1])
        words = {0: SILENT.format(1), 1: SILENT.format(0)}
        assert_ends(tmp_path / "run", runs, words)


def test_a_link_that_is_cut_for_12_s_is_survived(tmp_path, pair):
    with training(tmp_path / "run", pair) as runs:
        hosts.cut(pair[1])
        time.sleep(12)
        hosts.mend(pair[1])
        before = max(saved(tmp_path / "run"))
        wait_for(lambda: max(saved(tmp_path / "run")) > before + 100, seconds=60)
        runs[1].terminate()
        assert [run.wait(timeout=SECONDS) for run in runs] == [75, 75]


def test_a_link_that_is_cut_in_one_direction_ends_both(tmp_path, pair):
    with training(tmp_path / "run", pair) as runs:
        hosts.mute(pair[0], 1)
        assert [run.wait(timeout=SECONDS) for run in runs] == [69, 69]


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_process_ends_the_other(tmp_path, pair, index):
    with training(tmp_path / "run", pair) as runs:
        os.kill(runs[index].pid, signal.SIGKILL)
        other = 1 - index
        assert_ends(tmp_path / "run", runs, {other: KILLED.format(index)})


@pytest.mark.parametrize("index", [0, 1])
def test_a_stopped_process_ends_the_other_and_then_itself(tmp_path, pair, index):
    with training(tmp_path / "run", pair) as runs:
        os.kill(runs[index].pid, signal.SIGSTOP)
        other = 1 - index
        assert_ends(tmp_path / "run", runs, {other: SILENT.format(index)})
        os.kill(runs[index].pid, signal.SIGCONT)
        assert runs[index].wait(timeout=SECONDS) == 69


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_whose_data_hang_ends_both(tmp_path, pair, index):
    with training(tmp_path / "run", pair, "--stall_seconds=5") as runs:
        os.kill(runs[index].pid, signal.SIGUSR1)
        words = rf"process {index}( on \w+)? did not go on, and the others have waited"
        assert_ends(tmp_path / "run", runs, {0: words, 1: words})


def test_a_cut_link_between_two_others_ends_all(tmp_path):
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(hosts.linked(3))
        flags = "--stall_seconds=5", "--config.batch_size=126"
        made = training(tmp_path / "run", names, *flags)
        runs = stack.enter_context(made)
        hosts.part(names, 1, 2)
        words = "all processes have waited for each other since [\\d:]{8}: the network"
        assert_ends(tmp_path / "run", runs, dict.fromkeys(range(3), words))
