"""Tries the cases of a range of seeds, and prints those that disagree.

    python -m tests.oracle [--processes=N] LO HI [KIND ...]

Exits with 1 if any does. Each is printed whole: what is asked for, and what differs.
With `--processes=2` two processes train, or one and then two, as the seed says.
"""

import argparse
import pprint
import sys
import time
import traceback

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tests" / "undrawn"))  # No report is drawn.
from tests import conftest  # noqa: F401  # Devices, and quick compilation.


def main(low, high, kinds, processes):
    """Prints each case that disagrees, and how many did."""
    from tests.oracle.compare import disagreements
    from tests.oracle.draw import KINDS, draw

    count = 0
    for seed in range(low, high):
        case, begun = draw(seed, kinds or KINDS, processes), time.monotonic()
        try:
            faults = disagreements(case)
        except Exception:
            faults = [traceback.format_exc()]
        seconds = time.monotonic() - begun
        verdict = "disagree" if faults else "agree"
        print(
            f"seed {seed}: {verdict}, {_told(case)}, {seconds:.1f} s",
            flush=True,
        )
        if faults:
            count += 1
            pprint.pp(case)
            print(*faults, sep="\n", flush=True)
    print(f"{count} of {high - low} cases disagree")
    return int(count > 0)


def _told(case):
    """The kind of a case, and what it has beside."""
    names = [case["reads"] and f"reads {case['reads']}", case["adapters"]]
    names += [case["left_out"] and "rewind", case["stops_at"] and "resumed"]
    names += [case["trouble"]]
    if max(case["processes"]) > 1:
        names += ["{} processes, then {}".format(*case["processes"])]
        names += [case["stops_at"] and "{1} of {0}".format(*case["halt"])]
    return " + ".join([case["kind"], *filter(None, names)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("low", type=int)
    parser.add_argument("high", type=int)
    parser.add_argument("kinds", nargs="*", help="by default all")
    parser.add_argument("--processes", type=int, default=1, help="of a run")
    sys.exit(main(**vars(parser.parse_args())))
