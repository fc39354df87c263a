"""What comes after training agrees with itself: files, metrics, exports, new starts.

Runs are the oracle's cases, with many options each; that their training is right is
shown in `tests/oracle`.
"""

import contextlib
import io
import json

import jax
import numpy as np
import pytest

from haiku_template.config import default_config
from haiku_template.devices import DeviceManager
from haiku_template.finetuning import is_folder
from haiku_template.runs import Run, export_safetensors, start
from haiku_template.runs.predictions import write_predictions
from haiku_template.storage import Checkpoints, read
from haiku_template.training import Experiment
from tests.oracle.draw import ARRAYS, draw, examples, further
from tests.oracle.models import TASKS
from tests.oracle.template import config_of


def case_of(seed):
    """A case that starts from its seed and is evaluated on all of its test part."""
    case, of_file = draw(seed, ARRAYS), ("fresh", "rename", "ignore")
    for key in (*(f"finetuning.{x}" for x in of_file), "eval_batches"):
        case["config"].pop(key, None)
    return case


def trained(case, folder):
    """The workdir of a case, and its config."""
    config, devices = config_of(case, folder), of(case["devices"])
    with contextlib.redirect_stdout(io.StringIO()):
        start.run(config, devices, str(folder / "run"))
    return folder / "run", config


def of(num_devices):
    """So many devices."""
    return DeviceManager.create("cpu", num_devices=num_devices)


def of_row(tree, row=None):
    """All numbers of an example, in order: of a line of JSON, or of arrays' row."""
    if row is not None:
        tree = jax.tree.map(lambda x: x[row].tolist(), tree)
    return jax.tree.leaves(tree)


def of_predictions(outputs, case):
    """Averages of a test part's values, by the oracle's task on the host."""
    values = TASKS[case["config"]["task.name"]](outputs, examples(case)[1])
    weights = np.asarray(values.pop("example_weight", 1.0))
    weights = np.broadcast_to(weights, np.shape(values["loss"]))
    return {f"eval/{k}": np.average(x, weights=weights) for k, x in values.items()}


def begun_from(folder, config, devices):
    """Metrics before the first step of a run that starts from an exported model."""
    config = config.copy_and_resolve_references()
    config.finetuning, config.init_from = default_config().finetuning, str(folder)
    if is_folder(str(folder)):  # Which has the sizes.
        config.model = {"name": config.model.name}
    trainer = Experiment.from_config(config, devices).trainer(devices)
    return trainer.evaluate(trainer.init())


@pytest.mark.slow(but="305")
@pytest.mark.parametrize("seed", range(300, 312))
def test_what_comes_after_training_agrees(seed, tmp_path):
    case = case_of(seed)
    workdir, config = trained(case, tmp_path)
    files = {*workdir.rglob("*")}
    rounding = 1e-5 if config.precision == "float32" else 2e-2
    near = lambda metrics: pytest.approx(metrics, rel=rounding, abs=rounding)  # noqa: E731
    last = [x for x in read(workdir / "metrics.jsonl") if "eval/loss" in x][-1]
    del last["step"]  # The rest are of the evaluation set, and of further ones.
    of_one = {k: x for k, x in last.items() if k.split("/")[1] not in further(case)}
    inputs = test = examples(case)[1]
    inputs = test if case["kind"] == "points" else test["inputs"]
    for devices in map(of, (1, 4)):
        run = Run.open(workdir, devices)
        metrics = run.evaluate(run.evaluation_set())  # Which draws nothing.
        assert run.evaluate(run.evaluation_set()) == metrics == near(of_one)
        assert run.evaluate(test) == near(of_one)
        file = tmp_path / f"{devices.num_devices}.jsonl"
        assert write_predictions(run, file) == case["num_test"]
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        outputs = run.predict(inputs)
        for i, row in enumerate(rows):
            np.testing.assert_allclose(
                of_row(row["outputs"]), of_row(outputs, i), atol=rounding
            )
            if "labels" in test:
                assert of_row(row["labels"]) == of_row(test["labels"], i)
        for name, value in of_predictions(outputs, case).items():
            assert metrics[name] == near(value), name
        model, variables = run.model()
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=rounding),
            *(jax.jit(model)(variables, inputs), outputs),
        )
    exported = tmp_path / "exported"
    export_safetensors(run, exported)
    assert begun_from(exported, config, of(1)) == near(last)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        assert all(map(checkpoints.verify, checkpoints.metrics))
    assert {*workdir.rglob("*")} == files
