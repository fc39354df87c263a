"""Operations on files that fail, and kills at them: `make bench-faults`, in small.

Rows C03, C12 and C44 of the reliability bench.
"""

import shutil
import subprocess
import sys

import pytest

from tests.runs import ROOT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler is needed")
def test_a_run_survives_faults_at_operations_of_its_files():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--every=61", "--kills=3"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, *lines = done.stdout.splitlines()
    rows = {line[:28].strip(): [*map(int, line[28:].split())] for line in lines}
    assert len(rows) == 11 and not any(lost for *_, lost in rows.values())
    for name, (tried, went_on, started_again, _) in rows.items():
        assert tried == went_on + started_again > 0, name
    assert rows["kill -9"] == [3, 0, 3, 0]
    assert rows["write: EIO once"][1] > 0  # They were few, and passed.
