"""The template's side: a case trained by its command's function, and what it gives."""

import contextlib
import io

import numpy as np
from ml_collections.config_flags import config_path
from safetensors.numpy import load_file

from haiku_template.config import default_config
from haiku_template.data import (
    BatchSpec,
    Data,
    EvaluationSet,
    Split,
    bucketed,
    from_split,
)
from haiku_template.devices import DeviceManager
from haiku_template.runs import Run, start
from haiku_template.runs.export import export_safetensors
from haiku_template.storage import read
from haiku_template.training import Experiment
from tests.oracle.draw import examples, further
from tests.oracle.plain import flat


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
    split = Split(train["inputs"], train["labels"], test["inputs"], test["labels"])
    made = from_split(split, spec._replace(labels="any"))
    sets = {
        name: EvaluationSet(x["inputs"], x["labels"], spec.batch_size)
        for name, x in further(case).items()
    }
    return made._replace(num_outputs=case["num_outputs"], evaluations=sets)


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
    if case["kind"] in ("mlp", "numbers", "resnet", "noisy"):
        config.data = {"name": "npz", "path": str(folder / "examples.npz")}
        (x, y), (x_test, y_test) = (part.values() for part in examples(case))
        np.savez(config.data.path, x_train=x, y_train=y, x_test=x_test, y_test=y_test)
    for key, value in values.items():
        config_path.set_value(key, config, value, accept_new_attributes=True)
    return config


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

    def stop(event):
        if event.what == "step" and event.step == case["stops_at"]:
            raise Stopped

    with contextlib.redirect_stdout(io.StringIO()):
        devices = DeviceManager.create("cpu", num_devices=case["devices"])
        if case["stops_at"] is not None:
            first = config.copy_and_resolve_references()
            if case["extends"]:
                first.num_steps = case["stops_at"]
            hooks = [] if case["extends"] else [stop]
            with contextlib.suppress(Stopped):
                start.run(first, devices, str(workdir), hooks=hooks)
            devices = DeviceManager.create("cpu", num_devices=case["devices_then"])
        start.run(config, devices, str(workdir))
        parts = _parts_of(Run.open(workdir, devices), case)
        if case["asks_best"]:
            best = Run.open(workdir, devices, "best")
            parts["best"] = flat(devices.fetch(best.parameters()[0]))
    return parts | _lines_of(workdir, case)


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
    inputs = test if case["kind"] == "points" else test["inputs"]
    parts["predictions"] = flat({"outputs": run.predict(inputs)})
    if case["config"]["model.name"] != "gpt":
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
