import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import gpu_behaviour, gpu_check
from benchmarks.gpu_levers import LEVERS
from benchmarks.gpu_speed import QUICK
from haiku_template.devices.selection import why_no_gpu
from jax_doctor import Machine, children
from jax_doctor.children import Child, JaxResult, Stage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CHECKS = (
    "device_choice",
    "operations",
    "digits_training",
    "losses_on_cpu",
    "transfer_guard",
    "attention",
    "bandwidth",
    "loop_overhead",
    "checkpoints",
    "throughput",
    "memory",
    "prediction",
)
FAILING = """
import sys, time
from benchmarks import gpu_check

def breaks(devices, scale, figures):
    figures["before"] = float("nan")
    raise ValueError("broken")

def hangs(devices, scale, figures):
    while True:
        time.sleep(0.01)

def works(devices, scale, figures):
    figures["after"] = 1.5
    return True

gpu_check.CHECKS = {breaks: 0, hangs: 1, works: 1}
sys.exit(gpu_check.main(sys.argv[1:]))
"""


def run(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    # Compiling is most of what the small checks do.
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def contents(folder):
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.skipif(Machine.here().has_card(), reason="this machine has a card")
def test_without_a_card_it_says_why_and_writes_nothing():
    before = contents(RESULTS)
    done = run("-m", "benchmarks.gpu_check")
    assert done.returncode == 0, done.stderr
    assert why_no_gpu() in done.stdout
    assert "Nothing was measured" in done.stdout
    assert contents(RESULTS) == before


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--quick", "--fast"])
def test_flags_that_make_no_sense_are_refused(flag):
    done = run("-m", "benchmarks.gpu_check", flag)
    assert done.returncode == 64
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_every_check_runs_small_on_the_cpu(tmp_path):
    output = tmp_path / "made" / "found.json"
    flags = ["--device=cpu", "--quick", f"--output={output}"]
    before = contents(RESULTS)
    done = run("-m", "benchmarks.gpu_check", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(RESULTS) == before
    found = json.loads(output.read_text())
    assert found["command"] == " ".join(["python -m benchmarks.gpu_check", *flags])
    assert found["device_kind"] == "cpu"
    assert found["passed"] is True
    assert {"jax", "jaxlib"} <= set(found["packages"])
    assert {"date", "driver", "python", "commit", "seconds"} <= set(found)
    checks = {check["name"]: check for check in found["checks"]}
    assert tuple(checks) == CHECKS
    for name, check in checks.items():
        assert check["figures"], name
        assert "error" not in check["figures"], name
        unjudged = name in ("bandwidth", "memory", "prediction")
        assert check["passed"] is (None if unjudged else True)
        assert f"\n{name}: " in done.stdout
    unknown = "not measured on cpu"
    assert checks["transfer_guard"]["figures"]["float(loss)"] == unknown
    for figures in checks["memory"]["figures"].values():
        assert figures["measured growth, bytes"] == unknown
        assert figures["predicted growth, bytes"] > 0
    resumed = checks["checkpoints"]["figures"]["mlp resumed, deterministic"]
    assert resumed == {"bitwise_equal": True, "largest_difference": 0.0}


def test_a_check_that_fails_hides_no_other(tmp_path):
    output = tmp_path / "found.json"
    done = run("-c", FAILING, "--device=cpu", "--quick", f"--output={output}")
    assert done.returncode == 1, done.stderr
    assert "failed: breaks, hangs" in done.stdout
    found = json.loads(output.read_text())
    assert found["passed"] is False
    breaks, hangs, works = found["checks"]
    assert breaks["figures"] == {"before": "nan", "error": "ValueError: broken"}
    assert "OutOfTime: stopped after" in hangs["figures"]["error"]
    assert works["passed"] is True
    assert works["figures"] == {"after": 1.5}


def of_time(devices, scale, figures):
    with contextlib.suppress(gpu_check.OutOfTime):  # As an error that hides it.
        time.sleep(1.5)
    time.sleep(1.5)


def of_errors(devices, scale, figures):
    with contextlib.suppress(Exception):
        time.sleep(2)


@pytest.mark.parametrize("catches", [of_time, of_errors])
def test_a_check_that_catches_errors_is_stopped_too(catches, monkeypatch):
    monkeypatch.setattr(gpu_check, "AGAIN", 0.2)
    result = gpu_check.run(catches, 1, None, None)
    assert "OutOfTime: stopped after 1 s" in result["figures"]["error"]


def test_what_was_measured_outlives_an_interruption(tmp_path, one_device, monkeypatch):
    def works(devices, scale, figures):
        figures["after"] = 1.5
        return True

    def ends(devices, scale, figures):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "CHECKS", {works: 1, ends: 1})
    monkeypatch.setattr(gpu_check.DeviceManager, "create", lambda *_, **__: one_device)
    monkeypatch.setattr(gpu_check.logging, "set_verbosity", lambda level: None)
    output = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--device=cpu", f"--output={output}"])
    results = json.loads(output.read_text())
    assert [check["figures"] for check in results["checks"]] == [{"after": 1.5}]
    assert results["not_run"] == ["ends"]


def test_an_operation_that_a_card_gets_wrong_fails_the_checks(one_device, monkeypatch):
    stages = Stage("square root", "cuda:0", "wrong values: [0.]"), Stage("matmul", "")
    result = JaxResult(Child(0, "", "", 1.0), num_devices=1, stages=stages)
    monkeypatch.setattr(children, "probe_jax", lambda *args: result)
    figures = {}
    assert gpu_behaviour.operations in gpu_check.CHECKS
    assert gpu_behaviour.operations(one_device, QUICK, figures) is False
    assert figures["square root"] == "wrong values: [0.]"
    assert figures["matmul"] == "right"


@pytest.mark.slow
def test_options_of_xla_are_timed_in_turns(tmp_path):
    """The code alone: options that the CPU's compiler knows, and no figures."""
    output = tmp_path / "found.json"
    flags = ["--levers", "--device=cpu", "--quick", f"--output={output}"]
    done = run("-m", "benchmarks.gpu_check", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(output.read_text())["checks"]
    assert check["name"] == "levers" and check["passed"] is True
    columns = [
        f"{model} {lever}"
        for model in ("resnet20", "gpt2_124m")
        for lever in ("as it is", "no excess precision")
    ]
    assert list(check["figures"]) == columns
    for name, column in check["figures"].items():
        assert column["step, ms"]["min"] > 0 and column["compile, s"] > 0
        assert (column["time / as it is"] == 1) or "as it is" not in name


def test_an_option_that_the_compiler_does_not_know_is_an_error_that_names_it():
    for options in (*LEVERS["gpu"].values(), {"xla_gpu_no_such_option": 1}):
        lowered = jax.jit(lambda x: x @ x).lower(np.ones((2, 2)))
        if "xla_gpu_no_such_option" not in options:
            lowered.compile(compiler_options=options)
            continue
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
            lowered.compile(compiler_options=options)
