"""Several steps in one call of the devices: the same run, step for step."""

import copy
import dataclasses
import functools
import json
import math
import os
import signal

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

from configs import digits
from haiku_template.config import check
from haiku_template.data import (
    ArrayDataset,
    BatchSpec,
    Data,
    EvaluationSet,
    bucketed,
)
from haiku_template.devices.operations import operations
from haiku_template.devices.processes import Processes
from haiku_template.devices.transfer import own_rows
from haiku_template.errors import (
    ConfigError,
    Interrupted,
    NonFiniteError,
    PlacementError,
)
from haiku_template.models import mlp, resnet
from haiku_template.preflight.budget import (
    STEPS_PER_CALL,
    choose_steps_per_call,
    memory_budget,
)
from haiku_template.runs import train
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification, own_loss
from haiku_template.training.feed import STACK
from tests.runs import changed, placed

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 48)
EVALUATION = EvaluationSet(INPUTS, LABELS, 16)
MODELS = {
    "mlp": lambda axis_name: mlp(3, width=8),
    "resnet": lambda axis_name: resnet(
        3, axis_name=axis_name, channels=(4,), blocks=1, norm_decay=0.9
    ),
}
CALLS = (1, 7, 50)


@functools.cache
def made(devices, model="mlp", steps_per_call=1, **options):
    """A trainer, compiled once for all tests."""
    return Experiment(
        model=MODELS[model](devices.axis_name),
        task=classification,
        data=Data(ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EVALUATION, 3),
        optimizer=optax.adam(1e-3),
        schedule=optax.linear_schedule(1e-3, 0.0, 60),
        steps_per_call=steps_per_call,
        **options,
    ).trainer(devices)


def lines(workdir):
    """Lines of metrics.jsonl without times."""
    return [
        {k: v for k, v in row.items() if not k.startswith("perf/")}
        for row in read(workdir / "metrics.jsonl")
    ]


def alike(first, second, bound):
    for one, other in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)


