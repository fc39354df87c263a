"""Runs whose states are packed between calls: the bits of runs that are not."""

import json
import logging
import signal
from collections import OrderedDict

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager, packing
from haiku_template.errors import ConfigError, Interrupted, NonFiniteError
from haiku_template.models import mlp
from haiku_template.params import leaves_by_path
from haiku_template.runs import exhausted, train
from haiku_template.runs.rewind import leaving_out
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from haiku_template.training import trainer as trainers
from haiku_template.training.trainer import Trainer
from tests.runs import with_data

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 4, 4, 3)).astype(np.float32)
LABELS = RNG.integers(0, 3, 48).astype(np.int32)
EVERY = {"log_every": 3, "eval_every": 4, "save_every": 4}


def net(inputs, is_training):
    """Convolutions with BatchNorm, and a matrix that is too large to pack.

    They have no biases: before a norm their gradients are rounding alone, of which Adam
    makes whole updates.
    """
    for width in (8, 16, 16, 4):
        inputs = hk.Conv2D(width, 3, with_bias=False)(inputs)
        inputs = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(inputs, is_training))
    inputs = hk.Linear(72)(hk.Flatten()(inputs))
    return hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.1 * is_training, inputs))


def made(num_devices=1, inputs=INPUTS, **options):
    parts = {"task": classification, "optimizer": optax.adam(1e-3)}
    parts["model"] = hk.transform_with_state(net)
    train_set = ArrayDataset(inputs, LABELS, BatchSpec(8))
    parts["data"] = Data(train_set, EvaluationSet(INPUTS, LABELS, 16), 3)
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment(**parts | options).trainer(devices)


def assert_same(first, second):
    leaves = leaves_by_path(first), leaves_by_path(second)
    assert leaves[0].keys() == leaves[1].keys()
    differ = [k for k, x in leaves[0].items() if not np.array_equal(x, leaves[1][k])]
    assert differ == []


@pytest.fixture(autouse=True)
def any_steps_pay(monkeypatch):
    monkeypatch.setattr(trainers, "PAYS", 1)


@pytest.fixture
def sizes(monkeypatch):
    """Numbers of arrays of the states that calls of runs took, call by call."""
    numbers, advance = [], Trainer.advance

    def count(self, state, *args):
        numbers.append(len(jax.tree.leaves(state)))
        return advance(self, state, *args)

    monkeypatch.setattr(Trainer, "advance", count)
    return numbers


OPTIONS = {
    "one step a call": {"steps_per_call": 1},
    "several": {"steps_per_call": 3},
    "averages": {"ema_decay": 0.9, "steps_per_call": 1, "accumulate_steps": 2},
    "bfloat16": {"precision": "bfloat16", "steps_per_call": 1},
    "staged": {"placement": "device", "steps_per_call": 1},
    "exact": {"exact_elastic": 4},
}


ROUNDS = jax.__version_info__ < (0, 12)  # Earlier compilers round updates otherwise.


@pytest.mark.usefixtures("optimized")
@pytest.mark.slow(but="one step a call")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_run_has_the_bits_of_one_that_is_not(name, tmp_path, sizes):
    trainer = made(**OPTIONS[name])
    packed = train(trainer, num_steps=8, workdir=tmp_path / "a", **EVERY)
    whole = len(jax.tree.leaves(packed.state))
    assert whole > 60 and (max(sizes) < 25) == (name != "exact")
    sizes.clear()
    hooks = [lambda event: None]  # It would take the state of each step.
    hooked = train(trainer, num_steps=8, workdir=tmp_path / "b", hooks=hooks, **EVERY)
    assert {*sizes} == {whole}
    if not ROUNDS:
        assert_same(packed.state, hooked.state)
    runs = [read(tmp_path / x / "metrics.jsonl") for x in "ab"]
    for first, second in zip(*runs, strict=True):
        names = [k for k in first if k.startswith(("train/", "eval/"))]
        if OPTIONS[name] == {"steps_per_call": 1}:  # What is unpacked is no traffic.
            names += [k for k in first if k.startswith("perf/bytes")]
        expected = pytest.approx([second[k] for k in names], rel=1e-4 * ROUNDS, abs=0)
        assert [first[k] for k in names] == expected


STATES = []  # What hooks were given.
RESUMED = {
    "as before": {},
    "with hooks": {"hooks": [lambda event: STATES.append(event.state)]},
    "with steps made twice": {"sdc_replay": "every:2"},
    "for few steps": {"num_steps": 8},
}


