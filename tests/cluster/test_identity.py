"""Processes of one start know each other; whoever else comes ends and joins nothing."""

import contextlib
import functools
import json
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from haiku_template.cluster import identity, meet, relay, rendezvous
from haiku_template.errors import ConfigError, DeviceError
from tests.cluster.test_rendezvous import close

FORGED = {"index": 1, "count": 2, "facts": {}, "host": "x", "nonce": "0" * 32}


def come(address, count, index, workdir, seconds=5.0, facts=None):
    """Error of a process that comes; None if it joins."""
    try:
        close(meet(address, count, index, facts or {}, seconds, workdir))
    except (ConfigError, DeviceError) as error:
        return error
    return None


@contextlib.contextmanager
def waiting(address, count, workdir, seconds=5.0):
    """Process 0, once it listens."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come, address, count, 0, workdir, seconds)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                connect(address).close()
                break
            time.sleep(0.01)
        yield first


def connect(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize(
    "words",
    [
        FORGED,
        FORGED | {"index": 0, "count": 1},
        FORGED | {"facts": {"jax": "9"}},
        identity.sealed(FORGED, b"another key", "0" * 32),
        identity.sealed(FORGED, b"", ""),
        {"mac": "\ud800é", "body": "{}"},
        {"mac": [], "body": {}},
        {"unseen": []},
        {"unseen": 7},
    ],
)
def test_a_forged_hello_takes_no_place_and_ends_nothing(tmp_path, address, words):
    with waiting(address, 2, tmp_path) as first, connect(address) as stranger:
        identity.read(stranger, 5)
        identity.send(stranger, words)
        assert stranger.recv(1) == b""  # It is told nothing.
        assert not first.done()
        assert come(address, 2, 1, tmp_path) is None
        assert first.result() is None


def test_a_hello_that_was_overheard_joins_nothing(tmp_path, address):
    """Process 1 joins through a listener, which then says the same for process 2."""
    sent = []

    def overhear(here):
        client, _ = here.accept()
        with client, connect(address) as link:
            client.sendall(link.recv(9999))
            sent.append(client.recv(9999))
            link.sendall(sent[0])
            client.sendall(link.recv(9999))

    with waiting(address, 3, tmp_path) as first, ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", 0)) as here:
            between = f"127.0.0.1:{here.getsockname()[1]}"
            threading.Thread(target=overhear, args=(here,), daemon=True).start()
            second = pool.submit(come, between, 3, 1, tmp_path)
            while not sent:
                time.sleep(0.01)
        with connect(address) as stranger:
            identity.read(stranger, 5)
            stranger.sendall(sent[0])
            assert stranger.recv(1) == b""
        assert come(address, 3, 2, tmp_path) is None
        assert first.result() is second.result() is None


def test_idle_connections_hold_no_start(tmp_path, address):
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(waiting(address, 2, tmp_path))
        for _ in range(40):
            stack.enter_context(connect(address))
        assert come(address, 2, 1, tmp_path) is None
        assert first.result() is None
        assert time.monotonic() - begun < identity.HELLO_SECONDS


def greeted(address):
    """A stranger for whom there is a thread, once there is one."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        link = connect(address)
        with contextlib.suppress(ConnectionError):
            identity.read(link, 5)
            return link
        link.close()
        time.sleep(0.01)
    raise AssertionError("there is no room for one more")


@pytest.fixture
def room_for_two():
    """Threads for two strangers alone; those of earlier tests have ended."""
    for _ in range(identity.MOST_STRANGERS):
        assert identity._UNKNOWN.acquire(timeout=20)
    identity._UNKNOWN.release(2)
    yield
    identity._UNKNOWN.release(identity.MOST_STRANGERS - 2)


def test_strangers_who_are_gone_make_room(tmp_path, address, monkeypatch, room_for_two):
    monkeypatch.setattr(identity, "HELLO_SECONDS", 50.0)
    with waiting(address, 2, tmp_path, 20.0) as first:
        for _ in range(5):
            greeted(address).close()
        with greeted(address), greeted(address), connect(address) as third:
            assert third.recv(1) == b""  # There are no more threads for it.
        assert come(address, 2, 1, tmp_path, 20.0) is None
        assert first.result() is None


