"""Commands of the GPU's benchmark: each ends in time, and no result is lost."""

import json
import subprocess
import threading
import time

import pytest

from benchmarks import gpu_runs

RESULT = {"exit_code": 0, "as_expected": True, "seconds": 1.0, "errors": ""}
STOPPED = gpu_runs.train("stopped", "digits", code=75, stop_at=1000)


@pytest.mark.parametrize(
    ("child", "seconds", "code"),
    [
        ("import time; time.sleep(60)", 0.3, -9),
        ("import sys; sys.stderr.write(200_000 * 'x'); sys.exit(75)", 60, 75),
    ],
    ids=["hangs", "writes much"],
)
def test_a_command_to_be_stopped_has_a_limit(
    child, seconds, code, tmp_path, monkeypatch
):
    monkeypatch.setattr(gpu_runs, "CHILD", child)
    begun = time.monotonic()
    result = gpu_runs.run(STOPPED, tmp_path, "cpu", seconds)
    assert result["exit_code"] == code and time.monotonic() - begun < 20
    assert ("killed after" in result["errors"]) == (code != 75)


def test_the_doctor_leaves_the_card_to_other_commands(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    child = "import os; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])"
    monkeypatch.setattr(gpu_runs, "CHILD", child)
    doctor = gpu_runs.Command("doctor", "doctor")
    assert gpu_runs.run(doctor, tmp_path, "cpu", 60)["output"] == "false\n"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(18, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
    ],
)
def test_a_tool_that_does_not_name_the_card_loses_no_results(error, monkeypatch):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(subprocess, "check_output", fails)
    assert gpu_runs._device() == "unknown"


def test_one_thread_at_a_time_writes_the_results(tmp_path, monkeypatch):
    busy, output = threading.Lock(), tmp_path / "found.json"

    def show(name, result):
        assert busy.acquire(blocking=False), "two threads write"
        time.sleep(0.02)
        busy.release()

    stages = [[gpu_runs.train(str(i), "digits") for i in range(8)]] * 2
    monkeypatch.setattr(gpu_runs, "_show", show)
    monkeypatch.setattr(gpu_runs, "_prepare", lambda folder: None)
    monkeypatch.setattr(gpu_runs, "timed", lambda quick: [])
    monkeypatch.setattr(gpu_runs, "others", lambda quick: stages)
    monkeypatch.setattr(gpu_runs, "run", lambda *args: dict(RESULT))
    monkeypatch.setattr("sys.argv", ["", "--device=cpu", f"--output={output}"])
    assert gpu_runs.main() == 0
    results = json.loads(output.read_text())["commands"]
    assert len(results) == 16 and "7 again" in results
