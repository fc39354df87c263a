"""The watchdog of a run: what hangs ends it, with its stacks, and nothing else does."""

import itertools

import pytest

from haiku_template import signals
from haiku_template.config import check, default_config
from haiku_template.errors import ConfigError
from haiku_template.runs import train, watchdog
from haiku_template.runs.watchdog import DATA, SAVE, STEP, Watchdog
from haiku_template.storage.checkpoint import Checkpoints
from tests.test_blocked import digest, ended, finish, folder, numbers, start, trainer

__all__ = ["folder"]  # A fixture of those tests.


@pytest.fixture
def looked():
    """Makes a watchdog that waits 5 s; what it said, and a function that looks."""
    said, before = [], [*signals.LOOKERS]

    def make(floor=5.0, progress=lambda: 0):
        made = Watchdog(floor, progress, said.append)
        signals.LOOKERS.append(made.look)
        return made, said

    yield make
    signals.LOOKERS[:] = before


def look(made, seconds):
    for _ in range(seconds):
        if made.look in signals.LOOKERS:
            made.look()


def test_work_that_takes_longer_than_its_limit_ends_the_run_once(looked):
    made, said = looked()
    made.timed(DATA, lambda: None)()

    def hang():
        look(made, 6)
        assert not said
        look(made, 60)

    made.timed(DATA, hang)()
    assert said == ["no progress for 6 s in a wait for data"]


def test_the_first_of_a_kind_may_compile(looked):
    made, said = looked()
    made.timed(SAVE, lambda: look(made, 51))()
    assert not said
    made.timed(DATA, lambda: look(made, 52))()
    assert said == ["no progress for 51 s in a wait for data"]


def test_each_kind_of_work_has_ten_times_its_own_median(looked, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    made, _ = looked()

    def work(seconds):
        now[0] += seconds

    for seconds in (2.0, 3.0, 400.0):
        made.timed(SAVE, work)(seconds)
    made.timed(DATA, work)(0.1)
    for _ in made.waits("ab"):
        work(1.0)
    limits = [made.limit(kind) for kind in (SAVE, DATA, STEP)]
    assert limits == [30.0, 5.0, 10.0]


def test_a_save_may_take_as_long_as_its_state_needs(looked):
    """The last one of a run, say, after many that were not waited for."""
    said = []
    made = Watchdog(5.0, lambda: 0, said.append, 75.0)
    signals.LOOKERS.append(made.look)
    for kind in (SAVE, DATA):
        made.timed(kind, lambda: None)()
    made.timed(SAVE, lambda: look(made, 80))()
    assert not said
    made.timed(DATA, lambda: look(made, 80))()
    assert said == ["no progress for 6 s in a wait for data"]


def test_what_goes_on_within_a_piece_of_work_is_progress(looked):
    """Batches of a long evaluation, say: the ledger counts them."""
    count = itertools.count()
    made, said = looked(progress=lambda: next(count) // 4)
    made.timed(DATA, lambda: None)()
    made.timed(DATA, lambda: look(made, 100))()
    assert not said


def test_work_within_other_work_is_progress_of_it(looked):
    made, said = looked()
    inner = made.timed(DATA, lambda: None)
    inner()

    def outer():
        for _ in range(20):
            look(made, 4)
            inner()

    made.timed(DATA, outer)()
    assert not said


def test_a_wait_for_other_processes_is_the_heartbeats(looked, monkeypatch):
    made, said = looked()
    made.timed(DATA, lambda: None)()
    monkeypatch.setattr(watchdog, "waited", lambda: 1.0)
    made.timed(DATA, lambda: look(made, 100))()
    assert not said


def test_an_error_of_watched_work_is_raised_as_it_is(looked):
    made, _ = looked()
    with pytest.raises(ZeroDivisionError):
        made.timed(DATA, lambda: 1 / 0)()
    assert made.limit(DATA) == 5.0  # It is over.


def test_a_watched_run_is_as_any_other(tmp_path, monkeypatch):
    events, looks, wait = [], [], Checkpoints.wait
    options = {"num_steps": 12, "log_every": 3, "save_every": 5}
    train(trainer(), workdir=tmp_path / "plain", **options)
    hooks = [lambda event: events.append(event.what)]
    watched = tmp_path / "watched"

    def wait_or_hang(self):
        looks.append(len(signals.LOOKERS))
        wait(self)

    monkeypatch.setattr(Checkpoints, "wait", wait_or_hang)
    train(trainer(), workdir=watched, watchdog_minutes=9.0, hooks=hooks, **options)
    assert looks == [1, 0]  # The wait for the last save, and at the end of all.
    assert digest(watched) == digest(tmp_path / "plain")
    assert numbers(watched) == numbers(tmp_path / "plain")
    assert events.count("step") == 12 and events.count("save") == 3
    assert not signals.LOOKERS and not (watched / "stacks.txt").exists()
    with pytest.raises(OSError, match="is gone"):
        train(trainer(3), workdir=tmp_path / "run", watchdog_minutes=9.0, **options)
    assert not signals.LOOKERS


@pytest.mark.parametrize("minutes", [0, -1.0])
def test_a_limit_that_means_nothing_is_refused(minutes):
    config = default_config()
    config.watchdog_minutes = minutes
    with pytest.raises(ConfigError, match="None, or more than 0"):
        check(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "how", "words"),
    [
        ("data", "in C", "in a wait for data"),
        ("save", "in Python", "in a save"),
        ("evaluation", "in Python", "in an evaluation"),
    ],
)
def test_a_run_that_hangs_ends_with_its_stacks_and_is_saved(folder, where, how, words):
    """C18, of one process: exit code 76; a save that hangs is the one before."""
    name = f"hangs-{where}"
    (folder / "reached").unlink(missing_ok=True)
    arguments = ["--config=blocked.py", f"--workdir={folder / name}"]
    arguments += ["--config.watchdog_minutes=0.05"]
    code, errors = ended(start(folder, name, where, how, arguments=arguments))
    assert code == signals.STALLED == 76 and errors.count("error: ") == 1, errors
    assert "error: no progress for " in errors and words in errors
    step = {"data": 25, "evaluation": 20}.get(where)
    said = "did not end within 6 s" if step is None else f"step {step} is saved"
    assert said in errors
    assert f"stacks of all threads are in {folder / name / 'stacks.txt'}" in errors
    stacks = (folder / name / "stacks.txt").read_text()
    assert words in stacks and "blocked.py" in stacks and "in block" in stacks
    finish(folder, name)
