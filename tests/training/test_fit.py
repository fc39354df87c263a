"""`--fit`: changes of a config that make a run fit, each as compiled."""

import json
import shutil
import sys
from pathlib import Path

import haiku as hk
import jax
import numpy as np
import pytest

from configs import digits
from haiku_template.devices import DeviceManager
from haiku_template.devices.layout import device_bytes
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.preflight import NothingFits, fit, memory_budget
from haiku_template.preflight.fit import candidates
from haiku_template.runs import start
from haiku_template.training import Experiment
from tests.runs import run_command

NEW = Path("none")  # A workdir in which no run has begun.


class Block(hk.Module):
    def __call__(self, x):
        return x + hk.Linear(64)(jax.nn.gelu(hk.Linear(128)(x)))


def blocks(num_outputs, axis_name):
    def forward(inputs, is_training):
        x = hk.Linear(64)(hk.Flatten()(inputs))
        for i in range(4):
            x = Block(name=f"block_{i}")(x)
        return hk.Linear(num_outputs, name="head")(x)

    return hk.transform(forward)


def config_of(**changes):
    config = digits.get_config()
    config.model = {"name": f"{__name__}:blocks"}
    config.batch_size, config.steps_per_call = 1024, 1
    config.update_from_flattened_dict(changes)
    return config


def builder(config, devices):
    def build(changes):
        changed = start.with_changes(config, changes)
        return Experiment.from_config(changed, devices).trainer(devices)

    return build


@pytest.fixture
def two_devices():
    return DeviceManager.create("cpu", num_devices=2)


@pytest.mark.long
def test_changes_are_tried_in_the_order_of_cost_and_need_what_is_said(two_devices):
    build = builder(config_of(), two_devices)
    plain = memory_budget(build({}))
    (first,) = candidates(build, NEW, plain.peak)
    assert first.fits and first.changes == {}
    remat, sharding = {"model.remat": ("block_*",)}, {"sharding": (("*", "data"),)}
    limit = memory_budget(build(remat | {"accumulate_steps": 512})).peak - 1
    tried = list(candidates(build, NEW, limit))
    order = [{}, remat, {"accumulate_steps": 512}, remat | {"accumulate_steps": 512}]
    expected = [*order, *(sharding | changes for changes in order)]
    assert [x.changes for x in tried[:-1]] == expected[: len(tried) - 1]
    assert [x.fits for x in tried] == [False] * (len(tried) - 1) + [True]
    last = memory_budget(build(tried[-1].changes))
    assert tried[-1].size == last.peak <= limit < plain.peak
    assert tried[-1].changes["sharding"] == (("*", "data"),)


def test_the_fewest_micro_batches_that_fit_are_taken(one_device):
    build = builder(config_of(**{"model.remat": ("block_*",)}), one_device)
    peaks = {n: memory_budget(build({"accumulate_steps": n})).peak for n in (4, 8)}
    assert peaks[8] < peaks[4] < memory_budget(build({})).peak
    *_, last = candidates(build, NEW, peaks[8])
    assert last.changes == {"accumulate_steps": 8} and last.size == peaks[8]


def test_where_nothing_fits_the_closest_is_said_and_nothing_is_compiled(
    two_devices, monkeypatch, capsys
):
    module = sys.modules["haiku_template.preflight.fit"]
    monkeypatch.setattr(module, "memory_budget", None)
    build = builder(config_of(), two_devices)
    with pytest.raises(NothingFits, match="closest is --config.sharding=") as caught:
        fit(build, NEW, 1000)
    assert caught.value.exit_code == ConfigError.exit_code
    assert capsys.readouterr().out.count(" no ") == 2
    with pytest.raises(ConfigError, match="give --device_memory_limit=24GiB"):
        fit(build, NEW, None)


def test_frozen_parameters_are_tried_in_8_bits(one_device, tmp_path):
    init = blocks(10, None).init
    params = init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), True)
    np.savez(tmp_path / "published.npz", **flatten(params))
    config = config_of(init_from=str(tmp_path / "published.npz"))
    config.finetuning.train, config.batch_size = ("head/*",), 16
    build = builder(config, one_device)
    state = device_bytes(build({}).abstract)
    tried = list(candidates(build, NEW, state - 1))
    changes = {"finetuning.base_dtype": "int8"}
    assert [x.changes for x in tried[:2]] == [{}, changes] and tried[0].budget is None
    assert tried[1].budget.frozen < 0.3 * state
    (alone,) = candidates(builder(config_of(), one_device), NEW, 1)
    assert alone.changes == {}  # There is nothing frozen.


