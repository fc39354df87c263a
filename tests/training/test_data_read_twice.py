"""A data set that is read again, for a save or a warning, beside its other batches."""

import ast
import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haiku_template
from haiku_template.data import Data
from haiku_template.errors import ConfigError, NonFiniteError, PlacementError
from haiku_template.reporting.perf import Clock
from haiku_template.runs import resume, train
from haiku_template.runs.guards import Guards
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, feed

INPUTS = np.random.default_rng(0).normal(size=(64, 8, 4)).astype(np.float32)
LABELS = (INPUTS.sum(2) > 0).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Refilled:
    """Fills one buffer again for each batch, as slowly as a disk.

    Two threads at once in it would mix their batches, which `clashes` counts.
    """

    values: dict[int, float] = dataclasses.field(default_factory=dict)
    buffer: np.ndarray = dataclasses.field(default_factory=lambda: INPUTS[0].copy())
    busy: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    clashes: list[int] = dataclasses.field(default_factory=list)
    pauses: float = 0.02  # So long that a save begins while a batch is made.

    def batch(self, step):
        if not self.busy.acquire(blocking=False):
            self.clashes.append(step + 1)
            self.busy.acquire()
        try:
            time.sleep(self.pauses)
            self.buffer[:] = INPUTS[step % 64]
            self.buffer[0, 0] = self.values.get(step + 1, self.buffer[0, 0])
            return {"inputs": self.buffer, "labels": LABELS[step % 64]}
        finally:
            self.busy.release()


def squares(outputs, batch):
    return {"loss": (outputs[:, 0] - batch["labels"]) ** 2}


def made(devices, data, steps_per_call=1, rate=0.0, **options):
    return Experiment(
        model=hk.transform(lambda x: hk.Linear(2)(x)),
        task=squares,
        data=Data(data, None, 2),
        optimizer=optax.sgd(rate),
        steps_per_call=steps_per_call,
        **options,
    ).trainer(devices)


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize(
    ("values", "options", "said"),
    [
        ({}, {"save_every": 5}, ""),
        ({40: 1e8}, {}, "the gradient of step 40"),
        ({40: np.nan}, {"max_consecutive_nonfinite": 3}, "step 40 is skipped"),
    ],
    ids=["save", "outlier", "skipped"],
)
def test_one_thread_at_a_time_is_in_a_data_set(
    tmp_path, one_device, caplog, values, options, said, count
):
    data = Refilled(values)
    train(
        made(one_device, data, count),
        num_steps=60,
        workdir=tmp_path,
        log_every=1,
        **options,
    )
    assert data.clashes == [] and said in caplog.text
    if said:
        assert "row 0" in caplog.text


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation set of the buffer that the training set fills."""

    data: Refilled
    num_batches: int = 3

    def batch(self, index):
        return self.data.batch(index)


@pytest.mark.parametrize("count", [1, 5])
def test_one_thread_at_a_time_is_in_what_both_sets_read(tmp_path, one_device, count):
    data, alone = Refilled(pauses=0.01), Refilled(pauses=0.0)
    trainer = made(one_device, data, count)
    both = Data(data, Evaluation(data), 2)
    trainer = dataclasses.replace(trainer.experiment, data=both).trainer(one_device)
    result = train(trainer, num_steps=30, workdir=tmp_path, eval_every=5)
    assert data.clashes == []
    expected = trainer.evaluate(result.state, Evaluation(alone))
    assert result.metrics["eval/loss"] == expected["eval/loss"]


@dataclasses.dataclass(frozen=True)
class Hanging:
    """Hangs as the batch of step 12 is made, until a save has begun."""

    saved: threading.Event = dataclasses.field(default_factory=threading.Event)
    ends: list[bool] = dataclasses.field(default_factory=list)

    def batch(self, step):
        if step == 11 and not self.ends:
            self.ends.append(self.saved.wait(30))
        return {"inputs": INPUTS[step % 64], "labels": LABELS[step % 64]}

    def tell(self, event):
        if event.what == "save" and event.step == 10:
            self.saved.set()


def test_a_save_does_not_wait_for_a_data_set_that_hangs(
    tmp_path, one_device, monkeypatch
):
    monkeypatch.setattr(resume, "BUSY_SECONDS", 0.2)
    data = Hanging()
    trainer = made(one_device, data)
    train(trainer, num_steps=20, workdir=tmp_path, save_every=10, hooks=[data.tell])
    assert data.ends == [True]


@dataclasses.dataclass(frozen=True)
class Records:
    """Batches of one file, whose position all that read it share, as slowly as a disk.

    The batch of step 12 takes three times as long as any other.
    """

    file: Any
    pauses: float
    num_batches: int = 4

    def batch(self, step):
        self.file.seek(step % 64 * INPUTS[0].nbytes)
        time.sleep(self.pauses * (3 if step == 11 else 1))
        rows = np.frombuffer(self.file.read(INPUTS[0].nbytes), np.float32)
        return {"inputs": rows.reshape(8, 4), "labels": LABELS[step % 64]}


def test_a_wait_for_a_data_set_grows_with_its_batches(
    tmp_path, one_device, monkeypatch, caplog
):
    """The batch of step 12 is made beside the evaluation of step 10."""
    monkeypatch.setattr(feed, "BUSY_SECONDS", 0.05)
    (tmp_path / "rows").write_bytes(INPUTS.tobytes())
    with open(tmp_path / "rows", "rb") as file:
        data = Records(file, 0.1)
        trainer = made(one_device, data)
        experiment = dataclasses.replace(trainer.experiment, data=Data(data, data, 2))
        trainer = experiment.trainer(one_device)
        result = train(trainer, num_steps=14, workdir=tmp_path / "run", eval_every=5)
        expected = trainer.evaluate(result.state, Records(file, 0.0))
    assert caplog.text == ""
    for row in read(tmp_path / "run" / "metrics.jsonl"):
        if "eval/loss" in row:  # The rate is 0.
            assert row["eval/loss"] == expected["eval/loss"]


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Makes the batch of a step once the loop has done the step before."""

    done: threading.Semaphore = dataclasses.field(
        default_factory=lambda: threading.Semaphore(2)
    )

    def batch(self, step):
        if threading.current_thread().name == "prefetch":
            assert self.done.acquire(timeout=60)
        return {"inputs": INPUTS[step % 64], "labels": LABELS[step % 64]}

    def tell(self, event):
        if event.what == "step":
            time.sleep(2.0 * (event.step == 3))  # As where a step compiles.
            self.done.release()


