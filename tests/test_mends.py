"""Places and tests that the tables of mends name are there: see `make test-mends`."""

import ast

import pytest

from tests.mends import mends
from tests.runs import ROOT


@pytest.mark.parametrize("mend", mends(), ids=lambda mend: mend.fault[:60])
def test_a_mend_and_its_test_are_there(mend):
    assert (ROOT / mend.file).read_text().count(mend.code) == 1
    assert mend.without != mend.code
    file, _, name = mend.test.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert name.partition("[")[0] in functions