@pytest.mark.usefixtures("optimized")
@pytest.mark.slow(but="with hooks")
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_resumes_packs_as_at_its_start(
    name, packs, tmp_path, sizes, monkeypatch
):
    """Another program may round otherwise, whatever the resumed run is asked for."""
    trainer = made(steps_per_call=1)
    monkeypatch.setattr(trainers, "PAYS", 1 if packs else 100)
    whole = train(trainer, num_steps=8, workdir=tmp_path / "a", **EVERY)
    advance = Trainer.advance

    def stopping(self, state, steps, arrays):
        if steps[-1] == 5:
            signal.raise_signal(signal.SIGTERM)
        return advance(self, state, steps, arrays)

    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="step 5"):
        patched.setattr(Trainer, "advance", stopping)
        train(trainer, num_steps=8, workdir=tmp_path / "b", **EVERY)
    assert ({*sizes} == {sizes[0]}) and (sizes[0] < 25) == packs
    monkeypatch.setattr(trainers, "PAYS", 100 if packs else 1)
    options = {"num_steps": 8, "workdir": tmp_path / "b"} | RESUMED[name]
    STATES.clear()
    assert_same(whole.state, train(trainer, **options, **EVERY).state)
    assert {*sizes} == {sizes[0]}
    assert {jax.tree.structure(x) for x in STATES} <= {jax.tree.structure(whole.state)}
    assert len(STATES) == (5 if name == "with hooks" else 0)


def test_a_packed_run_that_fails_is_saved(tmp_path):
    """Its latest state is unpacked after the error of the data."""
    trainer = made(steps_per_call=1)

    class Failing(ArrayDataset):
        def batch(self, step):
            if step == 6:
                raise RuntimeError("the disk is gone")
            return super().batch(step)

    failing = with_data(trainer, train=Failing(INPUTS, LABELS, BatchSpec(8)))
    with pytest.raises(RuntimeError, match="the disk is gone"):
        train(failing, num_steps=8, workdir=tmp_path / "a")
    again = train(trainer, num_steps=8, workdir=tmp_path / "a")
    whole = train(trainer, num_steps=8, workdir=tmp_path / "b")
    assert_same(whole.state, again.state)


@pytest.mark.parametrize("most", [1, 2])
def test_a_packed_leaf_that_is_not_finite_is_named(most, tmp_path):
    """By the scalars, or where they are finite by the state that is to be saved."""

    def spoil(updates, state, params=None):
        bias = state + jnp.where(state == (5 if most == 2 else 7), jnp.nan, 0)
        updates["linear_1"]["b"] = updates["linear_1"]["b"] + 0 * bias
        return updates, state + 1

    spoiling = optax.GradientTransformation(lambda params: jnp.zeros(()), spoil)
    trainer = made(optimizer=optax.chain(optax.adam(1e-3), spoiling))
    with pytest.raises(NonFiniteError, match=r"\['linear_1'\]\['b'\] \(NaN\)"):
        train(
            trainer,
            num_steps=8,
            workdir=tmp_path,
            save_every=8,
            max_consecutive_nonfinite=most,
        )


def test_steps_that_a_packed_run_leaves_out(tmp_path, sizes):
    """Their calls change the step of a state alone."""
    trainer = made(steps_per_call=1)
    state = trainer.init()
    copies = [jax.tree.map(jnp.copy, state) for _ in range(2)]
    results = []
    for each, start in zip((trainer, trainer.with_packing(1000)), copies, strict=True):
        other = leaving_out(each, {2})
        held = other.packed(start)
        with other.calls(0, 3, lambda step: True) as calls:
            for steps, arrays in calls:
                held, _ = other.advance(held, steps, arrays)
        results.append(other.unpacked(held))
    assert max(sizes[2:]) < min(sizes[:2])  # Steps 1 and 3 of each.
    assert_same(*results)


def test_what_is_packed():
    """Small float32 arrays of one CPU, if they are many; the others stay themselves."""
    trainer = made().with_packing(1000)
    state = trainer.init()
    packed = trainer.packed(state)
    before, after = leaves_by_path(state), trainer.unpacked(packed)
    assert_same(state, after)
    small = {
        k: x for k, x in before.items() if x.dtype == np.float32 and x.nbytes <= 4096
    }
    assert packed.vector.shape == (sum(x.size for x in small.values()),)
    others = [x for k, x in before.items() if k not in small]
    assert [*map(id, packed.arrays)] == [*map(id, others)]
    kinds = {str(x.dtype) for x in packed.arrays}
    assert {"int32", "float32"} <= kinds and len(packed.arrays) < 25
    for other in (made(4), made(model=mlp(3, width=8))):
        assert other.with_packing(1000) is other


def test_few_steps_do_not_pay(monkeypatch):
    monkeypatch.undo()
    trainer, several = made(steps_per_call=1), made(steps_per_call=5)
    assert trainer.with_packing(999) is trainer is not trainer.with_packing(1000)
    assert several.with_packing(4999) is several is not several.with_packing(5000)


@pytest.mark.parametrize("value", ["no", 1, None, []])
def test_a_damaged_choice_is_refused(value, tmp_path):
    trainer, file = made(steps_per_call=1), tmp_path / "run.json"
    train(trainer, num_steps=2, workdir=tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"packs": value}))
    with pytest.raises(ConfigError, match=r"run.json cannot be read: its packs is"):
        train(trainer, num_steps=4, workdir=tmp_path)


