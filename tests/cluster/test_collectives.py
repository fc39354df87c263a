"""Each collective of the package is reached by two processes in the same order."""

import ast
import functools
import shutil
from pathlib import Path

import pytest

from tests.cluster.recorder import PACKAGE
from tests.cluster.test_one_alone import SHARDED, ends

pytestmark = pytest.mark.cluster
RECORD = "from tests.cluster.recorder import record; record(f'{path}{{index}}')"
METHODS = ("first", "agree", "least")  # Of `Processes`, called `processes` everywhere.
METHODS_OF = "devices/processes.py:"  # And its `_joined`, before all that is recorded.
FLAGS = "--fit=apply", "--device_memory_limit=4GiB"
SMALL = {f"model.{k}": 1 for k in ("num_layers", "num_heads")} | {"model.width": 8}
# A run, and those that go on with it: flags, and changes of its config.
RUNS = {
    "timed": [
        ((), {"save_minutes": 0.02, "max_minutes": 60, "num_steps": 200}),
        ((), {"max_minutes": 0.0001, "num_steps": 100_000, "save_every": None}),
    ],
    "evaluated": [
        ((), {"early_stop.patience": 5, "hooks": "('histograms',)", "mirror": "COPY"}),
        (("--rewind=15",), {"num_steps": 30, "mirror": "COPY"}),
        ((), {"num_steps": 40, "mirror": "COPY", "lost": True}),
    ],
    "sharded": [((), {"sharding": SHARDED, "hooks": "('histograms',)"})],
    "elastic": [(FLAGS, {"exact_elastic": 2})],
    # Of a model with a count of its operations, whose devices are measured.
    "gpt": [((), {"config": "gpt_bytes", "batch_size": 4, **SMALL})],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, free):
    """Makes a run of `RUNS`, once; returns the lines that each process wrote."""

    @functools.cache
    def record(name):
        folder = tmp_path_factory.mktemp(name)
        for flags, changes in RUNS[name]:
            changes = {k: folder / x if x == "COPY" else x for k, x in changes.items()}
            if changes.pop("lost", False):
                shutil.rmtree(folder / "run/checkpoints")
            patch = RECORD.format(path=f"{folder}/process_")
            codes, errors = ends(folder / "run", free(), patch, *flags, **changes)
            assert codes == [0, 0], errors
        paths = [Path(f"{folder}/process_{i}") for i in range(2)]
        return [path.read_text().splitlines() for path in paths]

    return record


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_reach_the_same_collectives(recorded, name):
    first, second = recorded(name)
    assert len(first) > 20
    assert first == second


def test_no_collective_is_left_out(recorded):
    lines = [line for name in RUNS for line in recorded(name)[0]]
    assert collectives() <= {line.split()[1] for line in lines}


def collectives():
    """Functions that ask all processes, as FILE:FUNCTION."""
    found = set()
    for path in Path(PACKAGE).rglob("*.py"):
        file = str(path.relative_to(PACKAGE))
        found |= {f"{file}:{name}" for name in askers(ast.parse(path.read_text()))}
    return {site for site in found if not site.startswith(METHODS_OF)}


def askers(node, name=""):
    """Names of the innermost functions with a call that asks."""
    if isinstance(node, ast.FunctionDef):
        name = node.name
    own = {name} if isinstance(node, ast.Call) and asks(node.func) else set()
    return own.union(*(askers(x, name) for x in ast.iter_child_nodes(node)))


def asks(function):
    if isinstance(function, ast.Name):
        return function.id == "gather"
    is_method = isinstance(function, ast.Attribute) and function.attr in METHODS
    return is_method and ast.unparse(function.value).endswith(("processes", "this"))
