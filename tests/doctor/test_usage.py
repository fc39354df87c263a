"""Who uses a card's memory: real processes, listed by an NVML of our own making."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from machines import build_stub, needs_compiler

from jax_doctor import Machine
from jax_doctor import __main__ as doctor
from jax_doctor import report as words_of
from jax_doctor.children import DriverResult, probe_driver

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = needs_compiler
MIB = 2**20


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """The environment in which stubs stand in for the driver and for NVML."""
    folder = tmp_path_factory.mktemp("stubs")
    build_stub(folder / "libcuda.so.1", HERE / "cuda_stub.c")
    build_stub(folder / "libnvidia-ml.so.1", HERE / "nvml_stub.c")
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "STUB_CUINIT": "100"}


@pytest.fixture
def process():
    """A process that does nothing, and is certain to be there."""
    with subprocess.Popen(["sleep", "100"]) as running:
        yield running
        running.kill()


def table(environ, machine=None):
    machine = machine or Machine.here()
    found = words_of.memory_in_use(machine, probe_driver(10, environ))
    rows = words_of.memory_rows(found, machine.sees_all_processes())
    return found, [f"{label:<24}{words}" for label, words in rows]


def test_each_process_is_named_with_its_bytes(stubs, process):
    environ = {
        **stubs,
        "STUB_USED": "3072",
        "STUB_PROCESSES": f"{process.pid}:2048,{os.getpid()}:512",
        "STUB_GRAPHICS": f"{os.getpid()}:512,{process.pid}:-1",  # Not told again.
    }
    (card,), text = table(environ)
    assert (card["bytes_in_use"], card["bytes"]) == (3072 * MIB, 16384 * MIB)
    by_id = {entry["pid"]: entry for entry in card["processes"]}
    assert by_id.keys() == {process.pid, os.getpid()}
    assert by_id[process.pid]["bytes_in_use"] == 2048 * MIB
    assert "3.0 GiB of 16.0 GiB in use by all" in text[0]
    words = {int(line.split()[1]): line for line in text if "  process " in line}
    name = "sleep" if Machine.here().sees_all_processes() else "cannot be seen"
    assert name in words[process.pid] and "2.0 GiB" in words[process.pid]
    assert "512 MiB" in words[os.getpid()]
    (others,) = [line for line in text if line.startswith("  others")]
    assert others.endswith("cannot be seen from here: 512 MiB")


def test_a_process_that_is_gone_or_elsewhere_is_said_to_be_unseen(stubs):
    gone = subprocess.Popen(["true"])
    gone.wait()
    _, text = table({**stubs, "STUB_PROCESSES": f"{gone.pid}:-1"})
    assert "process that cannot be seen from here: memory not known" in text[1]


def test_a_card_that_nobody_uses_has_its_own_line_alone(stubs):
    (card,), text = table({**stubs, "STUB_PROCESSES": ""})
    assert card["processes"] == [] and text[0].endswith(
        "0 MiB of 16.0 GiB in use by all"
    )
    assert len(text) == 1 + (not Machine.here().sees_all_processes())


def test_more_processes_than_there_is_room_for_at_first(stubs):
    many = ",".join(f"{pid}:1" for pid in range(1, 301))
    (one, two), _ = table({**stubs, "STUB_PROCESSES": many, "STUB_CARDS": "2"})
    assert len(one["processes"]) == len(two["processes"]) == 300


@pytest.mark.parametrize("old", [True, False])
def test_an_nvml_that_tells_of_no_process_is_no_card_without_processes(
    stubs, tmp_path, old
):
    environ = {**stubs, "STUB_USED": "100"}
    if old:
        build_stub(tmp_path / "libnvidia-ml.so.1", HERE / "nvml_stub.c", "-DOLD")
        environ["LD_LIBRARY_PATH"] = f"{tmp_path}:{stubs['LD_LIBRARY_PATH']}"
    else:
        environ["STUB_LIST"] = "4"  # Not permitted.
    (card,), text = table(environ)
    assert card["processes"] is None and card["bytes_in_use"] == 100 * MIB
    assert "NVML does not tell which processes" in text[1]


def test_an_nvml_that_hangs_does_not_hide_the_driver_s_answer(stubs):
    result = probe_driver(2, {**stubs, "STUB_NVML_SLEEP": "600"})
    assert (result.code, result.name) == (100, "CUDA_ERROR_NO_DEVICE")
    assert result.memory == () and result.nvml is None


def test_in_a_container_the_host_s_numbers_are_not_given_local_names(stubs):
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--mount-proc",
        "--fork",
    ]
    if not shutil.which("unshare") or subprocess.run([*command, "true"]).returncode:
        pytest.skip("this machine allows no process namespace")
    # In there the child is process 1, and the host's process 1 is another one.
    code = (
        "from jax_doctor import Machine, report\n"
        "from jax_doctor.children import probe_driver\n"
        "import os; assert os.getpid() == 1\n"
        "machine = Machine.here()\n"
        "found = report.memory_in_use(machine, probe_driver(10, os.environ))\n"
        "print(*report.memory_rows(found, machine.sees_all_processes()), sep='\\n')"
    )
    done = subprocess.run(
        [*command, sys.executable, "-c", code],
        cwd=ROOT,
        env={**stubs, "STUB_PROCESSES": "1:64"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "process that cannot be seen from here: 64 MiB" in done.stdout
    assert "docker run --pid=host" in done.stdout and "python" not in done.stdout


def test_the_doctor_prints_it_though_the_driver_finds_no_card(stubs, gpu):
    variables = {"STUB_PROCESSES": "77:9216", "STUB_USED": "10240"}
    gpu.environ.update({**stubs, **variables})
    gpu.file("/proc/77/comm", "python\n")
    for name in [n for n in gpu.environ if n.startswith(("JAX_", "XLA_", "CUDA_"))]:
        del gpu.environ[name]
    report = doctor.report(gpu.machine(), "gpu", 20)
    assert report["cause"]["id"] == "A22"
    assert report["card_memory"][0]["processes"] == [
        {"pid": 77, "program": "python", "bytes_in_use": 9216 * MIB}
    ]
    text = "\n".join(words_of.lines(report))
    assert "10.0 GiB of 16.0 GiB in use by all" in text
    assert "  process 77            python: 9.0 GiB" in text


def test_who_holds_a_full_card_is_said_with_bytes(gpu):
    gpu.file("/proc/77/comm", "python\n")
    gpu.file("/proc/88/comm", "Xorg\n")
    for pid in (77, 88):
        gpu.link(f"/proc/{pid}/fd/9", "/dev/nvidia0")
    users = [{"pid": 77, "bytes_in_use": 8 * 2**30}]
    card = {"bytes_in_use": 9 * 2**30, "bytes": 16 * 2**30, "processes": users}
    words = words_of.holders(gpu.machine(), DriverResult(0, memory=(card,)))
    assert words == "python (77, 8.0 GiB), Xorg (88)"
    words = words_of.holders(gpu.machine(), DriverResult(0, memory=(card, card)))
    assert words == "python (77, 16.0 GiB), Xorg (88)"
    assert words_of.holders(gpu.machine(), None) == "python (77), Xorg (88)"
