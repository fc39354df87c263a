import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data
from haiku_template.devices import DeviceManager, Layout, transfer
from haiku_template.errors import ConfigError, StorageError
from haiku_template.models import mlp
from haiku_template.storage import checkpoint
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.training import Experiment, classification
from haiku_template.training.state import TrainState

INPUTS = np.ones((8, 5), np.float32)
DATA = Data(ArrayDataset(INPUTS, np.zeros(8, np.int32), BatchSpec(8)), None, 3)


@functools.cache
def made(num_devices=1, width=4, **options):
    """A trainer, which compiles its step once for all tests."""
    return Experiment(
        model=mlp(3, width=width),
        task=classification,
        data=DATA,
        optimizer=optax.adamw(1e-3),
        **options,
    ).trainer(DeviceManager.create("cpu", num_devices=num_devices))


@pytest.mark.slow(but="4-2-loss scale")
@pytest.mark.parametrize(
    "options",
    [{}, {"ema_decay": 0.9}, {"precision": "float16"}],
    ids=["plain", "ema", "loss scale"],
)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2)])
def test_a_state_comes_back_bitwise_on_any_devices(tmp_path, before, after, options):
    trainer = made(before, **options)
    state = trainer.init()
    batch = trainer.devices.shard(DATA.train.batch(0))
    state, _ = trainer.step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state.saved(), None)
    other = made(after, **options)
    devices = other.devices
    with Checkpoints(tmp_path) as checkpoints:
        saved = checkpoints.restore(1, other.abstract.saved())
    restored = TrainState(**saved, frozen={})
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert a.dtype == b.dtype
        assert b.devices() == set(devices.devices)
        np.testing.assert_array_equal(a, b)
    # It is as good as the state of a new run.
    other.step(restored, devices.shard(DATA.train.batch(1)))


def test_a_save_compiles_nothing(tmp_path, four_devices, caplog):
    state = four_devices.replicate({"w": np.ones((7, 24), np.float32)})
    with jax.log_compiles(), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None)
    assert checkpoints.steps == [1] and "Compiling" not in caplog.text


@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_a_save_is_of_its_step_although_the_state_is_donated_on(tmp_path, count):
    """C42: all of it, bit for bit."""
    trainer = made()
    devices = trainer.devices
    state = trainer.init()
    expected = {}
    with Checkpoints(tmp_path, keep_last=count) as checkpoints:
        for step in range(1, count + 1):
            batch = devices.shard(DATA.train.batch(step))
            state, _ = trainer.step(state, batch)
            expected[step] = devices.fetch(state.saved())
            checkpoints.save(step, state.saved(), None)
        abstract = trainer.abstract.saved()
        for step, saved in expected.items():
            restored = checkpoints.restore(step, abstract)
            jax.tree.map(np.testing.assert_array_equal, saved, restored)


def test_shares_are_saved_as_they_are_although_the_state_is_donated_on(
    tmp_path, monkeypatch, four_devices
):
    """As Orbax saves what spans processes."""
    monkeypatch.setattr(
        checkpoint,
        "spans_processes",
        lambda x: isinstance(x, jax.Array) and not x.is_fully_replicated,
    )
    layout = Layout(four_devices.devices, (("*", "data"),))

    def first():
        return {"w": jnp.ones((3, 8)), "step": jnp.zeros((), jnp.int32)}

    state = four_devices.init(first, layout=layout)
    shapes = four_devices.abstract(first, layout=layout)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    add = jax.jit(
        lambda state: jax.tree.map(lambda x: x + 1, state),
        donate_argnums=0,
        out_shardings=shardings,
    )
    with Checkpoints(tmp_path, keep_last=20) as checkpoints:
        for step in range(1, 11):
            state = add(state)
            checkpoints.save(step, state, None)
        for step in range(1, 11):
            restored = checkpoints.restore(step, shapes)
            np.testing.assert_array_equal(restored["w"], np.full((3, 8), 1 + step))
            four_devices.check(restored, layout)


def test_the_last_and_the_best_stay(tmp_path):
    state = {"w": jnp.ones(3)}
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: None, 5: 3.0, 6: 2.0}
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state, loss and {"eval/loss": loss})
    with Checkpoints(tmp_path, keep_last=2, keep_best=1) as checkpoints:
        assert checkpoints.steps == [2, 5, 6]
        assert (checkpoints.latest, checkpoints.best) == (6, 2)


