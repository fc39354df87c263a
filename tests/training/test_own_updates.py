"""A step of one's own beside the options of a run, hooks that compute, early stops."""

import collections
import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from haiku_template.data import BatchSpec, Data, Split, from_split
from haiku_template.devices import DeviceManager, mean_over
from haiku_template.errors import ConfigError
from haiku_template.models.losses import confusion, macro_f1
from haiku_template.runs import early_stop, train
from haiku_template.storage import read
from haiku_template.training import Experiment, Task

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 4)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int32)
DATA = from_split(Split(X[:64], Y[:64], X[64:], Y[64:]), BatchSpec(16))
NET = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2)(x)))
ADAM = optax.adam(3e-2)


def task(outputs, batch):
    crossed = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return {"loss": crossed}


def step(state, batch, rng, axis_name, optimizer=ADAM, **more):
    def loss(params):
        return task(NET.apply(params, batch["inputs"]), batch)["loss"].mean()

    value, grads = mean_over(axis_name, jax.value_and_grad(loss)(state.params))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state), {"loss": value} | more


def made(**options):
    parts = {"model": NET, "task": task, "data": DATA, "optimizer": ADAM}
    return Experiment(**parts | options)


@pytest.mark.slow(but="four devices")
@pytest.mark.parametrize("averages", ["ema", "schedule-free"])
def test_a_step_of_ones_own_averages_as_the_template_s(tmp_path, devices, averages):
    options, ours = {"ema_decay": 0.5}, step
    if averages != "ema":
        free = optax.contrib.schedule_free_adamw(3e-2, warmup_steps=1)
        options, ours = {"optimizer": free}, functools.partial(step, optimizer=free)
    results = []
    for i, own in enumerate((None, ours)):
        trainer = made(step=own, **options).trainer(devices)
        results.append(train(trainer, num_steps=20, workdir=tmp_path / str(i)))
    for template, own in zip(
        *map(jax.tree.leaves, (x.state for x in results)), strict=True
    ):
        np.testing.assert_allclose(template, own, rtol=2e-5, atol=1e-6)
    losses = [x.metrics["eval/loss"] for x in results]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    untrained = made().trainer(devices)
    assert losses[1] < untrained.evaluate(untrained.init())["eval/loss"]


def test_averages_of_a_custom_init_stay_what_the_step_makes_of_them(one_device):
    def init(rng, batch):
        params = NET.init(rng, batch["inputs"])
        return {"params": params, "ema_params": jax.tree.map(jnp.zeros_like, params)}

    trainer = made(init=init).trainer(one_device)  # The template's step, without decay.
    new, _ = trainer.step(trainer.init(), one_device.shard(DATA.train.batch(0)))
    assert not any(np.any(x) for x in jax.tree.leaves(new.ema_params))


def test_the_schedule_of_a_step_of_ones_own_is_reported(tmp_path, one_device):
    trainer = made(step=step, schedule=lambda n: 0.5 / (n + 1)).trainer(one_device)
    train(trainer, num_steps=2, workdir=tmp_path, log_every=1)
    rates = [
        x["train/learning_rate"]
        for x in read(tmp_path / "metrics.jsonl")
        if "train/loss" in x
    ]
    assert rates == [0.5, 0.25]


# What the fields of an experiment do beside a step of one's own.
REFUSED = {
    "accumulate_steps": 2,
    "reduce_dtype": "bfloat16",
    "precision": "float16",
    "exact_elastic": 2,
}
ACTS = {"schedule", "ema_decay", "seed", "sharding", "steps_per_call", "skips"}
ACTS |= {"init", "init_from", "finetuning", "placement", "optimizer", "data"}
# Of evaluation, reports and exports alone, as the page on it says.
ELSEWHERE = {"model", "task", "steps", "family", "flops_per_token"}
ELSEWHERE |= {"why_on_host", "described", "step"}


def test_each_field_beside_a_step_of_ones_own_acts_or_is_refused(one_device):
    fields = {field.name for field in dataclasses.fields(Experiment)}
    assert fields == {*REFUSED, *ACTS, *ELSEWHERE}
    for name, value in REFUSED.items():
        with pytest.raises(ConfigError, match=name):
            made(step=step, **{name: value}).trainer(one_device)


