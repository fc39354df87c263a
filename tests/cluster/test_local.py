"""The launcher on this machine, with real processes that do little."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from haiku_template.runs import Run
from tests.cluster.test_several import ENVIRONMENT, command, metrics, train
from tests.runs import ROOT

FILE = ROOT / "launch/local.py"
SPEC = importlib.util.spec_from_file_location("local", FILE)
local = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(local)
# Waits for others less than a user's would.
HASTY = "import sys; sys.path.insert(0, 'launch'); import local; "
HASTY += "local.LEAVE_SECONDS = 1; local.main()"
# Each process notes that it was started, and with what, in a file of its own.
NOTE = """
given=$(printf '%s\\n' "$@" | sed -n 's/--process_id=//p')
printf '%s\\n' "$CUDA_VISIBLE_DEVICES $*" >> "$given"
starts=$(wc -l < "$given")
"""


def start(folder, script, *options, processes=2, launcher=(str(FILE),), **variables):
    script = f"cd {folder}\n{NOTE}\n{script}"
    return subprocess.Popen(
        [sys.executable, *launcher, f"--processes={processes}", *options]
        + ["--", "bash", "-c", script, "command", f"--workdir={folder}"],
        cwd=ROOT,
        env=os.environ | variables,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(launched):
    """Exit code, and what was said."""
    _, said = launched.communicate(timeout=60)
    return launched.returncode, said


def starts(folder, index=0):
    return (folder / str(index)).read_text().splitlines()


def test_the_system_gives_the_port_to_nobody_meanwhile():
    """Process 0 listens there once it has started, in which others connect."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not limits.exists() or int(limits.read_text().split()[0]) <= local.PORTS[-1]:
        pytest.skip("here it gives away other ports than Linux does by default")
    ports = {local.free_port() for _ in range(9)}
    assert max(ports) <= local.PORTS[-1] and len(ports) > 1


