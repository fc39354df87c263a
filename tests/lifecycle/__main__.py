"""Tries the lives of a range of seeds, and prints those that went wrong.

    python -m tests.lifecycle LO HI [FOLDER [CONFIG]]

Exits with 1 if any did. Undisturbed runs are kept in FOLDER, and the workdirs of lives
that went wrong. CONFIG is one of `CONFIGS` in life.py; by default any.
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
from tests.lifecycle.life import Life


def main(low, high, folder=None, name=None):
    """Prints each life with its faults, and how many had any."""
    folder = Path(folder or tempfile.mkdtemp(prefix="lives-"))
    folder.mkdir(exist_ok=True, parents=True)
    count = 0
    for seed in range(int(low), int(high)):
        begun = time.monotonic()
        life = Life(seed, folder, name)
        life.live()
        seconds = time.monotonic() - begun
        verdict = "went wrong" if life.faults else "went well"
        print(f"seed {seed}: {verdict}, {life.name}, {seconds:.0f} s", flush=True)
        if life.faults:
            count += 1
            print(*life.told, *life.faults, sep="\n", flush=True)
        else:
            shutil.rmtree(life.home)
    print(f"{count} of {int(high) - int(low)} lives went wrong")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
