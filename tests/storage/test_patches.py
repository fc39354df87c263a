"""Patches of `docs/decisions/patches.md`, and what may be removed once these fail."""

import os
import sys
import time

import jax.numpy as jnp
import pytest
from jax._src.distributed import global_state

from haiku_template.errors import StorageError
from haiku_template.storage import failures
from haiku_template.storage.checkpoint import Checkpoints


def reports_of(tmp_path, monkeypatch, most):
    """What Python reports while a damaged checkpoint is read again and again."""
    state = {"params": {f"layer{i}": jnp.ones((64, 64)) for i in range(40)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
    for file in tmp_path.glob("1/state/d/*"):
        os.truncate(file, file.stat().st_size // 2)
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: reports.append(x.exc_value))
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(most):
            with pytest.raises(StorageError, match="is damaged"):
                checkpoints.restore(1, state)
            time.sleep(0.1)
            if reports:
                break
    return [str(error) for error in reports]


def test_orbax_still_abandons_reads_which_fail_later(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "report_unabandoned", lambda report, x: report(x))
    assert "Event loop is closed" in reports_of(tmp_path, monkeypatch, 100)


def test_an_abandoned_read_is_not_reported(tmp_path, monkeypatch):
    assert reports_of(tmp_path, monkeypatch, 5) == []


def test_reading_leaves_python_s_own_hook_in_place(tmp_path):
    hook, state = sys.unraisablehook, {"w": jnp.ones(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
        checkpoints.restore(1, state)
    assert sys.unraisablehook is hook


def test_jax_still_has_the_names_that_the_end_of_several_processes_sets():
    assert hasattr(global_state, "preemption_sync_manager")
    assert hasattr(global_state, "client")
