"""Leaves that span processes have a digest for each share, compared in any layout."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from haiku_template.devices import Layout
from haiku_template.storage import manifest as manifests
from haiku_template.storage import shares
from haiku_template.storage.checkpoint import Checkpoints
from tests.storage.test_verified import edit_manifest

RNG = np.random.default_rng(0)
STATE = {
    "params": {
        "rows": RNG.normal(size=(8, 6)).astype(np.float32),
        "columns": RNG.normal(size=(3, 1200, 5)).astype(ml_dtypes.bfloat16),
    },
    "opt_state": (RNG.normal(size=(12,)).astype(np.float32), np.array(3, np.int32)),
    "step": np.array(1, np.int32),
}
SHARDED = ["params/rows", "params/columns", "opt_state/0"]


@pytest.fixture
def saved(tmp_path, four_devices):
    """A checkpoint whose manifest has digests of shares, as two processes write it."""
    layout = Layout(four_devices.devices, (("*", "data"),))
    placed = four_devices.init(lambda: STATE, layout=layout)
    with Checkpoints(tmp_path, run="a") as checkpoints:
        checkpoints.save(1, STATE, None)
    leaves = manifests.flatten(placed)
    entries = {
        path: manifests._entry(path, manifests.Shares.of(leaves[path]), ("a", 1))
        for path in SHARDED
    }
    assert all(len(entry["shares"]) == 4 for entry in entries.values())
    manifest = json.loads((tmp_path / "1/manifest/manifest").read_text())
    edit_manifest(tmp_path / "1", leaves=manifest["leaves"] | entries)
    return tmp_path / "1"


def read(step):
    return manifests.read(step)


def altered_on_disk(step, paths=SHARDED):
    return shares.altered(step / "state", read(step), paths)


def test_shares_are_compared_in_a_process_that_has_all(saved):
    with Checkpoints(saved.parent, run="a") as checkpoints:
        state = checkpoints.restore(1, STATE)
    assert manifests.altered(read(saved), state) == []
    for path in SHARDED:
        other = jax.tree_util.tree_map_with_path(
            lambda place, x, path=path: (
                x * np.array(2, x.dtype)
                if jax.tree_util.keystr(place, simple=True, separator="/") == path
                else x
            ),
            state,
        )
        assert manifests.altered(read(saved), other) == [path]


def test_shares_are_compared_as_they_lie_on_disk(saved):
    assert altered_on_disk(saved) == set()
    leaves = read(saved)["leaves"]
    for path in SHARDED:
        for where in leaves[path]["shares"]:
            entry = leaves[path]["shares"] | {where: "0" * 32}
            changed = {path: leaves[path] | {"shares": entry}}
            edit_manifest(saved, leaves=leaves | changed)
            assert altered_on_disk(saved) == {path}
            assert altered_on_disk(saved, ["step"]) == set()
    edit_manifest(saved, leaves=leaves)


def test_whole_leaves_are_compared_as_they_lie_on_disk(tmp_path):
    """Of a save by one process, which several read in shares."""
    for name, state in (("a", STATE), ("b", jax.tree.map(np.negative, STATE))):
        state = state | {"step": np.array(1, np.int32)}
        with Checkpoints(tmp_path / name, run="a") as checkpoints:
            checkpoints.save(1, state, None)
    assert altered_on_disk(tmp_path / "a/1") == set()
    other = read(tmp_path / "b/1")
    assert shares.altered(tmp_path / "a/1/state", other, SHARDED) == {*SHARDED}


def test_leaves_of_earlier_versions_that_spanned_processes_are_not_compared(saved):
    entry = {"form": "float32[8, 6]", "digest": None}
    manifest = read(saved)
    manifest["leaves"]["params/rows"] = entry
    assert shares.altered(saved / "state", manifest, SHARDED) == set()
    with Checkpoints(saved.parent, run="a") as checkpoints:
        state = checkpoints.restore(1, STATE)
    state["params"]["rows"] = np.zeros((8, 6), np.float32)
    assert manifests.altered(manifest, state) == []
