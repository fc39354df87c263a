"""The whole loop of this tree next to that of a commit before, in alternating rounds.

    python -m benchmarks.against --commit=HEAD~1

A regression is a ratio below 1 of two processes that take turns on one machine, not a
figure of another day. The commit is checked out beside this tree, with this tree's
benchmarks. Results are build/bench/against.json and .png.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import rounds

LOOPS = ("whole as configured", "whole, 1 a call", "own step", "bare")


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Makes a work tree of a commit for a while, with the benchmarks of this one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            shutil.copytree("benchmarks", tree / "benchmarks", dirs_exist_ok=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def main() -> None:
    """Starts the loops of both trees, runs them in turns, and prints their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", default="HEAD~1", help="to compare with")
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    arguments = parser.parse_args()
    loops, facts = {}, {}
    with contextlib.ExitStack() as stack:
        tree = stack.enter_context(checked_out(arguments.commit))
        for name in arguments.loops:
            command = [sys.executable, "-m", "benchmarks.overhead", f"--serve={name}"]
            for key, folder in ((name, None), (f"{name}, before", tree)):
                serving = rounds.served(command, folder)
                loops[key], facts[key] = stack.enter_context(serving)
        rates = rounds.alternate(loops, arguments.rounds)
    rounds.report("against", rates, "bare", {"processes": facts})
    for name in arguments.loops:
        rounds.compare(rates, name, f"{name}, before")


if __name__ == "__main__":
    main()
