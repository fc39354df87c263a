"""Runs of two processes whose port others come to, or whose workdir is not shared."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests.cluster.test_several import ENVIRONMENT, by_hand, command, wait_for

pytestmark = pytest.mark.cluster
SHARED = "a workdir must be on a disk that all processes share"
# Of JAX, which aborts a run whose service it reaches.
JAXS_CLIENT = """
import sys
from jax._src.lib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=5)
client.connect()
"""


def long(workdir, **changes):
    return command(workdir, 1, num_steps=100_000, eval_every=None, **changes)


def is_saved(workdir):
    return (workdir / "checkpoints" / "10").is_dir()


def ends(runs, seconds=400):
    errors = [run.communicate(timeout=seconds)[1] for run in runs]
    return [run.returncode for run in runs], errors


@contextlib.contextmanager
def killed(runs):
    """Ends the processes whatever the test finds."""
    try:
        yield runs
    finally:
        for run in runs:
            run.kill()
            run.wait()


def test_strangers_at_the_port_of_a_run_end_nothing(tmp_path, address):
    """JAX's own client, one that says nothing, and one that writes garbage."""
    workdir = tmp_path / "run"
    host, port = address.split(":")
    with killed(by_hand(address, long(workdir), long(workdir))) as runs:
        wait_for(lambda: is_saved(workdir))
        words = [sys.executable, "-c", JAXS_CLIENT, address]
        stranger = subprocess.run(words, env=ENVIRONMENT, capture_output=True)
        assert stranger.returncode != 0
        with contextlib.ExitStack() as stack:
            for words in [b"", b"[" * 100_000 + b"\n", b"{}\n"] * 20:
                link = socket.create_connection((host, int(port)), timeout=5)
                stack.enter_context(link)
                with contextlib.suppress(OSError):
                    link.sendall(words)
            before = len(list((workdir / "checkpoints").iterdir()))
            time.sleep(10)
            assert [run.poll() for run in runs] == [None, None]
            assert before
        runs[1].terminate()
        codes, errors = ends(runs)
        assert codes == [75, 75], errors


@pytest.mark.parametrize("pause", [0, 2, 3])
def test_of_two_runs_at_one_port_the_second_ends_in_a_sentence(
    tmp_path, address, pause
):
    with contextlib.ExitStack() as stack:
        first = by_hand(address, *[long(tmp_path / "a")] * 2)
        stack.enter_context(killed(first))
        time.sleep(pause)
        flags = ["--join_seconds=20"]
        second = by_hand(address, *[long(tmp_path / "b") + flags] * 2)
        stack.enter_context(killed(second))
        both = {"a": first, "b": second}
        ended, errors = {}, {}
        wait_for(lambda: any(is_saved(tmp_path / name) for name in both))
        (goes_on,) = [name for name in both if is_saved(tmp_path / name)]
        (other,) = both.keys() - goes_on
        ended[other], errors[other] = ends(both[other])
        assert ended[other][0] == 69 and ended[other][1] in (64, 69), errors
        assert "another run may use it" in errors[other][0]
        assert "could not reach" in errors[other][1] or SHARED in errors[other][1]
        assert [run.poll() for run in both[goes_on]] == [None, None]
        both[goes_on][0].terminate()
        assert ends(both[goes_on])[0] == [75, 75]


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces are made by root")
@pytest.mark.skipif(not shutil.which("unshare"), reason="util-linux is not installed")
@pytest.mark.parametrize("is_requeued", [False, True])
def test_a_workdir_on_each_hosts_own_disk_is_said_before_step_0(
    tmp_path, address, is_requeued
):
    """Each in a mount namespace, with a folder of its own under the same name."""
    shared = tmp_path / "runs"
    shared.mkdir()
    script = 'mount --bind "$0" "$1"; shift; exec "$@"'
    commands = []
    for name in ("host0", "host1"):
        (tmp_path / name / "run" / "processes").mkdir(parents=True)
        if is_requeued:  # What a process 1 of earlier left here.
            (tmp_path / name / "run" / "processes" / "1").mkdir()
        within = ["unshare", "--mount", "sh", "-c", script]
        within += [str(tmp_path / name), str(shared)]
        flags = ["--join_seconds=15"]
        commands.append([*within, *command(shared / "run", 1), *flags])
    with killed(by_hand(address, *commands)) as runs:
        codes, errors = ends(runs)
        assert codes == [64, 64], errors
        assert all(SHARED in words and "Traceback" not in words for words in errors)
        assert not list(tmp_path.glob("host*/run/checkpoints"))


@pytest.mark.parametrize("name", ["127.0.0.2", "[::]"])
def test_jaxs_variable_for_the_address_to_listen_at_is_heeded(
    tmp_path, address, monkeypatch, name
):
    port = address.split(":")[1]
    monkeypatch.setitem(ENVIRONMENT, "JAX_COORDINATOR_BIND_ADDRESS", f"{name}:{port}")
    whole = command(tmp_path / "run", 1)
    codes, errors = ends(by_hand(f"127.0.0.2:{port}", whole, whole))
    assert codes == [0, 0], errors


# Python's lock is held for longer than others may be silent, by a function of C.
LOCKED = """
import ctypes, sys
from haiku_template.cluster import join
index = int(sys.argv[1])
join(sys.argv[2], 2, index)
from haiku_template.devices import DeviceManager
devices = DeviceManager.create("cpu")
if index == {index}:
    ctypes.PyDLL(None).sleep(40)
devices.processes.agree({{"data": 1}})
"""
# A module that is long in being imported, as from a network's disk.
SLOW = """
import sys, time
from haiku_template.cluster import join, joining
joining.START_SECONDS = 3.0
index = int(sys.argv[1])
if index == 1:
    joining.relay.start = lambda *_: time.sleep(100)
join(sys.argv[2], 2, index)
"""


def scripts(tmp_path, address, text):
    script = tmp_path / "script.py"
    script.write_text(text)
    options = {"env": ENVIRONMENT, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, str(script)]
    return ends(
        [subprocess.Popen([*words, str(i), address], **options) for i in range(2)]
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_keeps_pythons_lock_for_40_s_is_not_lost(
    tmp_path, address, index
):
    codes, errors = scripts(tmp_path, address, LOCKED.format(index=index))
    assert codes == [0, 0], errors


def test_a_process_that_does_not_start_jax_ends_all_in_a_sentence(tmp_path, address):
    codes, errors = scripts(tmp_path, address, SLOW)
    assert codes == [69, 69], errors
    words = r"error: process 1 on \S+ did not go on, and the others have waited since "
    for each in errors:
        assert re.match(words + r"[\d:]{8}: .* takes more than 3 s to start JAX", each)
