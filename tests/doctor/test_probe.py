"""The children, asked for real: a driver of our own making, and JAX on the CPU."""

import os
import time
from pathlib import Path

import pytest
from machines import build_stub, needs_compiler

from jax_doctor import Facts, check_environment, children, diagnose
from jax_doctor.children import (
    probe_driver,
    probe_jax,
    probe_sums,
    run_child,
)
from jax_doctor.programs import OPERATIONS, OPTION, SUMS

SOURCE = Path(__file__).with_name("cuda_stub.c")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The environment in which a stub stands in for the driver."""
    folder = tmp_path_factory.mktemp("driver")
    build_stub(folder / "libcuda.so.1", SOURCE)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "STUB_COUNT": "1"}


@needs_compiler
@pytest.mark.parametrize(
    ("code", "id_"),
    [
        (2, "A61"),
        (3, "A26"),
        (34, "A27"),
        (46, "A38"),
        (100, "A22"),
        (101, "A110"),
        (304, "A39"),
        (802, "A25"),
        (803, "A23"),
        (804, "A24"),
        (999, "A26"),
    ],
)
def test_each_code_of_the_driver_has_its_cause(driver, gpu, code, id_):
    result = probe_driver(10, {**driver, "STUB_CUINIT": str(code)})
    assert result.code == code and result.name.startswith("CUDA_ERROR_")
    assert result.library == driver["LD_LIBRARY_PATH"] + "/libcuda.so.1"
    found = diagnose(gpu.machine(), Facts("gpu", result))
    assert [finding.id for finding in found] == [id_] and str(code) in found[0].found


@needs_compiler
def test_a_healthy_driver_has_no_cause(driver, gpu):
    result = probe_driver(10, {**driver, "STUB_DRIVER": "13000"})
    assert (result.code, result.version, result.count) == (0, 13000, 1)
    assert diagnose(gpu.machine(), Facts("gpu", result)) == []
    assert result.seconds < 5


@needs_compiler
def test_an_old_driver_and_a_driver_without_cards(driver, gpu):
    old = probe_driver(10, {**driver, "STUB_DRIVER": "12040"})
    assert [finding.id for finding in diagnose(gpu.machine(), Facts("gpu", old))] == [
        "A29"
    ]
    none = {**driver, "STUB_DRIVER": "13000", "STUB_COUNT": "0"}
    empty = probe_driver(10, none)
    assert [finding.id for finding in diagnose(gpu.machine(), Facts("gpu", empty))] == [
        "A28"
    ]


@needs_compiler
def test_the_driver_is_asked_again_without_the_mask(driver):
    masked = {**driver, "STUB_CUINIT": "0", "CUDA_VISIBLE_DEVICES": "7"}
    assert probe_driver(10, masked).count_unmasked is None
    assert probe_driver(10, {**masked, "STUB_COUNT": "0"}).count_unmasked == 0


def test_a_library_that_cannot_be_loaded(tmp_path, gpu):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcuda.so.1").touch()
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "lib")}
    result = probe_driver(10, environ)
    assert result.code == 303 and "libcuda.so.1" in result.problem
    found = diagnose(gpu.machine(), Facts("gpu", result))
    assert [finding.id for finding in found] == ["A21"]


@needs_compiler
def test_a_driver_that_hangs_is_killed_at_the_limit(driver, gpu):
    start = time.monotonic()
    result = probe_driver(0.5, {**driver, "STUB_SLEEP": "600"})
    assert time.monotonic() - start < 5
    assert result.code is None and "0.5 s" in result.problem
    assert diagnose(gpu.machine(), Facts("gpu", result))[0].id == "A26"


@needs_compiler
def test_a_driver_that_is_slow_is_waited_for_with_a_line(driver, monkeypatch, caplog):
    monkeypatch.setattr(children, "SLOW_SECONDS", 0.3)
    result = probe_driver(30, {**driver, "STUB_SLEEP": "2", "STUB_DRIVER": "13000"})
    assert result.code == 0 and result.count == 1
    (said,) = [x.getMessage() for x in caplog.records]
    assert said.startswith("the NVIDIA driver has not answered for 0 s")
    assert "up to 30" in said and "nvidia-smi -pm 1" in said


@needs_compiler
@pytest.mark.slow
def test_eight_cards_without_persistence_mode_are_no_fault(driver, gpu):
    gpu.environ.update(driver, STUB_SLEEP="61", STUB_DRIVER="13000", STUB_COUNT="8")
    gpu.environ.pop("JAX_PLATFORMS", None)
    assert check_environment("gpu", gpu.machine()) == []


@needs_compiler
def test_the_environment_check_asks_the_driver_of_a_visible_card(driver, gpu):
    gpu.environ.update(driver, STUB_CUINIT="802")
    gpu.environ.pop("JAX_PLATFORMS", None)
    assert [f.id for f in check_environment("gpu", gpu.machine())] == ["A25"]
    assert check_environment("auto", gpu.machine())[0].severity == "warning"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has it")
def test_a_child_needs_no_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert run_child(["-c", "print(1)"], 20).output == "1\n"


def test_grandchildren_are_killed_too(tmp_path):
    # Only the grandchild's end would close the pipe; its id says that it is gone.
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    child = run_child(["-c", code], 1.5)
    assert child.returncode is None and child.seconds < 6
    status = Path(f"/proc/{int(child.output)}/stat")
    for _ in range(50):
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the grandchild is still running")


@pytest.fixture
def several():
    return {**os.environ, "JAX_NUM_CPU_DEVICES": "3"}


def test_jax_shows_its_devices_though_none_of_those_asked_for_is_there(several):
    result = probe_jax(60, {**several, "JAX_PLATFORMS": "cpu"}, "gpu")
    assert result.num_devices == 0 and not result.stages
    assert result.child.returncode == 0, result.child.errors
    assert [(d.backend, d.id) for d in result.devices] == [("cpu", n) for n in range(3)]
    assert result.default == "cpu"


def test_operations_are_checked_on_every_device(several):
    result = probe_jax(60, several, "cpu")
    assert result.works() and result.num_devices == 3, result
    done = [stage.operation for stage in result.stages]
    each = ["round trip", *OPERATIONS]
    assert done == each * 3 + ["between devices"] * 2 + ["psum", *SUMS]


def test_operations_that_are_wrong_are_told_one_by_one(several, tmp_path):
    code = "import numpy\nnumpy.allclose = lambda *args, **kwargs: False"
    (tmp_path / "sitecustomize.py").write_text(code)
    result = probe_jax(60, {**several, "PYTHONPATH": str(tmp_path)}, "cpu", (0,))
    wrong = [stage.operation for stage in result.failures()]
    assert wrong == ["round trip", *OPERATIONS, *SUMS] and not result.works()
    problems = {stage.problem.partition(": ")[0] for stage in result.failures()}
    assert problems == {"wrong values"}


def test_sums_are_computed_without_the_flag(several):
    flags = f"--xla_cpu_use_xnnpack=false {OPTION}=-reduce"
    bare = probe_sums(60, {**several, "XLA_FLAGS": flags})
    told = [stage.operation for stage in bare.stages]
    assert [*told, *[bare.unfinished] * bool(bare.unfinished)] == list(SUMS)
    if bare.works():
        pytest.skip("here jaxlib is right without the flag")
    # A crash in the last of them, or values that are wrong.
    assert bare.child.returncode == (-11 if bare.unfinished else 0)
    assert bare.unfinished or bare.failures()


def test_an_unknown_flag_of_xla_is_found(plain):
    plain.environ["XLA_FLAGS"] = "--xla_gpu_bogus=1"
    jax = probe_jax(60, {**os.environ, **plain.environ}, "cpu")
    assert jax.child.returncode not in (0, None) and not jax.devices
    assert diagnose(plain.machine(), Facts("cpu", jax=jax))[0].id == "A50"
