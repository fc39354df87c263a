"""What may happen amid a call of several steps: errors, NaN, evaluation, dispatch."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.errors import NonFiniteError
from haiku_template.preflight.budget import STEPS_PER_CALL, choose_steps_per_call
from haiku_template.runs import scalars, train
from tests.runs import changed
from tests.training.test_calls import (
    EVALUATION,
    INPUTS,
    LABELS,
    Set,
    lines,
    made,
)


@pytest.mark.slow(but="alone")
@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "hook"])
def test_no_step_leaves_the_fast_dispatch_path(tmp_path, devices, count, watched):
    """After the first ten, with logs amid them: JAX's C++ path is ten times as fast."""
    trainer, misses = changed(made(devices, "mlp", count)), {}
    advance = trainer.advance

    with test_util.count_pjit_cpp_cache_miss() as count_misses:

        def counted(state, steps, arrays):
            misses[steps[0]] = count_misses()  # Before it.
            return advance(state, steps, arrays)

        trainer.advance = counted  # Of this trainer alone.
        hooks = [lambda event: None] if watched else []
        train(trainer, num_steps=230, workdir=tmp_path, log_every=30, hooks=hooks)
    steps = [step for step in misses if step > 10]
    assert len(steps) >= (8 if count > 1 and not watched else 219)
    # Programs that read norms of 16 calls in turn are compiled at the first log.
    assert misses[steps[-1]] - misses[steps[0]] <= 2, misses


