"""Properties of whole runs, in this process."""

import functools
import importlib
import json
import signal
import threading
import time

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits, digits_resnet
from haiku_template import published
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    PlacementError,
    ReplicaError,
)
from haiku_template.models import mlp, resnet
from haiku_template.preflight.checks import check_evaluation, check_parts
from haiku_template.runs import early_stop, train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from haiku_template.training.tasks import as_task
from tests.runs import with_data, with_step

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(50, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 50).astype(np.int32)


@functools.cache
def plain(num_devices):
    """The trainer that most tests run: what it compiled serves them all."""
    return fresh(num_devices)


def made(num_devices=1, **options):
    return fresh(num_devices, **options) if options else plain(num_devices)


def fresh(num_devices, train_inputs=INPUTS, model=None, **options):
    data = Data(
        ArrayDataset(train_inputs, LABELS, BatchSpec(8)),
        EvaluationSet(INPUTS, LABELS, 16),
        3,
    )
    return Experiment(
        model=model or mlp(3, width=8),
        data=data,
        **{"task": classification, "optimizer": optax.adam(1e-3)} | options,
    ).trainer(DeviceManager.create("cpu", num_devices=num_devices))


def numbers(workdir, prefixes=("train/", "eval/")):
    """What metrics.jsonl says, less what depends on the machine's speed."""
    return [
        {k: v for k, v in row.items() if k == "step" or k.startswith(prefixes)}
        for row in read(workdir / "metrics.jsonl")
    ]


def assert_same(a, b, atol=0.0):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=atol)


def stop_at(trainer, step):
    """The trainer, but a signal arrives while it computes the step."""
    calls = iter(range(1, 10_000))

    def train_step(state, batch):
        if next(calls) == step:
            signal.raise_signal(signal.SIGTERM)
        return trainer.step(state, batch)

    return with_step(trainer, train_step)


EVERY = {"log_every": 1, "eval_every": 5, "save_every": 5}


@pytest.mark.usefixtures("with_report")
def test_a_run_leaves_what_it_promises(tmp_path, capsys):
    result = train(made(4), num_steps=10, workdir=tmp_path, config={"a": 1}, **EVERY)
    assert int(result.state.step) == 10
    rows = read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10]
    assert result.metrics["eval/loss"] == rows[-1]["eval/loss"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    env = json.loads((tmp_path / "env.json").read_text())
    assert env["num_devices"] == 4 and env["packages"]["jax"] == jax.__version__
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"5", "10"}
    log = (tmp_path / "train.log").read_text()
    shown = capsys.readouterr().out
    for words in ("4 x cpu", "mlp/~/linear_0/w", "64x8", "cpu:0-3 replicated"):
        assert words in log and words in shown
    assert "8 examples, 2 on each device" in shown
    assert "step     10/10  eval loss" in shown and "step     10/10  loss" in shown


@pytest.mark.slow(but="4")
@pytest.mark.parametrize("num_devices", [1, 4])
def test_stopped_and_resumed_is_bitwise_uninterrupted(tmp_path, num_devices):
    options = {"ema_decay": 0.9, "model": resnet_of(num_devices), "steps_per_call": 1}
    trainer = made(num_devices, **options)
    whole = train(trainer, num_steps=12, workdir=tmp_path / "a", **EVERY)
    for stop in (3, 4):  # In the first interval, and after the first checkpoint.
        with pytest.raises(Interrupted, match="SIGTERM.*saved") as caught:
            stopped = stop_at(trainer, stop)
            train(stopped, num_steps=12, workdir=tmp_path / "b", **EVERY)
        assert caught.value.exit_code == 75
    resumed = train(
        made(num_devices, **options), num_steps=12, workdir=tmp_path / "b", **EVERY
    )
    assert_same(whole.state, resumed.state)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


def resnet_of(num_devices):
    axis_name = DeviceManager.create("cpu", num_devices=num_devices).axis_name
    return resnet(3, axis_name, channels=(4,), blocks=1)


