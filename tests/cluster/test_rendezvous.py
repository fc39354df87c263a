import contextlib
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from haiku_template.cluster import identity, join, meet
from haiku_template.errors import ConfigError, DeviceError
from tests.runs import ROOT


def fault(*given, **options):
    try:
        close(meet(*given, **options))
    except DeviceError as error:
        return str(error)
    return None


def close(meeting):
    for peer in meeting.peers:
        peer.link.close()
    if meeting.server:
        meeting.server.close()


def faults(address, *processes, seconds=5.0):
    """What each process that comes is told: (count, index, facts)."""
    with ThreadPoolExecutor(len(processes)) as pool:
        each = [pool.submit(fault, address, *given, seconds) for given in processes]
        return [one.result() for one in each]


def test_all_go_on_once_all_are_there(address):
    assert faults(address, *((4, i, {"jax": "1"}) for i in range(4))) == [None] * 4


FEW_FILES = """
import resource, sys
from haiku_template.cluster import meet
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
print(len(meet(sys.argv[1], 90, 0, {}, 20.0, sys.argv[2]).peers))
"""


def test_more_processes_meet_than_one_may_have_open_files(address, tmp_path):
    """The usual limit of 1,024 was that of some 340 processes."""
    command = [sys.executable, "-c", FEW_FILES, address, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)

    def come(index):
        return fault(address, 90, index, {}, 20.0, tmp_path)

    with ThreadPoolExecutor(89) as pool:
        assert [*pool.map(come, range(1, 90))] == [None] * 89
    assert first.communicate(timeout=60)[0] == "89\n"


def test_a_missing_process_is_named_to_all_that_came(address):
    words = f"2 of 4 processes joined at {address} within 1 s; missing: process 1, 3"
    assert faults(address, (4, 0, {}), (4, 2, {}), seconds=1.0) == [words] * 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((2, 1, {"jax": "2"}), "differ in jax: 1 in process 0 and 2 in process 1"),
        ((2, 1, {}), "differ in jax: 1 in process 0 and None in process 1"),
        ((3, 1, {"jax": "1"}), "process 1 was started with --num_processes=3 and proc"),
    ],
)
def test_a_process_of_another_run_is_named_to_both(address, other, words):
    for told in faults(address, (2, 0, {"jax": "1"}), other):
        assert words in told


def test_two_with_the_same_number_are_refused(address):
    told = faults(address, (3, 0, {}), (3, 1, {}), (3, 1, {}))
    assert all("two processes were started with --process_id=1" in x for x in told)


def test_an_address_where_nobody_is_says_so_in_time(address):
    words = rf"process 1 could not reach process 0 at {address} within 1 s \(.*refused"
    with pytest.raises(DeviceError, match=words):
        meet(address, 2, 1, {}, 1.0)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"cannot listen at port {port} .*use"):
            meet(f"127.0.0.1:{port}", 2, 0, {}, 0.5)


STRANGE = b'{"index": 9, "count": 2, "facts": {}, "host": "h"}\n'
WORDS = [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"[1]\n", b"", b"[" * 60_000, STRANGE]


@pytest.mark.parametrize("words", WORDS)
def test_a_stranger_at_the_port_is_passed_over(address, words):
    host, port = address.split(":")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fault, address, 2, 0, {}, 5.0)
        stranger = None
        while stranger is None:
            try:
                stranger = socket.create_connection((host, int(port)), timeout=1)
            except ConnectionRefusedError:
                continue
        with stranger:
            stranger.sendall(words)
            with contextlib.suppress(OSError):  # It may have hung up by now.
                stranger.shutdown(socket.SHUT_WR)
            assert fault(address, 2, 1, {}, 5.0) is None
        assert first.result() is None


def test_silent_strangers_do_not_make_it_later(address, monkeypatch):
    monkeypatch.setattr(identity, "HELLO_SECONDS", 0.5)
    host, port = address.split(":")
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as strangers:
        first = pool.submit(fault, address, 2, 0, {}, 1.0)
        while not first.done():
            with contextlib.suppress(OSError):
                stranger = socket.create_connection((host, int(port)), timeout=1)
                strangers.enter_context(stranger)
            time.sleep(0.1)
            assert len(strangers._exit_callbacks) < 30
        assert "1 of 2 processes joined" in first.result()


@pytest.mark.parametrize(
    "address", ["node1", "node1:", ":123", "node1:port", "n:70000"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(DeviceError, match="is not understood; it is HOST:PORT"):
        meet(address, 2, 0, {})


@pytest.mark.parametrize(("count", "index"), [(2, 2), (2, -1), (0, 0)])
def test_a_number_beyond_the_processes_is_refused(count, index):
    with pytest.raises(ConfigError, match=f"--process_id={index} of --num_processes="):
        join("node1:1", count, index)


def test_a_name_that_nobody_knows_says_so_in_time():
    with pytest.raises(DeviceError, match="could not reach process 0 at no-such-host"):
        meet("no-such-host.invalid:12355", 2, 1, {}, 1.0)
