"""The template's side: a case trained by its command's function, and what it gives."""

import contextlib
import io
from pathlib import Path

import grain
import numpy as np
import orbax.checkpoint as ocp
from ml_collections.config_flags import config_path
from safetensors.numpy import load_file

from haiku_template.config import default_config
from haiku_template.data import (
    BatchSpec,
    Data,
    EvaluationSet,
    GrainDataset,
    Split,
    bucketed,
    from_iterator,
    from_split,
)
from haiku_template.devices import DeviceManager
from haiku_template.finetuning import save_adapters
from haiku_template.params import unflatten
from haiku_template.runs import Run, start
from haiku_template.runs.export import export_adapters, export_safetensors
from haiku_template.storage import read
from haiku_template.training import Experiment
from tests.oracle import several
from tests.oracle.draw import examples, further, text_of
from tests.oracle.models import PREPROCESS
from tests.oracle.plain import flat
from tests.oracle.texts import LINES, STREAMS, write


class Stopped(Exception):
    """Of a hook: ends a run."""


class Rows:
    """Batches in order, over and over: a data set of the user's own."""

    def __init__(self, arrays, batch_size):
        self.arrays, self.batch_size = arrays, batch_size
        self.num_examples = len(arrays["inputs"])

    def batch(self, step):
        rows = np.arange(self.batch_size) + step * self.batch_size
        return {k: x[rows % self.num_examples] for k, x in self.arrays.items()}