@pytest.mark.parametrize(("keep_last", "keep_best"), [(9, 1), (2, 0)])
def test_a_save_reads_no_metrics_where_none_tell_what_to_remove(
    tmp_path, monkeypatch, keep_last, keep_best
):
    reads, real = [], checkpoint.metrics_of
    monkeypatch.setattr(checkpoint, "metrics_of", lambda x: reads.append(x) or real(x))
    options = {"keep_last": keep_last, "keep_best": keep_best}
    with Checkpoints(tmp_path, **options) as checkpoints:
        for step in range(1, 5):
            checkpoints.save(step, {"step": np.int32(step)}, {"eval/loss": 1.0})
    assert not reads
    assert checkpoints.steps == [1, 2, 3, 4][-keep_last:]


def left(values, keep_last, keep_best, best_mode, folder):
    """Steps that stay of saves with these metrics, and the best."""
    options = {"keep_last": keep_last, "keep_best": keep_best, "best_mode": best_mode}
    with Checkpoints(folder, **options) as checkpoints:
        kept = {}
        for step, value in enumerate(values, 1):
            kept[step] = {} if value is None else {"eval/loss": value}
            kept = {x: kept[x] for x in sorted(checkpoints.preserved(kept))}
        return [*kept], next(iter(checkpoints.best_first(kept)), None)


@pytest.mark.parametrize("best_mode", ["min", "max"])
def test_of_equals_the_earliest_is_the_best_whatever_is_kept(tmp_path, best_mode):
    """All runs of five evaluations with two values, one of which may be missing."""
    better = min if best_mode == "min" else max
    for values in itertools.product(
        [0.5, 1.0], [0.5, 1.0], *[[0.5, 1.0, np.nan, None]] * 3
    ):
        known = [x for x in values if x in (0.5, 1.0)]
        first = 1 + values.index(better(known))
        order = sorted(set(known), reverse=best_mode == "max")
        ranked = [i + 1 for x in order for i, y in enumerate(values) if y == x]
        for keep_last, keep_best in itertools.product((1, 2, 3), (1, 2, 3)):
            steps, best = left(values, keep_last, keep_best, best_mode, tmp_path)
            assert best == first
            latest = range(6 - keep_last, 6)
            assert steps == sorted({*latest, *ranked[:keep_best]})


@pytest.mark.parametrize("keep_last", [1, 2])
def test_of_equals_the_earliest_stays_on_disk(tmp_path, keep_last):
    state = {"w": jnp.ones(())}
    for steps in (range(1, 4), range(4, 6)):
        with Checkpoints(tmp_path, keep_last=keep_last, keep_best=1) as checkpoints:
            for step in steps:
                checkpoints.save(step, state, {"eval/loss": 0.5})
    with Checkpoints(tmp_path, keep_last=keep_last, keep_best=1) as checkpoints:
        assert (checkpoints.best, checkpoints.steps[0]) == (1, 1)
        assert len(checkpoints.steps) == 1 + keep_last


def test_best_can_be_the_highest(tmp_path):
    options = {"best_metric": "eval/accuracy", "best_mode": "max", "keep_best": 1}
    with Checkpoints(tmp_path, keep_last=1, **options) as checkpoints:
        for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.2], 1):
            checkpoints.save(step, {"w": jnp.ones(3)}, {"eval/accuracy": accuracy})
        checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best) == ([2, 4], 2)


@pytest.mark.parametrize(
    ("accuracies", "step"),
    [
        ([0.1, 0.9, 0.5, 0.2, 0.8, 0.3], 2),
        ([0.1, 0.9, 0.9, 0.2, 0.8, 0.3], None),  # As good as what is saved.
        ([0.1, 0.2, 0.5, 0.2, 0.8, 0.9], None),
        ([0.1, np.nan, 0.5, 0.2, None, 0.9], None),
        ([0.1, 0.2, 0.9], None),  # Of lines that were lost.
    ],
)
def test_a_better_evaluation_that_is_not_saved_is_named(tmp_path, accuracies, step):
    options = {"best_metric": "eval/accuracy", "best_mode": "max"}
    rows = [{"step": n, "eval/accuracy": x} for n, x in enumerate(accuracies, 1)]
    rows += [{"step": n, "train/loss": 0.1} for n in range(1, 7)]
    with Checkpoints(tmp_path, keep_last=1, keep_best=1, **options) as checkpoints:
        assert not [*checkpoints.unsaved_best(rows)]  # Nothing is saved at all.
        for n in (3, 6):
            accuracy = dict(enumerate(accuracies, 1)).get(n, 0.95)
            checkpoints.save(n, {"w": jnp.ones(3)}, {"eval/accuracy": accuracy})
        checkpoints.wait()
        text = f"eval/accuracy 0.9 at step {step}, not saved"
        lines = [*checkpoints.unsaved_best(rows)]
        assert [text in line for line in lines] == [True] * (step is not None)
    with Checkpoints(tmp_path, keep_last=1, keep_best=0, **options) as checkpoints:
        assert not [*checkpoints.unsaved_best(rows)]


