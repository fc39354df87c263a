import shutil
import subprocess
from pathlib import Path

import pytest
from environments import Environment, need_a_namespace

from jax_doctor import Machine

HERE = Path(__file__).parent
STUB = HERE.parent / "doctor/cuda_stub.c"


def pytest_collection_modifyitems(items):
    if "jax-cuda12-plugin" in Machine.here().distributions:
        return
    reason = "JAX's CUDA wheels are not installed here: make test-cuda-wheels does it"
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The environment as pip installed it."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "dev").mkdir()
    (folder / "driver").mkdir()
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler or not shutil.which("unshare"):
        pytest.skip("no C compiler, or no unshare (util-linux)")
    library = folder / "driver/libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, STUB], check=True)
    environment = Environment(folder, tmp_path_factory.mktemp("changes"))
    need_a_namespace(environment)
    return environment


@pytest.fixture
def broken(whole, tmp_path):
    """The same, to be changed."""
    return Environment(whole.folder, tmp_path)
