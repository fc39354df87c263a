"""ProteinMPNN as it is published: its scores, and fine-tuning on a family of proteins.

Run by `make test-published`, which fetches model and structures into build/published.
"""

import difflib
from pathlib import Path

import jax
import joblib
import numpy as np
import pytest
from safetensors.numpy import load_file

from configs import finetune_proteinmpnn
from examples import proteinmpnn
from haiku_template import config as configs
from haiku_template.data import BatchSpec
from haiku_template.devices import DeviceManager
from haiku_template.preflight.budget import memory_budget
from haiku_template.published import import_module
from haiku_template.runs import train
from haiku_template.storage import metrics
from haiku_template.training import Experiment
from tests.runs import run_steps

pytestmark = pytest.mark.published

FILES = Path(finetune_proteinmpnn.FILES)
WEIGHTS = FILES / "colabdesign/mpnn/weights/v_48_020.pkl"
# Small GTPases: Ran, Rac1, H-Ras, RalA, Rab4, Sec4 and Arf1.
CHAINS = "1A2K:A 1I2M:A 1E96:A 1I4D:A 2FJU:B 1HE8:A 1LFD:A 2A9K:A 1Z0K:A 3CPH:B 1J2J:A"
ALL = tuple(CHAINS.split())
SIZES = {"num_letters": 21, "k_neighbors": 48, "augment_eps": 0.0, "dropout": 0.0}
SIZES |= dict.fromkeys(("node_features", "edge_features", "hidden_dim"), 128)


def config(**changes):
    values = finetune_proteinmpnn.get_config()
    values.update_from_flattened_dict(changes)
    configs.check(values)
    return values


def trainer(devices, **changes):
    return Experiment.from_config(config(**changes), devices).trainer(devices)


def evaluated(trainer, chains=None):
    """Metrics of the first state: of the held-out chains, or of others."""
    dataset = None
    if chains is not None:
        keys = finetune_proteinmpnn.get_config().data.to_dict() | {"held_out": chains}
        keys["lengths"] = (200,)
        keys.pop("name")
        dataset = proteinmpnn.data(BatchSpec(4), **keys).evaluation
    return trainer.evaluate(trainer.init(), dataset)


@pytest.fixture(scope="module")
def published():
    """The published model on one device; a state is made where it is needed."""
    return trainer(DeviceManager.create("cpu", num_devices=1))


def test_the_converted_weights_are_those_of_the_wheel():
    published = joblib.load(WEIGHTS)["model_state_dict"]
    converted = load_file(FILES / "v_48_020.safetensors")
    assert len(published) == 60
    assert sum(array.size for array in converted.values()) == 1_660_485
    for module, arrays in published.items():
        for name, array in arrays.items():
            found = converted.pop(f"{module}/{name}")
            np.testing.assert_array_equal(found, np.asarray(array))
    assert not converted


@pytest.mark.parametrize("chain", ALL)
def test_half_of_each_sequence_is_recovered(published, chain):
    found = evaluated(published, (chain,))
    # Its authors report a perplexity of 5.25 and 47.9 % for their test set.
    assert found["eval/perplexity"] < 6
    assert 0.42 < found["eval/recovery"] < 0.6


@pytest.mark.parametrize("chain", ["1A2K:A", "1HE8:A", "3CPH:B"])
def test_scores_are_those_of_its_own_score(published, chain):
    """Which gets one structure without padding, and knows nothing of the template."""
    modules = import_module("colabdesign.mpnn.modules", FILES)
    structure = proteinmpnn.read(str(FILES / "PRODIGYdataset"), chain)
    order, letters = structure.pop("draw").argsort(), structure["S"]
    inputs = structure | {"mask": np.ones(len(order)), "decoding_order": order}
    params = joblib.load(WEIGHTS)["model_state_dict"]
    score = jax.jit(modules.RunModel(SIZES).score)
    logits = score(params, jax.random.key(0), inputs)["logits"]
    losses = -jax.nn.log_softmax(logits)[np.arange(len(letters)), letters]
    right = logits.argmax(axis=1) == letters
    found = evaluated(published, (chain,))
    assert found["eval/loss"] == pytest.approx(float(losses.mean()), abs=1e-5)
    assert found["eval/recovery"] == pytest.approx(float(right.mean()), abs=1e-6)


