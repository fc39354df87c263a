import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from haiku_template.cluster import relay
from haiku_template.errors import DeviceError
from tests.runs import ROOT

# A process of a run, whose link is its standard input; it waits as in a collective.
PROGRAM = """
import socket, sys, time
from haiku_template.cluster import heartbeat
from haiku_template.cluster.rendezvous import Peer
heartbeat.BEAT_SECONDS, heartbeat.SILENT_SECONDS = 0.1, 1.0
heartbeat.LEAVE_SECONDS, heartbeat.GATHER_SECONDS = 0.2, 0.5
link, index = socket.socket(fileno=0), {index}
heart = heartbeat.Heartbeat([Peer(f"process {{1 - index}} on here", link)], index)
print("ready", flush=True)
{ending}
"""


@pytest.fixture
def other():
    """Starts a process; gives it and the other end of its link."""
    started = []

    def start(ending="time.sleep(60)", index=1):
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(ending=ending, index=index)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        started.append((process, ours))
        assert process.stdout.readline() == "ready\n"
        return process, ours

    yield start
    for process, ours in started:
        process.kill()
        process.communicate()
        ours.close()


def ended(process):
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


def test_a_process_beats(other):
    process, link = other()
    link.settimeout(10)
    assert link.recv(1) == link.recv(1) == b"\n"
    assert process.poll() is None


def test_one_whose_connection_ends_was_killed(other):
    process, link = other()
    link.close()
    code, errors = ended(process)
    assert code == 69
    assert errors.startswith("error: process 0 on here was killed at ")
    assert "resumes the last checkpoint" in errors and errors.count("\n") == 1


def test_one_that_is_silent_is_lost(other):
    process, link = other()
    link.sendall(b"\n")
    code, errors = ended(process)
    assert code == 69
    assert errors.startswith("error: nothing was heard of process 0 on here since ")


@pytest.mark.parametrize(
    ("message", "expected", "words"),
    [
        ({"left": "no file"}, 69, "process 0 on here ended at .*: no file; the"),
        (
            {"left": "no file", "code": 64},
            64,
            "process 0 on here ended at .*: no file\n",
        ),
        ({"left": "a driver", "code": 1}, 69, "process 0 on here ended at .*: a dr"),
        ({"lost": "process 3 was killed"}, 69, "process 3 was killed; the same"),
        ({"lost": "process 3 ended", "code": 70}, 70, "process 3 ended\n"),
    ],
)
def test_what_another_says_of_its_end_or_a_thirds_is_shown(
    other, message, expected, words
):
    process, link = other()
    link.sendall(b"\n" + json.dumps(message).encode() + b"\n")
    code, errors = ended(process)
    assert code == expected
    assert re.match("error: " + words, errors)


@pytest.mark.parametrize("resumes", [True, False])
def test_where_there_is_no_checkpoint_nobody_is_told_to_resume_it(other, resumes):
    process, link = other(f"heart.resumes = lambda: {resumes}; time.sleep(60)")
    link.close()
    assert ("the same command" in ended(process)[1]) == resumes


def test_one_that_finished_is_lost_to_one_that_waits_for_it(other):
    process, link = other(
        "heartbeat.FINISHED_SECONDS = 1; heart.waited = lambda: 6; time.sleep(60)"
    )
    for line in (b"\n", b'{"left": ""}\n'):
        link.sendall(line)
        time.sleep(0.3)
        assert process.poll() is None
    with contextlib.suppress(OSError):  # It ends.
        while True:
            link.sendall(b"\n")
            time.sleep(0.1)
    code, errors = ended(process)
    assert code == 69
    words = r"error: process 0 on here finished at [\d:]{8}, and process 1 waits for it"
    assert re.match(words, errors) and errors.count("\n") == 1


def test_one_that_ends_its_last_step_a_little_later_is_not_lost(other):
    """A step that takes longer than a process may wait for one that has finished."""
    waited = "heart.waited = lambda: 6.0 * (time.monotonic() < latest)"
    ending = f"latest = time.monotonic() + 2; {waited}; time.sleep(60)"
    process, link = other(f"heartbeat.FINISHED_SECONDS = 5; {ending}")
    link.sendall(b'{"left": ""}\n')
    for _ in range(30):
        link.sendall(b"\n")
        time.sleep(0.1)
    assert process.poll() is None


