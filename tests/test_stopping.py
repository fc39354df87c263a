"""Runs that are stopped early, or lose their output: real signals, pipes and files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import UNDRAWN

ROOT = Path(__file__).parents[1]
PACKAGE = next(ROOT.glob("*/devices/manager.py")).parents[1].name
SHORT = ("--config.num_steps=40", "--config.optimizer.warmup_steps=10")


def start(workdir, config, *flags, **options):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", f"{PACKAGE}.train", f"--config={config}"),
            *(f"--workdir={workdir}", *flags),
        ],
        text=True,
        env=os.environ | {"PYTHONPATH": UNDRAWN, "JAX_PLATFORMS": "cpu"},
        **{"cwd": ROOT} | options,
    )


SLOW = """
import pathlib, time
import haiku as hk
from PACKAGE.config import default_config


def wait(where):
    if where == "WHERE":
        pathlib.Path("reached").touch()
        time.sleep(60)


def model(num_outputs, axis_name):
    def forward(inputs, is_training):
        wait("traced")
        return hk.Linear(num_outputs)(hk.Flatten()(inputs))

    wait("imports")
    return hk.transform(forward)


def get_config():
    wait("config")
    config = default_config()
    config.model = {"name": "slow:model"}
    return config
"""


@pytest.mark.slow(but="traced")
@pytest.mark.parametrize("where", ["config", "imports", "traced"])
def test_sigterm_before_the_first_step_ends_the_run_in_a_sentence(tmp_path, where):
    text = SLOW.replace("PACKAGE", PACKAGE).replace("WHERE", where)
    (tmp_path / "slow.py").write_text(text)
    process = start(
        tmp_path / "run",
        "slow.py",
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 50
        while not (tmp_path / "reached").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75, errors
    assert errors.startswith("error: SIGTERM received") and errors.count("\n") == 1
    assert "the same command resumes" in errors


@pytest.mark.slow
def test_a_run_whose_reader_goes_away_goes_on_with_its_log(tmp_path):
    """As `train ... 2>&1 | head -1` does."""
    process = start(
        tmp_path,
        "configs/digits.py",
        *SHORT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=100) == 0
    log = (tmp_path / "train.log").read_text()
    assert "standard output is lost, and the run continues" in log
    assert "step     40/40  eval loss" in log and "done      step 40" in log
    assert (tmp_path / "checkpoints/40").is_dir()


@pytest.mark.slow
def test_a_run_whose_output_meets_a_full_disk_goes_on_with_its_log(tmp_path):
    with open("/dev/full", "w") as full:
        process = start(
            tmp_path,
            "configs/digits.py",
            *SHORT,
            stdout=full,
            stderr=subprocess.PIPE,
        )
        _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (0, "")
    assert "done      step 40" in (tmp_path / "train.log").read_text()
    assert (tmp_path / "checkpoints/40").is_dir()
