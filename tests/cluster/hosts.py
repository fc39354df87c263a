"""Two linked hosts on this machine, network namespaces, for tests that run as root.

Each has its own name and address, and knows the other's.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = ("192.0.2.1", "192.0.2.2")  # Kept free for documentation.


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
def pair() -> Iterator[tuple[str, str]]:
    """Makes two hosts linked by `wire` in each; yields their names."""
    names = tuple(f"hkt{os.getpid()}{letter}" for letter in "ab")
    with contextlib.ExitStack() as stack:
        for name in names:
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            known = zip(ADDRESSES, names, strict=True)
            lines = ["127.0.0.1 localhost", *map(" ".join, known)]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        first, second = names
        ends = ["wire", "netns", first, "type", "veth", "peer", "name", "wire"]
        run("ip", "link", "add", *ends, "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def cut(host):
    """Cuts the link at a host."""
    run("ip", "-n", host, "link", "set", "wire", "down")
