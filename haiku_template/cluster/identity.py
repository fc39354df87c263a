"""Identity of a start: what the processes of one run know, and strangers do not.

While they meet, process 0 keeps a random key in the workdir, in a file for its user
alone. Whoever connects gets a nonce, and answers with its HMAC by that key: the key
does not travel, and what was overheard opens no second connection. A process that does
not see the file has another workdir, or is another run's.
"""

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.bounded import dangling, exists
from haiku_template.errors import ConfigError
from haiku_template.errors import printable as printable

# The key where no workdir is known, as in a script; launch/local.py sets it.
VARIABLE = "HAIKU_TEMPLATE_RUN"
HELLO_SECONDS = 5.0  # For a line of whoever connects: it may be a stranger.
ACCEPT_SECONDS = 0.1
LONGEST = 65_536  # Bytes of a line.
MOST_STRANGERS = 256  # Connections that have not said who they are.
STALE_SECONDS = 86_400.0  # Of the file of a process 0 that was killed.
HEX = re.compile(r"[0-9a-f]{32}")
Message = dict[str, Any]  # A line of JSON.
_UNKNOWN = threading.BoundedSemaphore(MOST_STRANGERS)


class Start(NamedTuple):
    """Start of a run: its public id, and the key of its processes."""

    id: str
    key: bytes


class UnseenError(OSError):
    """Process 0's start is not in this process's workdir."""


@contextlib.contextmanager
def announced(workdir: str | Path | None) -> Iterator[Start]:
    """Makes a start, whose key is in `workdir` for as long as the context lasts.

    Raises `ConfigError` if the workdir cannot be written to.
    """
    start = Start(secrets.token_hex(16), secrets.token_bytes(32))
    if workdir is None:
        yield Start(start.id, _variable())
        return
    workdir = Path(workdir)
    file, is_new = _file(workdir, start.id), not exists(workdir)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _write(file, start.key)
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written to: "
            f"{dangling(workdir) or error}; use another"
        ) from error
    try:
        yield start
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
            if is_new:  # A run that is refused leaves nothing.
                workdir.rmdir()


def _write(file: Path, key: bytes) -> None:
    """Writes a key for this user alone, and removes those of killed processes."""
    for old in file.parent.glob(".start-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.lstat().st_mtime > STALE_SECONDS:
                old.unlink()
    descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key)
        opened.flush()
        os.fsync(descriptor)


def find(workdir: str | Path | None, number: str) -> Start:
    """Start with this id, as another process than 0 sees it. Raises `UnseenError`."""
    if workdir is None:
        return Start(number, _variable())
    try:
        os.listdir(workdir)  # NFS asks its server anew.
        return Start(number, _file(Path(workdir), number).read_bytes())
    except OSError as error:
        raise UnseenError(str(error)) from error


def _file(workdir: Path, number: str) -> Path:
    return workdir / f".start-{number}"


def _variable() -> bytes:
    return hashlib.sha256(os.environ.get(VARIABLE, "").encode()).digest()


def admit(
    server: socket.socket,
    start: Start,
    welcome: Callable[[socket.socket, Message, bool], None],
) -> None:
    """Accepts a connection within `ACCEPT_SECONDS`, and greets it in a thread.

    `welcome` gets its connection, its message, and whether that has the key.
    """
    server.settimeout(ACCEPT_SECONDS)
    try:
        link, _ = server.accept()
    except TimeoutError:
        return
    except OSError:  # Such as too many open files.
        return time.sleep(ACCEPT_SECONDS)
    if not _UNKNOWN.acquire(blocking=False):
        return link.close()
    run(_greet, link, start, welcome)


def _greet(link: socket.socket, start: Start, welcome: Callable[..., None]) -> None:
    """Challenges a connection; closes that of a stranger."""
    nonce = secrets.token_hex(16)  # Why: docs/decisions/cluster.md#identity
    try:
        send(link, {"start": start.id, "nonce": nonce})
        message = read(link, HELLO_SECONDS)
        if is_known := "mac" in message:
            message = _opened(message, start.key, nonce)
    except Exception:  # Whatever it sends, it ends nothing here.
        return link.close()
    finally:
        _UNKNOWN.release()
    welcome(link, message, is_known)


def present(
    link: socket.socket,
    hello: Message,
    find_start: Callable[[str], Start],
    seconds: float,
) -> tuple[Message, Start]:
    """Answers process 0's challenge; returns its reply, and the start.

    Args:
      find_start: gives the start with an id; process 0 is told of `UnseenError`.
      seconds: for the reply: process 0 may wait for others.

    Raises `OSError` or `ValueError` for whoever has not the key.
    """
    greeting = read(link, HELLO_SECONDS)
    number, nonce = greeting.get("start"), greeting.get("nonce")
    if not all(isinstance(x, str) and HEX.fullmatch(x) for x in (number, nonce)):
        raise ValueError("what answers there is no process 0")
    try:
        start = find_start(number)
    except UnseenError:
        send(link, {"unseen": hello["index"]})
        raise
    reply_nonce = secrets.token_hex(16)
    send(link, sealed(hello | {"nonce": reply_nonce}, start.key, nonce))
    return _opened(read(link, seconds), start.key, reply_nonce), start


def sealed(message: Message, key: bytes, nonce: str) -> dict[str, str]:
    """Message with its HMAC, which holds for the connection of this nonce alone."""
    body = json.dumps(message)
    return {"body": body, "mac": _mac(key, nonce + body)}


def _opened(line: Message, key: bytes, nonce: str) -> Message:
    body, mac = str(line.get("body")), str(line.get("mac"))
    if not hmac.compare_digest(_mac(key, nonce + body).encode(), mac.encode()):
        raise ValueError("what answers there is of another run")
    return json.loads(body)


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def send(link: socket.socket, message: Message) -> None:
    """Sends a line of JSON."""
    link.sendall(json.dumps(message).encode() + b"\n")


def read(link: socket.socket, seconds: float) -> Message:
    """Reads the JSON object of one line alone. Raises `OSError` or `ValueError`."""
    text, deadline = b"", time.monotonic() + seconds
    while not text.endswith(b"\n"):
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (there := link.recv(LONGEST, socket.MSG_PEEK)):
            raise ConnectionError("what answers there hung up")
        text += link.recv(there.find(b"\n") + 1 or len(there))
        if len(text) > LONGEST:
            raise ValueError("a line without an end")
    try:
        message = json.loads(text)
    except RecursionError as error:
        raise ValueError("a line of brackets") from error
    if not isinstance(message, dict):
        raise ValueError("a line that is no object")
    return message


def run(work: Callable[..., Any], *args: Any) -> None:
    """Starts a thread that ends with its process."""
    threading.Thread(target=work, args=args, name="cluster", daemon=True).start()