def saved(workdir):
    return sorted(int(x.name) for x in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("step", [8, 11, 14], ids=["first", "middle", "last"])
def test_a_nan_anywhere_in_a_call_is_named_and_never_saved(tmp_path, one_device, step):
    trainer = changed(made(one_device, "mlp", 7), data=Data(Set(nan=step), None, 3))
    run = {"num_steps": 60, "workdir": tmp_path, "log_every": None}
    with pytest.raises(NonFiniteError, match=rf"loss of step {step} .*of step {step} "):
        train(trainer, **run, save_every=21)
    assert saved(tmp_path) == []
    with pytest.raises(NonFiniteError, match="the newest is of step 6"):
        train(trainer, **run, save_every=6, keep_last=9)
    assert max(saved(tmp_path)) == 6 * ((step - 1) // 6)


class Broken(ArrayDataset):
    """A data set with one batch that cannot be made."""

    def batch(self, step):
        if step + 1 == 18:
            raise OSError("the disk is gone")
        return super().batch(step)


@pytest.mark.parametrize("count", [1, 7])
def test_steps_before_a_batch_that_fails_are_made(tmp_path, one_device, count):
    data = Data(Broken(INPUTS, LABELS, BatchSpec(8)), EVALUATION, 3)
    trainer = changed(made(one_device, "mlp", count), data=data)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train(trainer, num_steps=40, workdir=tmp_path, log_every=1, save_every=17)
    assert caught.value.__notes__ == ["The batch is that of step 18."]
    assert saved(tmp_path) == [17]
    assert [row["step"] for row in lines(tmp_path)] == list(range(1, 18))


def of_many_dtypes(state, batch, rng, axis_name):
    del rng

    def loss(params):
        outputs = batch["inputs"].reshape(len(batch["labels"]), -1) @ params["w"]
        return jnp.square(outputs[:, 0] - batch["labels"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    if axis_name is not None:
        value, grads = jax.lax.pmean((value, grads), axis_name)
    params = jax.tree.map(lambda p, g: p - 1e-3 * g, state.params, grads)
    return state._replace(params=params), {
        "loss": value,
        "is_even": state.step % 2 == 0,
        "small": state.step.astype(jnp.uint8),
        "step": state.step,
        "half": value.astype(jnp.bfloat16),
        "float16": (value / 64).astype(jnp.float16),
        "number": 3.5,
        "count": np.int64(4),
    }


def test_scalars_of_any_dtype_come_back_from_each_step(tmp_path, devices):
    rows = []
    for count in (1, 7):
        trainer = changed(
            made(devices, "mlp", count),
            model=None,
            init=lambda rng, batch: {"params": {"w": jnp.ones((64, 1)) * 0.01}},
            step=of_many_dtypes,
            data=Data(ArrayDataset(INPUTS, LABELS, BatchSpec(8)), None, 3),
            optimizer=None,
            schedule=None,
            task=None,
        )
        workdir = tmp_path / str(count)
        train(trainer, num_steps=20, workdir=workdir, log_every=3)
        rows.append(lines(workdir))
    one, several = rows
    assert [row["step"] for row in one] == [*range(3, 20, 3), 20]
    for first, second in zip(one, several, strict=True):
        assert first == pytest.approx(second, rel=1e-6)
        step = first["step"] - 1
        facts = {"is_even": step % 2 == 0, "small": step, "step": step}
        facts |= {"number": 3.5, "count": 4}
        assert {k: second[f"train/{k}"] for k in facts} == facts


def test_early_stopping_ends_the_same_run_however_calls_are_cut(tmp_path, one_device):
    """With evaluations and saves at steps that no number of steps divides."""
    shifted = EvaluationSet(INPUTS + 1, LABELS, 16)
    data = Data(
        ArrayDataset(INPUTS, LABELS, BatchSpec(8)),
        EVALUATION,
        3,
        evaluations={"shifted": shifted},
    )
    ends = []
    for count in (1, 50):
        trainer = changed(made(one_device, "mlp", count), data=data)
        result = train(
            trainer,
            num_steps=90,
            workdir=tmp_path / str(count),
            log_every=None,
            eval_every=11,
            save_every=3,
            stop_when=lambda rows: rows[-1]["step"] >= 33,
        )
        ends.append((int(result.state.step), lines(tmp_path / str(count))))
        assert "eval/shifted/loss" in result.metrics
    for step, rows in ends:
        assert step == 33 and [row["step"] for row in rows] == [11, 22, 33, 33]
        for first, second in zip(rows, ends[0][1], strict=True):
            assert first == pytest.approx(second, rel=1e-5)


class Huge(ArrayDataset):
    """Batches whose gradients overflow float16 at some steps, first and last ones."""

    def batch(self, step):
        batch = super().batch(step)
        scale = 3e4 if step + 1 in (8, 11, 14, 20) else 1
        return batch | {"inputs": batch["inputs"] * np.float32(scale)}


def test_steps_that_float16_skips_are_counted_in_each_call(tmp_path, one_device):
    rows = []
    for count in (1, 7):
        trainer = changed(
            made(one_device, "mlp", count),
            precision="float16",
            data=Data(Huge(INPUTS, LABELS, BatchSpec(8)), None, 3),
        )
        train(trainer, num_steps=40, workdir=tmp_path / str(count), log_every=10)
        rows.append(
            [
                (row["step"], row["train/skipped_steps"], row["train/loss_scale"])
                for row in lines(tmp_path / str(count))
            ]
        )
    assert rows[0] == rows[1]
    assert rows[0][-1][1] >= 4


def convolutional(channels):
    def logits(images):
        x = jax.nn.relu(hk.Conv2D(channels, 3)(images))
        return hk.Linear(3)(hk.Flatten()(x))

    return logits


@pytest.mark.parametrize(("channels", "count"), [(4, STEPS_PER_CALL), (2**15, 1)])
def test_small_convolutions_are_put_in_a_loop_of_a_cpu(
    tmp_path, devices, channels, count
):
    model = hk.without_apply_rng(hk.transform(convolutional(channels)))
    trainer = changed(made(devices), model=model, steps_per_call=None)
    assert choose_steps_per_call(trainer, tmp_path).feed.steps_per_call == count


@pytest.mark.parametrize("count", [1, 50])
def test_scalars_of_as_many_steps_stay_on_the_devices(
    tmp_path, one_device, monkeypatch, count
):
    """Not of as many calls, whose tables would fill a device."""
    monkeypatch.setattr(scalars, "PENDING", 100)
    note, numbers = scalars.StepScalars.note, []

    def noted(self, steps, values):
        note(self, steps, values)
        stacked = [len(x) for calls, *_ in self.stacks for x in calls]
        numbers.append(sum(stacked) + sum(len(x) for x, _ in self.pending))

    monkeypatch.setattr(scalars.StepScalars, "note", noted)
    trainer = made(one_device, "mlp", count)
    train(trainer, num_steps=400, workdir=tmp_path, log_every=None)
    assert 100 <= max(numbers) <= 2 * (100 + count)  # Stacked and pending ones.
