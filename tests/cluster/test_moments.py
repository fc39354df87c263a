"""Faults of one process at any moment of a run: how both end, and what is said."""

import re
import signal
import subprocess

import pytest

from tests.cluster.test_several import ENVIRONMENT, by_hand, command

pytestmark = pytest.mark.cluster
KILLED = r"error: process {} on \S+ was killed at "
ENDED = r"error: process {} on \S+ ended at [\d:]{{8}}: {}"
HOST = {"data.placement": "host"}  # Its batches are read while it trains.


def run(folder, address, faults, count=2, **changes):
    """Exit codes and errors of processes with faults."""
    whole = command(folder / "run", 1, **changes)
    whole[whole.index("tests.cluster.guarded")] = "tests.cluster.faulty"
    faulty = ENVIRONMENT | {"FAULTS": faults}
    commands = [whole] * count
    started = by_hand(address, *commands, env=faulty, stdout=subprocess.DEVNULL)
    try:
        errors = [each.communicate(timeout=200)[1] for each in started]
    finally:
        for each in started:
            each.kill()
    return [each.returncode for each in started], errors


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "moment", ["import", "compile", "step", "save", "evaluation", "end"]
)
def test_a_process_that_is_killed_ends_the_other(tmp_path, address, moment, index):
    codes, errors = run(tmp_path, address, f"{index}:{moment}:SIGKILL")
    assert (codes[index], codes[1 - index]) == (-signal.SIGKILL, 69), errors
    assert re.match(KILLED.format(index), errors[1 - index]), errors
    assert "Traceback" not in errors[1 - index]


@pytest.mark.parametrize("index", [0, 2])
def test_a_killed_process_of_four_ends_the_others(tmp_path, address, index):
    codes, errors = run(tmp_path, address, f"{index}:step:SIGKILL", count=4)
    for other in {0, 1, 2, 3} - {index}:
        assert codes[other] == 69, errors
        assert re.match(KILLED.format(index), errors[other]), errors


def test_one_is_told_to_end_while_the_other_is_killed(tmp_path, address):
    faults = "1:step:SIGTERM,0:step:SIGKILL"
    codes, errors = run(tmp_path, address, faults)
    assert codes == [-signal.SIGKILL, 69], errors


@pytest.mark.parametrize(
    ("moment", "raised", "said", "codes"),
    [
        ("data", "raise RuntimeError('shard 17')", "RuntimeError: shard 17", (69, 1)),
        ("data", "raise OSError('shard 17')", "OSError: shard 17", (69, 1)),
        ("data", "raise MemoryError('no room')", "MemoryError: no room", (69, 1)),
        ("data", "sys.exit(3)", "SystemExit: 3", (69, 3)),
        ("data", "SIGSEGV", None, (69, -11)),
        ("data", "os._exit(0)", None, (69, 0)),
        ("compile", "raise ValueError('the model')", "ValueError: the model", (69, 1)),
        ("evaluation", "raise KeyError('x')", "KeyError: 'x'", (69, 1)),
        ("writer", "raise RuntimeError('tracker')", "RuntimeError: tracker", (69, 1)),
        ("step", "raise LookupError('hook')", "LookupError: hook", (69, 1)),
        ("step", "sys.exit(0)", "SystemExit: 0", (69, 0)),
    ],
)
def test_an_error_of_one_is_told_to_the_other(
    tmp_path, address, moment, raised, said, codes
):
    ended, errors = run(tmp_path, address, f"1:{moment}:{raised}", **HOST)
    assert tuple(ended) == codes, errors
    words = KILLED.format(1) if said is None else ENDED.format(1, said)
    assert re.search(words, errors[0]), errors


@pytest.mark.parametrize("index", [0, 1])
def test_a_full_disk_ends_both_with_its_code(tmp_path, address, index):
    full = "raise __import__('haiku_template.errors').errors.StorageError('disk full')"
    codes, errors = run(tmp_path, address, f"{index}:save:{full}")
    assert codes == [74, 74], errors
    assert "disk full" in errors[0] and "disk full" in errors[1]


@pytest.mark.parametrize("fault", ["clock", "40"])
def test_a_wrong_clock_or_a_slow_process_ends_nothing(tmp_path, address, fault):
    codes, errors = run(tmp_path, address, f"1:data:{fault}", **HOST)
    assert codes == [0, 0], errors


@pytest.mark.parametrize(
    ("moment", "name", "count"),
    [
        ("import", "SIGTERM", 2),
        ("compile", "SIGTERM", 2),
        ("step", "SIGTERM", 2),
        ("step", "SIGTERM", 4),
        ("step", "SIGHUP", 2),
        ("step", "SIGUSR1", 2),
        ("step", "SIGINT", 2),
    ],
)
def test_a_signal_to_one_ends_all_saved_or_says_why(
    tmp_path, address, moment, name, count
):
    changes = {"num_steps": 100_000, "eval_every": None}
    codes, errors = run(tmp_path, address, f"1:{moment}:{name}", count, **changes)
    expected = 130 if name == "SIGINT" else 75
    assert codes[1] == expected, errors
    others = {codes[index] for index in range(count)} - {expected}
    # Before the loop nothing is agreed, and nothing is to be saved.
    assert not others if moment == "step" and expected == 75 else others <= {69, 75}
    assert not any("Traceback" in words for words in errors)
