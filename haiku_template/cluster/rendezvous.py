"""Rendezvous: all processes of a run are there before JAX's runtime waits for them.

JAX ends a process from C++ when a peer is missing, and does not say which. So the peers
first meet at the same address by a line of JSON each; JAX's service takes it over.
"""

import contextlib
import json
import socket
import time
from typing import Any

from haiku_template.errors import DeviceError

SECONDS = 60.0
RETRY_SECONDS = 0.2
HELLO_SECONDS = 5.0  # For the line of whoever connects: it may be a stranger.
LONGEST = 65_536  # Bytes of a line.


def meet(
    address: str,
    count: int,
    index: int,
    facts: dict[str, Any],
    seconds: float = SECONDS,
) -> None:
    """Returns when `count` processes are at `address` with equal facts.

    Args:
      address: HOST:PORT of process 0, as the others reach it.
      index: number of this process, below `count`.
      facts: values by name, which JSON can hold, such as versions.

    Raises:
      DeviceError: the same in all processes that came: one is missing, came twice, or
        has other facts; or process 0 cannot be reached.
    """
    host, port = _parsed(address)
    deadline = time.monotonic() + seconds
    hello = {"index": index, "count": count, "facts": facts}
    if index == 0:
        fault = _receive(address, port, hello, deadline, seconds)
    else:
        fault = _visit(address, host, port, hello, deadline, seconds)
    if fault:
        raise DeviceError(fault)


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DeviceError(
            f"--coordinator_address={address} is not understood; it is HOST:PORT of "
            "process 0, such as node1:12355"
        )
    return host.strip("[]"), int(port)


def _receive(
    address: str, port: int, own: dict[str, Any], deadline: float, seconds: float
) -> str:
    """Waits for the others at process 0, and tells them the fault, "" for none."""
    count, came, fault = own["count"], {0: own}, ""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(port))
        except OSError as error:
            return (
                f"process 0 cannot listen at port {port} of "
                f"--coordinator_address={address}: {error.strerror}; another run may "
                "use it: choose another port"
            )
        peers = []
        while len(came) < count and not fault:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(count)) - came.keys())
                fault = (
                    f"{len(came)} of {count} processes joined at {address} within "
                    f"{seconds:.0f} s; missing: process {', '.join(map(str, missing))}"
                )
                break
            stack.enter_context(peer)
            hello = _read(peer)
            if hello is None:
                continue  # A stranger.
            peers.append(peer)
            fault = _odd(came, hello)
            came[hello["index"]] = hello
        # The port is free before the others go on to JAX's service there.
        server.close()
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sendall(json.dumps({"fault": fault}).encode() + b"\n")
    return fault


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
    address: str,
    host: str,
    port: int,
    hello: dict[str, Any],
    deadline: float,
    seconds: float,
) -> str:
    """Tells process 0 that this one is here; returns the fault that it found."""
    reason: Exception | str = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as server:
                server.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 has its own deadline, and says who is missing.
                answer = _line(server, seconds + HELLO_SECONDS)
            if answer is not None and "fault" in answer:
                return answer["fault"]
            reason = "what answers there is no process 0"
        except (OSError, ValueError) as error:
            reason = error
        time.sleep(RETRY_SECONDS)
    return (
        f"process {hello['index']} could not reach process 0 at {address} within "
        f"{seconds:.0f} s ({reason}); it must run, and the port be open, there"
    )


def _read(peer: socket.socket) -> dict[str, Any] | None:
    """Line of a process that connected; None for a stranger's."""
    try:
        hello = _line(peer, HELLO_SECONDS)
    except (OSError, ValueError):
        return None
    kinds = {"index": int, "count": int, "facts": dict}
    known = isinstance(hello, dict) and all(
        isinstance(hello.get(name), kind) for name, kind in kinds.items()
    )
    return hello if known else None


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