class EachRow(Rows):
    """Every row once."""

    @property
    def num_batches(self):
        return -(-self.num_examples // self.batch_size)

    def batch(self, index):
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return {k: x[rows] for k, x in self.arrays.items()}


def data(spec: BatchSpec, **case) -> Data:
    """The data set of a case, for a config: `tests.oracle.template:data`."""
    kind = case["kind"]
    train, test = examples(case)
    if kind == "masked":
        sets = [
            part(x, spec.batch_size) for part, x in ((Rows, train), (EachRow, test))
        ]
        return Data(*sets, case["num_outputs"])
    if kind == "points":
        lists = [
            [{"points": x["points"][i][x["mask"][i]]} for i in range(len(x["mask"]))]
            for x in (train, test)
        ]
        return bucketed(lists[0], spec, (3, 8), mask="mask", evaluation=lists[1])
    if kind == "ahead":
        sets = forward(train, spec), EvaluationSet(*test.values(), spec.batch_size)
        return Data(*sets, case["num_outputs"])
    if kind == "grain":
        return Data(*of_grain(train, test, spec), case["num_outputs"])
    split = Split(train["inputs"], train["labels"], test["inputs"], test["labels"])
    how = {"augment": shaken, "preprocess": PREPROCESS["changed"]}
    how = how if kind == "changed" else {}
    made = from_split(split, spec._replace(labels="any"), **how)
    sets = {
        name: EvaluationSet(x["inputs"], x["labels"], spec.batch_size)
        for name, x in further(case).items()
    }
    return made._replace(num_outputs=case["num_outputs"], evaluations=sets)


def shaken(inputs, rng):
    """Draws the last number of each example."""
    drawn = rng.random(len(inputs)).astype(np.float32)
    return np.concatenate([inputs[:, :-1], drawn[:, None]], axis=1)


def forward(train, spec):
    """Batches of a generator, which reuses its arrays; the last rows are dropped."""

    def make():
        own = {k: np.empty_like(x[: spec.batch_size]) for k, x in train.items()}
        for end in range(spec.batch_size, len(train["inputs"]) + 1, spec.batch_size):
            for name, x in own.items():
                x[:] = train[name][end - spec.batch_size : end]
            yield own

    return from_iterator(make)


def of_grain(train, test, spec):
    """Sets of Grain's: to train on, shuffled without end, and to evaluate on."""

    def rows(arrays):
        row = lambda i: {k: x[i] for k, x in arrays.items()}  # noqa: E731
        return grain.MapDataset.range(len(arrays["inputs"])), row

    source, row = rows(train)
    source = source.shuffle(seed=spec.seed).repeat().map(row)
    held_out, own_row = rows(test)
    return [
        GrainDataset(x.batch(spec.batch_size)) for x in (source, held_out.map(own_row))
    ]


def config_of(case, folder):
    """The config of a case, its data in a file where a file can hold them."""
    values = {"best_metric": "eval/loss", **case["config"]}
    names = {key: values.pop(f"{key}.name") for key in ("model", "task")}
    config = default_config()
    for key, name in names.items():
        config[key] = {"name": name}
    keys = ("seed", "kind", "num_train", "num_test", "num_outputs", "bad")
    config.data = {key: case[key] for key in keys}
    config.data.name = "tests.oracle.template:data"
    if case["kind"] in ("mlp", "numbers", "resnet", "noisy", "pixels"):
        config.data = {"name": "npz", "path": str(folder / "examples.npz")}
        (x, y), (x_test, y_test) = (part.values() for part in examples(case))
        np.savez(config.data.path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        if case["kind"] == "pixels":
            config.data.scale_pixels = True
    if case["kind"] in (*STREAMS, *LINES, "texts"):
        config.data = _text_file(case, folder)
    for key, value in values.items():
        config_path.set_value(key, config, value, accept_new_attributes=True)
    return config


def _text_file(case, folder):
    """Writes a text file, and tells where it is and what is held out."""
    train, test = text_of(case)
    if case["kind"] == "bytes":  # Of one file, whose end is held out.
        (folder / "text.txt").write_bytes(train + test)
        fraction = (len(test) + 0.5) / len(train + test)
        keys = {"path": str(folder / "text.txt"), "validation_fraction": fraction}
        return {"name": "bytes", "eval_windows": None} | keys
    ending = ".npy" if case["kind"] == "stream" else ".jsonl"
    paths = [folder / f"{part}{ending}" for part in ("train", "test")]
    for path, content in zip(paths, (train, test), strict=True):
        write(path, content)
    keys = dict(zip(("path", "validation_path"), map(str, paths), strict=True))
    if case["kind"] == "stream":
        return {"name": "tokens", "vocab_size": 11, "eval_windows": None} | keys
    return {"name": "jsonl"} | keys


def source_run(case, config, folder):
    """Trains a run to start from; returns what plain Orbax reads of its best step."""
    source, usual = config.copy_and_resolve_references(), default_config()
    source.finetuning, source.optimizer = usual.finetuning, usual.optimizer
    source.num_epochs = source.early_stop.patience = source.exact_elastic = None
    source.init_from = source.ema_decay = None
    _without_bad(source)
    source.update({"num_steps": 4, "seed": config.seed + 20, "log_every": 1})
    source.optimizer.learning_rate = 1e-2
    for key, value in case["source"].items():
        config_path.set_value(key, source, value)
    workdir = folder / "source"
    devices = DeviceManager.create("cpu", num_devices=1)
    with contextlib.redirect_stdout(io.StringIO()):
        start.run(source, devices, str(workdir))
    rows = read(workdir / "metrics.jsonl")
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    saved = {int(x.name) for x in (workdir / "checkpoints").iterdir()}
    losses = {step: loss for step, loss in losses.items() if step in saved}
    choose = min if case["source"]["best_mode"] == "min" else max
    step = choose(sorted(losses), key=losses.get)
    path = (workdir / "checkpoints" / str(step) / "state").absolute()
    state = ocp.PyTreeCheckpointer().restore(path)
    is_averaged = case["source"].keys() & {"ema_decay", "optimizer.name"}
    params = state["ema_params"] if is_averaged else state["params"]
    net_state = {f"state:{k}": x for k, x in flat(state["net_state"]).items()}
    return str(workdir), {**flat(params), **net_state}


def _without_bad(config):
    """Leaves out an example whose weight below 0 may end a run at its first step."""
    if "bad" in config.data:
        config.data = config.data.to_dict() | {"bad": None}


def adapters_of(case, config, folder):
    """Writes a file of adapters to start from; returns its path, and what it has."""
    devices = DeviceManager.create("cpu", num_devices=1)
    first = config.copy_and_resolve_references()
    with contextlib.redirect_stdout(io.StringIO()):
        if case["adapters"] == "exported":
            first.num_epochs = first.early_stop.patience = None
            _without_bad(first)
            first.update({"num_steps": 2, "seed": config.seed + 30, "keep_last": 2})
            start.run(first, devices, str(folder / "first"))
            export_adapters(Run.open(folder / "first", devices), folder / "adapters")
            file = folder / "adapters" / "adapters.safetensors"
            return str(folder / "adapters"), load_file(file)
        first.seed = config.seed  # Of frozen parameters, if none are read.
        trainer = Experiment.from_config(first, devices).trainer(devices)
        state, rng = trainer.init(), np.random.default_rng(case["seed"])
        noise = {
            path: (x + rng.normal(scale=0.1, size=x.shape)).astype(np.float32)
            for path, x in flat(devices.fetch(state.params)).items()
        }
        lora, params = trainer.recipe.plan.lora, devices.replicate(unflatten(noise))
        file = folder / "adapters.safetensors"
        save_adapters(file, params, state.frozen, lora, devices, step=1)
    return str(file), noise


def beginning(case, config, num_steps):
    """The batches of a run, as its data set gives them, and its first parameters."""
    config = config.copy_and_resolve_references()
    config.num_steps = num_steps
    devices = DeviceManager.create("cpu", num_devices=case["devices"])
    with contextlib.redirect_stdout(io.StringIO()):
        experiment = Experiment.from_config(config, devices)
        batches = [experiment.data.train.batch(step) for step in range(num_steps)]
        if not config.finetuning.lora.rank:
            return batches, {}
        params = experiment.trainer(devices).init().params
    return batches, flat(devices.fetch(params))


def trained(case, config, folder):
    """Trains a case, stopped and resumed or in one go; returns what it gives."""
    workdir = folder / "run"
    devices = case["devices"], case["devices_then"]
    where, then = zip(devices, case["processes"], strict=True)
    with contextlib.redirect_stdout(io.StringIO()):
        if case["stops_at"] is not None or case["left_out"]:
            begun = config.copy_and_resolve_references()
            if case["extends"]:
                begun.num_steps = case["stops_at"]
            until = None if case["extends"] else case["stops_at"]
            _start(begun, case, where, workdir, until)
            _trouble(case, config, workdir)
            where = then
        rewind = ",".join(map(str, case["left_out"])) or None
        if case["trouble"] == "stops again":
            last = case["config"]["num_steps"] - 1
            _start(config, case, where, workdir, last, rewind)
            rewind = None
        _start(config, case, where, workdir, rewind=rewind)
        devices = DeviceManager.create("cpu", num_devices=where[0])
        parts = _parts_of(Run.open(workdir, devices), case)
        if case["asks_best"]:
            best = Run.open(workdir, devices, "best")
            parts["best"] = flat(devices.fetch(best.parameters()[0]))
    return parts | _lines_of(workdir, case)


def _start(config, case, where, workdir, until=None, rewind=None):
    """Starts a run on so many devices of so many processes, and stops it after a step.

    Several are stopped by a signal, and one is by an error of a hook.
    """
    num_devices, processes = where
    if processes > 1:
        halt = until and (until, *case["halt"])
        return several.start(config, workdir, num_devices, processes, halt, rewind)

    def stop(event):
        if event.what == "step" and event.step == until:
            raise Stopped

    devices = DeviceManager.create("cpu", num_devices=num_devices)
    hooks = [] if until is None else [stop]
    with contextlib.suppress(Stopped):
        start.run(config, devices, str(workdir), hooks=hooks, rewind=rewind)


def _trouble(case, config, workdir):
    """What becomes of a run that has stopped, before it is started again."""
    if case["trouble"] == "killed" and case["processes"][0] == 1:
        folder = workdir / "checkpoints"  # It has not saved its last step.
        if len([*folder.glob("[0-9]*")]) > 1:
            folder.joinpath(str(case["stops_at"])).rename(workdir / "lost")
    if case["trouble"] == "loses its source":
        Path(config.init_from).rename(workdir.parent / "gone")


def _parts_of(run, case):
    """State, metrics and predictions of a run, and the file that it exports."""
    fetch = lambda tree: flat(run.devices.fetch(tree))  # noqa: E731
    state, test = run.state, examples(case)[1]
    parts = {"params": fetch(state.params), "net_state": fetch(state.net_state)}
    if state.ema_params is not None:
        parts["averages"] = fetch(state.ema_params)
    parts |= {
        "merged": fetch(run.parameters()[0]),
        "evaluate": run.evaluate(run.evaluation_set()),
    }
    inputs = test if case["kind"] == "points" else {"inputs": test["inputs"]}
    parts["predictions"] = flat({"outputs": run.predict(inputs)})
    if case["config"]["model.name"] not in ("gpt", "bert"):
        output = run.workdir.parent / "exported"
        export_safetensors(run, output)
        parts["exported"] = load_file(output / "model.safetensors")
    return parts


def _lines_of(workdir, case):
    """Lines of metrics.jsonl by step, but those of an early stop, and speeds."""
    lines = {}
    for row in read(workdir / "metrics.jsonl"):
        row = {k: x for k, x in row.items() if not k.startswith("perf/")}
        row.pop("train/skipped_steps", None)  # Since a start.
        lines.setdefault(row.pop("step"), {}).update(row)
    return {f"step {step}": line for step, line in lines.items() if line}