@pytest.mark.slow
def test_a_run_takes_the_cheapest_and_keeps_it(one_device, tmp_path, capsys):
    config = config_of(num_steps=2)
    build = builder(config, one_device)
    limit = memory_budget(build({"accumulate_steps": 64})).peak
    workdir, options = tmp_path / "run", {"memory_limit": limit}
    start.run(config, one_device, workdir, fit="true", dry_run=True, **options)
    assert "micro-batches" in capsys.readouterr().out and not workdir.exists()
    with pytest.raises(ConfigError, match="which --fit=apply takes"):
        start.run(config, one_device, workdir, fit="true", **options)
    start.run(config, one_device, workdir, fit="apply", **options)
    saved = json.loads((workdir / "config.json").read_text())
    changed = saved["accumulate_steps"], saved["model"].get("remat")
    assert changed != (1, None)
    # On another day there is more room, and the run is the same.
    config.num_steps, _ = 4, capsys.readouterr()
    start.run(config, one_device, workdir, fit="apply", memory_limit=100 * limit)
    assert "micro-batches" not in capsys.readouterr().out
    saved = json.loads((workdir / "config.json").read_text())
    assert changed == (saved["accumulate_steps"], saved["model"].get("remat"))
    with pytest.raises(ConfigError, match="belongs to a run with another config"):
        start.run(config, one_device, workdir)


@pytest.mark.slow
def test_the_command_says_what_fits(tmp_path):
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}", "--dry_run"]
    # Fifty batches that travel at once are most of what so small a model needs.
    flags += ["--simulate_devices=4", "--fit", "--device_memory_limit=2816KiB"]
    done = run_command("train", *flags)
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("fit ")]
    given = line.split("fit       ")[1].partition(": ")[0]
    flag = given.replace('"', "")
    fitting = run_command("train", *flags[:4], flag, flags[-1])
    assert fitting.returncode == 0, fitting.stderr
    none = run_command("train", *flags[:-1], "--device_memory_limit=9KiB")
    assert none.returncode == 64 and "nothing that --fit tries" in none.stderr


def test_micro_batches_of_logical_shares_split_those(capsys):
    devices = DeviceManager.create("cpu", num_devices=1)
    config = config_of(exact_elastic=8, batch_size=64)
    trainer = Experiment.from_config(config, devices).trainer(devices)
    limit = device_bytes(trainer.abstract) * 2
    tried = list(candidates(builder(config, devices), NEW, limit))  # Raises of none.
    counts = [
        x.changes["accumulate_steps"] for x in tried if "accumulate_steps" in x.changes
    ]
    assert counts and max(counts) <= 8


def test_a_run_that_lost_its_workdir_keeps_what_it_took(one_device, tmp_path, caplog):
    config = config_of(num_steps=2, accumulate_steps=4, batch_size=64)
    config.mirror = str(tmp_path / "m")
    workdir = tmp_path / "run"
    start.run(config, one_device, workdir)
    shutil.rmtree(workdir)
    config.num_steps, config.accumulate_steps = 4, 1
    start.run(config, one_device, workdir, fit="apply", memory_limit=2**40)
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["accumulate_steps"] == 4
    config.sharding = (("*", "data"),)
    start.run(config, one_device, workdir, fit="apply", memory_limit=2**40)
    assert "keeps config.sharding=(), with which the run began" in caplog.text


def test_a_list_is_no_other_value_than_its_tuple(caplog):
    config = config_of()
    config.model.remat = ["*/block_*"]
    same = start._as_fitted(config, {"model.remat": ("*/block_*",)})
    assert (*same.model.remat,) == ("*/block_*",) and not caplog.text
    start._as_fitted(config, {"model.remat": ("*/head",)})
    assert "keeps config.model.remat=('*/head',), with which" in caplog.text


def test_a_run_without_parameters_that_train_says_so(one_device, tmp_path, caplog):
    init = blocks(10, None).init
    params = init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), True)
    np.savez(tmp_path / "published.npz", **flatten(params))
    config = config_of(init_from=str(tmp_path / "published.npz"), num_steps=1)
    config.batch_size, config.finetuning.lora.rank = 64, 0
    for name in ("a", "b"):
        caplog.clear()
        start.run(config, one_device, str(tmp_path / name))
        assert "nothing trains: no parameter does" in caplog.text


def test_a_run_that_has_begun_is_tried_as_it_is(one_device, tmp_path, capsys):
    config = digits.get_config()
    for config.num_steps, way in ((1, None), (2, "true")):
        start.run(config, one_device, tmp_path, fit=way, memory_limit=2**40)
    assert "done      step 2" in capsys.readouterr().out
