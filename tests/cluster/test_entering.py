"""Calls that all processes begin or none, and a rescue in which all save their shares.

Three processes' parts, connected in memory; `test_rescue.py` has real ones.
"""

import contextlib
import json
import threading
from types import SimpleNamespace

import pytest

from haiku_template.cluster import rescue as rescues
from haiku_template.cluster.rendezvous import Peer
from haiku_template.cluster.rescue import Rescue

COUNT = 3


class Line:
    """Heartbeat of a process, whose connections are its peers' numbers."""

    def __init__(self, index, lines):
        others = range(1, COUNT) if index == 0 else [0]
        self.peers = [Peer(f"process {i}", i) for i in others]
        self.index, self.fault, self.lines, self.is_mute = index, "", lines, False
        self.rescue = Rescue(self)

    def send(self, message, peers):
        for peer in peers:
            line = self.lines[peer.link]
            (sender,) = (x for x in line.peers if x.link == self.index)
            if not line.is_mute:
                line.rescue.heed(sender, *json.loads(json.dumps(message))["rescue"])


@pytest.fixture
def lines():
    lines = []
    lines += [Line(i, lines) for i in range(COUNT)]
    return lines


@pytest.fixture
def saved(lines):
    """What each process was told to do with step 5, which is whole in all."""
    saved = []

    @contextlib.contextmanager
    def halted(entered):
        yield 5, "", True

    for line in lines:
        line.rescue.run = SimpleNamespace(
            halted=halted,
            is_saved=lambda step: False,
            check=lambda step, i=line.index: saved.append(("check", i, step)),
            save=lambda step, i=line.index: saved.append(("save", i, step)),
        )
    return saved


def begin(line, step):
    """Lets a process come to a call; its thread ends when it may begin it."""
    thread = threading.Thread(target=line.rescue.enter, args=[step], daemon=True)
    thread.start()
    return thread


def wait(threads, seconds=10.0):
    for thread in threads:
        thread.join(seconds)
    return [not thread.is_alive() for thread in threads]


@pytest.mark.parametrize("last", range(COUNT))
def test_none_begins_a_call_before_all_are_there(lines, last):
    for step in (7, 14):
        first = [begin(line, step) for line in lines if line.index != last]
        assert wait(first, 0.3) == [False] * 2
        assert wait([*first, begin(lines[last], step)]) == [True] * 3
        assert {line.rescue.entered for line in lines} == {step}


def test_a_lost_process_keeps_none_from_the_call_that_then_fails(lines):
    threads = [begin(lines[0], 7), begin(lines[1], 7)]
    assert wait(threads, 0.3) == [False] * 2
    for line in lines:
        line.fault = "process 2 was killed"
    assert wait(threads) == [True] * 2


@pytest.mark.parametrize("asking", range(COUNT))
def test_all_save_their_shares_once_all_have_looked_at_them(lines, saved, asking):
    waiting = [begin(line, 6) for line in lines if line.index != asking]
    during = []

    def save(step):  # The one that was blocked comes to its call.
        during.append(begin(lines[asking], 6))
        assert wait(during, 0.3) == [False]

    lines[asking].rescue.run.save = save
    assert lines[asking].rescue.ask() == (5, "")
    assert sorted(saved[:COUNT]) == [("check", i, 5) for i in range(COUNT)]
    assert {x for x, *_ in saved[COUNT:]} == {"save"} and len(saved) == 2 * COUNT - 1
    assert wait([*waiting, *during]) == [True] * 3  # A run that goes on.


def test_where_one_is_mute_nothing_is_saved(lines, saved, monkeypatch):
    monkeypatch.setattr(rescues, "HALT_SECONDS", 0.5)
    lines[2].is_mute = True
    step, why = lines[0].rescue.ask()
    assert step is None and "1 of the processes, which have shares of it" in why
    assert not saved


def test_where_one_has_a_share_that_is_not_finite_none_writes(lines, saved):
    def check(step):
        raise ValueError("w is NaN after step 5")

    lines[1].rescue.run.check = check
    assert lines[2].rescue.ask() == (None, "w is NaN after step 5")
    assert {x for x, *_ in saved} <= {"check"}
