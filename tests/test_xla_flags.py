"""Sums on CPUs are right however the template starts, and wrong without its flag."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys

import pytest

import haiku_template
from haiku_template import xla_flags
from haiku_template.xla_flags import FLAG, OPTION
from jax_doctor import children
from jax_doctor.programs import ASK_SUMS, COMMON, SUMS
from tests.runs import ROOT, run_command

# Computes them when a program of the template ends, in its own process.
AT_THE_END = f"""
import atexit, os, sys

def at_the_end():
    if "jax" in sys.modules and "WRITE_SUMS" in os.environ:
        sys.stdout = open(os.environ["WRITE_SUMS"], "a")
        exec({ASK_SUMS!r}, {{}})

atexit.register(at_the_end)
"""


def without_flags(**variables):
    """The environment of someone who has set no flag of XLA."""
    left = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return left | {"JAX_PLATFORMS": "cpu"} | variables


def python(code, **variables):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=without_flags(**variables),
        timeout=100,
        check=False,
    )
    return done


def results(text):
    """Each sum that came to an end, and its problem."""
    ended = [json.loads(line) for line in text.splitlines() if '"end"' in line]
    return {operation: problem for _, operation, _, problem in ended}


RIGHT = dict.fromkeys(SUMS, "")


def test_sums_are_right_after_an_import_and_wrong_without_it():
    done = python(f"import haiku_template\n{ASK_SUMS}")
    assert done.returncode == 0 and results(done.stdout) == RIGHT, done.stderr
    bare = python(ASK_SUMS)
    if results(bare.stdout) == RIGHT:
        pytest.skip("here jaxlib is right without the flag")
    assert bare.returncode in (0, -11), bare.stderr
    assert children.probe_sums(60, without_flags()).works() is False


def test_sums_are_right_in_the_tests_themselves(optimized):
    assert FLAG in os.environ["XLA_FLAGS"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(ASK_SUMS, {})
    assert results(said.getvalue()) == RIGHT


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, FLAG),
        ("", FLAG),
        ("--xla_cpu_use_xnnpack=false", f"{FLAG} --xla_cpu_use_xnnpack=false"),
        (f"{OPTION}=-dot", f"{OPTION}=-dot"),
        (f"--xla_a=1 {OPTION}=", f"--xla_a=1 {OPTION}="),
        (f"{FLAG} --xla_a=1", f"{FLAG} --xla_a=1"),
        ("--xla_a='unclosed", f"{FLAG} --xla_a='unclosed"),
        ("no_such_file", "no_such_file"),
        ("FILE --xla_b=1", f"{FLAG} --xla_b=1"),
        (f"FILE {OPTION}=-dot", "FILE"),
    ],
)
def test_what_the_user_set_stays(monkeypatch, tmp_path, flags, expected):
    file = tmp_path / "flags"
    monkeypatch.delenv("XLA_FLAGS")
    if flags is not None:
        if flags.startswith("FILE "):
            file.write_text(flags.removeprefix("FILE "))
            flags = str(file)
        monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(xla_flags, "sys", type("sys", (), {"modules": {}}))
    xla_flags.set_flag()
    assert os.environ["XLA_FLAGS"] == expected.replace("FILE", str(file))


def test_xla_reads_a_file_s_flags_beside_the_template_s(tmp_path):
    (tmp_path / "flags").write_text("--xla_cpu_use_xnnpack=false\n")
    code = f"import haiku_template\n{ASK_SUMS}"
    done = python(code, XLA_FLAGS=str(tmp_path / "flags"))
    assert done.returncode == 0 and results(done.stdout) == RIGHT, done.stderr
    (tmp_path / "flags").write_text("--xla_no_such_flag=1\n")
    done = python(code, XLA_FLAGS=str(tmp_path / "flags"))
    assert "Unknown flag" in done.stderr and "xla_no_such_flag" in done.stderr


NAME = f"{OPTION.removeprefix('--')}\0".encode()


@pytest.mark.parametrize(
    ("libraries", "is_set"),
    [
        ([b"x\0" + NAME + b"XLA_FLAGS\0"], True),
        ([b"XLA_FLAGS\0 of a jaxlib without it"], False),
        ([b"XLA_FLAGS\0" + NAME[:-1] + b"_of_another_name\0"], False),
        ([NAME + b"XLA_FLAGS\0", b"XLA_FLAGS\0 of an old plugin"], False),
        ([NAME + b"XLA_FLAGS\0", b"a plugin that reads no flags"], True),
        ([b""], False),
        ([], False),
    ],
)
def test_a_flag_that_a_library_does_not_know_is_not_set(
    monkeypatch, tmp_path, libraries, is_set
):
    paths = [tmp_path / str(i) for i in range(len(libraries))]
    for path, text in zip(paths, libraries, strict=True):
        path.write_bytes(text)
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(xla_flags, "_libraries", lambda: paths)
    monkeypatch.setattr(xla_flags, "sys", type("sys", (), {"modules": {}}))
    xla_flags.set_flag()
    assert ("XLA_FLAGS" in os.environ) is is_set


def test_the_library_of_jax_is_where_it_is_looked_for():
    libraries = [path for path in xla_flags._libraries() if "jaxlib" in path.parts]
    assert [path.stat().st_size > 2**26 for path in libraries] == [True]


def test_a_script_in_which_jax_has_started_is_told_what_to_write():
    late = "import jax\njax.devices()\nimport haiku_template"
    done = python(f"{late}\nimport os\nprint(os.environ.get('XLA_FLAGS'))")
    words = f'before the first JAX operation, or write export XLA_FLAGS="{FLAG}"'
    assert words in done.stderr and done.stdout == "None\n"
    assert python(late, XLA_FLAGS=FLAG).stderr == ""
    assert python(late.replace("jax.devices()", "jax.jit")).stderr == ""


# What can be started or imported first, and uses JAX.
PATHS = [
    *(ROOT / "haiku_template").glob("*.py"),
    *(ROOT / "haiku_template").glob("*/__*__.py"),
    *(ROOT / "haiku_text").glob("*/__init__.py"),
    *(ROOT / "benchmarks").glob("*.py"),
    *(ROOT / "examples").glob("*.py"),
    ROOT / "configs" / "digits.py",
    ROOT / "tests" / "conftest.py",
]
ENTRIES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in PATHS
    if "haiku" in path.read_text() or "jax" in path.read_text()
]
# Peers are measured as their own users have them, in processes without the package.
PEERS = ("start", "rounds", "gpt_on_cpu", "peer_loops")
IMPORTED = """
import importlib, os, sys
import jax, haiku, optax, orbax.checkpoint, grain, rich, absl.flags, ml_collections
from jax._src import xla_bridge
for name in {names}:
    if os.fork() == 0:
        try:
            importlib.import_module(name)
            started = xla_bridge.backends_are_initialized()
            print(name, os.environ.get("XLA_FLAGS"), started, flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_each_entry_point_sets_the_flag_before_a_backend_starts():
    done = python(IMPORTED.format(names=ENTRIES))
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    # Fuzzing imports the package where atheris sees it, after its own start.
    peers = {f"benchmarks.{name}" for name in (*PEERS, "fuzz", "readers")}
    flags = {name: None if name in peers else FLAG for name in ENTRIES}
    assert lines == {name: f"{flag} False" for name, flag in flags.items()}, done.stderr
    assert peers < set(ENTRIES)


IMPORT = re.compile(r"(?m)^ *(import|from) (jax|haiku|optax)")


def test_each_notebook_imports_the_package_before_it_computes():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        first = next(text for text in code if IMPORT.search(text))
        assert "from haiku_template" in first, path.name


@pytest.mark.slow
def test_sums_are_right_at_the_end_of_each_command(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END)
    workdir, written = tmp_path / "run", tmp_path / "sums"
    variables = {"WRITE_SUMS": str(written), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    where = [f"--workdir={workdir}", "--device=cpu"]
    config = ["--config=configs/digits.py", "--config.num_steps=2"]
    for name, *flags in (
        ("train", *where, *config),
        ("evaluate", *where),
        ("export", *where, f"--output={tmp_path}/out", "--format=stablehlo"),
    ):
        written.unlink(missing_ok=True)
        done = run_command(name, *flags, **variables)
        assert done.returncode == 0, done.stderr
        assert results(written.read_text()) == RIGHT, (name, done.stderr)


def test_the_programs_are_those_of_the_doctor():
    assert COMMON in ASK_SUMS and haiku_template.xla_flags is xla_flags
    assert OPTION == children.OPTION
