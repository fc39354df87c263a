"""A workdir resumes with the mathematics that it began with, and with no other."""

import functools
import importlib
import json
import logging

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

from haiku_template.data import BatchSpec, Split, from_split
from haiku_template.devices import DeviceManager, mean_over
from haiku_template.errors import ConfigError, NonFiniteError
from haiku_template.models import resnet
from haiku_template.preflight import fingerprint
from haiku_template.runs import Run, start, train
from haiku_template.training import Experiment
from haiku_template.training.tasks import classification

INPUTS = np.random.default_rng(0).normal(size=(96, 8)).astype(np.float32)
LABELS = (INPUTS.sum(axis=1) > 0).astype(np.int32)
TABLE = np.arange(8, dtype=np.float32)


def split_of(inputs, labels):
    return Split(inputs[:64], labels[:64], inputs[64:], labels[64:])


def parts():
    """What a script hands over, made anew: no function or array is the same object."""

    def forward(inputs, is_training):
        x = jax.nn.relu(hk.Linear(16)(inputs + TABLE.copy()))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(2)(x)

    return {
        "model": hk.transform(forward),
        "task": lambda outputs, batch: classification(outputs, batch),
        "data": from_split(split_of(INPUTS, LABELS), BatchSpec(16)),
        "optimizer": optax.adam(1e-3),
    }


def made(num_devices=1, **changes):
    devices = DeviceManager.create("cpu", num_devices=num_devices)
    return Experiment(**parts() | changes).trainer(devices)


def of(num_devices=1, **changes):
    return fingerprint.of(made(num_devices, **changes))


def run(workdir, num_steps=4, num_devices=1, **changes):
    trainer = made(num_devices, **changes)
    return train(trainer, num_steps=num_steps, workdir=workdir, log_every=None)


@functools.cache
def unchanged():
    """The trainer of the unedited script, which compiles its step once."""
    return made()


def run_unchanged(workdir):
    train(unchanged(), num_steps=4, workdir=workdir, log_every=None)


def other_model(**changes):
    values = {"width": 16, "init": None, "scale": 1.0, "table": TABLE} | changes

    def forward(inputs, is_training):
        hidden = hk.Linear(values["width"], w_init=values["init"])
        x = jax.nn.relu(hidden(inputs + values["table"])) * values["scale"]
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(2)(x)

    return hk.transform(forward)


@pytest.fixture(scope="module")
def unedited():
    return fingerprint.of(unchanged())


def test_the_same_script_again_has_the_same_fingerprint(unedited):
    assert of() == unedited