@pytest.mark.slow(but="host-mlp")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_run_is_the_same_however_many_steps_a_call_has(
    tmp_path, devices, model, placement
):
    results = {}
    for count in CALLS:
        trainer = placed(made(devices, model, count), placement)
        every = {"log_every": 10, "eval_every": 13, "save_every": 9}
        options = every | {"num_steps": 40, "workdir": tmp_path / str(count)}
        results[count] = train(trainer, **options)
    for count in CALLS[1:]:
        alike(results[1].state.params, results[count].state.params, 1e-6)
        one, several = lines(tmp_path / "1"), lines(tmp_path / str(count))
        assert [row["step"] for row in one] == [row["step"] for row in several]
        for first, second in zip(one, several, strict=True):
            assert first == pytest.approx(second, rel=1e-5, abs=1e-6)


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize(
    "options",
    [{"accumulate_steps": 2}, {"ema_decay": 0.9}, {"precision": "float16"}],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_step_is_one_of_several(tmp_path, devices, options):
    one, several = (
        train(
            made(devices, "mlp", n, **options), num_steps=30, workdir=tmp_path / str(n)
        )
        for n in (1, 7)
    )
    alike(one.state.saved(), several.state.saved(), 1e-6)
    assert one.metrics.keys() == several.metrics.keys()


def test_hooks_see_each_step_and_its_scalars(tmp_path, devices):
    seen = {1: [], 7: []}
    for count, events in seen.items():

        def hook(event, events=events):
            values = jax.device_get(event.values) if event.what == "step" else {}
            events.append((event.what, event.step, float(values.get("loss", 0))))

        trainer = made(devices, "mlp", count)
        train(trainer, num_steps=20, workdir=tmp_path / str(count), hooks=[hook])
    assert [x[:2] for x in seen[1]] == [x[:2] for x in seen[7]]
    alike([x[2] for x in seen[1]], [x[2] for x in seen[7]], 1e-6)


@pytest.mark.slow(but="7")
@pytest.mark.parametrize("count", [1, 7, 50])
def test_a_run_that_stopped_amid_a_stack_resumes_bitwise(tmp_path, devices, count):
    trainer = made(devices, "mlp", count)
    undisturbed = train(trainer, num_steps=60, workdir=tmp_path / "one")
    train(trainer, num_steps=33, workdir=tmp_path / "two", log_every=5)
    resumed = train(trainer, num_steps=60, workdir=tmp_path / "two", log_every=20)
    alike(undisturbed.state.saved(), resumed.state.saved(), 0)


class Signals(ArrayDataset):
    """Sends this process a SIGTERM while it makes the batch of a step."""

    def batch(self, step):
        if step == 24 and not os.environ.pop("SENT", ""):
            os.environ["SENT"] = "1"
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(step)


def test_sigterm_stops_at_the_end_of_a_call_and_the_run_resumes(
    tmp_path, one_device, monkeypatch
):
    monkeypatch.delenv("SENT", raising=False)
    data = Data(Signals(INPUTS, LABELS, BatchSpec(8)), None, 3)
    trainer = changed(made(one_device, "mlp", 7), data=data)
    with pytest.raises(Interrupted, match=r"step (1|7|14|21|28|35) is saved"):
        train(trainer, num_steps=60, workdir=tmp_path / "two", log_every=None)
    resumed = train(trainer, num_steps=60, workdir=tmp_path / "two", log_every=None)
    undisturbed = train(
        made(one_device, "mlp", 7), num_steps=60, workdir=tmp_path / "1"
    )
    alike(undisturbed.state.params, resumed.state.params, 0)


class Set:
    """Batches in memory that is used again, as a fast reader's; NaN in one of them."""

    def __init__(self, nan=None, odd=None):
        self.inputs, self.nan, self.odd = INPUTS[:8].copy(), nan, odd

    def batch(self, step):
        self.inputs[:] = INPUTS[step % 5 :][:8]
        if step + 1 == self.nan:
            self.inputs[3] = np.nan
        rows = self.inputs[:, :4] if step + 1 == self.odd else self.inputs
        return {"inputs": rows, "labels": LABELS[:8]}


def test_a_loss_that_is_nan_names_its_step_within_the_call(tmp_path, devices):
    trainer = changed(made(devices, "mlp", 50), data=Data(Set(nan=13), None, 3))
    with pytest.raises(NonFiniteError, match=r"the loss of step 13 .*batch of step 13"):
        train(trainer, num_steps=60, workdir=tmp_path / "run", log_every=25)


def test_each_batch_is_copied_before_the_next_is_made(tmp_path, one_device):
    own = np.stack([INPUTS[n : n + 8] for n in range(5)])

    class Fresh:
        def batch(self, step):
            return {"inputs": own[step % 5].copy(), "labels": LABELS[:8]}

    states = [
        train(
            changed(made(one_device, "mlp", 7), data=Data(data, None, 3)),
            num_steps=20,
            workdir=tmp_path / type(data).__name__,
        ).state.params
        for data in (Set(), Fresh())
    ]
    alike(*states, 0)


def test_batches_of_other_shapes_are_refused_by_name(tmp_path, one_device):
    trainer = changed(made(one_device, "mlp", 7), data=Data(Set(odd=5), None, 3))
    words = (
        r"\['inputs'\] has shape \[8, 4, 8, 1\] in the batch of step 5 and \[8, 8, 8"
    )
    with pytest.raises(ConfigError, match=words):
        train(trainer, num_steps=20, workdir=tmp_path / "run")
    examples = [{"x": np.ones(n, np.float32)} for n in (3, 5) for _ in range(8)]
    data = bucketed(examples, BatchSpec(4), sizes=(4, 8), mask="mask")
    model = hk.transform(lambda batch: (batch["x"] * batch["mask"]).mean())
    with pytest.raises(
        ConfigError, match="steps_per_call=7 needs batches of one shape"
    ):
        changed(made(one_device, "mlp", 7), data=data, model=model, task=own_loss)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["name"]
)
@dataclasses.dataclass
class Probe:
    """An array whose name is part of the tree, as CLRS's data points."""

    name: str
    data: np.ndarray


