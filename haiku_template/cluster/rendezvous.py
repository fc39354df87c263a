"""Rendezvous: all processes of a run are there before JAX's runtime waits for them.

JAX ends a process from C++ when a peer is missing, and does not say which. So the peers
first meet at the same address by a line of JSON each; JAX's service takes it over, and
the connections stay for the heartbeat.
"""

import contextlib
import json
import socket
import time
from typing import Any, NamedTuple

from haiku_template.errors import DeviceError

SECONDS = 300.0
RETRY_SECONDS = 0.2
HELLO_SECONDS = 5.0  # For the line of whoever connects: it may be a stranger.
LONGEST = 65_536  # Bytes of a line.


class Peer(NamedTuple):
    """Another process of the run, and the connection to it."""

    name: str
    link: socket.socket


def meet(
    address: str,
    count: int,
    index: int,
    facts: dict[str, Any],
    seconds: float = SECONDS,
) -> list[Peer]:
    """Returns when `count` processes are at `address` with equal facts.

    Process 0 gets connections to all others, and each of them the one to process 0.

    Args:
      address: HOST:PORT of process 0, as the others reach it.
      index: number of this process, below `count`.
      facts: values by name, which JSON can hold, such as versions.

    Raises:
      DeviceError: the same in all processes that came: one is missing, came twice, or
        has other facts; or process 0 cannot be reached.
    """
    hello = {"index": index, "count": count, "facts": facts}
    hello["host"] = socket.gethostname()
    with contextlib.ExitStack() as links:
        come_together = _visit if index else _receive
        peers, fault = come_together(address, hello, seconds, links)
        if fault:
            raise DeviceError(fault)
        links.pop_all()
    return peers


def parsed(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises `DeviceError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DeviceError(
            f"--coordinator_address={address} is not understood; it is HOST:PORT of "
            "process 0, such as node1:12355"
        )
    return host.strip("[]"), int(port)


def _receive(
    address: str, own: dict[str, Any], seconds: float, links: contextlib.ExitStack
) -> tuple[list[Peer], str]:
    """Waits for the others at process 0, and tells them the fault, "" for none."""
    (_, port), deadline = parsed(address), time.monotonic() + seconds
    count, came, fault = own["count"], {0: own}, ""
    peers: list[Peer] = []
    try:
        server = _listen(port)
    except OSError as error:
        return [], (
            f"process 0 cannot listen at port {port} of "
            f"--coordinator_address={address}: {error.strerror}; another run may "
            "use it: choose another port"
        )
    with server:
        while len(came) < count and not fault:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                if time.monotonic() > deadline:  # Strangers may come for ever.
                    raise TimeoutError
                peer, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(count)) - came.keys())
                fault = (
                    f"{len(came)} of {count} processes joined at {address} within "
                    f"{seconds:.0f} s; missing: process {', '.join(map(str, missing))}"
                )
                break
            links.enter_context(peer)
            hello = _read(peer)
            if hello is None:
                peer.close()
                continue  # A stranger.
            peers.append(Peer(_name(hello), peer))
            fault = _odd(came, hello)
            came[hello["index"]] = hello
    # The port is free before the others go on to JAX's service there.
    answer = {"fault": fault, "name": _name(own)}
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.link.sendall(json.dumps(answer).encode() + b"\n")
    return peers, fault


def _name(hello: dict[str, Any]) -> str:
    return f"process {hello['index']} on {hello['host']}"


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _odd(came: dict[int, dict[str, Any]], hello: dict[str, Any]) -> str:
    """Fault of a process that came, "" for none."""
    own, index = came[0], hello["index"]
    if hello["count"] != own["count"]:
        return (
            f"process {index} was started with --num_processes={hello['count']} and "
            f"process 0 with {own['count']}"
        )
    if index in came:
        return f"two processes were started with --process_id={index}; each has its own"
    for name, value in own["facts"].items():
        theirs = hello["facts"].get(name)
        if theirs != value:
            return (
                f"the processes of a run differ in {name}: {value} in process 0 and "
                f"{theirs} in process {index}"
            )
    return ""


def _visit(
    address: str, hello: dict[str, Any], seconds: float, links: contextlib.ExitStack
) -> tuple[list[Peer], str]:
    """Tells process 0 that this one is here; returns the fault that it found."""
    where, deadline = parsed(address), time.monotonic() + seconds
    reason = OSError("no answer")
    while (left := deadline - time.monotonic()) > 0:
        try:
            server, answer = _ask(where, hello, left, seconds)
            links.enter_context(server)
            return [Peer(answer["name"], server)], answer["fault"]
        except (OSError, ValueError) as error:
            reason = error
        time.sleep(RETRY_SECONDS)
    return [], (
        f"process {hello['index']} could not reach process 0 at {address} within "
        f"{seconds:.0f} s ({reason}); it must run, and the port be open, there"
    )


def _ask(
    where: tuple[str, int], hello: dict[str, Any], left: float, seconds: float
) -> tuple[socket.socket, dict[str, Any]]:
    """Connection to process 0, and its answer. Raises `OSError` or `ValueError`."""
    with contextlib.ExitStack() as link:
        server = link.enter_context(socket.create_connection(where, timeout=left))
        server.sendall(json.dumps(hello).encode() + b"\n")
        # Process 0 has its own deadline, and says who is missing.
        answer = _line(server, seconds + HELLO_SECONDS)
        if answer is None or "fault" not in answer:
            raise ValueError("what answers there is no process 0")
        link.pop_all()
    return server, answer


def _read(peer: socket.socket) -> dict[str, Any] | None:
    """Line of a process that connected; None for a stranger's."""
    try:
        hello = _line(peer, HELLO_SECONDS)
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"index": int, "count": int, "facts": dict, "host": str}
    known = isinstance(hello, dict) and all(
        isinstance(hello.get(name), kind) for name, kind in kinds.items()
    )
    return hello if known and 0 <= hello["index"] < hello["count"] else None


def _line(peer: socket.socket, seconds: float) -> Any:
    """JSON of a line; None if it does not end in time. Raises `ValueError`."""
    text, deadline = b"", time.monotonic() + seconds
    while not text.endswith(b"\n") and len(text) < LONGEST:
        peer.settimeout(max(deadline - time.monotonic(), 0.001))
        piece = peer.recv(LONGEST)
        if not piece:
            return None
        text += piece
    return json.loads(text)
