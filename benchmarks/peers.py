"""The whole loop next to Keras, PyTorch, Lightning and Flax NNX, in one call.

    make bench-peers

Each loop is a process that compiles and warms up once and then waits; rounds of 3,000
steps take turns, from another one on each time. The peers, `peer_loops.py`, run in an
environment of their own (`peers.txt`), the whole loop and the bare ones, `overhead.py`,
in this one. All train the same model on the same digits. The whole loop checks each
step's loss and gradients, reports every 100 steps and writes metrics; the peers only
train. Results are build/bench/peers.json and .png.
"""

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import overhead, peer_loops, rounds

OWN = ("whole as configured", "whole, 1 a call", "whole, 50 a call")
OWN += ("bare", "bare scan")


def main() -> None:
    """Starts all loops, runs them in turns, and reports their steps per second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--python", required=True, help="of the peers' environment")
    arguments = parser.parse_args()
    loops, facts = {}, {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        images, labels = overhead.arrays()
        np.savez(folder / "digits.npz", images=images, labels=labels)
        commands = {
            name: [sys.executable, "-m", "benchmarks.overhead", f"--serve={name}"]
            for name in OWN
        }
        commands |= {
            name: [
                *(arguments.python, "-m", "benchmarks.peer_loops"),
                *(name, folder / "digits.npz"),
            ]
            for name in peer_loops.LOOPS
        }
        for name, command in commands.items():
            loops[name], facts[name] = stack.enter_context(rounds.served(command))
            print(f"{name:>20}  {facts[name]['description']}", flush=True)
        rates = rounds.alternate(loops, arguments.rounds)
    rounds.report("peers", rates, "bare", {"processes": facts})


if __name__ == "__main__":
    main()
