"""Starts the processes of one run on this machine.

    python launch/local.py --processes=2 -- python -m haiku_template.train --config=...

The command is started so many times with --coordinator_address, --num_processes and
--process_id. `--processes=per_device` starts one for each NVIDIA card, which sees that
one alone; a number divides no cards. SIGTERM, SIGHUP, SIGINT or SIGUSR1 to the
launcher, and its own end by kill -9, are SIGTERM for all processes. When one ends with
an error, the others get SIGTERM, and SIGKILL once no save in --workdir, nor a copy to
its mirror, has gone on for 300 s.

`--restarts=3` then starts all of them again, up to three times an hour: if the first
was ended by a signal, or with 69 (a device or a process lost), 71 (replicas differ),
76 (it hung) or 1 (any other error, as a driver's), and nobody asked for it. It waits 1,
2, 4 and at most 60 s, and 1 s again once a start saved a step beyond the newest in
--workdir; after three starts in a row that did not, it starts no more.
Exit code: the first that was not 0; 128 and its number for a signal.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Without a byte more of a save, once one failed; and for nvidia-smi: many cards, or a
# driver that starts for it, take a minute.
LEAVE_SECONDS, LONGEST_PAUSE, SMI_SECONDS = 300.0, 60, 300.0
LOST, STOPPED = 69, 75
MENDABLE = {1, LOST, 71, 76}
ASKED = {128 + signal.SIGINT, 128 + signal.SIGTERM}
PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
FRUITLESS, HOUR = 3, 3600.0  # Starts in a row that saved nothing new; seconds.
# Why: docs/decisions/cluster.md#launcher-port
PORTS = range(20_000, 32_768)
# Why: docs/decisions/cluster.md#launcher-end
PARENT_DEATH = 1  # Linux' PR_SET_PDEATHSIG.


def free_port() -> int:
    """Port of this machine where nobody listens, of those that it gives to nobody."""
    for port in random.sample(PORTS, min(99, len(PORTS))):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def visible_cards() -> list[str]:
    """Names of the cards here, as CUDA_VISIBLE_DEVICES has them; ends without any."""
    visible, where = os.environ.get("CUDA_VISIBLE_DEVICES"), "nvidia-smi"
    if visible is not None:  # CUDA reads it up to the first that is none.
        where = f"CUDA_VISIBLE_DEVICES={visible}"
        names = [name.strip() for name in visible.split(",")]
        cards = [*itertools.takewhile(re.compile(r"\d|GPU-|MIG-").match, names)]
    else:
        listed = ""
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--list-gpus"]
            try:
                listed = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, timeout=SMI_SECONDS
                ).stdout
            except subprocess.TimeoutExpired:  # A driver may hang.
                where += f", which gave no answer within {SMI_SECONDS:g} s"
        cards = re.findall(r"^GPU \d+: .*\(UUID: (GPU-[^)]+)\)", listed, re.M)
    if not cards:
        say(
            "error: --processes=per_device needs NVIDIA cards, and there are none by "
            f"{where}; --processes=2 starts two processes without"
        )
        sys.exit(LOST)
    return cards


def say(words: str) -> None:
    """Prints a line beside those of the processes."""
    with contextlib.suppress(OSError):  # Nobody may read it: the processes go on.
        os.write(2, f"{words}\n".encode(errors="backslashreplace"))


def checkpoints(command: list[str]) -> Path | None:
    """Folder of checkpoints in the command's --workdir; None without a workdir."""
    found = re.findall(r"\0--?workdir[=\0]([^\0]+)", "\0".join(command))
    return Path(found[-1], "checkpoints") if found else None