@pytest.mark.parametrize("which", ["latest", "best", "3"])
def test_a_run_without_a_checkpoint_says_when_one_is_saved(tmp_path, which):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="has no checkpoint yet; its run saves one"):
        checkpoint.restore(tmp_path, which, lambda *_: None)


def test_another_model_is_refused_with_every_difference(tmp_path):
    trainer = made(ema_decay=0.9)
    with Checkpoints(tmp_path) as checkpoints:
        state = trainer.init()._replace(step=jnp.int32(3))
        checkpoints.save(3, state.saved(), None)
    other = made(width=7)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(StorageError) as caught:
            checkpoints.restore(3, other.abstract.saved())
        words = str(caught.value)
        assert "nothing was loaded" in words
        assert (
            "ema_params/mlp/~/linear_0/w: 'float32[5, 4]' there, 'absent' now" in words
        )
        shapes = "params/mlp/~/linear_0/w: 'float32[5, 4]' there, 'float32[5, 7]' now"
        assert shapes in made_long(checkpoints, other)
        with pytest.raises(StorageError, match=r"no checkpoint of step 9.*\[3\]"):
            checkpoints.restore(9, other.abstract.saved())


def test_the_state_of_another_optimizer_is_refused_with_what_can_be_done(tmp_path):
    saved = {"opt_state": {"mu": jnp.ones(3)}, "params": {"w": jnp.ones(3)}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved, None)
        checkpoints.wait()
        for field, is_said in (("opt_state", True), ("params", False)):
            other = saved | {field: {"other": jnp.ones(3)}}
            with pytest.raises(StorageError, match="does not fit") as caught:
                checkpoints.restore(1, other)
            assert ("starts from a run's parameters" in str(caught.value)) == is_said


def made_long(checkpoints, trainer):
    """The message without the part that differs in structure."""
    abstract = trainer.abstract
    abstract = abstract._replace(ema_params=abstract.params)
    with pytest.raises(StorageError) as caught:
        checkpoints.restore(3, abstract.saved())
    return str(caught.value)


def test_another_dtype_is_refused_and_not_cast(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, None)
        checkpoints.wait()
        wanted = {"w": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
        with pytest.raises(StorageError, match=r"'float32\[3\]' there, 'bfloat16"):
            checkpoints.restore(1, wanted)


def test_a_metric_that_is_not_a_number_is_never_the_best(tmp_path):
    losses = {1: 0.5, 2: float("nan"), 3: 0.9}
    with Checkpoints(tmp_path, keep_last=1, keep_best=1) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, {"w": jnp.ones(3)}, {"eval/loss": loss})
        checkpoints.wait()
        assert (checkpoints.steps, checkpoints.best) == ([1, 3], 1)


def test_only_the_process_that_saves_removes_what_a_killed_save_left(tmp_path):
    left = tmp_path / "3.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "half").touch()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps == [] and left.exists()
    with Checkpoints(tmp_path, cleanup=True) as checkpoints:
        assert checkpoints.steps == [] and not left.exists()


def test_a_save_keeps_no_view_of_what_is_in_the_hosts_memory(devices):
    """A GPU's next step could not donate it while the writing thread has one."""
    leaf = devices.replicate(np.arange(8.0, dtype=np.float32))
    leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
    view = np.asarray(leaf.addressable_data(0))
    assert np.shares_memory(view, np.asarray(leaf.addressable_data(0)))
    (saved,) = checkpoint._on_host([leaf])
    assert not np.shares_memory(view, saved)
    np.testing.assert_array_equal(saved, view)


def test_what_is_sharded_in_the_hosts_memory_is_copied_once(four_devices):
    layout = Layout(four_devices.devices, (("*", "data"),))
    leaf = four_devices.place(np.arange(8.0, dtype=np.float32), layout)
    leaf = jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
    array = np.asarray(leaf)  # Joined of its shares: no view of them.
    assert transfer.own(array, leaf) is array
