"""Runs in cells of a notebook: interrupts, errors, and what a cell shows of a value."""

import gc
import json
import random
import signal
import sys
import tempfile
import time

import haiku as hk
import jax
import numpy as np
import optax
import pytest
from jupyter_client.manager import KernelManager

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.reporting import plots
from haiku_template.runs import Run, train
from haiku_template.training import Experiment, classification
from tests.test_notebooks import kernel  # noqa: F401

INPUTS = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
LABELS = (INPUTS[:, :3].argmax(axis=1)).astype(np.int32)
SPLIT = Split(INPUTS[:32], LABELS[:32], INPUTS[32:], LABELS[32:])


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr(plots, "write", lambda *_: None)


def experiment(width=8):
    def forward(inputs):
        return hk.nets.MLP([width, 3])(inputs)

    return Experiment(
        model=hk.transform(forward),
        task=classification,
        optimizer=optax.adam(1e-2),
        data=from_split(SPLIT, BatchSpec(8)),
    )


def fit(workdir, width=8, **options):
    trainer = experiment(width).trainer(DeviceManager.create("cpu", num_devices=1))
    return train(trainer, num_steps=6, workdir=workdir, log_every=2, **options)


def arrays_of(width):
    """Arrays on devices that have this width."""
    return [x.shape for x in jax.live_arrays() if width in x.shape]


def test_an_interrupt_too_late_to_stop_a_run_stops_the_cell_behind_it(tmp_path):
    def interrupts(event):
        if event.what == "save":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="is done, and is saved"):
        fit(tmp_path, hooks=[interrupts])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert int(fit(tmp_path).state.step) == 6


def test_a_state_that_is_deleted_is_freed_without_a_collection(tmp_path):
    fit(tmp_path / "first")
    gc.collect()
    gc.disable()
    try:
        result = fit(tmp_path / "second", width=23)
        assert arrays_of(23)
        del result
        assert not arrays_of(23)
    finally:
        gc.enable()


def test_a_run_frees_the_arrays_that_the_error_before_it_holds(tmp_path, monkeypatch):
    arrays = []

    def fails(event):
        raise ZeroDivisionError

    def counts(event):
        arrays.extend(arrays_of(29))

    with pytest.raises(ZeroDivisionError) as caught:
        fit(tmp_path / "first", width=29, hooks=[fails])
    gc.collect()
    assert arrays_of(29)  # For a debugger.
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    gc.collect()
    fit(tmp_path / "second", hooks=[counts])
    gc.collect()
    assert not arrays_of(29)


def test_a_cell_shows_the_lines_of_its_user_and_a_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def begin():\n    train(None, num_steps=0, workdir='run')\n")
    names = {"train": train}
    exec(compile(script.read_text(), script, "exec"), names)
    with pytest.raises(ConfigError) as caught:
        names["begin"]()
    caught.value.add_note("A note.")
    own, *lines = caught.value._render_traceback_()[-4:]
    assert "test_interactive.py" in own
    assert lines == [
        f"{script}, line 2: train(None, num_steps=0, workdir='run')",
        "ConfigError: config.num_steps=0; possible is 1 or more, up to 2**31 - 1, a "
        "whole number",
        "A note.",
    ]


def test_no_value_that_a_cell_ends_with_shows_arrays(tmp_path):
    result = fit(tmp_path)
    parts = experiment()
    devices = DeviceManager.create("cpu", num_devices=1)
    run = Run.open(tmp_path, devices, experiment=parts)
    trainer = parts.trainer(devices)
    values = (result, result.state, parts, parts.data, parts.data.train, run, trainer)
    for value in (*values, devices, jax.eval_shape(lambda: result.state)):
        text = repr(value)
        assert len(text) < 700 and "rray(" not in text and " at 0x" not in text, text
    assert "params: 4 of" in repr(result.state) and "eval/loss" in repr(result)
    assert "inputs=float32 [32, 6]" in repr(parts) and "1 x cpu" in repr(run)


SETUP = """
import glob, hashlib, os, signal, tempfile, threading
from pathlib import Path
from tests import test_interactive as cells
import jax

base = Path(tempfile.mkdtemp())


def go(name):
    state = cells.fit(base / name, save_every=2, eval_every=2).state.saved()
    leaves = jax.device_get(jax.tree.leaves(state))
    print("BITS", hashlib.md5(b"".join(x.tobytes() for x in leaves)).hexdigest())


def facts():
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {
        "threads": sorted(x.name for x in threading.enumerate()),
        "children": children,
        "signals": [str(signal.getsignal(n)) for n in (1, 2, 10, 15)],
        "guards": jax.config.jax_transfer_guard_host_to_device,
        "folder": os.getcwd(),
        "files": sorted({x.name for x in base.rglob(".*")} - {".lock"}),
    }


go("whole")
"""


class Kernel:
    """A kernel of Jupyter, which runs cells and is interrupted in them."""

    def __enter__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=tempfile.mkdtemp())
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        return self

    def __exit__(self, *_):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code, interrupt=None):
        """The text of a cell, its error's name, and its seconds."""
        texts, names, begun = [], [None], time.monotonic()

        def read(message):
            content = message["content"]
            texts.append(content.get("text", ""))
            names.append(content.get("ename", names[-1]))

        identifier = self.client.execute(code)
        if interrupt is not None:
            time.sleep(interrupt)
            self.manager.interrupt_kernel()
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != identifier:
                continue
            if message["content"].get("execution_state") == "idle":
                return "".join(texts), names[-1], time.monotonic() - begun
            read(message)


def bits(text):
    return text.partition("BITS ")[2].split()[0]


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_a_cell_that_is_interrupted_anywhere_runs_again_as_if_it_was_not(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    draw = random.Random(0)
    facts = "import json; print(json.dumps(facts()))"
    with Kernel() as cells:
        text, error, _ = cells.run(SETUP)
        assert error is None, text
        whole, (_, _, seconds) = bits(text), cells.run("go('again')")
        before = json.loads(cells.run(facts)[0])
        errors = []
        for number in range(12):
            moment = draw.uniform(0, seconds)
            errors.append(cells.run(f"go('{number}')", interrupt=moment)[1])
            assert json.loads(cells.run(facts)[0]) == before, (number, moment)
            text, error, _ = cells.run(f"go('{number}')")
            assert error is None and bits(text) == whole, (number, moment, text)
        assert {*errors} <= {"KeyboardInterrupt", "Interrupted", None}
        assert "KeyboardInterrupt" in errors, errors
