"""The benchmark of token readers, small: it runs, and its readers read the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--tokens=300000", "--batches=3", "--rounds=2")
WRONG = """
from benchmarks import token_reader
right = token_reader.plain_memmap
token_reader.plain_memmap = lambda path: lambda batches: (
    batch + 1 for batch in right(path)(batches)
)
token_reader.main()
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments, *SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def flags(tmp_path):
    (tmp_path / "disk").mkdir()
    return f"--folder={tmp_path / 'disk'}", f"--output={tmp_path / 'found.json'}"


def test_all_readers_are_measured_and_the_file_is_removed(tmp_path, flags):
    done = run("-m", "benchmarks.token_reader", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].startswith("python -m benchmarks.token_reader --folder")
    parts = [found["warm"]]
    if "nothing cold to measure" not in done.stdout:
        parts.append(found["cold"])
        assert found["cold"]["most_resident"] <= 0.001
    for part in parts:
        rates = part["windows_per_second"]
        assert {"this package", "numpy.memmap", "pread, WILLNEED"} <= set(rates)
        for rate in rates.values():
            assert 0 < rate["min"] <= rate["median"] <= rate["max"]
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_reader_that_reads_something_else_is_noticed(tmp_path, flags):
    done = run("-c", WRONG, *flags)
    assert done.returncode != 0
    assert "the readers read different tokens" in done.stderr
    assert not (tmp_path / "found.json").exists()
    assert list((tmp_path / "disk").iterdir()) == []