def test_the_relay_takes_no_stranger_to_jaxs_service(tmp_path, address):
    path, start = str(tmp_path / "jax"), identity.Start("0" * 32, b"key")
    host, port = address.split(":")
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(path)
        service.listen()
        service.settimeout(0.5)
        server = socket.create_server((host, int(port)))
        with server, connect(address) as stranger:
            welcome = functools.partial(relay.serve, path, start)
            identity.admit(server, start, welcome)
            identity.read(stranger, 5)
            identity.send(stranger, FORGED | {"jax": True})
            assert stranger.recv(1) == b""
        with pytest.raises(TimeoutError):
            service.accept()


def test_the_key_is_the_users_alone_and_is_gone_after(tmp_path, address):
    workdir = tmp_path / "runs" / "new"
    with waiting(address, 2, workdir) as first:
        with connect(address) as stranger:
            greeting = identity.read(stranger, 5)
        (file,) = workdir.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.name == f".start-{greeting['start']}"
        assert file.read_bytes().hex() not in json.dumps(greeting)
        assert come(address, 2, 1, workdir) is None
        assert first.result() is None
    assert not workdir.exists()


def test_keys_of_killed_processes_are_removed_in_time(tmp_path):
    old, new = tmp_path / ".start-old", tmp_path / ".start-new"
    for file in (old, new):
        file.write_bytes(b"")
    os.utime(old, (1, 1))
    with identity.announced(tmp_path):
        assert not old.exists() and new.exists()


@pytest.mark.parametrize("seconds", [0.5, 5.0])
def test_a_workdir_that_is_not_shared_is_said_by_both(
    tmp_path, address, monkeypatch, seconds
):
    """Also by one that waits longer than process 0."""
    monkeypatch.setattr(rendezvous, "SHARED_SECONDS", seconds)
    (tmp_path / "b").mkdir()  # As of an earlier run on that host.
    with waiting(address, 2, tmp_path / "a", 1.0) as first:
        second = come(address, 2, 1, tmp_path / "b", 1.5)
        for error in (first.result(), second):
            assert isinstance(error, ConfigError)
            assert "a workdir must be on a disk that all processes share" in str(error)
        assert "missing: process 1; process 1 came and did not" in str(first.result())
        assert f"--workdir={tmp_path / 'b'} here" in str(second)
    assert [*tmp_path.rglob("*")] == [tmp_path / "b"]


def test_a_workdir_that_is_seen_late_is_shared(tmp_path, address, monkeypatch):
    found, late = identity.find, time.monotonic() + 0.7

    def find(workdir, number):
        return found(tmp_path / "w" if time.monotonic() > late else workdir, number)

    monkeypatch.setattr(identity, "find", find)
    with waiting(address, 2, tmp_path / "w") as first:
        assert come(address, 2, 1, tmp_path / "not yet") is None
        assert first.result() is None


def test_two_runs_at_one_port_tell_each_other_apart(tmp_path, address, monkeypatch):
    monkeypatch.setattr(rendezvous, "SHARED_SECONDS", 0.5)
    a, b = tmp_path / "a", tmp_path / "b"
    b.mkdir()  # It has run before.
    with waiting(address, 2, a) as first:
        assert "another run may use it" in str(come(address, 2, 0, b))
        assert "each run needs a port of its own" in str(come(address, 2, 1, b))
        assert come(address, 2, 1, a) is None
        assert first.result() is None


def test_the_port_stays_taken_when_all_have_met(tmp_path, address):
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(meet, address, 2, i, {}, 5.0, tmp_path) for i in (0, 1)]
        meetings = [each.result() for each in both]
    assert "cannot listen at port" in str(come(address, 2, 0, tmp_path))
    for meeting in meetings:
        close(meeting)