@pytest.mark.parametrize("count", [1, 2])
def test_names_in_a_batch_are_those_of_each_step(tmp_path, one_device, count):
    class Named:
        def batch(self, step):
            return Probe(("even", "odd")[step % 2], np.ones((8, 2), np.float32))

    def model(probe):
        hk.get_parameter("w", [], init=jnp.ones)
        return probe.data[:, 0] * (probe.name == "odd")

    changes = {"data": Data(Named(), None), "model": hk.transform(model)}
    trainer = changed(made(one_device, "mlp", count), task=own_loss, **changes)
    options = {"num_steps": 4, "workdir": tmp_path / "run", "log_every": 1}
    if count > 1:  # Its steps would all be those of the first name.
        with pytest.raises(ConfigError, match=r"step 2 is a .*'odd'.*one structure"):
            train(trainer, **options)
        return
    train(trainer, **options)
    losses = [line["train/loss"] for line in lines(tmp_path / "run")]
    assert losses == [0, 1, 0, 1]


def test_the_budget_counts_the_batches_of_a_call(one_device):
    one, *several = (memory_budget(made(one_device, "mlp", n)) for n in (1, 7, 14))
    assert several[1].batch == 2 * several[0].batch
    assert several[1].waiting == 2 * several[0].waiting
    # With one step a call, too, small batches travel together.
    assert 7 * one.batch == STACK * several[0].batch


def test_a_config_leaves_the_choice_to_the_run(tmp_path, one_device, capsys):
    config = digits.get_config()
    config.steps_per_call, config.num_steps = None, 60
    check(config)
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    train(trainer, num_steps=60, workdir=tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["steps_per_call"] == 50 and run["packs"] is False
    assert "on each device, 50 steps a call; " in capsys.readouterr().out
    train(trainer, num_steps=70, workdir=tmp_path)  # The same choice, made once.
    assert "step     70/70" in capsys.readouterr().out
    assert trainer.with_steps_per_call(50)._call.compiled._cache_size() == 1
    train(trainer, num_steps=75, workdir=tmp_path, hooks=[lambda event: None])
    assert "steps a call" not in capsys.readouterr().out  # Each is one.


def test_a_choice_holds_when_the_run_resumes(tmp_path, one_device):
    """Also on devices, or with data, where a new run would choose another."""
    trainer = changed(made(one_device, "mlp"), steps_per_call=None)
    train(trainer, num_steps=20, workdir=tmp_path)
    trainer = changed(trainer, data=trainer.experiment.data._replace(train=Set()))
    resumed = choose_steps_per_call(trainer, tmp_path)
    assert resumed.feed.steps_per_call == STEPS_PER_CALL
    run = json.loads((tmp_path / "run.json").read_text())
    del run["steps_per_call"]  # As of a version that had none.
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert choose_steps_per_call(trainer, tmp_path).feed.steps_per_call == 1


def chosen(trainer, workdir):
    trainer = changed(trainer, steps_per_call=None)
    return choose_steps_per_call(trainer, workdir).feed.steps_per_call


def test_none_chooses_several_for_few_operations_on_data_in_memory(devices, tmp_path):
    small, new = made(devices), tmp_path / "new"
    assert chosen(small, new) == STEPS_PER_CALL
    assert chosen(placed(small, "device"), new) == STEPS_PER_CALL
    # Of staged data row numbers travel, many steps of them at once.
    rows = Data(ArrayDataset(INPUTS, LABELS, BatchSpec(128)), None, 3)
    assert chosen(placed(changed(small, data=rows), "device"), new) == STEPS_PER_CALL
    assert chosen(changed(small, data=Data(Set(), None, 3)), new) == 1  # Not in memory.
    assert chosen(changed(small, model=mlp(3, width=2**14)), new) == 1
    assert changed(small, steps_per_call=None).feed.steps_per_call == 1


def test_gpus_where_jax_counts_no_operations_choose_as_cpus_do(
    one_device, tmp_path, monkeypatch
):
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda _: None)
    monkeypatch.setattr(type(one_device), "platform", "gpu")
    small = made(one_device, "mlp")
    assert chosen(small, tmp_path) == STEPS_PER_CALL
    assert chosen(changed(small, model=mlp(3, width=2**14)), tmp_path) == 1
    # No GPU has trained one in a loop.
    assert chosen(made(one_device, "resnet"), tmp_path) == 1


