"""The command from end to end, on a machine without a card."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from machines import HEALTHY, jax_result

from haiku_template.doctor import ADVICE
from jax_doctor import Machine, children
from jax_doctor import __main__ as doctor
from jax_doctor.code.names import REMOVED
from jax_doctor.programs import OPTION

ROOT = Path(__file__).parents[2]
no_card = pytest.mark.skipif(
    bool(Machine.here().nodes() or Machine.here().amd_gpus()), reason="there is a card"
)


def run_doctor(*flags, program="haiku_template.doctor", **environ):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "XLA_", "CUDA_", "NVIDIA_"))
    }
    return subprocess.run(
        [sys.executable, "-m", program, *flags],
        cwd=ROOT,
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


@no_card
@pytest.mark.parametrize("program", ["haiku_template.doctor", "jax_doctor"])
@pytest.mark.parametrize(
    ("platforms", "ids"),
    [
        (None, ["A20"]),
        ("cuda", ["A40", "A20"]),
        ("gpu", ["A41", "A20"]),
        ("cuda,cpu", ["A42", "A20"]),
        ("cpu,cuda", ["A43", "A20"]),
        ("cuda, cpu", ["A44", "A42", "A20"]),
    ],
)
def test_without_a_card_each_setting_has_its_cause(program, platforms, ids):
    environ = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    done = run_doctor("--device=gpu", "--json", program=program, **environ)
    assert done.returncode == doctor.UNAVAILABLE, done.stderr
    report = json.loads(done.stdout)
    assert [finding["id"] for finding in report["findings"]] == ids
    assert report["cause"] == report["findings"][0] and report["cause"]["fix"]
    assert report["works"] is False and report["seconds"] < 1


@no_card
def test_the_table_names_the_cause_within_a_second():
    start = time.monotonic()
    done = run_doctor("--device=gpu:1", JAX_PLATFORMS="cuda, cpu")
    # The limit is generous for a busy machine; a start of JAX would take longer.
    assert time.monotonic() - start < 3
    assert done.returncode == doctor.UNAVAILABLE and done.stderr == ""
    assert "CAUSE A44" in done.stdout and "JAX_PLATFORMS=cuda,cpu" in done.stdout


def test_the_cpu_works_and_its_devices_are_listed():
    done = run_doctor("--device=cpu", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == doctor.WORKS, done.stdout
    assert report["works"] and report["cause"] is None
    # Of jaxlib without the flag that the package sets.
    assert {finding["id"] for finding in report["findings"]} <= {"A120"}
    assert [device["backend"] for device in report["devices"]] == ["cpu"]
    assert any(row["check"] == "test run" for row in report["checks"])


def test_a_jaxlib_that_miscomputes_is_a_cause_if_nothing_is_done_against_it():
    bare = children.probe_sums(60, os.environ)
    if bare.works():
        pytest.skip("here jaxlib is right without the flag")
    wrong = bare.unfinished or bare.failures()[0].operation
    for flags, code, kind, fix in (
        ("", 0, "warning", f"keep {OPTION}=-reduce in XLA_FLAGS"),
        ("=-dot", 69, "CAUSE", f'export XLA_FLAGS="$XLA_FLAGS {OPTION}=-reduce"'),
    ):
        done = run_doctor("--device=cpu", XLA_FLAGS=f"{OPTION}{flags}" * bool(flags))
        assert done.returncode == code and f"{kind} A120" in done.stdout, done.stdout
        assert wrong in done.stdout and fix in done.stdout


@pytest.mark.parametrize(
    ("program", "fix"),
    [
        ("haiku_template.doctor", "or in a run, --simulate_devices=4"),
        ("jax_doctor", "or export JAX_NUM_CPU_DEVICES=4"),
    ],
)
def test_a_device_that_does_not_exist(program, fix):
    done = run_doctor("--device=cpu:3", program=program)
    assert done.returncode == doctor.UNAVAILABLE
    assert "cpu:3 was asked for, and there are cpu:0" in done.stdout
    assert f"ask for one of these, {fix}\n" in done.stdout


def test_the_doctor_of_any_user_of_jax_names_nothing_of_this_package(tmp_path, capsys):
    for path in (ROOT / "jax_doctor").rglob("*.py"):
        assert not re.search("haiku_|simulate_devices", path.read_text()), path
    (tmp_path / "old.py").write_text("import jax\njax.device_put_sharded")
    for advice, words in (
        ({}, "jax.device_put(numpy.stack(shards), sharding)"),
        (ADVICE, "haiku_template.devices.device_put_sharded"),
    ):
        assert doctor.main([f"--code={tmp_path}"], advice=advice) == doctor.UNAVAILABLE
        assert f"jax 0.10.0; write {words}\n" in capsys.readouterr().out
    for general in ADVICE:  # Each is still said somewhere.
        table = any(row.instead == general for row in REMOVED.values())
        assert table or general in (ROOT / "jax_doctor/start.py").read_text()


@pytest.mark.parametrize(
    ("program", "code"), [("haiku_template.doctor", 75), ("jax_doctor", 143)]
)
def test_a_signal_ends_the_children_too(tmp_path, program, code):
    (tmp_path / "jax.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'child')!r})\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", program, "--device=cpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as process:
        limit = time.monotonic() + 60
        while not (tmp_path / "child").exists():
            assert time.monotonic() < limit
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == code
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":
        assert time.monotonic() < limit, "the child is still running"
        time.sleep(0.02)


def test_jax_that_cannot_be_imported_still_gets_an_answer(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text("raise ImportError('broken on purpose')")
    done = run_doctor("--device=cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == doctor.UNAVAILABLE and done.stderr == ""
    assert "CAUSE A00" in done.stdout and "broken on purpose" in done.stdout


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("--device=gpux", "not understood"),
        ("--device=auto:1", "not understood"),
        ("--devise=gpu", "--devise=gpu"),
        ("--timeout=soon", "soon"),
        ("--timeout=-1", "-1"),
    ],
)
def test_a_mistyped_flag_is_one_sentence(flag, word, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.parse([flag])
    said = capsys.readouterr().err
    assert ended.value.code == doctor.USAGE
    assert said.startswith("error: ") and said.count("\n") == 1 and word in said


def test_this_process_never_imports_jax():
    code = (
        "import sys; from jax_doctor import __main__ as doctor; "
        "doctor.main(['--device=gpu', '--timeout=30']); "
        "assert not {'jax', 'numpy', 'absl', 'rich'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )


def test_a_broken_link_stops_the_walk(gpu, monkeypatch):
    def refuse(*args):
        raise AssertionError("asked")

    monkeypatch.setattr(children, "probe_driver", refuse)
    monkeypatch.setattr(children, "probe_jax", refuse)
    gpu.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    report = doctor.report(gpu.machine(), "gpu", 5)
    assert report["cause"]["id"] == "A22" and not report["works"]


def test_auto_beside_a_card_that_is_not_used_does_not_just_work(gpu, monkeypatch):
    monkeypatch.setattr(children, "probe_driver", lambda *args: HEALTHY)
    monkeypatch.setattr(children, "probe_sums", lambda *args: jax_result("cpu"))

    def verdict(*platforms):
        shown = jax_result(*platforms)
        monkeypatch.setattr(children, "probe_jax", lambda *args: shown)
        return doctor.lines(doctor.report(gpu.machine(), "auto", 5))[-1]

    unused = "--device=auto works on the CPU, and this machine's GPU is not used"
    assert verdict("cpu").startswith(unused)
    assert verdict("gpu", "cpu").startswith("--device=auto works (")


def test_a_healthy_card_works_and_its_holders_are_listed(gpu, monkeypatch):
    memory = {"bytes_in_use": 2**30, "bytes": 2**34, "processes": None}
    seen = HEALTHY._replace(memory=(memory,))
    monkeypatch.setattr(children, "probe_driver", lambda *args: seen)
    monkeypatch.setattr(children, "probe_jax", lambda *args: jax_result("gpu", "cpu"))
    gpu.file("/proc/77/comm", "python\n")
    gpu.link("/proc/77/fd/9", "/dev/nvidia0")
    report = doctor.report(gpu.machine(), "gpu:0", 5)
    text = "\n".join(doctor.lines(report))
    assert report["works"] and report["findings"] == []
    assert "held by process 77      python: /dev/nvidia0" in text
    assert "1.0 GiB of 16.0 GiB in use by all" in text and "works" in text