@pytest.mark.slow
def test_a_run_that_moves_between_devices_agrees(tmp_path):
    whole = train(made(1), num_steps=30, workdir=tmp_path / "a", log_every=1)
    for num_devices, stop in ((4, 10), (1, 10)):
        with pytest.raises(Interrupted):
            trainer = stop_at(made(num_devices), stop)
            train(trainer, num_steps=30, workdir=tmp_path / "b", log_every=1)
    moved = train(made(2), num_steps=30, workdir=tmp_path / "b", log_every=1)
    assert_same(whole.state.params, moved.state.params, atol=1e-5)
    for a, b in zip(numbers(tmp_path / "a"), numbers(tmp_path / "b"), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def run_config(module, num_devices, num_steps, workdir, **changes):
    config = module.get_config()
    config.update(changes)
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    # The schedule keeps the length that the config gives it.
    train(trainer, num_steps=num_steps, workdir=workdir, log_every=1)
    return [row["train/loss"] for row in numbers(workdir) if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("module", "num_steps", "atol"), [(digits, 200, 1e-5), (digits_resnet, 20, 1e-4)]
)
def test_configs_have_the_same_losses_on_four_devices(
    tmp_path, module, num_steps, atol
):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, fun_name="", **__: (
            compiled.append(fun_name) if "backend_compile" in name else None
        )
    )
    one = run_config(module, 1, num_steps, tmp_path / "1")
    four = run_config(module, 4, num_steps, tmp_path / "4")
    assert len(one) == num_steps
    np.testing.assert_allclose(one, four, rtol=0, atol=atol)
    # Each once on one device and once on four, where pmap is inside.
    assert compiled.count("jit(train_step)") == 2
    assert compiled.count("jit(eval_step)") == 2
    assert "jit(_fun)" not in compiled


@pytest.mark.usefixtures("optimized")
@pytest.mark.long
def test_three_thousand_steps_on_eight_simulated_devices_do_not_hang(tmp_path):
    result = train(
        made(8), num_steps=3000, workdir=tmp_path, log_every=500, eval_every=500
    )
    assert int(result.state.step) == 3000


def test_nothing_is_left_running(tmp_path):
    before = threading.active_count()
    with pytest.raises(Interrupted):
        train(stop_at(made(), 5), num_steps=1000, workdir=tmp_path)
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert threading.active_count() <= before + 4  # Orbax keeps a pool.


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    bad = INPUTS.copy()
    bad[:] = np.nan
    with pytest.raises(
        NonFiniteError,
        match=r"loss of step 1 is .*batch of step 1 .*\['inputs'\], row 0",
    ) as caught:
        train(made(train_inputs=bad), num_steps=20, workdir=tmp_path, log_every=5)
    assert caught.value.exit_code == 70
    assert not any((tmp_path / "checkpoints").iterdir())
    assert read(tmp_path / "metrics.jsonl") == []


def test_a_norm_without_the_axis_is_said_before_step_0(tmp_path):
    def forward(inputs, is_training):
        norm = hk.BatchNorm(True, True, 0.9, name="own_norm")
        return hk.Linear(3)(norm(hk.Flatten()(inputs), is_training))

    model = hk.transform_with_state(forward)
    with pytest.raises(PlacementError, match="BatchNorm own_norm.*cross_replica_axis"):
        train(made(4, model=model), num_steps=20, workdir=tmp_path)
    assert not any(tmp_path.iterdir())
    train(made(1, model=model), num_steps=1, workdir=tmp_path)


def losses_of(transform, forward, folder):
    """Last losses on one device and on four, whose axis `forward` takes first."""
    for count, axis_name in ((1, None), (4, "data")):
        model = transform(functools.partial(forward, axis_name))
        trainer, workdir = made(count, model=model), folder / str(count)
        yield train(trainer, num_steps=4, workdir=workdir).metrics["train/loss"]


