"""Linked hosts on this machine, network namespaces, for tests that run as root.

Each has its own name and address, and knows the other's.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = tuple(f"192.0.2.{i}" for i in (1, 2, 3))  # Kept free for documentation.


def missing():
    """What hosts lack here, in words; "" for nothing."""
    if lacks := [name for name in ("ip", "unshare") if not shutil.which(name)]:
        return f"no {', '.join(lacks)}: apt-get install iproute2 util-linux"
    return "" if os.geteuid() == 0 else "network namespaces are made by root alone"


def run(*words):
    subprocess.run(words, check=True, timeout=30)


def at(host, *command):
    """Command that runs on a host, which `ip netns` gives its own /etc/hosts."""
    script = 'hostname "$0"; exec "$@"'
    within = ["unshare", "--uts", "sh", "-c", script, host, *command]
    return ["ip", "netns", "exec", host, *within]


@contextlib.contextmanager
def linked(count: int = 2) -> Iterator[tuple[str, ...]]:
    """Makes hosts, each linked by its `wire` to a switch; yields their names."""
    names = tuple(f"hkt{os.getpid()}{letter}" for letter in "abc"[:count])
    switch = f"hkt{os.getpid()}s"
    with contextlib.ExitStack() as stack:
        for name in (*names, switch):
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for name, address in zip(names, ADDRESSES, strict=False):
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            known = zip(ADDRESSES, names, strict=False)
            lines = ["127.0.0.1 localhost", *map(" ".join, known)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            ends = ["wire", "netns", name, "type", "veth", "peer", "name", name]
            run("ip", "link", "add", *ends, "netns", switch)
            run("ip", "-n", switch, "link", "set", name, "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def part(names, *indices):
    """Cuts what two hosts send each other."""
    for one, other in (indices, indices[::-1]):
        mute(names[one], other)


def mute(host, index):
    """Cuts what a host sends the one with this index."""
    run("ip", "-n", host, "route", "add", "blackhole", ADDRESSES[index])


def cut(host):
    """Cuts the link at a host."""
    run("ip", "-n", host, "link", "set", "wire", "down")


def mend(host):
    """Ends the cut."""
    run("ip", "-n", host, "link", "set", "wire", "up")
