"""Runs that start from what others trained, through their configs."""

import json
import pickle
import re
import shutil
from pathlib import Path

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from configs import digits
from haiku_template import config as configs
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.finetuning.source import open_source, vocabulary_of, with_sizes
from haiku_template.params import flatten
from haiku_template.runs import Run, start
from haiku_template.runs.export import export_npz, export_safetensors
from haiku_template.training import Experiment, experiment
from haiku_text.models import bert, gpt
from tests.runs import changed, evaluated

REFERENCES = Path(__file__).parents[1] / "pretrained" / "references"
HEAD = "mlp/~/linear_2/*"


def config(**changes):
    values = digits.get_config()
    values.update_from_flattened_dict(
        {"num_steps": 3, "model.width": 8, "optimizer.warmup_steps": 0} | changes
    )
    configs.check(values)
    return values


@pytest.fixture(scope="module")
def cpu():
    return DeviceManager.create("cpu", num_devices=1)


@pytest.fixture(scope="module")
def pretrained(cpu, tmp_path_factory):
    """The workdir of a run, with averaged parameters."""
    workdir = tmp_path_factory.mktemp("runs") / "pretrained"
    values = config(num_steps=20, ema_decay=0.5)
    start.run(values, cpu, str(workdir))
    return workdir


@pytest.mark.slow(but="four devices")
def test_adapters_of_a_run_start_where_it_ended(tmp_path, devices, pretrained):
    values = config(
        init_from=str(pretrained),
        **{"finetuning.lora.rank": 2, "optimizer.learning_rate": 0.0},
    )
    start.run(values, devices, str(tmp_path))
    expected = evaluated(pretrained, devices)[1]
    found = evaluated(tmp_path, devices)[1]
    assert found == pytest.approx(expected, abs=1e-6)


def test_frozen_parameters_of_a_run_in_bfloat16(cpu, pretrained):
    values = {"finetuning.lora.rank": 2, "finetuning.base_dtype": "bfloat16"}
    trainer = Experiment.from_config(
        config(init_from=str(pretrained), **values), cpu
    ).trainer(cpu)
    half = flatten(trainer.initializer.frozen(trainer.layout))
    values["finetuning.base_dtype"] = "float32"
    trainer = Experiment.from_config(
        config(init_from=str(pretrained), **values), cpu
    ).trainer(cpu)
    full = flatten(trainer.initializer.frozen(trainer.layout))
    for path, leaf in half.items():
        assert str(leaf.dtype) == "bfloat16"
        np.testing.assert_array_equal(leaf, full[path].astype(leaf.dtype))


def test_a_fresh_head_of_another_size_trains_on_a_frozen_body(cpu, pretrained):
    values = {"finetuning.train": (HEAD,), "finetuning.fresh": (HEAD,)}
    start = {"init_from": str(pretrained), "model.num_layers": 2}
    trainer = Experiment.from_config(config(**start, **values), cpu).trainer(cpu)
    other = changed(trainer, model=experiment.make_model(config(**start), 4))
    state = other.init()
    assert state.params["mlp/~/linear_2"]["w"].shape == (8, 4)
    body = Experiment.from_config(config(**start), cpu).trainer(cpu).init().params
    frozen = other.initializer.frozen(other.layout)
    assert set(frozen) == {"mlp/~/linear_0", "mlp/~/linear_1"}
    for module, leaves in frozen.items():
        for name, leaf in leaves.items():
            np.testing.assert_array_equal(leaf, body[module][name])


@pytest.mark.parametrize("key", ["micro_batches", "finetuning.tran"])
def test_a_script_is_refused_keys_that_would_change_nothing(cpu, key):
    values = config()
    *path, last = key.split(".")
    (values.finetuning if path else values)[last] = 2
    with pytest.raises(ConfigError, match=f"unknown key {key}"):
        Experiment.from_config(values, cpu)


