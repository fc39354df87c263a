"""Rendezvous: all processes of a run are there before JAX's runtime waits for them.

JAX ends a process from C++ when a peer is missing, and does not say which. So the peers
first meet at the coordinator's address by a line of JSON each, which only processes of
this start can write (`identity`). Process 0 goes on listening there, for its relay, and
the connections stay for the heartbeat.
"""

import errno
import functools
import ipaddress
import math
import os
import queue
import resource
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from haiku_template.cluster import identity
from haiku_template.cluster.identity import Message
from haiku_template.errors import ConfigError, DeviceError

SECONDS = 300.0  # Why: docs/decisions/cluster.md#rendezvous
RETRY_SECONDS = 0.2
Workdir = str | Path | None  # None where it is not known yet.
SHARED_SECONDS = 60.0  # Until a file is seen: NFS may remember its folder so long.
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
ANYWHERE = ("", "0.0.0.0", "::")
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
BACKLOG = 1024
LINKS, FILES = 8, 1024  # Open files for each process, here and in the relay; others.
SHARED = (
    "a workdir must be on a disk that all processes share, and each run needs a port "
    "of its own"
)


class Peer(NamedTuple):
    """Another process of the run, and the connection to it."""

    name: str
    link: socket.socket


class Meeting(NamedTuple):
    """Result of a rendezvous: the start, and connections that stay open.

    Attributes:
      peers: all others for process 0, and process 0 for each of them.
      server: listens for them at the coordinator's address; None but in process 0.
    """

    peers: list[Peer]
    start: identity.Start
    server: socket.socket | None = None


def meet(
    address: str,
    count: int,
    index: int,
    facts: dict[str, Any],
    seconds: float = SECONDS,
    workdir: Workdir = None,
) -> Meeting:
    """Returns when `count` processes of one start are at `address` with equal facts.

    Args:
      address: HOST:PORT of process 0, as the others reach it.
      index: number of this process, below `count`.
      facts: values by name, which JSON can hold, such as versions.
      workdir: of the run, on a disk that all share; None where it is not known yet.

    Raises:
      DeviceError: the same in all processes that came: one is missing, came twice, or
        has other facts; or process 0 cannot be reached.
      ConfigError: the workdir is not shared, or cannot be written to.
    """
    hello = {"index": index, "count": count, "facts": facts}
    hello["host"] = socket.gethostname()
    with ExitStack() as links:
        come_together = _visit if index else _receive
        meeting = come_together(address, hello, seconds, links, workdir)
        links.pop_all()
    return meeting


def parsed(address: str, name: str = "--coordinator_address") -> tuple[str, int]:
    """Splits HOST:PORT. Raises `DeviceError`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise DeviceError(
            f"{name}={address} is not understood; it is HOST:PORT of process 0, such "
            "as node1:12355"
        )
    return host.strip("[]"), int(port)


def _receive(
    address: str, hello_0: Message, seconds: float, links: ExitStack, workdir: Workdir
) -> Meeting:
    """Waits for the others at process 0, and tells them the error if there is one."""
    _allow_links(hello_0["count"])
    server, deadline = links.enter_context(_listen(address)), time.monotonic() + seconds
    came, unseen, error = {0: hello_0}, set(), None
    peers: list[tuple[Peer, str]] = []
    hellos: queue.SimpleQueue = queue.SimpleQueue()

    def welcome(link: socket.socket, hello: Message, is_known: bool) -> None:
        if is_known and _is_hello(hello):
            return hellos.put((link, hello))
        unseen.update(_claimed(hello, hello_0["count"]))
        link.close()  # A stranger is told nothing, and ends nothing.

    with identity.announced(workdir) as start:
        while len(came) < hello_0["count"] and error is None:
            if time.monotonic() > deadline:
                error = _missing(address, hello_0["count"], seconds, came, unseen)
                break
            identity.admit(server, start, welcome)
            while not hellos.empty():
                link, hello = hellos.get()
                peer = _peer(_name(hello), links.enter_context(link))
                peers.append((peer, hello["nonce"]))
                error = error or _mismatch(came, hello)
                came[hello["index"]] = hello
    answer = {"fault": str(error or ""), "name": _name(hello_0)}
    for peer, nonce in peers:
        with suppress(OSError):
            identity.send(peer.link, identity.sealed(answer, start.key, nonce))
    if error:
        raise error
    return Meeting([peer for peer, _ in peers], start, server)


def _allow_links(count: int) -> None:
    """Raises this process's limit of open files to what so many others need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # A system may refuse.
        most = min(LINKS * count + FILES, hard % 2**63)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _peer(name: str, link: socket.socket) -> Peer:
    """Another process, to which lines are sent at once: some are waited for."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(name, link)


def _missing(
    address: str, count: int, seconds: float, came: dict[int, Any], unseen: set[int]
) -> ConfigError | DeviceError:
    """Error for missing processes; `unseen` came, and do not see the workdir."""
    absent = sorted(set(range(count)) - came.keys())
    sentence = (
        f"{len(came)} of {count} processes joined at {address} within "
        f"{seconds:.0f} s; missing: process {', '.join(map(str, absent))}"
    )
    if not unseen & set(absent):
        return DeviceError(sentence)
    numbers = ", ".join(map(str, sorted(unseen & set(absent))))
    return ConfigError(
        f"{sentence}; process {numbers} came and did not find this start in its "
        f"--workdir: {SHARED}"
    )


def _claimed(message: Message, count: int) -> set[int]:
    """Index that a process claims which does not see the workdir, or a stranger."""
    number = message.get("unseen")
    return {number} if isinstance(number, int) and 0 < number < count else set()


def _name(hello: Message) -> str:
    return f"process {hello['index']} on {identity.printable(hello['host'][:255])}"


def _listen(address: str) -> socket.socket:
    """Listens at JAX's bind address, else at the coordinator's if it is this host's."""
    variable = os.environ.get(BIND)
    host, port = parsed(variable, BIND) if variable else parsed(address)
    try:
        for family, place in _places(host, port):
            try:
                return socket.create_server(place, family=family, backlog=BACKLOG)
            except OSError as error:
                if variable or error.errno not in NOT_HERE:
                    raise
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=BACKLOG
        )
    except OSError as error:
        at = f"{BIND}={variable}" if variable else f"--coordinator_address={address}"
        raise DeviceError(
            f"process 0 cannot listen at port {port} of {at}: {error.strerror}; "
            "another run may use it, or another process have --process_id=0: choose "
            "another port"
        ) from error