def test_without_a_workdir_a_variable_tells_runs_apart(address, monkeypatch):
    monkeypatch.setenv(identity.VARIABLE, "this run")
    with waiting(address, 2, None, 2.0) as first:
        monkeypatch.setenv(identity.VARIABLE, "another")
        assert "could not reach process 0" in str(come(address, 2, 1, None, 0.5))
        monkeypatch.setenv(identity.VARIABLE, "this run")
        assert come(address, 2, 1, None) is None
        assert first.result() is None


@pytest.mark.parametrize("facts", [{"jax": "1\x1b[2J"}, {"jax": "\x1b]0;x\x07"}])
def test_words_of_another_process_command_no_terminal(tmp_path, address, facts):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(come, address, 2, 0, tmp_path, 5.0, {"jax": "1"})
        told = come(address, 2, 1, tmp_path, facts=facts), other.result()
    assert all("differ in jax" in str(x) and str(x).isprintable() for x in told)


def test_words_of_process_0_command_no_terminal_of_another(tmp_path, address):
    with ThreadPoolExecutor(1) as pool:
        facts = {"jax": "1\x1b[2J"}
        first = pool.submit(come, address, 2, 0, tmp_path, 5.0, facts)
        told = come(address, 2, 1, tmp_path, facts={"jax": "1"})
        assert "differ in jax" in str(first.result())
    assert "differ in jax: 1?[2J in process 0" in str(told)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (rendezvous._name, "process 1 on node?[2J"),
        (lambda hello: hello["host"], "node\x1b[2J"),
    ],
)
def test_names_of_hosts_command_no_terminal(
    tmp_path, address, monkeypatch, names, named
):
    """Also if process 0 has other code, which sends its own as it is."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node\x1b[2J")
    monkeypatch.setattr(rendezvous, "_name", names)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(meet, address, 2, i, {}, 5.0, tmp_path) for i in (0, 1)]
        meetings = [each.result() for each in both]
    ((first,), (second,)) = (meeting.peers for meeting in meetings)
    for meeting in meetings:
        close(meeting)
    assert first.name == named and second.name.endswith("node?[2J")


@pytest.mark.parametrize(
    ("told", "refused"), [(None, "127.0.0.3"), ("127.0.0.3:{}", "127.0.0.2")]
)
def test_it_listens_at_one_address_alone(tmp_path, address, monkeypatch, told, refused):
    port = address.split(":")[1]
    if told:
        monkeypatch.setenv(rendezvous.BIND, told.format(port))
    server = rendezvous._listen(f"127.0.0.2:{port}")
    with server, pytest.raises(ConnectionRefusedError):
        connect(f"{refused}:{port}")
    with pytest.raises(DeviceError, match="is not understood"):
        monkeypatch.setenv(rendezvous.BIND, "nonsense")
        rendezvous._listen(address)


@pytest.mark.parametrize("name", ["192.0.2.77", "no-such-host.invalid", "0.0.0.0"])
def test_an_address_that_is_not_this_hosts_means_all_interfaces(address, name):
    port = address.split(":")[1]
    with rendezvous._listen(f"{name}:{port}"), connect(f"127.0.0.2:{port}"):
        pass


def test_a_name_that_is_a_loopback_here_means_all_interfaces(address, monkeypatch):
    """As Debian's table has it for the name of a host."""
    port = int(address.split(":")[1])
    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    assert rendezvous._places("node1", port) == []
    assert rendezvous._places("127.0.1.1", port) == [(place[0], place[4])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"x" * 200_000, "a line without an end"),
        (b"[" * 100_000 + b"\n", "a line without an end"),
        # Python 3.14 reads so many.
        (b"[" * 60_000 + b"\n", "a line of brackets|Expecting value"),
        (b"[]\n", "a line that is no object"),
    ],
)
def test_a_line_has_a_limit(line, words):
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        pool.submit(ours.sendall, line)
        with pytest.raises(ValueError, match=words):
            identity.read(theirs, 5.0)
        theirs.close()


def test_what_follows_a_line_is_left_in_the_connection():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b'{"a": 1}\n\n {"lost')
        assert identity.read(theirs, 1.0) == {"a": 1}
        assert theirs.recv(99) == b'\n {"lost'