def test_four_devices_agree_on_the_whole_family(published, four_devices):
    one, four = evaluated(published, ALL), evaluated(trainer(four_devices), ALL)
    assert one == pytest.approx(four, abs=1e-5)
    assert 0.47 < one["eval/recovery"] < 0.53


def test_sharded_it_loses_what_it_does_whole(four_devices):
    """Of as many devices: each draws orders of decoding of its own."""
    still, rows = {"model.noise": 0.0, "model.dropout": 0.0}, []
    for rules in ((), (("*", "data"),)):
        state, history = run_steps(trainer(four_devices, sharding=rules, **still), 20)
        rows.append([float(x["loss"]) for x in history])
        shares = [bool(x.sharding.spec) for x in jax.tree.leaves(state.params)]
        assert sum(shares) == (len(shares) - 1 if rules else 0)  # A bias of 21 numbers.
    np.testing.assert_allclose(*rows, rtol=2e-6)


def test_random_weights_recover_one_letter_in_twenty(one_device):
    found = evaluated(trainer(one_device, init_from=None), ALL)
    assert found["eval/recovery"] < 0.1
    assert found["eval/perplexity"] > 18


def test_letters_in_the_order_of_alphafold_are_noticed(published, monkeypatch):
    names = "ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP "
    monkeypatch.setattr(proteinmpnn, "NAMES", f"{names}TYR VAL")
    assert evaluated(published, ALL)["eval/perplexity"] > 30


def test_held_out_domains_are_others_than_those_that_train():
    def sequence(chain):
        read = proteinmpnn.read(str(FILES / "PRODIGYdataset"), chain)
        return "".join(proteinmpnn.LETTERS[letter] for letter in read["S"])

    for one in map(sequence, finetune_proteinmpnn.HELD_OUT):
        for other in map(sequence, finetune_proteinmpnn.TRAIN):
            match = difflib.SequenceMatcher(None, one, other, autojunk=False)
            same = sum(block.size for block in match.get_matching_blocks())
            assert same < 0.8 * len(one)


REMAT = ("*/protein_features", "*/enc_layer*", "*/dec_layer*")


def test_its_modules_are_rematerialized_by_name(one_device):
    plain, less = trainer(one_device), trainer(one_device, **{"model.remat": REMAT})
    (_, one), (_, other) = run_steps(plain, 2), run_steps(less, 2)
    for name in ("loss", "grad_norm"):
        numbers = [[float(row[name]) for row in rows] for rows in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    if jax.__version_info__ >= (0, 11):  # Earlier the CPU's compiler undoes it.
        bytes_of = [memory_budget(x).temporaries for x in (plain, less)]
        assert bytes_of[1] < bytes_of[0] / 3


STEPS = 4  # Of the schedule that the config has.
ADAPTERS = {"finetuning.lora.rank": 8, "optimizer.learning_rate": 3e-3}
TUNED = {"all": {}, "adapters": ADAPTERS}


def losses(workdir):
    rows = metrics.read(workdir / "metrics.jsonl")
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.parametrize("changes", TUNED.values(), ids=TUNED)
def test_fine_tuning_helps_on_held_out_domains_and_resumes_bitwise(
    tmp_path, devices, changes
):
    def run(workdir, num_steps):
        made = trainer(devices, **changes)
        return train(made, num_steps=num_steps, workdir=workdir, log_every=1)

    before = evaluated(trainer(devices, **changes))
    whole = run(tmp_path / "a", STEPS)
    run(tmp_path / "b", STEPS // 2)
    resumed = run(tmp_path / "b", STEPS)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    a, b = (losses(tmp_path / name) for name in "ab")
    assert a == b and len(a) == STEPS
    assert whole.metrics["eval/loss"] < before["eval/loss"] - 0.03