@pytest.mark.parametrize("axis", [None, "i"])
def test_norms_of_code_that_stays_average_over_the_devices(tmp_path, axis):
    """Published norms name no axis, or that of their own `jax.pmap`."""

    def forward(axis_name, inputs, is_training):
        with published.norms_over(axis_name):
            norm = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis)
        return hk.Linear(3)(norm(hk.Flatten()(inputs), is_training))

    one, four = losses_of(hk.transform_with_state, forward, tmp_path)
    assert four == pytest.approx(one, rel=1e-5)


def test_collectives_of_code_that_stays_are_over_the_devices(tmp_path):
    """As in jaxline's losses; the context ends with it, and names no other axis."""

    def centered(inputs):
        features = hk.Linear(8)(hk.Flatten()(inputs))
        count = len(features) * jax.lax.psum(1, "i")  # A number of Python's.
        assert isinstance(count, int)
        every = jax.lax.all_gather(features, "i", tiled=True)
        assert len(every) == count
        mean = jax.lax.pmean({"all": features.mean(axis=0)}, axis_name="i")["all"]
        return hk.Linear(3)(features - (mean + every.mean(axis=0)) / 2)

    def forward(axis_name, inputs):
        with published.collectives_over(axis_name, "i"):
            return centered(inputs) + 0 * jax.lax.axis_index("i")

    one, four = losses_of(hk.transform, forward, tmp_path)
    assert four == pytest.approx(one, rel=1e-5)
    with pytest.raises(NameError, match="unbound axis name: i"):
        jax.make_jaxpr(lambda x: jax.lax.pmean(x, "i"))(1.0)
    with published.collectives_over(None, "i"), pytest.raises(NameError, match="j"):
        jax.make_jaxpr(lambda x: jax.lax.pmean(x, "j"))(1.0)


# As networks have it whose authors import what they call.
PMEAN = """
from jax.lax import pmean as mean_of

def center(features):
    return features - mean_of(features.mean(axis=0), "i")
"""


