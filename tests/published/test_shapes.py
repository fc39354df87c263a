"""GraphCast and Nucleotide Transformer in the shapes of their files and batches.

Their code is in no package: small nets stand for it, and nothing is fetched.
"""

import functools

import haiku as hk
import jax
import joblib
import numpy as np
import pytest

from examples import graphcast, nucleotide_transformer
from haiku_template import config as configs
from haiku_template.pretrained import convert
from haiku_template.runs import Run, export_npz, verify
from haiku_template.runs.start import run
from haiku_template.testing import assert_devices_agree
from haiku_template.training import Experiment
from tests.runs import run_steps


def changed(module, **changes):
    config = module.get_config()
    config.update_from_flattened_dict(changes)
    configs.check(config)
    return config


@pytest.mark.slow
def test_graphcasts_batches_loss_and_file(tmp_path, one_device):
    assert_devices_agree(changed(graphcast), tmp_path / "agree")
    config, workdir = changed(graphcast, num_steps=20), tmp_path / "run"
    first = Experiment.from_config(config, one_device).trainer(one_device)
    before = first.evaluate(first.init())
    run(config, one_device, str(workdir))
    trained = Run.open(workdir, one_device)
    after = trained.evaluate()
    assert after["eval/loss"] < before["eval/loss"] / 2
    assert {f"eval/{name}" for name in graphcast.VARIABLES} < after.keys()

    def published(params, net_state, batch):
        model = graphcast.model(0, None, width=32)
        return model.apply(params, None, batch)

    assert all(x.difference < 1e-5 for x in verify(first, first.init(), published))
    export_npz(trained, tmp_path / "a.npz", "graphcast")
    with np.load(tmp_path / "a.npz") as arrays:
        keys = {name.split(":")[0] for name in arrays}
        others = {"model_config:mesh_size": np.array(5), "license": np.array("CC BY")}
        assert keys == {"params"}
        np.savez(tmp_path / "b.npz", **arrays, **others)
    again = changed(graphcast, init_from=str(tmp_path / "b.npz"), num_steps=1)
    run(again, one_device, str(tmp_path / "next"))
    second = Run.open(tmp_path / "next", one_device)
    export_npz(second, tmp_path / "c.npz", "graphcast")
    with np.load(tmp_path / "b.npz") as b, np.load(tmp_path / "c.npz") as c:
        assert {*b} == {*c} and str(c["license"]) == "CC BY"


@pytest.mark.slow
def test_nucleotide_transformers_file_becomes_a_head(tmp_path, one_device):
    model = nucleotide_transformer.model(2, None)
    tokens = np.zeros((1, nucleotide_transformer.LENGTH), np.int32)
    params = jax.device_get(model.init(jax.random.key(3), tokens))
    theirs, pairs = {}, (("self_attention", "mha"),)
    for name, arrays in params.items():
        old = functools.reduce(lambda x, pair: x.replace(*pair), pairs, name)
        theirs[old] = arrays
    theirs.pop("head")
    theirs["esm_transformer/esm_roberta_lm_head/fc"] = {"b": np.zeros(3, np.float32)}
    joblib.dump(theirs, tmp_path / "pytree_ckpt.joblib")
    source = tmp_path / "nt.safetensors"
    convert(tmp_path / "pytree_ckpt.joblib", source)
    config = changed(nucleotide_transformer, init_from=str(source))
    trainer = Experiment.from_config(config, one_device).trainer(one_device)
    state, history = run_steps(trainer, 30)
    assert {*state.params} == {"head"}
    assert float(history[-1]["loss"]) < float(history[0]["loss"]) - 0.1
    frozen = one_device.fetch(state.frozen)
    body = {k: x for k, x in params.items() if k != "head"}
    jax.tree.map(np.testing.assert_array_equal, frozen, body)
    assert "esm_transformer/attention_layer_0/self_attention/query" in frozen

    def published(params, net_state, batch):
        with_theirs = hk.data_structures.merge(body, {"head": params["head"]})
        return model.apply(with_theirs, None, batch["inputs"])

    assert all(x.difference < 1e-5 for x in verify(trainer, state, published))