def convolved(shape, kernel, numbers, **options):
    strides = (1,) * (len(shape) - 2)

    def loss(x, w):
        results = jax.lax.conv_general_dilated(
            x, w, strides, "VALID", dimension_numbers=numbers, **options
        )
        return jnp.square(results).sum()

    return jax.jit(jax.grad(loss, 1)).trace(jnp.ones(shape), jnp.ones(kernel))


IMAGES, VOLUMES = ("NHWC", "HWIO", "NHWC"), ("NDHWC", "DHWIO", "NDHWC")


def test_operations_of_convolutions_are_about_those_that_xla_counts():
    traced = convolved((4, 16, 16, 8), (3, 3, 8, 12), IMAGES)
    flops = traced.lower().cost_analysis()["flops"]
    assert operations(traced.jaxpr.jaxpr, 1) == pytest.approx(flops, rel=0.3)
    assert operations(traced.jaxpr.jaxpr) > 4 * flops  # They take longer than products.
    assert operations(traced.jaxpr.jaxpr, math.inf) == math.inf


@pytest.mark.parametrize(
    "traced",
    [
        convolved((2, 4, 4, 8), (3, 3, 2, 8), IMAGES, feature_group_count=4),
        convolved((2, 4, 4, 8), (3, 3, 1, 8), IMAGES, feature_group_count=8),
        convolved((2, 4, 4, 8), (3, 3, 8, 8), IMAGES, batch_group_count=2),
        convolved((2, 4, 4, 4, 8), (3, 3, 3, 8, 8), VOLUMES),
    ],
    ids=["groups", "depthwise", "batch groups", "three dimensions"],
)
def test_slow_convolutions_are_never_few_operations(traced):
    """Fifty of one take half a second or more, in which no signal is heard."""
    assert operations(traced.jaxpr.jaxpr) == math.inf


@pytest.mark.parametrize("accumulate_steps", [1, 4])
def test_operations_are_about_those_that_xla_counts(one_device, accumulate_steps):
    trainer = changed(
        made(one_device, "mlp"),
        model=mlp(3, width=256),
        accumulate_steps=accumulate_steps,
    )
    trace = trainer.trace(trainer.feed.host_shapes()[0])
    count = operations(trace.jaxpr.jaxpr)
    whole = changed(trainer, accumulate_steps=1)
    lowered = whole.trace(whole.feed.host_shapes()[0]).lower()
    assert count == pytest.approx(lowered.cost_analysis()["flops"], rel=0.3)


