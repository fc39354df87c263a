"""Starts the processes of one run on this machine.

    python launch/local.py --processes=2 -- python -m haiku_template.train --config=...

The command is started so many times with --coordinator_address, --num_processes and
--process_id. SIGTERM is passed on to all. When one ends with an error, the others get
SIGTERM, and 30 s later SIGKILL. Exit code: the first that was not 0. GPUs are not
divided: give each process its own by CUDA_VISIBLE_DEVICES.
"""

import argparse
import signal
import socket
import subprocess
import sys
import time

LEAVE_SECONDS = 30.0


def free_port() -> int:
    """Port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(command: list[str], processes: int, port: int) -> list[subprocess.Popen]:
    """Starts the command once for each process."""
    shared = [f"--coordinator_address=127.0.0.1:{port}", f"--num_processes={processes}"]
    return [
        subprocess.Popen([*command, *shared, f"--process_id={index}"])
        for index in range(processes)
    ]


def wait(running: list[subprocess.Popen]) -> int:
    """Waits for all; ends the others once one failed. Returns the first exit code."""
    first, deadline = 0, None
    while None in [process.poll() for process in running]:
        codes = [p.returncode for p in running if p.returncode]
        if codes and deadline is None:
            first, deadline = codes[0], time.monotonic() + LEAVE_SECONDS
            for process in running:
                process.terminate()
        if deadline is not None and time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.1)
    return first or next((p.returncode for p in running if p.returncode), 0)


def main() -> None:
    """Parses the arguments, starts the processes and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    running = start(command, given.processes, free_port())

    def forward(number: int, _: object) -> None:
        for process in running:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all.
    code = wait(running)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
