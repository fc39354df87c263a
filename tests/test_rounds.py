"""Benchmarks take turns, and say by which figures they compare."""

import json
import platform
import sys

import pytest

from benchmarks import models, rounds
from tests.runs import ROOT

SERVES = """
from benchmarks.rounds import serve

rates = iter([0, 100, 200])

def make():
    print("a library says something")
    return lambda: next(rates), "a loop"

serve(make)
"""


def test_each_round_begins_with_another_loop():
    turns = []
    loops = {name: lambda name=name: turns.append(name) or 1.0 for name in "abc"}
    rates = rounds.alternate(loops, 4)
    assert "".join(turns) == "abcbcacababc"
    assert rates == {name: [1.0] * 4 for name in "abc"}


def test_a_loop_of_another_process_waits_for_its_turn():
    command = [sys.executable, "-c", SERVES]
    with rounds.served(command, ROOT) as (loop, facts):
        assert facts["description"] == "a loop"
        assert facts["versions"]["jax"] and "torch" not in facts["versions"]
        assert [loop(), loop()] == [100, 200]
        with pytest.raises(RuntimeError, match="StopIteration"):
            loop()


def test_ratios_are_of_the_same_round(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["overhead", "--rounds=3"])
    rates = {"whole": [50.0, 300.0, 90.0], "bare": [100.0, 200.0, 100.0]}
    rounds.report("overhead", rates, "bare", {"description": "here"})
    results = json.loads((tmp_path / "overhead.json").read_text())
    whole = results["loops"]["whole"]
    assert whole["steps_per_second"] == [70.0, 90.0, 195.0]
    assert whole["ratio"] == pytest.approx([0.7, 0.9, 1.2])
    assert results["command"] == "python -m benchmarks.overhead --rounds=3"
    assert {"date", "machine", "commit"} <= results.keys()
    assert (tmp_path / "overhead.png").read_bytes().startswith(b"\x89PNG")
    assert "0.90 (0.70-1.20)" in capsys.readouterr().out


def test_where_nobody_tells_the_commit_it_is_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # No repository.
    assert rounds._commit() == "unknown"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Two: Three\n", "Two: Three"),
        ("processor\t: 0\nBogoMIPS\t: 2\n", platform.machine()),
    ],
)
def test_a_processor_has_a_name(text, name):
    assert rounds.processor(text) == name


@pytest.mark.slow
def test_the_loops_of_a_model_run_in_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "FOLDER", tmp_path)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    flags = ["--models=gpt", "--processes=1", "--rounds=1"]
    monkeypatch.setattr("sys.argv", ["models", *flags])
    models.main()
    results = json.loads((tmp_path / "models_gpt.json").read_text())
    for name in ("whole", "bare"):
        low, _, high = results["loops"][name]["steps_per_second"]
        assert 0 < low <= high
    assert results["command"] == "python -m benchmarks.models --models gpt"