class Turns:
    """A lock that notes how long it was waited for in vain."""

    def __init__(self):
        self.lock, self.vain = threading.Lock(), []
        self.release = self.lock.release

    def acquire(self, timeout=-1):
        is_free = self.lock.acquire(timeout=timeout)
        self.vain += [timeout] * (timeout > 0 and not is_free)
        return is_free

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.release()


def test_a_data_set_that_waits_for_the_loop_is_waited_for_once_an_evaluation(
    tmp_path, one_device, monkeypatch, caplog
):
    monkeypatch.setattr(feed, "BUSY_SECONDS", 0.2)
    data = Replayed()
    trainer = made(one_device, data)
    sets = Data(data, Evaluation(Refilled(pauses=0.0), num_batches=9), 2)
    trainer = dataclasses.replace(trainer.experiment, data=sets).trainer(one_device)
    trainer.feed.reading = turns = Turns()
    options = {"eval_every": 5, "hooks": [data.tell]}
    train(trainer, num_steps=15, workdir=tmp_path, **options)
    # By halves, and not for each of 27 batches; two where the thread goes on.
    assert 2 <= len(turns.vain) <= 12 and max(turns.vain) < 10.0, turns.vain
    said = [x.getMessage() for x in caplog.records]
    assert len(said) == 1 and "batch of step" in said[0] and "hangs" in said[0]


def test_a_wait_that_passed_while_the_machine_was_suspended_is_no_hang(
    one_device, caplog
):
    """A clock went on, and the thread in the data set did not."""

    class Suspended(Turns):
        def acquire(self, timeout=-1):
            self.vain.append(timeout)
            return len(self.vain) > 1 and self.lock.acquire(timeout=timeout)

    made_feed = made(one_device, Refilled(pauses=0.0)).feed
    made_feed.reading = turns = Suspended()
    with made_feed.alone():
        assert turns.lock.locked()
    assert not turns.lock.locked() and not caplog.records