def test_steps_that_are_skipped_are_the_run_s_to_count(one_device):
    own = functools.partial(step, skipped_steps=jnp.zeros(()))
    trainer = made(step=own).trainer(one_device)
    with pytest.raises(ConfigError, match="'skipped_steps', which a run counts"):
        trainer.step(trainer.init(), one_device.shard(DATA.train.batch(0)))


@pytest.mark.parametrize("part", ["schedule", "init_from", "init", "step"])
def test_a_part_that_is_no_function_is_refused(part):
    with pytest.raises(ConfigError, match=rf"Experiment\({part}=0\.1\) is no function"):
        made(**{part: 0.1})


def test_a_name_is_no_task_of_a_script(one_device):
    with pytest.raises(ConfigError, match="task is 'classification'; .* for configs"):
        made(task="classification").trainer(one_device)


def test_whatever_a_loop_calls_of_a_user_s_may_compute(tmp_path, devices, caplog):
    """Hooks, writers, `stop_when`, derived metrics, data: between the steps."""
    calls = collections.Counter()

    def computed(name):
        calls[name] += 1
        return float(jnp.sum(jnp.arange(3)) * 0.5)  # A constant is copied, too.

    def hook(event):
        squares = [jnp.sum(w**2) for w in jax.tree.leaves(event.state.params)]
        assert np.isfinite(float(jnp.sqrt(sum(squares)) * computed("hook")))

    def stops(rows):
        computed("stop_when")
        return jnp.asarray([x["step"] for x in rows]).max() >= 4

    def derive(averages, counts):
        computed("derive, evaluated" if counts else "derive")
        return {"perplexity": jnp.exp(averages["loss"])}

    def writer(workdir, start):
        return lambda step, metrics: computed("writer")

    class Rows:
        def batch(self, n):
            computed("data")
            return DATA.train.batch(n)

    class Held(Rows):
        num_batches = 2

        def batch(self, n):
            computed("evaluation data")
            return DATA.evaluation.batch(n)

    options = {"hooks": [hook], "writers": [writer], "stop_when": stops}
    own = Task(task, "classes", confusion, derive)
    trainer = made(task=own, data=Data(Rows(), Held(), 2)).trainer(devices)
    metrics = train(
        trainer, num_steps=9, workdir=tmp_path, log_every=2, eval_every=2, **options
    ).metrics
    assert len(calls) == 7 and "Disallowed" not in caplog.text, calls
    for kind in ("train", "eval"):
        assert metrics[f"{kind}/perplexity"] == pytest.approx(
            np.exp(metrics[f"{kind}/loss"])
        )
    assert max(x["step"] for x in read(tmp_path / "metrics.jsonl")) == 4


@pytest.mark.parametrize(
    "options", [{"mode": "maximize"}, {"patience": 0}, {"min_delta": -1.0}]
)
def test_early_stopping_is_refused_out_of_its_ranges(options):
    with pytest.raises(ConfigError, match="early_stop.*possible is"):
        early_stop("eval/loss", **{"patience": 2} | options)


