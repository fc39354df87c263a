"""The prefetching thread: order, bounds, errors, and that it ends."""

import threading
import time

import pytest

from haiku_template.training import feed
from haiku_template.training.feed import TRIAL, Prefetcher

# Seconds; a thread that does not end would otherwise hold up the whole suite.
pytestmark = pytest.mark.timeout(30)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def wait_for(made, count):
    """Waits until `made` has `count` entries, and a moment for it to get more."""
    deadline = time.monotonic() + 10
    while len(made) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("start", "stop"), [(0, 9), (3, 8), (4, 5), (2, 2)])
def test_batches_come_in_order_each_once(start, stop, depth, monkeypatch):
    monkeypatch.setattr(feed, "DEPTH", depth)
    with Prefetcher(str, range(start, stop)) as batches:
        assert list(batches) == [str(step) for step in range(start, stop)]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_it_runs_ahead_by_one_more_than_the_depth_and_no_further(depth, monkeypatch):
    monkeypatch.setattr(feed, "DEPTH", depth)
    made = []
    with Prefetcher(made.append, range(0, 20)) as batches:
        waiting = iter(batches)
        for taken in range(10):
            wait_for(made, taken + depth + 1)
            assert len(made) == taken + depth + 1
            next(waiting)


def test_batches_are_made_by_one_other_thread():
    def make(step):
        return threading.current_thread()

    with Prefetcher(make, range(0, 5)) as batches:
        threads = set(batches)
    assert len(threads) == 1
    assert threads.pop().name == "prefetch"


@pytest.mark.parametrize("error", [ValueError("of step 3"), KeyboardInterrupt()])
def test_an_error_is_raised_at_its_own_step_and_ends_the_thread(error):
    made, received = [], []

    def make(step):
        made.append(step)
        if step == 3:
            raise error
        return step

    with (
        pytest.raises(type(error)) as raised,
        Prefetcher(make, range(0, 10)) as batches,
    ):
        for batch in batches:
            received.append(batch)
    assert raised.value is error
    assert received == [0, 1, 2]
    assert made == [0, 1, 2, 3]
    assert prefetch_threads() == []


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("taken", [0, 1, 6])
def test_leaving_early_ends_the_thread(taken, depth, monkeypatch):
    monkeypatch.setattr(feed, "DEPTH", depth)
    made = []
    with Prefetcher(made.append, range(0, 1000)) as batches:
        assert len(prefetch_threads()) == 1
        for _ in zip(range(taken), batches, strict=False):
            pass
    assert prefetch_threads() == []
    # It stops where it is, and does not work through the remaining steps.
    assert len(made) <= taken + depth + 3


def test_an_error_of_the_consumer_is_raised_and_ends_the_thread():
    with pytest.raises(ZeroDivisionError), Prefetcher(str, range(0, 1000)) as batches:
        for _ in batches:
            1 / 0  # noqa: B018
    assert prefetch_threads() == []


def test_leaving_waits_for_the_batch_that_is_being_made():
    begun, finished = threading.Event(), threading.Event()

    def make(step):
        begun.set()
        time.sleep(0.1)
        finished.set()

    with Prefetcher(make, range(0, 1)):
        begun.wait()
    assert finished.is_set()
    assert prefetch_threads() == []


def makers(slow, cheap=0.05, steps=60):
    """Names of the threads that made each batch; those of `slow` take longer."""

    def make(step):
        if step in slow:
            time.sleep(11 * cheap)
        return step, threading.current_thread().name

    with Prefetcher(make, range(3, steps), cheap=cheap) as batches:
        numbers, names = zip(*batches, strict=True)
    assert numbers == tuple(range(3, steps))
    assert prefetch_threads() == []
    return names


def test_batches_that_are_cheap_are_made_where_they_are_asked_for():
    here = threading.current_thread().name
    assert makers(slow=()) == ("prefetch",) * TRIAL + (here,) * (57 - TRIAL)


def test_a_batch_that_takes_long_brings_the_thread_back():
    here = threading.current_thread().name
    names = makers(slow=(5, 30, 31, 32))
    assert names[: 3 + TRIAL] == ("prefetch",) * (3 + TRIAL)  # After the slow third.
    assert names[3 + TRIAL : 28] == (here,) * (25 - TRIAL)  # Step 30 is the 28th.
    assert names[28 : 30 + TRIAL] == ("prefetch",) * (2 + TRIAL)
    assert names[30 + TRIAL :] == (here,) * (27 - TRIAL)


def test_an_error_of_a_batch_that_is_made_here_is_raised_at_its_step():
    def make(step):
        return 1 // (20 - step)

    received = []
    with (
        pytest.raises(ZeroDivisionError),
        Prefetcher(make, range(0, 30), cheap=0.05) as batches,
    ):
        for batch in batches:
            received.append(batch)
    assert len(received) == 20
    assert prefetch_threads() == []
