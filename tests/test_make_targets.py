"""Tests with a target of `make` of their own: CI calls it, and none is skipped."""

import re
import subprocess
import sys

import pytest

from tests.runs import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
# With packages of others, in environments of their own: what is missing is a failure.
PACKAGES = {"trackers": "optuna", "onnx": "onnxruntime"}
# By name, since they need what CI's machines do not have, or take hours.
ASKED = {"test-long", "test-mends", "test-pretrained", "test-cuda-wheels"}


def commands(*targets):
    """What `make` would run for targets whose environments are there."""
    done = subprocess.run(
        ["make", "--dry-run", "PYTHON=" + sys.executable, *targets],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.replace("\\\n", " ").splitlines()


def files(marker):
    """Test files that mark something so."""
    mark = re.compile(rf"pytest\.mark\.{marker}\b")
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [x for x in paths if mark.search(x.read_text())]


@pytest.mark.parametrize("marker", PACKAGES)
def test_a_target_runs_all_files_of_its_marker_and_the_others_none(marker):
    (line,) = [x for x in commands(f"test-{marker}") if " pytest " in x]
    assert f"-m {marker} " in line
    names = [str(x.relative_to(ROOT)) for x in files(marker)]
    assert names and sorted(line.partition(f"-m {marker} ")[2].split()) == names
    for line in commands("test-all"):
        if "-m pytest" in line and "tests/target" not in line:
            assert f"and not {marker}" in line


@pytest.mark.parametrize("minor", [11, 12])
def test_what_is_heavy_is_run_once_by_the_tests_of_all(minor, tmp_path):
    """On 3.11 with what is slow, later with what is quick; each name is a test."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    code = f"import sys; sys.version_info = (3, {minor}); "
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}$2"\n')
    python.chmod(0o755)
    (tmp_path / ".test").touch()
    quick, slow = (
        line.partition(' -m "')[2].partition(" and not target")[0]
        + " and not heavy" * line.endswith(' and not heavy"')
        for line in commands("test-all", f"VENV={tmp_path}")
        if " --dist" in line
    )
    assert (quick, slow) == (
        ("not slow and not heavy", "(slow or heavy)")
        if minor == 11
        else ("not slow", "slow")
    )


def test_a_make_that_calls_the_tests_gives_no_words_to_the_ones_that_they_call(
    tmp_path,
):
    """`.ci/run` calls `make test LATER=`, and the test above saw it in its own."""
    (tmp_path / "Makefile").write_text(
        f"test:\n\t{sys.executable} -m pytest -q -p no:cacheprovider --rootdir={ROOT} "
        f"-k 'is_heavy_is_run_once and 11' {__file__}\n"
    )
    done = subprocess.run(
        ["make", "LATER="], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_the_words_of_a_slow_test_leave_a_case_that_is_quick(request):
    """`slow(but=...)` of all that is collected: 45 cases had lost theirs."""
    assert request.config.without_quick_case == []


def test_what_is_heavy_is_a_test():
    for name in (ROOT / "tests/heavy.txt").read_text().split():
        path, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / path).read_text(), name


@pytest.mark.slow
@pytest.mark.parametrize(("marker", "package"), PACKAGES.items())
def test_a_missing_package_is_a_failure(marker, package, tmp_path):
    """And a skip would not be: no test of these targets knows one."""
    absent = f"import sys, pytest; sys.modules['{package}'] = None; "
    paths = [x for x in files(marker) if package in x.read_text()]
    last = "'-x', '-q', '-p', 'no:cacheprovider'"
    code = f"{absent}sys.exit(pytest.main(['-m', '{marker}', {last}, *sys.argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
    for path in files(marker):
        assert not re.search(r"skipif|importorskip|pytest\.skip", path.read_text())


def test_ci_calls_each_target_of_tests(tmp_path):
    targets = set(re.findall(r"^(test[a-z-]*):", MAKEFILE, re.M)) - ASKED
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r"make (test[a-z-]*)", workflow)) == targets - {"test"}


@pytest.mark.parametrize("minors", [(11, 13), (11, 14), (11,), (12,)])
def test_a_change_runs_all_tests_of_packages_on_one_python(minors, tmp_path):
    """`.ci/run` as it is, with a `make` that writes down how it was called."""
    for minor in minors:
        python = tmp_path / f"python3.{minor}"
        is_it = f'case "$2" in *"3, {minor})"*) exit 0;; *sys.exit*) exit 1;; esac'
        python.write_text(f"#!/bin/sh\n{is_it}\necho Python 3.{minor}\n")
    (tmp_path / "make").write_text(
        '#!/bin/sh\necho "$@" >> "$0.called"\n'
        'for word in "$@"; do case $word in VENV=*) mkdir -p "${word#VENV=}/bin"; '
        'ln -sf /bin/true "${word#VENV=}/bin/python";; esac; done\n'
    )
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    for name in ("bash", "dirname", "mktemp", "rm", "mkdir", "ln", "sh"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    done = subprocess.run(
        [ROOT / ".ci" / "run"],
        env={"PATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "make.called").read_text().splitlines()
    assert len(calls) == len(minors)
    words = calls[-1].split()
    assert f"PYTHON=python3.{minors[-1]}" in words
    assert {"test-trackers", "test-onnx"} < set(words)
    assert "LATER=" in words  # What is heavy, too, on whatever Python.
    places = dict(x.split("=") for x in words if "=" in x)
    for name in ("VENV", "TRACKERS_VENV", "ONNX_VENV"):  # None of them is the clone's.
        assert places[name].startswith(f"{tmp_path}/tmp."), name
    assert places["VENV"] not in (places["TRACKERS_VENV"], places["ONNX_VENV"])
    for call in calls[:-1]:
        assert not {"test-trackers", "test-onnx"} & set(call.split())
    for call in calls:  # The wheel, in an environment of nothing else.
        assert {"test", "test-wheel"} < set(call.split())
    assert "EMPTY_ENVIRONMENT=1" in "".join(commands("test-wheel"))
