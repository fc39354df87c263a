"""Tries the cases of a range of seeds, and prints those that disagree.

    python -m tests.oracle LO HI [KIND ...]

Exits with 1 if any does. Each is printed whole: what is asked for, and what differs.
"""

import pprint
import sys
import time
import traceback

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tests" / "undrawn"))  # No report is drawn.
from tests import conftest  # noqa: F401  # Devices, and quick compilation.


def main(low, high, *kinds):
    """Prints each case that disagrees, and how many did."""
    from tests.oracle.compare import disagreements
    from tests.oracle.draw import KINDS, draw

    count = 0
    for seed in range(int(low), int(high)):
        case, begun = draw(seed, kinds or KINDS), time.process_time()
        try:
            faults = disagreements(case)
        except Exception:
            faults = [traceback.format_exc()]
        seconds = time.process_time() - begun
        verdict = "disagree" if faults else "agree"
        print(
            f"seed {seed}: {verdict}, {_told(case)}, {seconds:.1f} s of CPU",
            flush=True,
        )
        if faults:
            count += 1
            pprint.pp(case)
            print(*faults, sep="\n", flush=True)
    print(f"{count} of {int(high) - int(low)} cases disagree")
    return int(count > 0)


def _told(case):
    """The kind of a case, and what it has beside."""
    names = [case["reads"] and f"reads {case['reads']}", case["adapters"]]
    names += [case["left_out"] and "rewind", case["stops_at"] and "resumed"]
    names += [case["trouble"]]
    return " + ".join([case["kind"], *filter(None, names)])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
