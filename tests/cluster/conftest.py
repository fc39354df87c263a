import runpy

import pytest

from tests.runs import ROOT

LAUNCHER = runpy.run_path(str(ROOT / "launch/local.py"))


def free_address():
    """HOST:PORT of this machine that nobody listens at."""
    return f"127.0.0.1:{LAUNCHER['free_port']()}"


@pytest.fixture
def address():
    """HOST:PORT of this machine that nobody listens at."""
    return free_address()


@pytest.fixture(scope="module")
def free():
    """Makes such addresses."""
    return free_address