def test_a_port_at_which_somebody_listens_is_passed_by(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(local, "PORTS", range(taken, taken + 1))
        assert local.free_port() != taken


@pytest.mark.parametrize("code", [0, 2, 64, 70, 74, 75, 127, 130, 143])
def test_what_would_end_the_same_way_is_not_restarted(code):
    assert not local.can_mend(code)


@pytest.mark.parametrize("code", [1, 69, 71, 76, 134, 137, 139])
def test_what_a_restart_may_mend(code):
    assert local.can_mend(code)


def test_all_start_again_at_another_port_until_they_end_well(tmp_path):
    script = "case $given$starts in 11) kill -9 $$;; 12) exit 69;; esac"
    code, said = end(start(tmp_path, script, "--restarts=3"))
    assert code == 0, said
    assert said.splitlines() == [
        "restart 1 of 3 in 1 s: process 1 of 2 was ended by signal 9, Killed",
        "restart 2 of 3 in 2 s: process 1 of 2 was ended with exit code 69",
    ]
    first, second = starts(tmp_path, 0), starts(tmp_path, 1)
    assert len(first) == len(second) == len(set(first)) == 3
    for lines, index in ((first, 0), (second, 1)):
        assert all(f" --num_processes=2 --process_id={index}" in x for x in lines)
    assert [x.split()[0] for x in first] == [x.split()[0] for x in second]


@pytest.mark.parametrize(("code", "lines"), [(70, 0), (71, 2)])
def test_the_exit_code_is_that_of_the_first_error_in_the_last_try(
    tmp_path, code, lines
):
    script = f"[ $given = 1 ] && exit {code}; exec sleep 60"
    ended, said = end(start(tmp_path, script, "--restarts=1"))
    assert ended == code and said.count("\n") == lines
    assert len(starts(tmp_path)) == 1 + (lines > 0)
    assert said.endswith(
        "not started again: --restarts=1 within an hour\n" * (lines > 0)
    )


def test_a_lost_process_is_the_cause_and_not_who_says_so(tmp_path):
    script = "[ $given = 0 ] && exit 69; exit 74"
    assert end(start(tmp_path, script, "--restarts=1"))[0] == 74


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(launched):
    text = Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_process_does_not_keep_the_others(tmp_path, number):
    script = "trap 'exit 75' TERM; touch ready$given$starts; "
    script += "while :; do sleep 0.05; done"
    run = start(tmp_path, script, "--restarts=1", launcher=("-c", HASTY))
    for name in ("ready01", "ready11"):
        wait_for((tmp_path / name).exists)
    stopped, other = children(run)
    os.kill(stopped, signal.SIGSTOP)
    if number == signal.SIGKILL:  # Both start again, and then all are told to end.
        os.kill(other, number)
        for name in ("ready02", "ready12"):
            wait_for((tmp_path / name).exists)
    run.terminate()
    assert end(run)[0] == 75
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


@pytest.mark.parametrize("pieces", [15, 1])
@pytest.mark.parametrize("place", ["", "copies/"], ids=["workdir", "mirror"])
def test_a_save_that_goes_on_is_waited_for(tmp_path, pieces, place):
    """For as long as it grows, or a copy to a mirror, after another process failed."""
    config = json.dumps({"mirror": str(tmp_path / place) if place else None})
    (tmp_path / "config.json").write_text(config)
    (tmp_path / place).mkdir(exist_ok=True)
    script = f"""
    cd {tmp_path / place}
    [ $given = 0 ] && exit 3
    trap : TERM
    mkdir -p checkpoints/7.orbax-checkpoint-tmp
    for piece in $(seq {pieces}); do
      echo piece >> checkpoints/7.orbax-checkpoint-tmp/state
      sleep 0.3
    done
    while [ {pieces} = 1 ]; do sleep 0.05; done
    mv checkpoints/7.orbax-checkpoint-tmp checkpoints/7"""
    assert end(start(tmp_path, script, launcher=("-c", HASTY)))[0] == 3
    assert (tmp_path / place / "checkpoints/7").exists() == (pieces > 1)


def test_sigterm_between_two_tries_ends_the_launcher(tmp_path):
    run = start(tmp_path, "exit 69", "--restarts=9")
    wait_for(lambda: (tmp_path / "1").exists() and len(starts(tmp_path, 1)) == 2)
    wait_for(lambda: not children(run))
    run.terminate()
    code, said = end(run)
    assert code == 75 and "restart 2 of 9 in 2 s" in said


UNTIL_TOLD = "trap 'touch told$given; exit 75' TERM; trap : INT HUP USR1\n"
UNTIL_TOLD += "touch ready$given; while :; do sleep 0.05; done"


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "KILL"])
def test_the_launchers_end_is_that_of_its_processes(tmp_path, name):
    run = start(tmp_path, UNTIL_TOLD, "--restarts=1")
    wait_for(lambda: len([*tmp_path.glob("ready*")]) == 2)
    both = children(run)
    run.send_signal(getattr(signal, f"SIG{name}"))
    assert run.wait(timeout=30) == (-signal.SIGKILL if name == "KILL" else 75)
    try:
        wait_for(lambda: not any(map(is_alive, both)))
    finally:
        for pid in filter(is_alive, both):
            os.kill(pid, signal.SIGKILL)
    assert (tmp_path / "told0").exists() and (tmp_path / "told1").exists()
    run.stderr.close()


def test_under_nohup_a_launcher_lives_on(tmp_path):
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); " + HASTY
    run = start(tmp_path, UNTIL_TOLD, launcher=("-c", nohup))
    wait_for(lambda: len([*tmp_path.glob("ready*")]) == 2)
    run.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert run.poll() is None and all(map(is_alive, children(run)))
    run.terminate()
    assert end(run)[0] == 75


