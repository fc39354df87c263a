"""Saves by the clock: `save_minutes`."""

import contextlib
import time

import pytest

from haiku_template.config import check, default_config
from haiku_template.devices.processes import Processes
from haiku_template.errors import ConfigError
from haiku_template.runs import save_timer, train
from haiku_template.runs.save_timer import SaveTimer
from tests.storage.test_failed_saves import join_saves, small_files
from tests.storage.test_verified import bits, lines, made


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch):
        self.now = float(round(time.monotonic()))  # Else 90 seconds may be 89.999.
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def saved_by(workdir, clock, seconds, minutes, num_steps=10, start=0):
    """Steps that a run saves whose steps take so many seconds each."""
    saved = []

    def hook(event):
        if event.what == "step":
            join_saves()
            clock.now += seconds
        if event.what == "save":
            saved.append(event.step)

    options = {"save_minutes": minutes, "log_every": 1, "hooks": [hook]}
    state = train(made(), num_steps=num_steps, workdir=workdir, **options).state
    return saved, bits(state)


def test_saves_are_due_so_long_after_the_last_one(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    plain = train(made(), num_steps=10, workdir=tmp_path / "a", log_every=1)
    timed = saved_by(tmp_path / "b", clock, 30, 1.5)
    assert timed == ([3, 6, 9, 10], bits(plain.state))
    assert lines(tmp_path / "b") == lines(tmp_path / "a")


def test_with_0_minutes_the_next_save_begins_when_the_last_is_on_disk(
    tmp_path, monkeypatch
):
    clock = Clock(monkeypatch)
    saved, expected = saved_by(tmp_path / "a", clock, 0, 0.0, 4)
    assert saved == [1, 2, 3, 4]
    assert saved_by(tmp_path / "b", clock, 1e6, None, 4) == ([4], expected)


def test_a_resumed_run_does_not_depend_on_when_it_was_saved(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    saved_by(tmp_path / "a", clock, 30, 2, 5)
    _, state = saved_by(tmp_path / "a", clock, 7, 0.5, 10)
    _, expected = saved_by(tmp_path / "b", clock, 0, None, 10)
    assert state == expected and lines(tmp_path / "a") == lines(tmp_path / "b")


def test_a_save_that_failed_is_not_tried_again_at_once(tmp_path, monkeypatch, caplog):
    clock = Clock(monkeypatch)
    stack = contextlib.ExitStack()
    saved = []

    def hook(event):
        if event.what == "step":
            join_saves()
            clock.now += 10
            if event.step == 2:
                stack.enter_context(small_files(10_000))
            if event.step == 4:
                stack.close()
        if event.what == "save":
            saved.append(event.step)

    with stack:
        options = {"save_minutes": 0.0, "log_every": 1, "hooks": [hook]}
        train(made(), num_steps=12, workdir=tmp_path, **options)
    # Step 2 failed, as is seen at step 3: its save is begun, and fails, too.
    assert "step 2 could not be saved" in caplog.text
    assert saved[:2] == [1, 2] and saved[-1] == 12
    later = [step for step in saved if 3 < step < 12]
    assert later and min(later) >= 3 + save_timer.FAILED_SECONDS // 10


class Devices:
    """Two processes, of which the first decides."""

    def __init__(self, decisions):
        self.decisions, self.waits = iter(decisions), 0
        self.processes = self
        self.count = Processes(1, 2).count

    def wait(self, scalars):
        self.waits += 1

    def first(self, value):
        return next(self.decisions)


def test_several_processes_ask_the_first_once_a_second(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    devices = Devices([(False, 3), (True, 6), (False, 9)])

    class Saves:
        began, is_saving, failed = 0.0, False, 0

    timer = SaveTimer(1, Saves, devices)
    answers = []
    for step in range(1, 9):
        clock.now += 0.1
        answers.append(timer.due(step, None))
    assert answers == [False, False, True, False, False, False, False, False]
    assert devices.waits == 3


@pytest.mark.parametrize("minutes", [-1.0, "always"])
def test_minutes_are_0_or_more(minutes):
    config = default_config()
    with pytest.raises((ConfigError, TypeError), match="save_minutes"):
        config.save_minutes = minutes
        check(config)