EDITS = {
    "learning rate": {"optimizer": optax.adam(1.01e-3)},
    "optimizer": {"optimizer": optax.sgd(1e-3)},
    "seed": {"seed": 1},
    "task": {"task": lambda o, b: {"loss": 2 * classification(o, b)["loss"]}},
    "average": {"ema_decay": 0.9},
    "parts": {"accumulate_steps": 2},
    "precision": {"precision": "bfloat16"},
    "width": {"model": other_model(width=17)},
    "first parameters": {"model": other_model(init=jnp.zeros)},
    "number in the model": {"model": other_model(scale=0.5)},
    "array in the model": {"model": other_model(table=TABLE[::-1])},
    "batch size": {"data": from_split(split_of(INPUTS, LABELS), BatchSpec(32))},
    "order of the data": {
        "data": from_split(split_of(INPUTS, LABELS), BatchSpec(16, 1))
    },
    "inputs": {"data": from_split(split_of(INPUTS * 1.1, LABELS), BatchSpec(16))},
    "labels": {"data": from_split(split_of(INPUTS, 1 - LABELS), BatchSpec(16))},
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_mathematics_or_the_data_changes_the_fingerprint(edit, unedited):
    assert of(**EDITS[edit]) != unedited


def of_axis(factor, num_devices=1):
    def task(outputs, batch, axis_name):
        loss = classification(outputs, batch)["loss"]
        return {"loss": loss if axis_name is None else factor * loss}

    return of(num_devices, task=task)


def test_what_a_task_does_where_there_is_an_axis_is_in_the_fingerprint(unedited):
    one, other = of_axis(1), of_axis(4)
    assert of_axis(1, num_devices=4) == one
    changed = {k for k in one if other[k] != one[k]}
    assert changed == {"steps over devices"} and not changed & unedited.keys()


def of_own_step(reduce):
    def init(rng, batch):
        return {"params": {"w": jnp.ones(8)}}

    def step(state, batch, rng, axis_name):
        def loss(w):
            return jnp.mean(jnp.square(batch["inputs"] @ w))

        value, gradient = jax.value_and_grad(loss)(state.params["w"])
        gradient = gradient if axis_name is None else reduce(gradient, axis_name)
        params = {"w": state.params["w"] - 0.1 * gradient}
        return state._replace(params=params), {"loss": mean_over(axis_name, value)}

    parts = {"model": None, "task": None, "optimizer": None, "init": init}
    data = from_split(split_of(INPUTS, LABELS), BatchSpec(16))._replace(evaluation=None)
    return of(**parts, step=step, data=data)


def test_how_a_step_of_ones_own_averages_is_in_the_fingerprint():
    """A sum is n times a mean, and on one device they are the same."""
    ways = {
        "mean": jax.lax.pmean,
        "sum": jax.lax.psum,
        "maximum": jax.lax.pmax,
        "none": lambda x, axis_name: x,
        # It counts on the rows of all devices' batches.
        "gathered": lambda x, axis: jax.lax.all_gather(x, axis, tiled=True) + TABLE,
    }
    found = {name: of_own_step(way) for name, way in ways.items()}
    steps = {x.pop("steps over devices") for x in found.values()}
    assert len(steps) == len(ways)
    assert all(x == found["mean"] for x in found.values())


def gathering(axis_name):
    """A model that looks at the examples of all devices."""

    def forward(inputs, is_training):
        x = jax.nn.relu(hk.Linear(16)(inputs + TABLE))
        every = jax.lax.stop_gradient(x)
        top = every.max(axis=0)
        if axis_name is not None:
            every = jax.lax.all_gather(every, axis_name, tiled=True)
            top = jax.lax.pmax(top, axis_name)
        return hk.Linear(2)(x - top - every.mean(axis=0))

    return hk.transform(forward)


def test_what_one_device_gathers_of_all_is_no_other_program():
    """A run that began on one device goes on on four."""
    assert of(4, model=gathering("data")) == of(1, model=gathering(None))


def over_rows(way):
    """A model that reduces over the examples, an axis of `jax.vmap`."""

    def forward(inputs, is_training):
        x = hk.Linear(2)(inputs)
        every = jax.lax.stop_gradient(x)  # A maximum has no derivative.
        return x - jax.vmap(lambda row: way(row, "rows"), axis_name="rows")(every)

    return hk.transform(forward)


def test_a_reduction_over_examples_is_no_identity():
    ways = jax.lax.psum, jax.lax.pmax, jax.lax.pmin, lambda row, axis_name: row
    digests = {of(model=over_rows(way))["train step"] for way in ways}
    assert len(digests) == len(ways)


@pytest.mark.parametrize("model", [gathering("data"), over_rows(jax.lax.psum)])
def test_a_run_has_the_digests_of_the_version_that_began_it(tmp_path, model):
    token = fingerprint._identities.set(fingerprint.EARLIER)
    run(tmp_path, 2, 4, model=model)
    fingerprint._identities.reset(token)
    saved = json.loads((tmp_path / "program.json").read_text())
    assert saved["train step"] != of(4, model=model)["train step"]
    run(tmp_path, 2, 4, model=model)
    with pytest.raises(ConfigError, match="computed something else .*train step"):
        run(tmp_path, 2, 4, model=over_rows(jax.lax.pmax))


FACTOR = 2.0


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def method(self, x):
        return self.factor - x


def doubled(x):
    return FACTOR * x


def of_callback(function):
    def call(x):
        return jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return fingerprint.traced(call, TABLE)


def scaled(factor, names=("a", "b", "c")):
    return lambda x: factor * x * (x.dtype.kind in {"f", "V", *names})


def test_the_code_of_a_callback_is_in_the_fingerprint(monkeypatch):
    """Its instructions and constants, what it closes over, and its module's names."""
    calls = {
        "lambda": lambda x: x + 1,
        "another operation": lambda x: x - 1,
        "another number": lambda x: x + 2,
        "closed over": scaled(2.0),
        "another closed over": scaled(3.0),
        "bound": functools.partial(np.multiply, 2.0),
        "another bound": functools.partial(np.multiply, 3.0),
        "global": lambda x: doubled(x),
        "object": Scaled(2.0),
        "another object": Scaled(3.0),
        "method": Scaled(2.0).method,
        "another method": Scaled(3.0).method,
    }
    found = {name: of_callback(call) for name, call in calls.items()}
    assert len({*found.values()}) == len(calls)
    assert of_callback(scaled(2.0)) == found["closed over"]
    assert of_callback(Scaled(2.0)) == found["object"]

    def noted(factor):
        note = functools.partial(io_callback, Scaled(factor).method)
        return fingerprint.traced(lambda x: note(x, x), TABLE)

    assert noted(2.0) == noted(3.0)  # Fields of an object with a state.
    monkeypatch.setattr(f"{__name__}.FACTOR", 3.0)
    assert of_callback(calls["global"]) != found["global"]


def test_the_fingerprint_is_that_of_any_number_of_devices(unedited):
    def batch_norm(num_devices):
        images = INPUTS.reshape(-1, 8, 1, 1)
        data = from_split(split_of(images, LABELS), BatchSpec(16))
        axis_name = "data" if num_devices > 1 else None
        model = resnet(2, axis_name, channels=(4,), blocks=1)
        return of(num_devices, model=model, data=data, precision="bfloat16")

    def own_norm(num_devices):
        axis_name = "data" if num_devices > 1 else None

        def net(images, is_training):
            moments = mean_over(axis_name, [images.mean(0), (images**2).mean(0)])
            return hk.Linear(2)(images - moments[0] + moments[1])

        return of(num_devices, model=hk.transform(net))

    assert batch_norm(1) == batch_norm(4)
    assert own_norm(1) == own_norm(4)
    assert of(4) == unedited


def test_staging_the_data_and_printing_are_not_mathematics(unedited):
    def task(outputs, batch):
        jax.debug.print("loss {}", outputs[0, 0])
        return classification(outputs, batch)

    assert of(task=task, placement="device") == unedited


def test_an_edited_script_is_refused_by_its_workdir_and_says_what_changed(tmp_path):
    run_unchanged(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match="train step.*another --workdir") as error:
        run(tmp_path, optimizer=optax.adam(3e-3))
    assert error.value.exit_code == 64 and "training data" not in str(error.value)
    edited = from_split(split_of(INPUTS, 1 - LABELS), BatchSpec(16))
    with pytest.raises(ConfigError, match="first batch of the training data"):
        run(tmp_path, data=edited)
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert after == before


@pytest.mark.slow
def test_an_unedited_script_goes_on_on_other_devices_and_further(tmp_path):
    run(tmp_path, num_steps=2, num_devices=4)
    assert int(run(tmp_path, num_steps=4).state.step) == 4


@pytest.mark.slow
def test_a_script_that_failed_before_it_saved_may_be_edited(tmp_path):
    data = from_split(split_of(INPUTS * np.nan, LABELS), BatchSpec(16))
    with pytest.raises(NonFiniteError):
        run(tmp_path, data=data)
    run(tmp_path, optimizer=optax.adam(3e-3))


def test_another_jax_is_named_where_its_trace_differs(tmp_path):
    run_unchanged(tmp_path)
    file = tmp_path / "program.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"jax": "0.9.9"}))
    run_unchanged(tmp_path)  # The traces agree.
    file.write_text(json.dumps(kept | {"jax": "0.9.9", "train step": "0"}))
    with pytest.raises(ConfigError, match=r"jax 0\.9\.9.*remove .*program\.json"):
        run_unchanged(tmp_path)
    without = {k: x for k, x in kept.items() if k not in ("format", "python")}
    file.write_text(json.dumps(without | {"train step": "0"}))
    with pytest.raises(ConfigError, match=r"else \(train step\): its code, its data"):
        run_unchanged(tmp_path)  # The first versions wrote none.
    file.unlink()
    run_unchanged(tmp_path)
    assert json.loads(file.read_text()) == kept


@pytest.mark.parametrize("counts", [(4, 1), (1, 4)], ids=["to one", "to four"])
def test_a_step_of_ones_own_with_norms_goes_on_on_other_devices(
    tmp_path, caplog, counts
):
    """Where there are several, its model averages, too; an edit on these is refused."""

    def run_on(count, reduce=jax.lax.pmean, num_steps=2):
        devices = DeviceManager.create("cpu", num_devices=count)
        names = {"cross_replica_axis": devices.axis_name}

        def net(inputs):
            normed = hk.BatchNorm(True, True, 0.9, **names)(inputs, is_training=True)
            return hk.Linear(2)(normed)

        model = hk.without_apply_rng(hk.transform_with_state(net))

        def init(rng, batch):
            params, net_state = model.init(rng, batch["inputs"])
            return {"params": params, "net_state": net_state}

        def step(state, batch, rng, axis_name):
            def loss(params):
                args = params, state.net_state, batch["inputs"]
                outputs, net_state = model.apply(*args)
                return jnp.square(outputs).mean(), net_state

            grads, net_state = jax.grad(loss, has_aux=True)(state.params)
            if axis_name is not None:
                grads = reduce(grads, axis_name)
            params = jax.tree.map(lambda x, g: x - 0.1 * g, state.params, grads)
            new = state._replace(params=params, net_state=net_state)
            return new, {"loss": jnp.zeros(())}

        data = from_split(split_of(INPUTS, LABELS), BatchSpec(16))
        parts = {"data": data._replace(evaluation=None), "init": init, "step": step}
        trainer = Experiment(**parts).trainer(devices)
        return train(trainer, num_steps=num_steps, workdir=tmp_path)

    run_on(counts[0])
    run_on(counts[1], num_steps=4)
    assert "computed something else" not in caplog.text
    with pytest.raises(ConfigError, match="steps over devices"):
        run_on(counts[0], jax.lax.psum, num_steps=6)


def test_another_kind_of_device_is_warned_of_where_its_trace_differs(tmp_path, caplog):
    run_unchanged(tmp_path)
    file = tmp_path / "program.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"platform": "gpu", "train step": "0"}))
    with caplog.at_level(logging.WARNING):
        run_unchanged(tmp_path)
    assert "train step" in caplog.text and "gpu" in caplog.text


def test_other_data_are_refused_on_another_kind_of_device_too(tmp_path):
    run_unchanged(tmp_path)
    file = tmp_path / "program.json"
    kept = json.loads(file.read_text())
    other = {"platform": "gpu", "train step": "0", fingerprint.ENDS: "0"}
    file.write_text(json.dumps(kept | other))
    with pytest.raises(ConfigError, match=r"else \(first and last rows of the train"):
        run_unchanged(tmp_path)


MODULE = """
import haiku as hk
from haiku_template.config import default_config

def model(num_outputs, axis_name):
    return hk.transform(lambda x, is_training: SCALE * hk.Linear(num_outputs)(
        hk.Flatten()(x)))

def get_config():
    config = default_config()
    config.num_steps = 3
    config.model = {"name": "edited:model"}
    return config
"""


def test_an_edited_function_that_a_config_names_is_refused_and_evaluation_warns(
    tmp_path, monkeypatch, caplog
):
    import sys

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)  # Where a run's code may be imported from.
    workdir = tmp_path / "run"

    def run_with(scale):
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        sys.modules.pop("edited", None)
        (tmp_path / "edited.py").write_text(f"SCALE = {scale}\n{MODULE}")
        importlib.invalidate_caches()
        config = importlib.import_module("edited").get_config()
        devices = DeviceManager.create("cpu", num_devices=1)
        start.run(config, devices, str(workdir))

    run_with(1.5)
    run_with(1.5)
    one, three = (DeviceManager.create("cpu", num_devices=n) for n in (1, 3))
    assert Run.open(workdir, one).trainer and "computed" not in caplog.text
    with pytest.raises(ConfigError, match="train step"):
        run_with(2.5)
    assert Run.open(workdir, three).trainer  # Batches of 129 have another fingerprint.
    assert "computed" not in caplog.text
    assert Run.open(workdir, one).trainer
    assert caplog.messages[-1].endswith(
        "computed something else (evaluation step, train step): its code, its data or "
        "haiku_template itself was edited since"
    )
    sys.modules.pop("edited", None)


def test_a_config_of_built_in_parts_says_it_all(tmp_path):
    names = {key: {"name": "mlp"} for key in ("model", "data", "task")}
    assert not fingerprint.needed(names)
    assert fingerprint.needed({}) and fingerprint.needed({"a": 1})
    assert fingerprint.needed(names | {"task": {"name": "mine:task"}})


@pytest.mark.parametrize("batches", [(1, 1), (None, 2)])
def test_evaluations_of_some_batches_are_no_edit(tmp_path, monkeypatch, batches):
    """Nor are then more steps, with which a schedule ends."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    name = f"shortened_{batches[1]}"
    (tmp_path / f"{name}.py").write_text(f"SCALE = 1.0\n{MODULE}")
    config = importlib.import_module(name).get_config()
    config.model.name = f"{name}:model"
    devices = DeviceManager.create("cpu", num_devices=1)
    for config.num_steps, config.eval_batches in zip((2, 3), batches, strict=True):
        start.run(config, devices, str(tmp_path / "run"))
    assert Run.open(tmp_path / "run", devices).step == 3