def test_collectives_that_code_imported_by_name_are_over_the_devices(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_center.py").write_text(PMEAN)
    theirs = importlib.import_module("their_center")

    def forward(axis_name, inputs):
        with published.collectives_over(axis_name, "i"):
            return hk.Linear(3)(theirs.center(hk.Flatten()(inputs)))

    one, four = losses_of(hk.transform, forward, tmp_path)
    assert four == pytest.approx(one, rel=1e-5)
    assert theirs.mean_of is jax.lax.pmean


def test_a_collective_of_a_backward_function_is_over_the_devices_around_the_gradient():
    @jax.custom_vjp
    def theirs(x):
        return x

    theirs.defvjp(lambda x: (x, None), lambda _, grad: (jax.lax.pmean(grad, "i"),))
    with published.collectives_over(None, "i"):
        assert jax.grad(theirs)(2.0) == 1
    with pytest.raises(NameError, match="axis name: i"):
        jax.grad(theirs)(2.0)


def test_a_codebook_without_state_needs_no_axis(tmp_path):
    def forward(inputs):
        quantized = hk.nets.VectorQuantizer(4, 8, 0.25)(hk.Linear(4)(inputs), True)
        return hk.Linear(3)(quantized["quantize"])

    model = hk.transform(lambda inputs: forward(hk.Flatten()(inputs)))
    result = train(made(4, model=model), num_steps=1, workdir=tmp_path)
    assert int(result.state.step) == 1


def test_a_norm_whose_statistics_are_fixed_needs_no_axis(tmp_path):
    """A published trunk, whose code has none, trains its head on several devices."""

    def forward(inputs, is_training):
        norm = hk.BatchNorm(True, True, 0.9, eps=1.0, name="own_norm")
        return hk.Linear(3)(norm(hk.Flatten()(inputs), hk.running_init()))

    model = hk.transform_with_state(forward)
    results = [
        train(made(n, model=model), num_steps=4, workdir=tmp_path / str(n))
        for n in (1, 4)
    ]
    for a, b in zip(*(jax.tree.leaves(x.state) for x in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def mean_keeper(inputs, is_training):
    """Keeps a mean of its own rows, in a state that no name tells."""
    x = hk.Flatten()(inputs)
    hk.set_state("mean", jnp.mean(x) + hk.get_state("mean", [], init=jnp.zeros))
    return hk.Linear(3)(x)


def test_a_state_that_is_not_averaged_stops_the_run_at_its_first_step(tmp_path):
    model = hk.transform_with_state(mean_keeper)
    with pytest.raises(PlacementError, match="net_state") as caught:
        train(made(4, model=model), num_steps=20, workdir=tmp_path)
    assert caught.value.exit_code == 64
    assert read(tmp_path / "metrics.jsonl") == []


def with_state_after(trainer, step, change):
    """The trainer, but `change` makes another state of that of a step."""
    calls = iter(range(1, 10_000))

    def train_step(state, batch):
        state, scalars = trainer.step(state, batch)
        return (change(state) if next(calls) == step else state), scalars

    return with_step(trainer, train_step)


def on_one_device(state, index, value):
    """The state with another value in one device's copy of one leaf."""
    leaf = state.params["mlp/~/linear_1"]["b"]
    copies = [x.data for x in leaf.addressable_shards]
    copies[index] = copies[index].at[0].set(value)
    wrong = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)
    params = {k: dict(v) for k, v in state.params.items()}
    params["mlp/~/linear_1"]["b"] = wrong
    return state._replace(params=params)


@pytest.mark.parametrize("value", [7.0, np.nan])
def test_a_device_that_diverges_is_named_and_has_its_own_exit_code(tmp_path, value):
    def change(state):
        with jax.transfer_guard("allow"):
            return on_one_device(state, 2, value)

    trainer = with_state_after(made(4), 4, change)
    with pytest.raises(
        ReplicaError, match=r"linear_1'\]\['b'\].*another on cpu:2"
    ) as caught:
        train(trainer, num_steps=4, workdir=tmp_path, log_every=100)
    assert caught.value.exit_code == 71
    assert not any((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_huge_finite_value_is_found_before_a_save(tmp_path, num_devices):
    """Its gradient is finite, and its square freezes Adam for good."""
    inputs = np.array(INPUTS[:8])
    inputs[3, 3, 3, 0] = 1e25

    class Once:
        def batch(self, step):
            rows = inputs if step == 6 else INPUTS[:8]
            return {"inputs": rows.copy(), "labels": LABELS[:8].copy()}

    trainer = made(num_devices)
    trainer = with_data(trainer, train=Once())
    device = f"cpu:{3 * num_devices // 8}"
    words = r"opt_state.*nu.*infinite.*batch of step 7 .*1e\+25 .*\['inputs'\], row 3.*"
    with pytest.raises(NonFiniteError, match=words + device) as caught:
        train(trainer, num_steps=30, workdir=tmp_path, log_every=10, save_every=5)
    assert caught.value.exit_code == 70
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]


def test_a_network_state_that_is_nan_is_not_saved(tmp_path):
    def forward(inputs, is_training):
        hk.set_state("log", jnp.log(hk.get_state("log", [], init=jnp.zeros) - 1))
        return hk.Linear(3)(hk.Flatten()(inputs))

    with pytest.raises(
        NonFiniteError, match=r"step 1 .*net_state\['~'\]\['log'\] \(NaN"
    ):
        train(
            made(model=hk.transform_with_state(forward)), num_steps=1, workdir=tmp_path
        )
    assert not any((tmp_path / "checkpoints").iterdir())


def test_leaves_that_are_infinite_from_the_start_may_stay_so(tmp_path):
    def forward(inputs, is_training):
        hk.get_state("lowest", [], init=lambda *_: jnp.asarray(jnp.inf))
        return hk.Linear(3)(hk.Flatten()(inputs))

    model = hk.transform_with_state(forward)
    train(made(model=model), num_steps=2, workdir=tmp_path)
    train(made(model=model), num_steps=4, workdir=tmp_path, save_every=1)


class HeldOut:
    """The evaluation set of these tests, in the hands of a user."""

    num_batches = 4

    def __init__(self, inputs=INPUTS, fails=False):
        self.set = EvaluationSet(inputs, LABELS, 16)
        self.fails = fails

    def batch(self, index):
        if self.fails and index == 2:
            raise OSError("the disk is gone")
        return self.set.batch(index)


def evaluated_on(dataset, **options):
    return with_data(made(**options), evaluation=dataset)


def test_a_finite_state_is_saved_before_its_evaluation_ends_the_run(tmp_path):
    """What was trained is not lost for a value of the data to evaluate on."""
    inputs = np.array(INPUTS)
    inputs[20] = np.nan
    with pytest.raises(NonFiniteError, match="evaluation's loss after step 2 is"):
        train(evaluated_on(HeldOut(inputs)), num_steps=2, workdir=tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]
    train(evaluated_on(HeldOut()), num_steps=2, workdir=tmp_path)  # It is mended.
    assert read(tmp_path / "metrics.jsonl")[-1]["eval/loss"] > 0


def test_a_fault_in_evaluation_costs_no_step(tmp_path):
    """It is saved, and the next start evaluates it and does nothing else."""
    with pytest.raises(OSError, match="the disk is gone"):
        train(evaluated_on(HeldOut(fails=True)), num_steps=4, workdir=tmp_path / "a")
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["4"]
    train(evaluated_on(HeldOut()), num_steps=4, workdir=tmp_path / "a")
    train(evaluated_on(HeldOut()), num_steps=4, workdir=tmp_path / "b")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")


@pytest.mark.parametrize(("batch_size", "said"), [(51, True), (50, False)])
def test_a_batch_larger_than_the_training_set_is_warned_of(batch_size, said, caplog):
    data = ArrayDataset(INPUTS, LABELS, BatchSpec(batch_size))
    check_parts(with_data(made(), train=data), "eval/loss")
    words = "a batch has 51 examples and the training set 50, so that some are in a"
    assert (words in caplog.text) is said


@pytest.mark.parametrize(("save_every", "said"), [(None, True), (2, False)])
def test_a_run_names_its_best_evaluation_if_it_is_not_saved(
    tmp_path, capsys, save_every, said
):
    """A loss that falls is best, by `max`, in the first one."""
    every = {"eval_every": 2, "save_every": save_every}
    train(made(), num_steps=6, workdir=tmp_path, best_mode="max", **every)
    assert ("at step 2, not saved" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("ema_decay", "num_steps", "share", "less"),
    [
        (0.9999, 2000, "82 %", "0.997"),
        (0.999, 2000, "14 %", "0.997"),
        (0.999, 2400, None, None),
        (0.99999, 120_000, "30 %", "0.99996"),
        (0.99, 100, "37 %", "0.95"),
        (0.99, 99, None, None),  # A trial.
        (None, 2000, None, None),
    ],
)
def test_averages_of_the_first_parameters_are_warned_of(
    ema_decay, num_steps, share, less, caplog
):
    trainer = made(ema_decay=ema_decay)
    check_parts(trainer, "eval/loss", num_steps=num_steps)
    words = f"are still {share} of the first parameters; {less} leaves 1 % or less"
    assert (words in caplog.text) is (share is not None)
    assert ("first parameters" in caplog.text) is (share is not None)
    assert less is None or float(less) ** num_steps <= 0.01


def test_evaluation_is_traced_before_step_0(tmp_path):
    def task(outputs, batch):
        if len(batch["labels"]) == 16:
            raise TypeError("only in evaluation")
        return classification(outputs, batch)

    trainer = made(task=task)
    with pytest.raises(TypeError, match="only in evaluation"):
        train(trainer, num_steps=2, workdir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_model_that_draws_in_its_forward_pass_is_evaluated(tmp_path):
    def forward(inputs, is_training):
        x = hk.Flatten()(inputs)
        return hk.Linear(3)(x + jax.random.normal(hk.next_rng_key(), x.shape))

    result = train(made(4, model=hk.transform(forward)), num_steps=2, workdir=tmp_path)
    assert np.isfinite(result.metrics["eval/loss"])


def test_data_that_fails_in_the_background_stops_the_run_with_its_error(tmp_path):
    class Failing:
        def batch(self, step):
            if step == 7:
                raise OSError("the disk is gone")
            return {"inputs": INPUTS[:8].copy(), "labels": LABELS[:8].copy()}

    trainer = with_data(made(), train=Failing())
    with pytest.raises(OSError, match="the disk is gone"):
        train(trainer, num_steps=20, workdir=tmp_path, log_every=1)
    assert numbers(tmp_path)[-1]["step"] == 7


def test_an_implicit_copy_in_the_loop_is_an_error(tmp_path):
    trainer = made()
    step = trainer.step
    trainer = with_step(
        trainer, lambda state, batch: step(state, jax.device_get(batch))
    )
    words = r"the batch's \['inputs'\] .* is on host \(NumPy\)"
    with pytest.raises(PlacementError, match=words):
        train(trainer, num_steps=3, workdir=tmp_path)


def test_a_numpy_leaf_in_the_state_is_an_error_that_names_it(tmp_path, devices):
    trainer = made(devices.num_devices)
    step = trainer.step

    def train_step(state, batch):
        state, scalars = step(state, batch)
        params = state.params | {
            "mlp/~/linear_0": {
                name: np.asarray(leaf)
                for name, leaf in state.params["mlp/~/linear_0"].items()
            }
        }
        return state._replace(params=params), scalars

    words = r"the state's .params\['mlp/~/linear_0'\]\['b'\] .* is on host \(NumPy\)"
    with pytest.raises(PlacementError, match=words):
        train(with_step(trainer, train_step), num_steps=3, workdir=tmp_path)


def test_a_batch_committed_elsewhere_is_an_error_that_names_it(tmp_path, devices):
    class Committed:
        def __init__(self, first):
            self.first = first

        def batch(self, step):
            array = np.array if step < self.first else jnp.from_dlpack
            return {"inputs": array(INPUTS[:8]), "labels": LABELS[:8].copy()}

    words = r"\['inputs'\] is a JAX array on cpu:0 and committed there"
    with pytest.raises(PlacementError, match=words):
        with_data(made(devices.num_devices), train=Committed(0))
    trainer = with_data(made(devices.num_devices), train=Committed(2))
    with pytest.raises(PlacementError, match=words):
        train(trainer, num_steps=3, workdir=tmp_path)


@pytest.mark.slow(but="four devices")
def test_a_model_that_leaks_a_tracer_is_refused_by_name(tmp_path, devices):
    def forward(inputs, is_training):
        inputs = inputs.reshape(len(inputs), -1)
        return jax.jit(lambda x: hk.Linear(3, name="lost")(x))(inputs)

    trainer = made(devices.num_devices, model=hk.transform(forward))
    with pytest.raises(PlacementError, match=r"params\['lost'\]\['b'\].* tracer"):
        train(trainer, num_steps=3, workdir=tmp_path)
    assert not (tmp_path / "checkpoints").exists() or not list(
        (tmp_path / "checkpoints").iterdir()
    )


def test_a_finished_run_is_left_as_it_is(tmp_path, capsys):
    train(made(), num_steps=5, workdir=tmp_path, **EVERY)
    before = (tmp_path / "metrics.jsonl").read_text()
    train(made(), num_steps=5, workdir=tmp_path, **EVERY)
    assert (tmp_path / "metrics.jsonl").read_text() == before
    assert "resumed at step 5" in capsys.readouterr().out


def test_another_config_is_refused_with_the_differences(tmp_path):
    config = {"seed": 0, "model": {"width": 8}}
    train(made(), num_steps=2, workdir=tmp_path, config=config)
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    time.sleep(0.01)
    again = {"num_steps": 2, "workdir": tmp_path}
    wider = config | {"model": {"width": 9}}
    with pytest.raises(ConfigError, match=r"restore: model\.width: 8 there, 9 now$"):
        train(made(), config=wider, **again)
    words = r"restore:\n  model\.width: 8 there, 9 now\n  seed: 0 there, 1 now$"
    with pytest.raises(ConfigError, match=words):
        train(made(), config=wider | {"seed": 1}, **again)
    assert files == {
        p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()
    }


def test_a_directory_of_something_else_is_not_written_to(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl but no config\.json"):
        train(made(), num_steps=2, workdir=tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        train(made(), num_steps=2, workdir=tmp_path / "file")
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_a_changed_environment_is_told(tmp_path, caplog):
    with pytest.raises(Interrupted):
        train(stop_at(made(4), 2), num_steps=4, workdir=tmp_path)
    train(made(2), num_steps=4, workdir=tmp_path)
    assert "num_devices: 4 there, 2 now" in caplog.text


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    def forward(inputs, is_training):
        x = hk.Linear(3, w_init=jnp.zeros)(hk.Flatten()(inputs))
        return jnp.sqrt(x)  # Finite at zero, where its gradient is not.

    with pytest.raises(NonFiniteError, match=r"after step 1 is .*\.params\[.*NaN"):
        train(
            made(model=hk.transform(forward)),
            num_steps=1,
            workdir=tmp_path,
        )
    assert not any((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x: x[:, :1], r"\[8, 1\] for 8 examples"),
        (lambda x: x[:, 0] - x[:, :1], r"\[8, 8\] for 8 examples"),
        (lambda x: jnp.mean(x), "one number for 16 examples.*own_loss.*`mask`"),
    ],
)
def test_a_loss_that_is_not_one_number_an_example_is_refused(tmp_path, loss, words):
    trainer = made(task=lambda outputs, batch: {"loss": loss(outputs)})
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=2, workdir=tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "asked",
    [{"best_metric": "eval/acuracy"}, {"stop_when": early_stop("eval/acuracy", 1)}],
    ids=["best", "early stopping"],
)
def test_a_metric_that_is_not_measured_is_named_before_step_0(tmp_path, asked):
    words = "acuracy is not measured; nearest is eval/accuracy; possible.*eval/loss"
    with pytest.raises(ConfigError, match=words) as caught:
        train(made(), num_steps=2, workdir=tmp_path, **asked)
    assert caught.value.exit_code == 64 and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name, warns", [("acuracy", True), ("accuracy", False), ("median", False)]
)
def test_a_metric_that_may_be_derived_is_warned_of_before_step_0(caplog, name, warns):
    def derive(averages, counts):
        raise ValueError("a median of made-up numbers")

    task = as_task(classification)._replace(derive=derive)
    check_evaluation(made(task=task), f"eval/{name}")
    words = "best_metric=eval/acuracy is none of eval/accuracy, eval/loss; nearest is"
    assert (words in caplog.text) is warns


def test_a_run_does_not_go_back(tmp_path):
    train(made(), num_steps=4, workdir=tmp_path)
    with pytest.raises(ConfigError, match="is at step 4, and num_steps is 2"):
        train(made(), num_steps=2, workdir=tmp_path)


def test_a_finished_run_still_tells_its_metrics(tmp_path):
    first = train(made(), num_steps=4, workdir=tmp_path)
    assert train(made(), num_steps=4, workdir=tmp_path).metrics == first.metrics


def test_float16_inputs_leave_the_parameters_in_float32(one_device):
    trainer = made(train_inputs=INPUTS.astype(np.float16))
    for leaf in jax.tree.leaves(trainer.abstract.params):
        assert leaf.dtype == np.float32