def _places(host: str, port: int) -> list[tuple[int, tuple]]:
    """Addresses to listen at; none for all interfaces.

    A host's own table may have a loopback for its name, where no other reaches it.
    """
    if host in ANYWHERE:
        return []
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror:  # As the others may know it, and this host not.
        return []
    return [
        (family, place)
        for family, _, _, _, place in infos
        if host in ("localhost", place[0])
        or not ipaddress.ip_address(place[0].partition("%")[0]).is_loopback
    ]


def _is_hello(hello: Message) -> bool:
    kinds = {"index": int, "count": int, "facts": dict, "host": str, "nonce": str}
    is_typed = all(isinstance(hello.get(name), kind) for name, kind in kinds.items())
    return is_typed and 0 < hello["index"] < hello["count"]


def _mismatch(came: dict[int, Message], hello: Message) -> DeviceError | None:
    """Error for a peer whose count, index or versions differ from process 0's."""
    first, index = came[0], hello["index"]
    if hello["count"] != first["count"]:
        return DeviceError(
            f"process {index} was started with --num_processes={hello['count']} and "
            f"process 0 with {first['count']}"
        )
    if index in came:
        return DeviceError(
            f"two processes were started with --process_id={index}; each has its own"
        )
    for name, value in first["facts"].items():
        other = hello["facts"].get(name)
        if other != value:
            return DeviceError(
                f"the processes of a run differ in {name}: {value} in process 0 and "
                f"{identity.printable(str(other))} in process {index}"
            )
    return None


def _visit(
    address: str, hello: Message, seconds: float, links: ExitStack, workdir: Workdir
) -> Meeting:
    """Announces this process to process 0; raises the fault that its answer names."""
    where, deadline = parsed(address), time.monotonic() + seconds
    reason, latest = OSError("no answer"), math.inf
    while (remaining := deadline - time.monotonic()) > 0 and time.monotonic() < latest:
        try:
            link = socket.create_connection(where, timeout=remaining)
            links.enter_context(link)
            # Process 0 has its own deadline, and says who is missing.
            limit = seconds + identity.HELLO_SECONDS
            find = functools.partial(identity.find, workdir)
            answer, start = identity.present(link, hello, find, limit)
            if answer["fault"]:
                raise DeviceError(identity.printable(answer["fault"]))
            return Meeting([_peer(identity.printable(answer["name"]), link)], start)
        except identity.UnseenError:
            latest = min(latest, time.monotonic() + SHARED_SECONDS)
        except (OSError, ValueError, KeyError) as error:
            reason = error
        links.close()
        time.sleep(RETRY_SECONDS)
    if latest < math.inf:  # Process 0 may have given up since.
        raise ConfigError(
            f"process {hello['index']} came to process 0 at {address}, whose start is "
            f"not to be seen in --workdir={workdir} here: {SHARED}"
        )
    raise DeviceError(
        f"process {hello['index']} could not reach process 0 at {address} within "
        f"{seconds:.0f} s ({reason}); it must run, and the port be open, there"
    )
