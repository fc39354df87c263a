import pytest
from machines import Builder


@pytest.fixture
def plain(tmp_path):
    """A machine without a card, and JAX for the CPU."""
    return Builder(tmp_path)


@pytest.fixture
def gpu(tmp_path):
    """A healthy machine with one card and JAX for CUDA 13."""
    built = Builder(tmp_path)
    built.card()
    built.cuda()
    return built