CUSTOM = {
    "data": Data(ArrayDataset(INPUTS, LABELS, BatchSpec(8)), None, 3),
    **dict.fromkeys(("model", "task", "optimizer")),
}


def test_a_state_of_another_structure_is_refused(tmp_path):
    """Its leaves would be taken for others: an OrderedDict has an order of its own."""

    def first(rng, batch):
        return {"params": {f"p{i:02}": jnp.zeros(()) + i for i in range(40)}}

    def step(state, batch, rng, axis_name):
        params = OrderedDict(reversed([*state.params.items()]))
        state = state._replace(step=state.step + 1, params=params)
        return state, {"loss": jnp.zeros(())}

    trainer = made(**CUSTOM, init=first, step=step, steps_per_call=1)
    with pytest.raises(ValueError, match="OrderedDict"):
        train(trainer, num_steps=3, workdir=tmp_path)


def test_a_first_state_is_of_strong_types(tmp_path):
    """A checkpoint keeps no weak ones: steps after a resume would round otherwise."""

    def first(rng, batch):
        return {"params": {"scale": jnp.asarray(1.0)}}

    trainer = made(**CUSTOM, init=first, step=lambda *args: args)
    assert not any(x.weak_type for x in jax.tree.leaves(trainer.init()))


def weak_step(state, batch, rng, axis_name):
    params = {"scale": jnp.asarray(1.0) / 3, "number": 2.0}
    return state._replace(step=state.step + 1, params=params), {"loss": 0.5}


def weak_optimizer():
    def update(grads, state, params=None):
        return jax.tree.map(jnp.zeros_like, grads), 1.0 / 3

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def weak_net(inputs, is_training):
    hk.set_state("count", 1.0 / 3)
    return hk.Linear(3)(hk.Flatten()(inputs))


WEAK = {
    "step": CUSTOM
    | {"step": weak_step}
    | {"init": lambda rng, batch: {"params": dict.fromkeys(["number", "scale"], 1.0)}},
    "optimizer": {"optimizer": weak_optimizer()},
    "net_state": {"model": hk.transform_with_state(weak_net)},
}


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("of", WEAK)
def test_a_state_after_a_step_is_of_strong_types(of, steps_per_call):
    trainer = made(**WEAK[of], steps_per_call=steps_per_call)
    before = trainer.init()
    with trainer.batches(0, 1) as batches:
        after, _ = trainer.step(trainer.init(), next(iter(batches)))
    with trainer.calls(0, 2, lambda step: True) as calls:
        for steps, arrays in calls:
            before, _ = trainer.advance(before, steps, arrays)
    for leaf in jax.tree.leaves((before, after)):
        assert not leaf.weak_type


@pytest.mark.parametrize("replay, last", [("first:2", 2), ("every:2", 1)])
def test_states_that_a_replay_needs_no_longer_are_not_held(
    replay, last, tmp_path, monkeypatch
):
    """A run names its newest state; that before a replay at its start stays."""
    numbers, advance = [], Trainer.advance

    def count(self, state, *args):
        numbers.append(alive())
        return advance(self, state, *args)

    trainer = made(steps_per_call=1)
    large = trainer.abstract.params["linear"]["w"].shape

    def alive():
        same = [x for x in jax.live_arrays() if x.shape == large]
        return len([x for x in same if not x.is_deleted()]) / 3

    before = alive()  # What other tests hold.
    monkeypatch.setattr(Trainer, "advance", count)
    options = {"num_steps": 7, "sdc_replay": replay, "log_every": None}
    train(trainer, workdir=tmp_path, **options)
    assert numbers[-1] - before == last


def test_larger_arrays_of_a_packed_state_are_named_where_memory_is_full():
    trainer = made().with_packing(1000)

    def call(held):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(RuntimeError) as caught:
        call(trainer.packed(trainer.init()))
    paths = exhausted._paths(caught.value, trainer)
    shape = trainer.abstract.params["linear"]["w"].shape
    large = {paths.get(id(x)) for x in jax.live_arrays() if x.shape == shape}
    assert {".params['linear']['w']", ".opt_state[0].mu['linear']['w']"} < large


def test_a_gpu_takes_states_as_they_are(monkeypatch):
    trainer = made()
    assert packing.packing_of(trainer.devices, trainer.abstract) is not None
    monkeypatch.setattr(DeviceManager, "platform", "gpu")
    assert packing.packing_of(trainer.devices, trainer.abstract) is None


def test_a_packed_call_is_compiled_once_ahead_of_the_steps(tmp_path, caplog):
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax._src.interpreters"):
        train(made(seed=7, steps_per_call=1), num_steps=3, workdir=tmp_path)
    compiled = [x for x in caplog.messages if x.startswith("Compiling jit(train_step)")]
    assert len(compiled) == 1