@pytest.mark.parametrize("name", ["grad_norm", "learning_rate", "skipped_steps"])
@pytest.mark.parametrize("where", ["task", "derive"])
def test_no_metric_takes_the_name_of_a_step_s(tmp_path, one_device, name, where):
    more = {name: 7.0}
    own = Task(task, derive=lambda averages, counts: more)
    if where == "task":
        own = Task(lambda outputs, batch: task(outputs, batch) | {name: Y[:16] * 7.0})
    with pytest.raises(ConfigError, match=f"{name}'?, which a step has; rename it"):
        train(made(task=own).trainer(one_device), num_steps=2, workdir=tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("in_place", [False, True])
def test_averages_may_be_handed_back_beside_what_is_derived(
    tmp_path, one_device, in_place
):
    def derive(averages, counts):
        returned = averages if in_place else dict(averages)
        returned["perplexity"] = np.exp(averages["loss"])
        return returned

    trainer = made(task=Task(task, derive=derive)).trainer(one_device)
    metrics = train(trainer, num_steps=4, workdir=tmp_path, log_every=2).metrics
    assert metrics["train/perplexity"] == np.exp(metrics["train/loss"])
    assert {"eval/perplexity", "train/grad_norm"} < metrics.keys()


def test_no_metric_takes_the_name_of_a_further_set_s(tmp_path, one_device):
    data = DATA._replace(evaluations={"shifted": DATA.evaluation})

    def own(outputs):
        return {"loss": outputs[:, 0], "shifted/loss": outputs[:, 1]}

    trainer = made(task=own, data=data).trainer(one_device)
    with pytest.raises(ConfigError, match="are eval/shifted/loss; rename one"):
        train(trainer, num_steps=2, workdir=tmp_path)


def test_what_is_derived_of_counts_is_evaluation_s_alone(tmp_path, one_device):
    def derive(averages, counts):
        return {"examples": counts["confusion"].sum()}

    own = Task(task, "classes", confusion, derive)
    trainer = made(task=own).trainer(one_device)
    metrics = train(trainer, num_steps=4, workdir=tmp_path, log_every=2).metrics
    assert metrics["eval/examples"] == 32 and "train/examples" not in metrics


def test_patience_counts_evaluations_of_a_training_metric_too():
    stops = early_stop("train/loss", patience=2)
    rows = [{"step": n, "train/loss": float(n)} for n in range(5, 300, 5)]

    def with_evaluations(*steps):
        evaluations = [{"step": n, "eval/loss": 1.0} for n in steps]
        return sorted(rows + evaluations, key=lambda x: x["step"])

    assert not stops(with_evaluations(102)) and not stops(with_evaluations(102, 202))
    assert stops(with_evaluations(102, 202, 290))
    assert "best at step 100, 100, and not better in 2 evaluations" in stops.reason
    # Several evaluations after one line are no values of their own.
    rows = [{"step": n, "train/loss": -float(n)} for n in range(500, 2000, 500)]
    assert not stops(with_evaluations(*range(100, 2000, 100)))


def test_examples_that_are_left_out_are_in_no_count(devices):
    def weighted(outputs, batch):
        return task(outputs, batch) | {"example_weight": batch["inputs"]["weight"]}

    weight = (np.arange(96) % 3 == 0).astype(np.float32)
    x = {"x": X, "weight": weight}
    first, last = (
        {k: v[part] for k, v in x.items()} for part in (slice(64), slice(64, 96))
    )
    data = from_split(Split(first, Y[:64], last, Y[64:]), BatchSpec(16))
    model = hk.transform(lambda inputs: hk.Linear(2)(inputs["x"]))
    own = Task(weighted, "classes", confusion, macro_f1)
    trainer = made(model=model, data=data, task=own).trainer(devices)
    _, counts = trainer.measure(trainer.init())
    assert counts["confusion"].sum() == weight[64:].sum() < 32


def test_a_step_that_maps_the_state_leaves_its_averages_alone_too(one_device):
    def mapped(state, batch, rng, axis_name):
        return step(jax.tree.map(lambda x: x, state), batch, rng, axis_name)

    trainer = made(step=mapped, ema_decay=0.5).trainer(one_device)
    state = trainer.init()
    before = jax.tree.map(np.asarray, state.ema_params)
    new, _ = trainer.step(state, one_device.shard(DATA.train.batch(0)))
    assert not np.array_equal(before["linear"]["w"], new.ema_params["linear"]["w"])


def test_parameters_of_another_shape_are_a_sentence_beside_averages(one_device):
    def other(state, batch, rng, axis_name):
        new, scalars = step(state, batch, rng, axis_name)
        return new._replace(params={"linear": {"w": jnp.ones(3)}}), scalars

    trainer = made(step=other, ema_decay=0.5).trainer(one_device)
    with pytest.raises(ConfigError, match="the step"):
        trainer.step(trainer.init(), one_device.shard(DATA.train.batch(0)))


def test_a_step_of_ones_own_that_does_not_fit_says_how_much_it_needs(tmp_path):
    devices = DeviceManager.create("cpu", num_devices=1)
    trainer = made(step=step).trainer(devices)
    with pytest.raises(ConfigError, match="the run needs .* on each device"):
        train(trainer, num_steps=1, workdir=tmp_path / "run", memory_limit=2000)
