"""Helper process: keeps JAX's connection open, and beats while Python is busy.

JAX's service and its clients listen in a private folder of each host alone. Process 0's
helper listens at the coordinator's address for the others' helpers, which have the key
of the start; whoever else connects there reaches nothing. When process 0 is gone, JAX's
client would end its process from C++, with no sentence: behind its helper it waits, and
the heartbeat ends the process.

It is a process of its own, since JAX, and whatever reads a large file, may hold the
interpreter's lock. It imports the standard library and files of this room.

Why: docs/decisions/cluster.md#relay, docs/decisions/cluster.md#relay-beats
"""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from haiku_template.cluster import identity
from haiku_template.cluster.identity import Message
from haiku_template.cluster.rendezvous import Meeting, parsed
from haiku_template.errors import DeviceError

RETRY_SECONDS, PATIENCE_SECONDS, START_SECONDS = 0.2, 60.0, 86_400.0
LONGEST_FOLDER = 80  # Letters: a Unix socket's name has at most 107.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ROOT = str(Path(__file__).parents[2])
PROGRAM = f"""
import sys
sys.path.insert(0, {ROOT!r})
from haiku_template.cluster import relay
relay.main()
"""
_RELAYS: list[subprocess.Popen] = []  # Each ends when its pipe closes.
_KEPT: list[tuple[socket.socket, ...]] = []  # Connections that must not close.


def start(meeting: Meeting, address: str, index: int, beat_seconds: float) -> str:
    """Starts a helper that lives as long as this process.

    Returns gRPC's address of JAX's service: where process 0 starts it, and where the
    others' clients find it.
    """
    folder = _folder()
    sockets = [peer.link for peer in meeting.peers]
    sockets += [meeting.server] if meeting.server else []
    # Not one of 0 to 2, which a process without standard input may give a connection.
    numbers = [fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, 3) for link in sockets]
    count = len(meeting.peers)
    task = {"id": meeting.start.id, "key": meeting.start.key.hex(), "index": index}
    task |= {"where": parsed(address), "folder": folder, "links": numbers[:count]}
    task |= {"servers": numbers[count:], "process": os.getpid()}
    task |= {"seconds": beat_seconds}
    relay = subprocess.Popen(
        [sys.executable, "-I", "-c", PROGRAM],
        start_new_session=True,
        pass_fds=numbers,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    for number in numbers:
        os.close(number)
    _RELAYS.append(relay)
    # A child would keep the helper of a process that was killed.
    os.register_at_fork(after_in_child=relay.stdin.close)
    relay.stdin.write(json.dumps(task).encode() + b"\n")
    relay.stdin.flush()
    if not relay.stdout.readline():
        raise DeviceError(f"process {index}'s helper, {__file__}, did not start")
    if meeting.server:
        meeting.server.close()
    return f"unix:{folder}/jax"


def _folder() -> str:
    """Makes a folder that this user alone can enter; the helper removes it."""
    try:
        folder = tempfile.mkdtemp(prefix="haiku-")
        if len(folder) > LONGEST_FOLDER:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="haiku-", dir="/tmp")
    except OSError as error:
        raise DeviceError(
            f"there is no folder for the socket of JAX's service ({error}); TMPDIR can "
            "name one"
        ) from error
    return folder


def main() -> None:
    """Relays as the first line of standard input says, until the input ends."""
    for number in IGNORED:  # Meant for who started it.
        signal.signal(number, signal.SIG_IGN)
    task = json.loads(sys.stdin.buffer.readline())
    key = identity.Start(task["id"], bytes.fromhex(task["key"]))
    links = [socket.socket(fileno=number) for number in task["links"]]
    identity.run(beat, links, task["process"], task["seconds"])
    path = f"{task['folder']}/jax"
    if task["servers"]:
        server = socket.socket(fileno=task["servers"][0])
        welcome = functools.partial(serve, path, key)
        work = functools.partial(identity.admit, server, key, welcome)
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        where, hello = tuple(task["where"]), {"index": task["index"], "jax": True}
        # Connects JAX's client here to process 0's helper, in a thread.
        work = lambda: identity.run(connect, server.accept()[0], where, key, hello)  # noqa: E731
    identity.run(repeat, work)
    print("ready", flush=True)
    sys.stdin.buffer.read()
    shutil.rmtree(task["folder"], ignore_errors=True)
    os._exit(0)


def repeat(work: Callable[[], None]) -> None:
    """Repeats `work` until the process ends."""
    while True:
        work()


def beat(links: list[socket.socket], process: int, seconds: float) -> None:
    """Sends beats for a process whose threads may wait for the interpreter's lock.

    A space is no line, and harms none that the process itself is sending.
    """
    while True:
        for link in [] if is_stopped(process) else links:
            with contextlib.suppress(OSError):
                link.send(b" ", socket.MSG_DONTWAIT)
        time.sleep(seconds)


def is_stopped(process: int) -> bool:
    """True for a process that SIGSTOP stopped, and where that cannot be known."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "tT"


def serve(
    path: str,
    start: identity.Start,
    link: socket.socket,
    hello: Message,
    is_known: bool,
) -> None:
    """Connects the helper of another process to JAX's service, once that listens."""
    if not is_known or "jax" not in hello:
        return link.close()
    service = socket.socket(socket.AF_UNIX)
    while service.connect_ex(path):
        time.sleep(RETRY_SECONDS)
    with contextlib.suppress(OSError):
        identity.send(link, identity.sealed({}, start.key, hello["nonce"]))
        link.settimeout(None)
        identity.run(copy, link, service, True)
        copy(service, link, True)


def connect(
    client: socket.socket, where: tuple[str, int], start: identity.Start, hello: Message
) -> None:
    """Connects a client; closes it if that fails for `PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            link = socket.create_connection(where, timeout=remaining)
            # Process 0 may be long in importing JAX; the heartbeat knows if it lives.
            identity.present(link, hello, lambda _: start, START_SECONDS)
        except (OSError, ValueError):
            time.sleep(RETRY_SECONDS)
            continue
        link.settimeout(None)
        identity.run(copy, client, link, False)
        return copy(link, client, False)
    client.close()


def copy(source: socket.socket, target: socket.socket, ends: bool) -> None:
    """Copies bytes until `source` ends; then closes both, or keeps them open."""
    for end in (source, target):
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    if ends:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    else:
        _KEPT.append((source, target))