@pytest.mark.parametrize(
    "line",
    [
        b"xx}\n",
        b"[" * 60_000 + b"\n",
        b"[1]\n",
        b"\xff\n",
        b'{"left": "x", "code": []}\n',
        b'{"lost": "x", "code": "69"}\n',
        b"x" * 10_000_000,
        b" " * 200_000 + b"x" * 200_000,
    ],
    ids=["braces", "deep", "list", "bytes", "code", "lost", "long", "spaces"],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_line_that_is_no_heartbeats_counts_as_a_lost_process(other, line, index):
    process, link = other(index=index)
    link.settimeout(10)
    with contextlib.suppress(OSError):  # It ends.
        link.sendall(line)
    code, errors = ended(process)
    assert code == 69
    assert "sent what is no heartbeat's at" in errors and errors.count("\n") == 1
    assert len(errors) < 3_000


def test_beats_of_a_helper_alone_are_no_line_without_an_end(other):
    """As in hours in which Python's lock is held."""
    process, link = other()
    link.settimeout(10)
    link.sendall(b" " * 300_000)
    time.sleep(0.5)
    assert process.poll() is None
    link.sendall(json.dumps({"left": "no file", "code": 64}).encode() + b"\n")
    code, errors = ended(process)
    assert code == 64 and "process 0 on here ended at" in errors


def test_a_line_without_an_end_takes_no_memory(other):
    process, link = other("time.sleep(60)")
    before = resident(process)
    heartbeats = [b"x" * 1_000_000] * 200
    with contextlib.suppress(OSError):
        for piece in heartbeats:
            link.sendall(piece)
            assert resident(process) < before + 10_000_000
    assert ended(process)[0] == 69


def resident(process):
    """Bytes of memory that a process has had at most."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0


def test_words_of_another_process_command_no_terminal(other):
    process, link = other()
    link.sendall(json.dumps({"left": "\x1b[2J\x07\n\rerror: done"}).encode() + b"\n")
    _, errors = ended(process)
    assert errors.count("\n") == 1 and errors[:-1].isprintable()


HELPED = """
import ctypes
from haiku_template.cluster import relay
from haiku_template.cluster.identity import Start
from haiku_template.cluster.rendezvous import Meeting
start = Start("0" * 32, b"key")
relay.start(Meeting(heart.peers, start), "127.0.0.1:1", index, 0.1)
{ending}
"""
# A function of C that keeps Python's lock.
LOCKED = "ctypes.PyDLL(None).usleep(1_500_000); heart.leave('is back')"


def wait_for_helper(link, words=b" "):
    heard = b""
    while words not in heard:
        piece = link.recv(99)
        assert piece, "it ended"
        heard += piece
    return heard


def test_a_process_beats_while_pythons_lock_is_held(other):
    process, link = other(HELPED.format(ending=LOCKED))
    link.settimeout(0.8)  # It is silent for no longer.
    heard = wait_for_helper(link, b"is back")
    assert b" " * 10 in heard


def test_a_process_that_is_stopped_is_silent_and_heard_again(other):
    process, link = other(HELPED.format(ending="time.sleep(60)"))
    link.settimeout(10)
    wait_for_helper(link)
    os.kill(process.pid, signal.SIGSTOP)
    link.settimeout(0.6)
    with pytest.raises(TimeoutError):
        for _ in range(20):
            link.recv(99)
    os.kill(process.pid, signal.SIGCONT)
    assert link.recv(1)


def test_a_temporary_folder_that_is_none_is_a_sentence(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(DeviceError, match="no folder for the socket .*; TMPDIR can"):
        relay._folder()


def test_a_folder_whose_name_is_too_long_for_a_socket_is_made_elsewhere(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    os.mkdir(tempfile.tempdir)
    folder = relay._folder()
    os.rmdir(folder)
    assert len(folder) < 40 and os.listdir(tempfile.tempdir) == []


def test_a_helper_ends_with_its_process(other):
    process, link = other(HELPED.format(ending="time.sleep(60)"))
    link.settimeout(10)
    wait_for_helper(link)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    process.kill()
    with contextlib.suppress(ConnectionError):
        while link.recv(99):
            pass
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in children.split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_that_left_in_order_is_not_missed(other):
    ends = "heart.leave(); heart.parted.set()"
    process, link = other(f"time.sleep(2); {ends}; time.sleep(2)")
    link.sendall(b'{"left": ""}\n')
    for _ in range(20):
        link.sendall(b"\n")
        time.sleep(0.1)
    link.close()
    assert ended(process) == (0, "")


@pytest.mark.parametrize(
    ("last", "words"),
    [(b"", "process 0 on here was killed"), (b'{"lost": "process 3 was"}\n', "proc")],
)
def test_one_that_left_is_missed_if_it_does_not_wait_for_all(other, last, words):
    process, link = other("heart.leave(); time.sleep(60)")
    link.sendall(b'{"left": ""}\n' + last)
    link.close()
    code, errors = ended(process)
    assert code == 69
    assert errors.startswith("error: " + words)


def test_a_process_keeps_its_own_exit_code_and_sentence(other):
    process, link = other("heart.exit_code = 75; heart.leave(); time.sleep(60)")
    link.close()
    assert ended(process) == (75, "")


@pytest.mark.parametrize("ending", ["sys.stderr.close()", "sys.stdout.detach()"])
def test_a_process_ends_if_nobody_reads_what_it_prints(other, ending):
    process, link = other(f"{ending}; time.sleep(60)")
    link.close()
    assert ended(process)[0] == 69


def test_a_process_ends_if_what_it_prints_has_to_wait(other):
    words = "heartbeat.PRINT_SECONDS = 0.5; sys.stderr.write('x' * 1_000_000)"
    process, link = other(words)
    link.close()
    assert process.wait(timeout=20) == 69


WAITS = "heart.stall_seconds, heart.waited = 5, lambda: 6; time.sleep(60)"


def test_one_that_waits_too_long_says_so(other):
    process, link = other(WAITS)
    link.settimeout(10)
    for line in link.makefile():
        if line.strip():
            assert json.loads(line) == {"stalled": "all"}
            break
    assert process.poll() is None


def test_one_waits_longer_for_a_large_save(other):
    """Process 0 writes a state of so many seconds, and perhaps one before it."""
    size = "import types; heart.rescue.run = types.SimpleNamespace(seconds={})"
    process, link = other(f"{size.format(1)}; {WAITS}")
    for _ in range(10):
        link.sendall(b"\n")
        time.sleep(0.1)
    process.kill()
    link.settimeout(10)
    assert not link.makefile().read().strip()


@pytest.mark.parametrize(
    ("ending", "told", "words"),
    [
        ("time.sleep(60)", True, "process 0 did not go on, and the others have waited"),
        (WAITS, False, "process 1 on here did not go on, and the others have waited"),
        (WAITS, True, "all processes have waited for each other since"),
    ],
)
def test_who_keeps_others_waiting_is_named(other, ending, told, words):
    process, link = other(ending, index=0)
    with contextlib.suppress(OSError):  # It ends.
        while True:
            link.sendall(b'{"stalled": "all"}\n' if told else b"\n")
            time.sleep(0.1)
    code, errors = ended(process)
    assert code == 69
    assert errors.startswith(f"error: {words}") and errors.count("\n") == 1


def test_one_that_waits_and_goes_on_is_not_missed(other):
    process, link = other(index=0)
    for line in (b'{"stalled": "all"}\n', b"\n") * 10:
        link.sendall(line)
        time.sleep(0.2)
    assert process.poll() is None


def last_message(link):
    link.settimeout(20)
    return json.loads(link.makefile().read())  # Beats are white space.


@pytest.mark.parametrize("left", ["", "no such model", "no\\n  such model"])
def test_the_end_of_a_process_is_told_once(other, left):
    words = f"heart.exit_code = 64; heart.leave('{left}'); heart.leave('later')"
    process, link = other(words)
    assert last_message(link) == {"left": left.replace("\\n  ", " "), "code": 64}
    assert ended(process)[0] == 0


def test_a_child_does_not_keep_the_connection_of_a_killed_process(other):
    process, link = other("import os; os.fork(); time.sleep(9)")
    link.settimeout(5)
    link.recv(1)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGKILL)
    assert link.makefile("rb").read().strip() == b""


CHILDS_CHILD = """
import os
if os.fork() == 0:
    files = [open("/dev/null") for _ in range(20)]
    if os.fork() == 0:
        [os.fstat(file.fileno()) for file in files]
        os._exit(0)
    os._exit(os.wait()[1] >> 8)
os._exit(os.wait()[1] >> 8)
"""


def test_a_childs_child_keeps_its_own_files(other):
    process, _ = other(CHILDS_CHILD)
    assert ended(process)[0] == 0
