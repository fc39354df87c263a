"""The table of cases: each has a test that exists."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cases import CASES

FOLDER = Path(__file__).parent
TESTS = [test for group in CASES.values() for test in group.values()]


def test_it_has_105_cases():
    assert len(TESTS) == 105, {name: len(group) for name, group in CASES.items()}


def test_each_has_a_test_of_its_own():
    for first, second in itertools.permutations(TESTS, 2):
        assert not second.startswith(first)


@pytest.mark.parametrize("test", sorted({test.split("[")[0] for test in TESTS}))
def test_each_has_a_test(test):
    file, _, name = test.partition("::")
    tree = ast.parse((FOLDER / file).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert any(each.startswith(name) for each in names)


@pytest.mark.cluster
def test_each_is_collected():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(FOLDER)]
    listed = subprocess.run(
        [*command, "-o", "addopts="],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    names = [line.rpartition("/")[2] for line in listed.stdout.splitlines()]
    missing = [test for test in TESTS if not any(x.startswith(test) for x in names)]
    assert not missing, listed.stdout[-500:]
