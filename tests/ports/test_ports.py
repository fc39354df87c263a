"""Programs in the shape of dm-haiku's examples, trained for real by the template."""

import ast
import importlib.util
from pathlib import Path

import haiku as hk
import jax
import numpy as np
import pytest

from haiku_template.devices import DeviceManager
from haiku_template.runs import train
from haiku_template.storage import Checkpoints, read

HERE = Path(__file__).parent
EXAMPLES = ("imagenet", "mnist", "pruning", "rnn", "transformer", "vae")
OWN_STEP_OR_LOOP = ("gan", "reinforce")
MARKER = "# The template."
pytestmark = pytest.mark.usefixtures("optimized")


def load(name):
    spec = importlib.util.spec_from_file_location(f"port_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(name, devices, workdir, num_steps, **options):
    """Trains a program; returns its state, last metrics, and rows of training."""
    trainer = load(name).experiment(devices).trainer(devices)
    how = {"num_steps": num_steps, "workdir": workdir, "log_every": 10} | options
    result = train(trainer, **how)
    rows = [row for row in read(workdir / "metrics.jsonl") if "train/loss" in row]
    return devices.fetch(result.state), result.metrics, rows


@pytest.mark.parametrize("name", EXAMPLES + OWN_STEP_OR_LOOP)
def test_a_model_has_no_word_of_the_template_and_a_whole_program_few_lines(name):
    text = (HERE / f"{name}.py").read_text()
    lines = text.splitlines()
    assert len(lines) <= (60 if name in EXAMPLES else 75)
    nodes = list(ast.walk(ast.parse(text)))
    names = {"haiku_template"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("haiku_temp"):
            names |= {alias.asname or alias.name for alias in node.names}
    model = [n for n in nodes if getattr(n, "lineno", 0) < lines.index(MARKER)]
    assert len(names) > 2
    assert not {n.id for n in model if isinstance(n, ast.Name)} & names


@pytest.mark.slow
def test_mnist_classifies_and_its_loss_falls_fivefold(devices, tmp_path):
    _, metrics, rows = trained("mnist", devices, tmp_path / "run", 150)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 5
    assert metrics["eval/accuracy"] > 0.93


@pytest.mark.slow
def test_the_transformer_learns_more_than_the_frequencies_of_characters(
    four_devices, tmp_path
):
    _, metrics, rows = trained("transformer", four_devices, tmp_path / "run", 100)
    text = load("transformer").topics
    codes = np.frombuffer("".join(text.values()).encode("ascii", "replace"), np.uint8)
    share = np.bincount(codes[:128_000]) / 128_000
    entropy = -np.sum(share * np.log(np.maximum(share, 1e-9)))
    assert metrics["eval/loss"] < 0.9 * entropy < rows[0]["train/loss"]


@pytest.mark.slow
def test_imagenet_trains_in_float16_with_norms_over_all_devices(four_devices, tmp_path):
    state, metrics, rows = trained("imagenet", four_devices, tmp_path / "run", 80)
    assert metrics["train/loss_scale"] >= 2**14
    assert metrics["eval/top_1_acc"] > 0.8
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] / 2
    averages = hk.data_structures.filter(
        lambda module, name, value: name == "average", state.net_state
    )
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(averages))


@pytest.mark.slow
def test_the_elbo_of_the_vae_improves_in_both_its_parts(devices, tmp_path):
    workdir = tmp_path / "run"
    _, metrics, rows = trained("vae", devices, workdir, 150, eval_every=50)
    first = next(row for row in read(workdir / "metrics.jsonl") if "eval/loss" in row)
    assert metrics["eval/loss"] < first["eval/loss"] - 3
    assert metrics["eval/log_likelihood"] > first["eval/log_likelihood"] + 3
    assert metrics["eval/kl"] > 1  # The code is used.
    parts = metrics["eval/kl"] - metrics["eval/log_likelihood"]
    assert metrics["eval/loss"] == pytest.approx(parts, rel=1e-6)


@pytest.mark.slow
def test_the_rnn_of_words_of_two_lengths_equals_itself_on_four_devices(
    one_device, four_devices, tmp_path
):
    runs = [
        trained("rnn", devices, tmp_path / str(devices.num_devices), 60)
        for devices in (one_device, four_devices)
    ]
    (_, metrics, rows), (_, others, _) = runs
    assert metrics["eval/loss"] < 0.7 * np.log(128)
    assert others["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-3)
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]


@pytest.mark.slow
def test_pruning_keeps_a_tenth_of_the_weights_and_a_stop_does_not_change_which(
    devices, tmp_path
):
    whole, metrics, _ = trained("pruning", devices, tmp_path / "whole", 220)
    trained("pruning", devices, tmp_path / "parts", 110)
    parts, _, _ = trained("pruning", devices, tmp_path / "parts", 220)
    assert metrics["eval/accuracy"] > 0.9
    for _, _, value in hk.data_structures.traverse(whole.params):
        if value.ndim == 2:
            pruned = int(np.sum(value == 0))
            assert pruned == round(0.9 * value.size)
    jax.tree.map(np.testing.assert_array_equal, whole.params, parts.params)


@pytest.mark.slow
def test_the_points_of_the_gan_are_where_the_data_are(devices, tmp_path):
    gan = load("gan")
    state, metrics, _ = trained("gan", devices, tmp_path / "run", 700)
    noise = jax.random.normal(jax.random.key(1), (1000, 4))
    apply, params = gan.NETS["generator"].apply, state.params["generator"]
    points = np.asarray(apply(params, noise))
    np.testing.assert_allclose(points.mean(axis=0), gan.MEAN, atol=0.45)
    assert np.all(points.std(axis=0) > 0.05)
    assert 0.3 < metrics["train/discriminator"] < 1


@pytest.mark.slow
def test_the_agent_catches_the_ball_and_a_stop_changes_nothing(devices, tmp_path):
    main = load("reinforce").main
    assert main(devices, tmp_path / "whole", 150) > 0.6  # By chance about -0.5.
    main(devices, tmp_path / "parts", 50)
    main(devices, tmp_path / "parts", 150)
    found = []
    for name in ("whole", "parts"):
        one = DeviceManager.create("cpu", num_devices=1)
        abstract = one.abstract(load("reinforce").init)
        with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
            assert checkpoints.latest == 150
            found.append(one.fetch(checkpoints.restore(150, abstract)))
    jax.tree.map(np.testing.assert_array_equal, *found)
