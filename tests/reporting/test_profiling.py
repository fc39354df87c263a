"""--profile writes a trace that can be read, and a page that says what it shows."""

import gzip
import json
import re

import jax
import numpy as np
import optax
import pytest

from haiku_template.config import interval
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError, Interrupted
from haiku_template.models import mlp
from haiku_template.reporting.profile import operations
from haiku_template.runs import train
from haiku_template.training import Experiment, classification
from tests.runs import with_data

INPUTS = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
LABELS = np.arange(50, dtype=np.int32) % 3


@pytest.fixture(scope="module", params=[1, 4], ids=["one device", "four devices"])
def trainer(request):
    data = Data(
        ArrayDataset(INPUTS, LABELS, BatchSpec(8)), EvaluationSet(INPUTS, LABELS, 16), 3
    )
    return Experiment(
        model=mlp(3, width=8),
        task=classification,
        data=data,
        optimizer=optax.adam(1e-3),
        steps_per_call=1,
    ).trainer(DeviceManager.create("cpu", num_devices=request.param))


def folders(workdir):
    return sorted((workdir / "profile/plugins/profile").glob("*"))


@pytest.mark.slow(but="one device")
def test_a_trace_and_a_page_of_the_steps_asked_for(tmp_path, trainer, capsys):
    train(trainer, num_steps=12, workdir=tmp_path, profile=(3, 7), eval_every=5)
    (folder,) = folders(tmp_path)
    page = (folder / "summary.txt").read_text()
    assert page.startswith("Steps 4 to 7\n") and page.count("\n") < 50
    assert trainer.devices.describe() in page
    assert str(folder / "summary.txt") in capsys.readouterr().out
    milliseconds = float(re.search(r"step +([\d.]+) ms", page)[1])
    parts = [float(x) for x in re.findall(r"([\d.]+) ms +[\d.]+%  \w", page)]
    assert sum(parts) == pytest.approx(milliseconds, rel=0.02)
    trace = gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes())
    found = [event.get("args", {}) for event in json.loads(trace)["traceEvents"]]
    steps = {int(args["step_num"]) for args in found if "step_num" in args}
    assert steps == {4, 5, 6, 7}


@pytest.mark.slow
def test_calls_of_several_steps_are_traced_as_they_are(tmp_path, trainer):
    several = trainer.with_steps_per_call(50)
    train(several, num_steps=12, workdir=tmp_path, profile=(3, 7), eval_every=5)
    (folder,) = folders(tmp_path)
    assert (folder / "summary.txt").read_text().startswith("Steps 4 to 7\n")
    trace = gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes())
    events = [event.get("args", {}) for event in json.loads(trace)["traceEvents"]]
    assert {int(x["step_num"]) for x in events if "step_num" in x} == {5, 7}
    seconds, calls = operations(folder)
    assert max(seconds.values()) > 0 and max(calls.values()) >= 4


@pytest.mark.slow(but="four devices")
def test_each_operation_of_a_step_is_counted_once_a_step_and_device(tmp_path, trainer):
    train(trainer, num_steps=6, workdir=tmp_path, profile=(2, 5))
    seconds, calls = operations(folders(tmp_path)[0])
    assert seconds and min(seconds.values()) >= 0
    assert max(calls.values()) % (3 * trainer.devices.num_devices) == 0


def test_a_loop_counts_without_what_is_inside(tmp_path):
    @jax.jit
    def f(x):
        return jax.lax.fori_loop(0, 10, lambda _, x: jax.numpy.sin(x @ x), x)

    x = np.ones((64, 64), np.float32)
    f(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        f(x).block_until_ready()
    seconds, _ = operations(next(tmp_path.glob("plugins/profile/*")))
    loops = [value for name, value in seconds.items() if name.startswith("while")]
    inside = sum(value for name, value in seconds.items() if "while" not in name)
    assert loops and max(loops) < inside


@pytest.mark.slow
def test_profiling_changes_no_result(tmp_path, trainer):
    plain = train(trainer, num_steps=6, workdir=tmp_path / "a")
    traced = train(trainer, num_steps=6, workdir=tmp_path / "b", profile=(0, 6))
    for x, y in zip(*map(jax.tree.leaves, (plain.state, traced.state)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.slow
def test_a_run_that_is_stopped_inside_can_be_traced_again(tmp_path, trainer):
    class Stops:
        def batch(self, step):
            if step == 4:
                raise Interrupted("SIGTERM", 75)
            return trainer.experiment.data.train.batch(step)

    stopping = with_data(trainer, train=Stops())
    with pytest.raises(Interrupted):
        train(stopping, num_steps=6, workdir=tmp_path, profile=(2, 6), save_every=2)
    train(trainer, num_steps=6, workdir=tmp_path, profile=(2, 6), save_every=2)
    page = (folders(tmp_path)[-1] / "summary.txt").read_text()
    assert page.startswith("Steps 5 to 6\n") or page.startswith("Steps 3 to 6\n")


def test_a_run_that_resumes_later_says_so(tmp_path, trainer, capsys):
    train(trainer, num_steps=4, workdir=tmp_path)
    train(trainer, num_steps=6, workdir=tmp_path, profile=(1, 3))
    assert "steps 1 to 3 were done before this run" in capsys.readouterr().out
    assert not folders(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "10", "a:b", "5:5", "7:3", "-1:4", "3:101", "1:2:3"]
)
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(ConfigError, match=r"possible is START:STOP with 0 <= START < "):
        interval(text, 100)


def test_an_interval_may_reach_the_end():
    assert interval("0:100", 100) == (0, 100)


@pytest.mark.parametrize("steps", [(5, 2), (3, 3), (-1, 2), (2, 9), (2,), "ab", 3])
def test_a_call_with_what_is_no_interval_of_the_run_is_refused(
    tmp_path, trainer, steps
):
    with pytest.raises(ConfigError, match=re.escape(f"profile={steps}; possible is")):
        train(trainer, num_steps=6, workdir=tmp_path, profile=steps)
    assert not [*tmp_path.iterdir()]  # Before anything is compiled or opened.