VECTORS = np.ones((4, 8), np.float32)
UNSEEN = {
    "fft": lambda x: jnp.fft.fft(x),
    "experts": lambda x: jax.lax.ragged_dot(x, jnp.ones((2, 8, 3)), jnp.array([1, 3])),
    "windows": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (2, 2), (1, 1), "SAME"
    ),
    "kernel": pl.pallas_call(
        lambda x, y: None, jax.ShapeDtypeStruct((4, 8), np.float32)
    ),
    "own": jax.ffi.ffi_call("own", jax.ShapeDtypeStruct((4, 8), np.float32)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_operations_that_a_jaxpr_does_not_show_are_never_few(name):
    jaxpr = jax.make_jaxpr(jax.jit(lambda x: UNSEEN[name](x).real.sum()))(VECTORS)
    assert operations(jaxpr.jaxpr) == math.inf


def test_a_reduction_with_a_function_of_its_own_counts_as_its_results():
    def largest(x):
        return jax.lax.reduce(x, np.float32(0), lambda a, b: jnp.abs(a) + b, (1,))

    assert (
        operations(jax.make_jaxpr(largest)(np.ones((512, 2), np.float32)).jaxpr) >= 512
    )


def test_no_buffer_of_a_call_is_copied_whole_in_each_step(one_device):
    """Else a call's time would grow with the square of its steps."""
    counts = {}
    for steps in (50, 1000):
        trainer = made(one_device, "mlp", steps)
        compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        text = compiled.as_text()
        tables = [x for x in text.splitlines() if f"= f32[{steps},64]" in x]
        assert tables and not [x for x in tables if " copy(" in x]
        counts[steps] = text.count(" copy(")
    assert counts[50] == counts[1000]


def test_the_step_of_a_call_is_traced_once(devices):
    """A start waits for each trace: of a deep model it takes seconds."""
    traced = []

    def counted(outputs, batch, axis_name):
        traced.append(axis_name)
        return classification.values(outputs, batch)

    trainer = changed(made(devices, "mlp", 50), task=counted)
    shapes = trainer.feed.host_shapes()[0]
    traced.clear()  # Of evaluation.
    trainer.trace(shapes)
    trainer.trace(shapes).lower()
    assert traced == [devices.axis_name]


def test_a_subclass_with_other_batches_is_not_gathered_past_them(one_device):
    class Doubled(ArrayDataset):
        def batch(self, step):
            batch = super().batch(step)
            return batch | {"inputs": 2 * batch["inputs"]}

    plain = made(one_device, "mlp", 7)
    train = Doubled(INPUTS, LABELS, BatchSpec(8))
    doubled = changed(plain, data=plain.experiment.data._replace(train=train))
    stacks = []
    for trainer in (plain, doubled):
        with trainer.feed.calls(2, 12, lambda step: step == 4) as calls:
            calls = list(calls)
        assert [steps for steps, _ in calls] == [range(3, 5), range(5, 8), range(8, 13)]
        stacks.append(one_device.fetch(calls[0][1]))
    for step in range(2, 7):  # The stack has steps 0 to 6, and those before 2 are void.
        batch = plain.experiment.data.train.batch(step)
        for stack, factor in zip(stacks, (1, 2), strict=True):
            rows = stack["inputs"][:, step]
            np.testing.assert_array_equal(rows, factor * batch["inputs"])
            np.testing.assert_array_equal(stack["labels"][:, step], batch["labels"])


@pytest.mark.parametrize("count", [1, 7])
def test_a_process_puts_its_rows_of_whole_batches(one_device, count):
    trainer = made(one_device, "mlp", count)
    feed = copy.copy(trainer.feed)
    feed._own = own_rows(Processes(1, 2), trainer.experiment.data.train)
    found = feed._gather(0)
    assert found["inputs"].shape[:2] == (4, feed.stack)
    for step in (0, feed.stack - 1):
        batch = trainer.experiment.data.train.batch(step)
        np.testing.assert_array_equal(found["inputs"][:, step], batch["inputs"][4:])
        np.testing.assert_array_equal(found["labels"][:, step], batch["labels"][4:])


@pytest.mark.parametrize("count", [1, 7, 50])
def test_a_value_that_does_not_fit_is_an_error_of_its_step(one_device, count):
    train = ArrayDataset(INPUTS, LABELS.astype(np.int64), BatchSpec(8))
    row = train.rows(3)[5]  # And of no step before: each epoch has six.
    train.labels[row] = 2**40
    data = Data(train, None, 3)
    trainer, done = changed(made(one_device, "mlp", count), data=data), []
    with (
        pytest.raises(PlacementError, match="1099511627776"),
        trainer.feed.calls(0, 6, lambda step: False) as calls,
    ):
        for steps, _ in calls:
            done += steps
    assert done == [1, 2, 3]
    with trainer.feed.calls(0, 3, lambda step: False) as calls:
        assert [step for steps, _ in calls for step in steps] == [1, 2, 3]


@pytest.mark.parametrize("pattern", ["*", "opt_state/*"])
def test_a_sharded_state_stays_sharded_in_the_loop(tmp_path, four_devices, pattern):
    rules = ((pattern, "data"),)
    states, gathers = [], []
    for count in (1, 7):
        trainer = made(four_devices, "mlp", count, sharding=rules)
        compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        gathers.append(compiled.as_text().count(" all-gather("))
        workdir = tmp_path / str(count)
        states.append(train(trainer, num_steps=20, workdir=workdir).state)
    assert gathers[0] == gathers[1] > 0
    alike(states[0].saved(), states[1].saved(), 1e-6)
