"""Patches of `docs/decisions/patches.md`, and what may be removed once these fail."""

import gc
import inspect
import json
import os
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax._src.distributed import global_state
from orbax.checkpoint._src.serialization import tensorstore_utils

from haiku_template.errors import StorageError
from haiku_template.storage import failures
from haiku_template.storage.checkpoint import Checkpoints
from tests.runs import ROOT


def empty_half(file):
    """Fills half of a file with zeros: another size would be seen before."""
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)


def empty_lists(step):
    for file in step.glob("state/d/*"):
        empty_half(file)


def empty_arrays(step):
    files = step.glob("state/ocdbt.*/d/*")
    empty_half(max(files, key=lambda path: path.stat().st_size))


# What Python reports of reads that were on their way as one failed.
REPORTS = {
    empty_lists: "Event loop is closed",
    empty_arrays: "while reading array index",
}
damages = pytest.mark.parametrize("damage", REPORTS)


def reports_of(tmp_path, monkeypatch, damage, most):
    """What Python reports while a damaged checkpoint is read again and again."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 64, 64)).astype(np.float32)
    state = {"params": {f"layer{i}": jnp.asarray(row) for i, row in enumerate(rows)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
    damage(tmp_path / "1")
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: reports.append(x.exc_value))
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(most):
            with pytest.raises(StorageError, match="is damaged"):
                checkpoints.restore(1, state)
            gc.collect()
            time.sleep(0.1)
            if REPORTS[damage] in "\n".join(map(str, reports)):
                break
    time.sleep(0.5)
    gc.collect()  # Those that are still on their way.
    return "\n".join(map(str, reports))


@damages
def test_orbax_still_abandons_reads_which_fail_later(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(failures, "report_unabandoned", lambda report, x: report(x))
    assert REPORTS[damage] in reports_of(tmp_path, monkeypatch, damage, 100)


@damages
def test_an_abandoned_read_is_not_reported(tmp_path, monkeypatch, damage):
    assert reports_of(tmp_path, monkeypatch, damage, 5) == ""


@pytest.mark.parametrize(("file", "count"), [("orbax/read.py", 0), ("mine/read.py", 1)])
def test_a_read_is_known_without_its_coroutine(file, count):
    """Python 3.14 tells of a coroutine that it closes the error alone."""
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", f"/site-packages/{file}", "exec"))
    trace, reports = caught.value.__traceback__.tb_next, []
    unraisable = types.SimpleNamespace(
        object=None, exc_value=caught.value, exc_traceback=trace
    )
    failures.report_unabandoned(reports.append, unraisable)
    assert len(reports) == count


def test_reading_leaves_python_s_own_hook_in_place(tmp_path):
    hook, state = sys.unraisablehook, {"w": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
        checkpoints.restore(1, state)
    assert sys.unraisablehook is hook


def test_jax_still_has_the_names_that_the_end_of_several_processes_sets():
    assert hasattr(global_state, "preemption_sync_manager")
    assert hasattr(global_state, "client")


def codecs(step):
    """Names of the codecs of each array of a checkpoint."""
    store = {"driver": "ocdbt", "base": f"file://{step / 'state'}/"}
    store = ts.KvStore.open(store).result()
    names = {}
    for key in store.list().result():
        if key.endswith(b"/zarr.json"):
            metadata = json.loads(store.read(key).result().value)
            inner = metadata["codecs"][0]["configuration"]["codecs"]
            names[key.decode()] = [codec["name"] for codec in inner]
    return names


def test_chunks_of_all_arrays_carry_a_checksum(tmp_path):
    state = {"a": jnp.ones(3), "b": {"c": np.ones((2, 2), np.float16)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
    names = ["bytes", "zstd", "crc32c"]
    assert codecs(tmp_path / "1") == {"a/zarr.json": names, "b.c/zarr.json": names}


RELOADS = """
import importlib
from haiku_template import program_cache
from haiku_template.storage import checkpoint
from jax._src.lru_cache import LRUCache
from orbax.checkpoint._src.serialization import tensorstore_utils as utils

def patched():
    checkpoint._add_checksums()
    program_cache._write_at_once()
    return utils._build_zarr3_metadata, LRUCache.put

before = patched()
importlib.reload(checkpoint), importlib.reload(program_cache)
assert patched() == before
"""


def test_modules_that_are_reloaded_patch_nothing_twice():
    """As IPython's %autoreload does: chunks had two checksums."""
    subprocess.run([sys.executable, "-c", RELOADS], check=True, cwd=ROOT)


def test_orbax_still_needs_to_be_told_of_checksums():
    build = tensorstore_utils._build_zarr3_metadata.__wrapped__
    inner = build((4,), (4,), True)["codecs"][0]["configuration"]["codecs"]
    assert [codec["name"] for codec in inner] == ["bytes", "zstd"]


def test_orbax_still_writes_json_where_digests_are_computed():
    save = ocp.JsonCheckpointHandler._save_fn
    assert list(inspect.signature(save).parameters) == ["self", "x", "directory"]
    assert inspect.iscoroutinefunction(save)


@pytest.mark.parametrize("reader", ["v0", "v1"])
def test_plain_orbax_reads_what_was_saved(tmp_path, reader):
    """As a user without this package would, in a process of its own."""
    state = {"params": {"w": np.arange(600, dtype=np.float32)}, "step": np.int32(1)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {"eval/loss": 0.5})
    read = {
        "v0": f"ocp.PyTreeCheckpointer().restore('{tmp_path}/1/state')",
        "v1": f"ocp.v1.load_pytree('{tmp_path}/1', checkpointable_name='state')",
    }
    code = (
        "import orbax.checkpoint as ocp, orbax.checkpoint.experimental.v1 as v1\n"
        f"ocp.v1 = v1\nstate = {read[reader]}\n"
        "print(state['params']['w'].sum(), state['step'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout == "179700.0 1\n", done.stderr[-2000:]
