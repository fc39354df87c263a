"""Relay to JAX's coordination service, which keeps its client's connection open.

When process 0 is gone, the client ends its process from C++, with no sentence. Behind
the relay it waits, and the heartbeat ends the process. It is a process of its own,
since JAX may keep the interpreter's lock while it waits for an answer. This file is a
program, too, of the standard library alone.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

RETRY_SECONDS, PATIENCE_SECONDS = 0.2, 60.0
_RELAYS: list[subprocess.Popen] = []  # Each ends when its pipe closes.


def start(host: str, port: int) -> int:
    """Starts a relay that lives as long as this process; returns its port here."""
    command = [sys.executable, "-I", __file__, host, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    relay = subprocess.Popen(command, start_new_session=True, **pipes)
    _RELAYS.append(relay)
    # A child would keep the relay of a process that was killed.
    os.register_at_fork(after_in_child=relay.stdin.close)
    return int(relay.stdout.readline())


def main(host: str, port: int) -> None:
    """Relays what comes to a port of this machine, and prints that port."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Meant for who started it.
        signal.signal(number, signal.SIG_IGN)
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    run(accept, server, host, port)
    sys.stdin.buffer.read()
    os._exit(0)


def run(work: object, *args: object) -> None:
    """Starts a thread."""
    threading.Thread(target=work, args=args, daemon=True).start()


def accept(server: socket.socket, host: str, port: int) -> None:
    """Connects each client."""
    while True:
        client, _ = server.accept()
        run(connect, client, host, port)


def connect(client: socket.socket, host: str, port: int) -> None:
    """Connects a client to the service, once that listens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            service = socket.create_connection((host, port), timeout=PATIENCE_SECONDS)
        except OSError:
            time.sleep(RETRY_SECONDS)
            continue
        service.settimeout(None)
        run(copy, client, service)
        run(copy, service, client)
        return


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copies until one of them ends, and keeps the other open."""
    for each in (source, target):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        while data := source.recv(65_536):
            target.sendall(data)
    except OSError:
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
