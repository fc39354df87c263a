import ast
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from haiku_template.data import ArrayDataset, BatchSpec
from haiku_template.devices import DeviceManager, processes
from haiku_template.devices.processes import Processes, waited
from haiku_template.devices.transfer import own_rows
from haiku_template.errors import PlacementError

BATCH = {"inputs": np.arange(12).reshape(6, 2), "labels": np.arange(6)}


def test_each_process_has_its_rows_of_a_batch_in_order():
    parts = [own_rows(Processes(i, 3))(BATCH) for i in range(3)]
    for name, whole in BATCH.items():
        np.testing.assert_array_equal(np.concatenate([x[name] for x in parts]), whole)


@pytest.mark.parametrize(("count", "sizes"), [(4, "4 or 8"), (7, "are 7$")])
def test_a_batch_that_does_not_split_over_processes_names_sizes_that_do(count, sizes):
    words = f"6 examples .* {count} processes; .* {sizes}"
    with pytest.raises(PlacementError, match=words):
        own_rows(Processes(0, count))(BATCH)


@pytest.mark.parametrize("shares", [False, True])
def test_a_set_that_reads_shares_is_not_cut_again(shares):
    given = (1, 2) if shares else ()
    dataset = ArrayDataset(*BATCH.values(), BatchSpec(4, 0, "classes", *given))
    batch = dataset.batch(0)
    own = own_rows(Processes(1, 2), dataset)(batch)
    whole = ArrayDataset(*BATCH.values(), BatchSpec(4)).batch(0)
    np.testing.assert_array_equal(own["labels"], whole["labels"][2:])


def test_one_process_is_the_whole_run(devices):
    assert devices.processes == Processes()
    assert own_rows(devices.processes)(BATCH) is BATCH
    devices.processes.agree({"anything": object()})
    assert " in process" not in devices.describe()


@pytest.mark.parametrize(("count", "waits"), [(1, False), (2, True)])
def test_waiting_for_other_processes_is_timed(count, waits):
    with Processes(0, count).waiting():
        time.sleep(0.02)
        with ThreadPoolExecutor(1) as threads:  # As the heartbeat's.
            assert (threads.submit(waited).result() >= 0.02) == waits
    assert waited() == 0.0


@pytest.mark.parametrize(
    "everyone, least", [([7, 5], 5), ([5, 7], 5), ([None, 7], 7), ([None, None], None)]
)
def test_processes_decide_by_the_device_that_has_least_memory(
    monkeypatch, everyone, least
):
    """Else one would stage its data, or have calls of several steps, and all wait."""
    monkeypatch.setattr(processes, "gather", lambda value: [value, *everyone[1:]])
    stats = {"bytes_limit": 10 + (everyone[0] or 0), "bytes_in_use": 10}
    device = types.SimpleNamespace(memory_stats=lambda: everyone[0] and stats)
    devices = DeviceManager.create("cpu", num_devices=1)._replace(
        devices=(device,),
        processes=Processes(0, 2),
    )
    assert devices.memory_limit() == least


# Calls that return once devices have computed, or other processes have answered.
BLOCKING = {"block_until_ready", "device_get", "process_allgather"}
# Those where no other process can be in the way, and why.
ALONE = {
    ("devices/exact.py", "map"): "exact mode is of one process",
    ("devices/manager.py", "replicate"): "copies from the host",
    ("devices/manager.py", "place"): "copies from the host",
    ("devices/manager.py", "shard"): "copies from the host",
    ("devices/manager.py", "fetch"): "waited for, just before",
    ("pretrained/reading.py", "load"): "copies from the host",
    ("reporting/perf.py", "_matmul_seconds"): "a product of this process's devices",
}


def blocking_calls(function, is_timed=False):
    """Blocking calls of a function that are not within `waiting()`."""
    for node in ast.iter_child_nodes(function):
        names = {
            getattr(item.context_expr.func, "attr", None)
            or getattr(item.context_expr.func, "id", None)
            for item in getattr(node, "items", ())
            if isinstance(node, ast.With) and isinstance(item.context_expr, ast.Call)
        }
        if isinstance(node, ast.Attribute) and node.attr in BLOCKING and not is_timed:
            yield node.attr
        if not isinstance(node, ast.FunctionDef):
            yield from blocking_calls(node, is_timed or "waiting" in names)


def test_each_wait_for_devices_is_one_that_the_watchdog_times():
    package = Path(processes.__file__).parents[1]
    untimed = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and [*blocking_calls(node)]:
                untimed.add((str(path.relative_to(package)), node.name))
    assert untimed == ALONE.keys()


def test_a_wait_within_a_wait_does_not_end_it():
    with processes.waiting():
        time.sleep(0.02)
        with processes.waiting():
            pass
        assert waited() >= 0.02
    assert waited() == 0