def newest_step(command: list[str]) -> int | None:
    """Newest step in the command's --workdir, -1 for none; None without a workdir."""
    if (folder := checkpoints(command)) is None:
        return None
    names = [path.name for path in folder.glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def written(command: list[str]) -> list[tuple[str, int]]:
    """Files of saves that are under way, and of copies to a mirror, and their bytes."""
    folder = checkpoints(command)
    folders = [folder, *copies(folder)] if folder else []
    with contextlib.suppress(OSError):  # One may end meanwhile.
        files = [x for f in folders for x in f.glob("*.orbax-checkpoint-tmp*/**/*")]
        return sorted((str(path), path.stat().st_size) for path in files)
    return [("", 0)]  # Of a disk that fails, too, which is waited for once.


def copies(folder: Path) -> list[Path]:
    """Folder of copies in the mirror of a run's config, if it has one."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RuntimeError):
        name = json.loads((folder.parent / "config.json").read_text())["mirror"]
        return [Path(name).expanduser() / "checkpoints"] if name else []
    return []


def tied(parent: int) -> Callable[[], None]:
    """Work of a child before its command: it gets SIGTERM when its parent is gone."""
    control = getattr(ctypes.CDLL(None), "prctl", None)  # Of Linux alone.

    def tie() -> None:
        if control is not None:
            control(PARENT_DEATH, signal.SIGTERM)
        if os.getppid() != parent:  # It went before.
            os.kill(os.getpid(), signal.SIGTERM)

    return tie


def start(
    running: list[subprocess.Popen], command: list[str], cards: list[str | None]
) -> None:
    """Fills `running` with a process for each card; None stands for all there are."""
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    # By which processes of a script know each other; commands do by the workdir.
    run = {"HAIKU_TEMPLATE_RUN": secrets.token_hex(16)}
    running.clear()
    tie = tied(os.getpid())
    for index, card in enumerate(cards):
        own = [address, f"--num_processes={len(cards)}", f"--process_id={index}"]
        more = {} if card is None else {"CUDA_VISIBLE_DEVICES": card}
        whole, environ = [*command, *own], os.environ | run | more
        running.append(subprocess.Popen(whole, env=environ, preexec_fn=tie))


def wait(running: list[subprocess.Popen], command: list[str]) -> tuple[int, int]:
    """Waits for all; ends the others once one failed, but not while they save.

    Returns the number of the first that failed, and its exit code; 0 for none.
    """
    first, deadline, alive, before = (0, 0), None, True, []
    while alive:
        time.sleep(0.1)
        alive = None in [process.poll() for process in running]
        failed = [(i, p.returncode) for i, p in enumerate(running) if p.returncode]
        if failed and deadline is None:
            # Who lost another one ends with 69, and the other says why.
            first = min(failed, key=lambda each: each[1] == LOST)
            deadline = time.monotonic() + LEAVE_SECONDS
            for process in running:
                process.terminate()
        if deadline is not None and time.monotonic() > deadline:
            if (now := written(command)) != before:
                before, deadline = now, time.monotonic() + LEAVE_SECONDS
                continue
            for process in running:
                process.kill()
    index, code = first
    return index, code if code >= 0 else 128 - code


def is_signal(code: int) -> bool:
    """True for the exit code of a process, or of its shell, that a signal ended."""
    return code - 128 in signal.valid_signals()


def can_mend(code: int) -> bool:
    """True if a restart may end otherwise than with this exit code."""
    return code in MENDABLE or (is_signal(code) and code not in ASKED)


def run(command: list[str], cards: list[str | None], restarts: int) -> int:
    """Runs all processes, again where that may help; returns the exit code."""
    running: list[subprocess.Popen] = []
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        for process in running:
            process.terminate()

    for number in PASSED_ON:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)  # Under nohup it is ignored.
    crashes, times = 0, []
    while True:
        before = newest_step(command)
        start(running, command, cards)
        if stopped.is_set():  # Some were started since.
            stop()
        index, code = wait(running, command)
        if stopped.is_set() or not restarts or not can_mend(code):
            return code
        after, now = newest_step(command), time.monotonic()
        crashes = crashes + 1 if before == after else 0
        fruitless = 0 if after is None else crashes
        times = [then for then in times if now - then < HOUR]
        if reason := why_not(fruitless, times, restarts):
            say(f"not started again: {reason}")
            return code
        times.append(now)
        seconds = min(2 ** max(crashes - 1, 0), LONGEST_PAUSE)
        how = f"with exit code {code}"
        if is_signal(code):
            how = f"by signal {code - 128}, {signal.strsignal(code - 128)}"
        ended = f"process {index} of {len(cards)} was ended {how}"
        say(f"restart {len(times)} of {restarts} in {seconds} s: {ended}")
        if stopped.wait(seconds):
            return STOPPED


def why_not(fruitless: int, times: list[float], restarts: int) -> str:
    """Reason for no further start, of those within the hour; "" for one more."""
    if fruitless == FRUITLESS:
        return f"{FRUITLESS} starts in a row saved nothing new"
    return f"--restarts={restarts} within an hour" if len(times) >= restarts else ""


def main() -> None:
    """Parses the arguments, starts the processes and waits for them."""
    text = __doc__ or ""  # None by `python -OO`.
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--processes", required=True, help="a number, or per_device")
    parser.add_argument("--restarts", type=int, default=0, help="so many an hour")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command or shutil.which(command[0]) is None:
        found = f"{command[0]} is not one" if command else "there is none"
        parser.error(f"the last arguments are a command to start, and {found}")
    if given.processes == "per_device":
        cards = visible_cards()
    elif given.processes.isdecimal() and int(given.processes):
        cards = [None] * int(given.processes)
    else:
        parser.error(f"--processes={given.processes} is no number, nor per_device")
    sys.exit(run(command, cards, given.restarts))


if __name__ == "__main__":
    main()