@pytest.mark.parametrize(
    ("saves", "tries"),
    [
        ("true", 3),
        ("mkdir -p w/checkpoints/1$starts", 6),
        # Twice in a row is not three times.
        ("[ $((starts % 3)) = 0 ] && mkdir -p w/checkpoints/1$starts", 6),
    ],
)
def test_starts_that_save_nothing_new_are_not_repeated(tmp_path, saves, tries):
    script = f"[ $given = 0 ] && ({saves}); exit 69"
    fast = HASTY.replace("local.main", "local.LONGEST_PAUSE = 0; local.main")
    run = subprocess.Popen(
        [sys.executable, "-c", fast, "--processes=1", "--restarts=5", "--", "bash"]
        + ["-c", f"cd {tmp_path}\n{NOTE}\n{script}", "x", f"--workdir={tmp_path}/w"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, said = end(run)
    assert code == 69 and len(starts(tmp_path)) == tries, said
    words = "not started again: 3 starts in a row saved nothing new"
    assert (words in said) == (tries == 3)


def test_restarts_are_counted_by_the_hour_of_a_clock_that_nobody_sets(
    tmp_path, monkeypatch, capfd
):
    """C46: two an hour are fewer than three, and one more a second later is not."""
    now, pauses, steps = [0.0], [], iter(range(99))
    clocks = {"monotonic": lambda: now[0], "time": lambda: -now[0]}
    monkeypatch.setattr(local, "time", types.SimpleNamespace(**clocks))
    monkeypatch.setattr(local, "start", lambda *_: None)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)
    monkeypatch.setattr(local, "newest_step", lambda _: next(steps))

    def wait(*_):
        now[0] += 1500 if now[0] < 9 * 1500 else 1
        return 0, 69

    class Event(threading.Event):
        def wait(self, seconds):
            pauses.append(seconds)

    monkeypatch.setattr(local, "wait", wait)
    monkeypatch.setattr(local, "threading", types.SimpleNamespace(Event=Event))
    assert local.run(["x"], [None], 3) == 69
    assert pauses == [1] * 9 and now[0] == 9 * 1500 + 1
    assert "not started again: --restarts=3 within an hour" in capfd.readouterr().err


CARDS = """
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5f9d1c2e-0a)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa)
  MIG 1g.5gb      Device  0: (UUID: MIG-1b2c)
"""


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, ["GPU-5f9d1c2e-0a", "GPU-77aa"]),
        ("3,1", ["3", "1"]),
        ("GPU-a, GPU-b", ["GPU-a", "GPU-b"]),
        ("0,-1,2", ["0"]),
    ],
)
def test_each_card_has_a_process(tmp_path, monkeypatch, visible, cards):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{CARDS}'\n")
    tool.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    code, said = end(start(tmp_path, "true", processes="per_device", **variables))
    assert code == 0, said
    seen = [starts(tmp_path, index)[0].split()[0] for index in range(len(cards))]
    assert seen == cards
    assert f"--num_processes={len(cards)}" in starts(tmp_path)[0]


@pytest.mark.parametrize("visible", [None, "", "-1"])
def test_without_a_card_it_says_so(tmp_path, monkeypatch, visible):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bash").symlink_to("/bin/bash")
    variables = {"PATH": str(tmp_path)}  # Without nvidia-smi.
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    run = start(tmp_path, "true", processes="per_device", **variables)
    code, said = end(run)
    assert code == 69
    where = "nvidia-smi" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
    assert f"there are none by {where}; --processes=2 starts two" in said


def test_a_driver_that_hangs_has_no_cards(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 20\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    spec = importlib.util.spec_from_file_location("local", FILE)
    local = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(local)
    local.SMI_SECONDS = 0.2
    begun = time.monotonic()
    with pytest.raises(SystemExit) as end:
        local.visible_cards()
    assert end.value.code == local.LOST and time.monotonic() - begun < 10
    said = "none by nvidia-smi, which gave no answer within 0.2 s; --processes=2"
    assert said in capfd.readouterr().err


def test_a_path_that_is_no_text_is_said_all_the_same(capfd):
    local.say("no folder runs/\udcff")
    assert capfd.readouterr().err == "no folder runs/\\udcff\n"


@pytest.mark.parametrize("options", [["--processes=0"], ["--processes=all"], []])
def test_arguments_that_mean_nothing_are_refused(options):
    command = [sys.executable, str(FILE), *(options or ["--processes=2"])]
    command += ["--", "true"] if options else ["--", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: " in done.stderr


@pytest.mark.cluster
def test_a_run_that_lost_a_process_ends_as_one_that_did_not(tmp_path, one_device):
    workdir, other = tmp_path / "run", tmp_path / "other"
    changes = {"num_steps": 300, "save_every": 25, "log_every": 25, "eval_every": 100}
    run = subprocess.Popen(
        [sys.executable, str(FILE), "--processes=2", "--restarts=1", "--"]
        + command(workdir, 1, **changes),
        cwd=ROOT,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for((workdir / "checkpoints/50").is_dir, seconds=100)
    os.kill(children(run)[1], signal.SIGKILL)
    _, said = run.communicate(timeout=250)
    assert run.returncode == 0, said
    assert "restart 1 of 1 in 1 s: process 1 of 2 was ended by signal 9, Killed" in said
    train(2, other, 1, **changes)
    assert metrics(workdir) == metrics(other)
    same, expected = (Run.open(path, one_device, "latest") for path in (workdir, other))
    assert same.step == expected.step == 300
    jax.tree.map(np.testing.assert_array_equal, same.state, expected.state)