def test_the_loop_reads_a_batch_of_a_run_through_its_feed_alone():
    """Each `.batch(` in the room of a live run is of a set that no thread reads."""
    folder = Path(haiku_template.__file__).parent / "runs"
    calls = {
        (path.name, ast.unparse(node.func.value))
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "batch"
    }
    assert calls == {
        ("hooks.py", "data.evaluation"),
        ("predictions.py", "dataset"),  # Of a finished run, as the next two.
        ("trial.py", "experiment.data.train"),
        ("verification.py", "trainer.experiment.data.train"),
        ("resume.py", "dataset"),  # Holding `feed.reading`, as is tested above.
    }


class WithAttributes:
    """A data set that calls its own examples `dataset`, and its rows `rows`."""

    def __init__(self, values):
        self.values, self.dataset, self.rows = values, list(INPUTS), [1, 2]

    def batch(self, step):
        inputs = INPUTS[step % 64].copy()
        inputs[3, 1] = self.values.get(step + 1, inputs[3, 1])
        return {"inputs": inputs, "labels": LABELS[step % 64]}


@pytest.mark.parametrize(
    ("value", "most", "said"),
    [(1e8, 1, "the gradient of step 9"), (np.nan, 3, "step 9 is skipped")],
)
def test_names_of_a_users_data_set_end_no_run(
    tmp_path, one_device, caplog, value, most, said
):
    trainer = made(one_device, WithAttributes({9: value}))
    options = {"log_every": 4, "max_consecutive_nonfinite": most}
    train(trainer, num_steps=30, workdir=tmp_path, **options)
    assert said in caplog.text and "row 3" in caplog.text


def test_names_of_a_users_data_set_hide_no_error(tmp_path, one_device):
    trainer = made(one_device, WithAttributes({9: np.nan}))
    with pytest.raises(NonFiniteError, match=r"of step 9 .* row 3"):
        train(trainer, num_steps=30, workdir=tmp_path, save_every=5)
    assert (tmp_path / "nonfinite.json").exists()


class Changing:
    """Batches that are others from step 6 on."""

    def __init__(self, change):
        self.change = change

    def batch(self, step):
        batch = {"inputs": INPUTS[step % 64].copy(), "labels": LABELS[step % 64]}
        return self.change(batch) if step > 4 else batch


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda batch: {"inputs": batch["inputs"], "targets": batch["labels"]},
            ConfigError,
            r"\['labels'\] is absent in the batch of step 6",
        ),
        (
            lambda batch: batch | {"inputs": jnp.asarray(batch["inputs"])},
            PlacementError,
            r"\['inputs'\] is a JAX array on cpu:0",
        ),
    ],
    ids=["another name", "on a device"],
)
def test_other_leaves_are_refused_with_any_number_of_steps_a_call(
    tmp_path, one_device, change, error, words, count
):
    trainer = made(one_device, Changing(change), count)
    with pytest.raises(error, match=words):
        train(trainer, num_steps=20, workdir=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]


@pytest.mark.parametrize("count", [1, 40])
def test_no_batch_is_made_for_a_run_that_has_ended(tmp_path, one_device, count):
    data = Refilled(pauses=0.15)

    def fails(event):
        raise RuntimeError("of a hook")

    with pytest.raises(RuntimeError, match="of a hook"):
        train(
            made(one_device, data, count), num_steps=80, workdir=tmp_path, hooks=[fails]
        )
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


def test_the_clock_of_a_line_is_read_before_its_values_are(
    tmp_path, monkeypatch, four_devices
):
    """Their check would wait for the next call, on several devices."""
    reads, values = [], []

    def clock_read(self, step, read=Clock.read):
        reads.append(step)
        assert step not in values
        return read(self, step)

    def finite(self, steps, scalars, finite=Guards.finite):
        values.append(steps[-1])
        return finite(self, steps, scalars)

    monkeypatch.setattr(Clock, "read", clock_read)
    monkeypatch.setattr(Guards, "finite", finite)
    trainer = made(four_devices, Refilled(pauses=0.0), 5)
    train(trainer, num_steps=20, workdir=tmp_path, log_every=5)
    assert reads == [5, 10, 15, 20] and set(reads) <= set(values)
    assert len(read(tmp_path / "metrics.jsonl")) == 4