def test_all_of_a_run_can_train_on(cpu, pretrained):
    state = (
        Experiment.from_config(config(init_from=str(pretrained)), cpu)
        .trainer(cpu)
        .init()
    )
    before = Run.open(pretrained, cpu, "best").state
    for a, b, c in zip(
        *map(jax.tree.leaves, (state.params, before.ema_params, before.params)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(b, c)
    assert int(state.step) == 0


def test_a_run_whose_frozen_part_changed_does_not_resume(tmp_path, cpu, pretrained):
    source = tmp_path / "source.safetensors"
    trainer = Experiment.from_config(config(init_from=str(pretrained)), cpu).trainer(
        cpu
    )
    leaves = flatten(jax.device_get(trainer.init().params))
    save_file(leaves, source)
    values = config(init_from=str(source), **{"finetuning.lora.rank": 2})
    workdir = tmp_path / "run"
    start.run(values, cpu, str(workdir))
    before = (workdir / "metrics.jsonl").read_text()
    start.run(values, cpu, str(workdir))  # Nothing is left to do.
    leaves["mlp/~/linear_0/b"] = leaves["mlp/~/linear_0/b"] + 1
    save_file(leaves, source)
    with pytest.raises(ConfigError, match="were trained with other frozen parameters"):
        start.run(values, cpu, str(workdir))
    with pytest.raises(ConfigError, match="were trained with other frozen parameters"):
        evaluated(workdir, cpu)[1]
    assert (workdir / "metrics.jsonl").read_text() == before
    with pytest.raises(ConfigError, match="trained a part of its model"):
        Experiment.from_config(config(init_from=str(workdir)), cpu).trainer(cpu)


def test_a_run_that_trained_all_needs_its_source_no_more(tmp_path, cpu, pretrained):
    source, workdir = tmp_path / "source.safetensors", tmp_path / "run"
    trainer = Experiment.from_config(config(init_from=str(pretrained)), cpu).trainer(
        cpu
    )
    leaves = flatten(jax.device_get(trainer.init().params))
    save_file({f"old/{k}": x for k, x in leaves.items()}, source)
    of_names = {"finetuning.rename": (("old/*", "*"),), "finetuning.fresh": (HEAD,)}
    values = config(init_from=str(source), **of_names, num_steps=4, save_every=2)
    start.run(values, cpu, str(workdir))
    shutil.copytree(workdir, tmp_path / "as_it_was")
    shutil.rmtree(tmp_path / "as_it_was" / "checkpoints" / "4")
    before = evaluated(tmp_path / "as_it_was", cpu)
    source.rename(tmp_path / "elsewhere")
    assert evaluated(tmp_path / "as_it_was", cpu) == before and before[0] == 2
    start.run(values, cpu, str(tmp_path / "as_it_was"))
    ends = [Run.open(x, cpu).state for x in (workdir, tmp_path / "as_it_was")]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(a, b)
    export_safetensors(Run.open(workdir, cpu), tmp_path / "exported")
    with pytest.raises(ConfigError, match="source.safetensors is not there"):
        export_npz(Run.open(workdir, cpu), tmp_path / "exported.npz")  # In its names.
    with pytest.raises(ConfigError, match="source.safetensors is not there"):
        start.run(values, cpu, str(tmp_path / "new"))


def test_what_training_warned_of_is_not_said_again(tmp_path, cpu, caplog):
    values = config(**{"optimizer.warmup_steps": 9})
    start.run(values, cpu, str(tmp_path))
    assert "warmup_steps=9 leaves nothing of num_steps=3" in caplog.text
    caplog.clear()
    run = Run.open(tmp_path, cpu)
    assert run.evaluate() and not caplog.text
    rate = values.optimizer.learning_rate
    assert run.trainer.experiment.schedule(2) == pytest.approx(rate)


def test_a_run_that_starts_from_itself_is_a_sentence(tmp_path):
    """As one that was moved to the folder that it started from."""
    folders = [tmp_path / name for name in "ab"]
    for folder, other in zip(folders, reversed(folders), strict=True):
        folder.mkdir()
        values = configs.to_dict(config(init_from=str(other)))
        (folder / "config.json").write_text(json.dumps(values))
    a, b = map(re.escape, map(str, folders))
    with pytest.raises(ConfigError, match=f"{a} starts from itself, as .* of {a}, {b}"):
        vocabulary_of(str(folders[0]))


def test_what_does_not_fit_is_refused(tmp_path, cpu, pretrained, monkeypatch):
    with pytest.raises(ConfigError, match=r"init_from=nowhere is not there"):
        Experiment.from_config(config(init_from="nowhere"), cpu).trainer(cpu)
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="not be re"):
        patch.setattr("os.access", lambda path, mode: path != pretrained)
        open_source(str(pretrained), None, cpu)
    file = tmp_path / "model.safetensors"
    save_file({"mlp/~/linear_0/w": np.zeros((3, 3), np.float32)}, file)
    trainer = Experiment.from_config(config(init_from=str(file)), cpu).trainer(cpu)
    with pytest.raises(ConfigError, match="5 missing, 0 extra, 1 mismatched"):
        trainer.init()
    save_file({"mlp/~/linear_0/w": np.zeros((8, 64, 8), np.float32)}, file)
    with pytest.raises(ConfigError, match=r"of 8 \(convert --unreplicate\), is ne"):
        trainer.init()
    wider = {"init_from": str(pretrained), "model.width": 9}
    with pytest.raises(ConfigError, match="init_from=.*does not fit this model, and n"):
        Experiment.from_config(config(**wider), cpu).trainer(cpu).init()


def test_a_folder_says_the_sizes_of_its_model(tmp_path):
    folder = str(REFERENCES / "gpt2")
    sizes = json.loads((REFERENCES / "gpt2" / "config.json").read_text())
    given = {"name": "gpt", "remat": True, "width": None}
    values = with_sizes(given, folder, gpt.family)
    assert values["width"] == sizes["n_embd"] and values["remat"]
    assert values["num_heads"] == sizes["n_head"]
    with pytest.raises(ConfigError, match=r"config\.model\.num_heads=99, and the mod"):
        with_sizes({"name": "gpt", "num_heads": 99}, folder, gpt.family)
    with pytest.raises(ConfigError, match="of type 'gpt2'"):
        with_sizes({"name": "bert"}, folder, bert.family)
    assert with_sizes({"name": "gpt"}, None, gpt.family) == {"name": "gpt"}


def test_other_heads_than_those_of_a_run_are_warned_of(tmp_path, caplog):
    """No shape shows them: another model was trained on, without a word."""
    saved = configs.default_config()
    saved.model = {"name": "gpt", "width": 64, "num_heads": 4}
    (tmp_path / "config.json").write_text(saved.to_json())
    for heads in (None, 4):
        values = {"width": 64, "num_heads": heads}
        assert with_sizes(values, str(tmp_path), gpt.family) == values
    assert with_sizes({"num_heads": 2}, str(tmp_path), None) == {"num_heads": 2}
    assert not caplog.text
    with_sizes({"num_heads": 2}, str(tmp_path), gpt.family)
    assert f"num_heads=2, and the run in {tmp_path} has 4: no shape" in caplog.text
    (tmp_path / "checkpoints").mkdir()
    for text in ("{}", "{damaged"):  # A script's; a run may need its source no more.
        (tmp_path / "config.json").write_text(text)
        with_sizes({"num_heads": 2}, str(tmp_path), gpt.family)


def test_adapters_of_a_folder_of_gpt_2(cpu, tmp_path):
    from haiku_template.finetuning.lora import Lora
    from haiku_template.finetuning.plan import Finetuning, make_plan

    folder = REFERENCES / "gpt2"
    values = with_sizes({"name": "gpt"}, str(folder), gpt.family)
    values.pop("name")
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    model = gpt(vocabulary, **values)
    tokens = np.zeros((1, 4), np.int32)
    shapes = cpu.abstract(lambda: model.init(jax.random.key(0), tokens, False))
    plan = make_plan(Finetuning(lora=Lora(2, patterns=("*/qkv/w",))), shapes)
    source = open_source(str(folder), gpt.family, cpu)
    leaves, net_state = source(shapes, plan.trained, None)
    assert set(leaves) == plan.frozen and net_state is None
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    (copied / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_source(str(copied), gpt.family, cpu)


def normed(num_outputs, axis_name=None):
    """A model with network state."""

    def forward(x, is_training):
        x = hk.Linear(8, name="body")(hk.Flatten()(x))
        x = hk.BatchNorm(True, True, 0.9, cross_replica_axis=axis_name, name="norm")(
            x, is_training
        )
        return hk.Linear(num_outputs, name="head")(jax.nn.relu(x))

    return hk.transform_with_state(forward)


def write_npz(path, tree):
    flat = {
        f"{k}:{m}:{n}": x
        for k, t in tree.items()
        for m, p in t.items()
        for n, x in p.items()
    }
    np.savez(path, **flat, **{"model_config:width": 8})


def write_tree(path, tree):
    shutil.rmtree(path, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, (tree["params"], tree["state"]))


@pytest.mark.slow(but="write_npz")
@pytest.mark.parametrize("write", [write_npz, write_tree])
def test_a_run_from_a_published_file_resumes_with_the_same_frozen_part(
    tmp_path, cpu, write
):
    """Parameters and state begin as published, renamed; one that changed is refused."""
    rng, source = np.random.default_rng(0), tmp_path / "published.npz"
    published = normed(7).init(jax.random.key(1), jnp.zeros((2, 64)), True)
    published = jax.tree.map(lambda x: x + rng.random(x.shape), published)
    published = jax.tree.map(lambda x: x.astype(np.float32), jax.device_get(published))
    state = published[1]
    for leaves in state.values():
        leaves["counter"] = leaves["counter"].astype(np.int32)
    names = [{f"old/{m}": x for m, x in tree.items()} for tree in published]
    tree = dict(zip(("params", "state"), names, strict=True))
    write(source, tree)
    values = config(
        init_from=str(source),
        model={"name": "tests.training.test_init_from:normed"},
        **{
            "finetuning.train": ("head/*", "norm/*"),
            "finetuning.fresh": ("head/*",),
            "finetuning.rename": (("old/*", "*"),),
            "optimizer.schedule": "constant",
        },
    )
    first = Experiment.from_config(values, cpu).trainer(cpu).init()
    for name, x in flatten(state).items():
        np.testing.assert_array_equal(flatten(first.net_state)[name], x)
    frozen = flatten(first.frozen)
    assert set(frozen) == {"body/w", "body/b"}
    for name, x in frozen.items():
        np.testing.assert_array_equal(x, flatten(published[0])[name])
    assert first.params["head"]["w"].shape == (8, 10)
    workdir = tmp_path / "run"
    start.run(values, cpu, str(workdir))
    values.num_steps = 5
    start.run(values, cpu, str(workdir))
    assert evaluated(workdir, cpu)[0] == 5
    tree["params"]["old/body"]["w"] += 1
    write(source, tree)
    values.num_steps = 6
    with pytest.raises(ConfigError, match="were trained with other frozen parameters"):
        start.run(values, cpu, str(workdir))


def recurrent(num_outputs, axis_name):
    """A model whose module keeps a tree of arrays as its state."""

    def forward(inputs):
        zeros = {"cell": jnp.zeros(3), "more": (jnp.zeros(2), jnp.zeros(()))}
        carry = hk.get_state("carry", (), init=lambda *_: zeros)
        hk.set_state("carry", jax.tree.map(lambda x: x + 1, carry))
        return hk.Linear(num_outputs)(hk.Flatten()(inputs)) + carry["more"][1]

    return hk.transform_with_state(forward)


def test_a_module_s_state_may_be_a_tree(tmp_path, cpu):
    tree = recurrent(10, None).init(jax.random.key(1), jnp.zeros((2, 64)))
    tree = jax.tree.map(lambda x: np.asarray(x) + 7, tree)
    leaves = flatten(dict(zip(("params", "state"), tree, strict=True)))
    np.savez(tmp_path / "a.npz", **{k: x for k, x in leaves.items() if "/0" not in k})
    values = config(
        init_from=str(tmp_path / "a.npz"),
        model={"name": "tests.training.test_init_from:recurrent"},
        **{"finetuning.fresh": ("state:*/0",)},
    )
    found = Experiment.from_config(values, cpu).trainer(cpu).init().net_state
    tree[1]["~"]["carry"]["more"][0][:] = 0
    jax.tree.map(np.testing.assert_array_equal, found, tree[1])


def test_names_are_not_mapped_in_a_workdir(cpu, pretrained):
    values = config(init_from=str(pretrained), **{"finetuning.ignore": ("a",)})
    with pytest.raises(
        ConfigError, match=r"finetuning\.ignore=.* is for the names in f"
    ):
        Experiment.from_config(values, cpu)
    with pytest.raises(
        ConfigError, match=r"finetuning\.rename needs --config.init_from"
    ):
        Experiment.from_config(config(**{"finetuning.rename": (("a", "b"),)}), cpu)


def test_a_pickle_is_refused_with_the_command_that_converts_it(tmp_path, cpu):
    path = tmp_path / "params.pkl"
    path.write_bytes(pickle.dumps({"mlp": {"w": np.ones(3)}}))
    with pytest.raises(
        ConfigError, match=f"haiku_template.convert --input={path} --ou"
    ):
        Experiment.from_config(config(init_from=str(path)), cpu).trainer(cpu).init()
