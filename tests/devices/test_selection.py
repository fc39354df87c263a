"""What must happen before JAX starts, each in a process of its own."""

import os
import subprocess
import sys

import pytest

from haiku_template.devices import hardware


def run(code, **variables):
    done = subprocess.run(
        [sys.executable, "-c", "from haiku_template.devices import *\n" + code],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def error_of(call, **variables):
    code = f"try: {call}\nexcept DeviceError as e: print(e)"
    return run(code, **variables)


def test_simulated_devices_exist_from_the_start():
    code = (
        "d = DeviceManager.create(simulate_devices=3); print(d.num_devices, d.reason)"
    )
    assert run(code) == "3 --simulate_devices=3: the CPU as several"


def test_memory_options_reach_the_variables_that_jax_reads():
    code = (
        "import os; d = DeviceManager.create('cpu', gpu_memory_fraction=0.5, "
        "gpu_preallocate=False); print(os.environ['XLA_CLIENT_MEM_FRACTION'], "
        "os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'], "
        "os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION'))"
    )
    assert run(code, XLA_PYTHON_CLIENT_MEM_FRACTION=".3") == "0.5 false None"


def test_choosing_the_cpu_starts_no_other_backend():
    code = (
        "import jax; DeviceManager.create('cpu'); "
        "print(jax.config.jax_platforms, list(jax.extend.backend.backends()))"
    )
    assert run("import jax.extend\n" + code) == "cpu ['cpu']"


@pytest.mark.parametrize("value", ["cpu", "cpu,cuda", "tpu"])
def test_a_platform_variable_that_contradicts_the_request_is_named(value):
    words = error_of("DeviceManager.create('gpu')", JAX_PLATFORMS=value)
    assert f"JAX_PLATFORMS={value}" in words and "unset" in words


@pytest.mark.parametrize("spec", ["gpu", "gpu:0,1"])
@pytest.mark.skipif(bool(hardware.nvidia_nodes()), reason="this machine has a card")
def test_a_gpu_that_is_not_there_is_refused_before_jax_starts(spec):
    code = (
        "from haiku_template.devices import selection\n"
        f"try: DeviceManager.create('{spec}')\n"
        "except DeviceError as e: print(selection.backend_started(), e)"
    )
    words = run(code)
    assert words.startswith(
        f"False --device={spec} was asked for and no GPU can be used"
    )
    assert "no NVIDIA card" in words


@pytest.mark.skipif(bool(hardware.nvidia_nodes()), reason="this machine has a card")
def test_a_variable_that_leaves_jax_without_a_backend_is_no_assertion_error():
    words = error_of("DeviceManager.create('auto')", JAX_PLATFORMS="cuda")
    assert "JAX cannot provide it" in words and "no NVIDIA card" in words
