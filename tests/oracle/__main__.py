"""Tries the cases of a range of seeds, and prints those that disagree.

    python -m tests.oracle LO HI

Exits with 1 if any does. Each is printed whole: what is asked for, and what differs.
"""

import pprint
import sys
import time
import traceback

from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tests" / "undrawn"))  # No report is drawn.
from tests import conftest  # noqa: F401  # Devices, and quick compilation.


def main(low, high):
    """Prints each case that disagrees, and how many did."""
    from tests.oracle.compare import disagreements
    from tests.oracle.draw import draw

    count = 0
    for seed in range(low, high):
        case, begun = draw(seed), time.process_time()
        try:
            faults = disagreements(case)
        except Exception:
            faults = [traceback.format_exc()]
        seconds = time.process_time() - begun
        verdict = "disagree" if faults else "agree"
        print(
            f"seed {seed}: {verdict}, {case['kind']}, {seconds:.1f} s of CPU",
            flush=True,
        )
        if faults:
            count += 1
            pprint.pp(case)
            print(*faults, sep="\n", flush=True)
    print(f"{count} of {high - low} cases disagree")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
