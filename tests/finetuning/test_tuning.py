"""What trains, what is frozen, and low-rank adapters: properties of whole steps."""

import functools

import jax
import numpy as np
import optax
import pytest

from haiku_template.config import default_config
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import check_replicas
from haiku_template.errors import ConfigError
from haiku_template.finetuning import trains_a_part
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Finetuning
from haiku_template.models import mlp
from haiku_template.params import flatten
from haiku_template.preflight.budget import check_budget, memory_budget
from haiku_template.runs import train
from haiku_template.storage.checkpoint import Checkpoints
from haiku_template.storage.metrics import read
from haiku_template.training import Experiment, classification
from tests.runs import placed, run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(48, 8, 8, 1)).astype(np.float32)
LABELS = RNG.integers(0, 3, 48).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(24)), EvaluationSet(INPUTS, LABELS, 24), 3
)
WIDTH = 17  # No other axis has this length.
MODEL = mlp(3, width=WIDTH)
HEAD = ("mlp/~/linear_2/*",)
LORA = Finetuning(lora=Lora(rank=4, alpha=8.0))
BOTH = Finetuning(train=HEAD, lora=Lora(rank=4))


@pytest.mark.parametrize(
    ("key", "value", "a_part"),
    [
        ("train", (), False),
        ("train", HEAD, True),
        ("lora.rank", 4, True),
        ("lora.rank", 0, True),
        ("fresh", HEAD, False),
    ],
)
def test_a_config_says_if_only_a_part_of_the_model_trains(key, value, a_part):
    finetuning = default_config().finetuning
    finetuning.update_from_flattened_dict({key: value})
    assert trains_a_part(finetuning) is a_part


@functools.cache
def made(devices, tuning=LORA, **options):
    """A trainer, which compiles its step once for all tests."""
    options = {"optimizer": optax.adam(1e-2)} | options
    return Experiment(
        model=MODEL, task=classification, data=DATA, finetuning=tuning, **options
    ).trainer(devices)


def run(trainer, num_steps):
    state, history = run_steps(trainer, num_steps)
    return state, [float(scalars["loss"]) for scalars in history]


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def losses_in(workdir):
    rows = read(workdir / "metrics.jsonl")
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def test_without_tuning_everything_trains_and_the_base_is_empty(one_device):
    trainer = made(one_device, Finetuning())
    whole = trainer.init().params
    assert trainer.initializer.frozen(trainer.layout) == {}
    assert not trainer.recipe.plan.frozen
    assert set(flatten(whole)) == trainer.recipe.plan.trained


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rank_0_is_the_base_bitwise(one_device, dtype):
    options = {"precision": dtype}
    plain = made(one_device, Finetuning(), **options)
    frozen = made(
        one_device, Finetuning(lora=Lora(rank=0), base_dtype=dtype), **options
    )
    state, (loss, _) = run(frozen, 2)
    assert state.params == {}
    assert loss == run(plain, 1)[1][0]
    assert frozen.evaluate(state) == plain.evaluate(plain.init())


def test_adapters_are_no_change_at_first(one_device):
    plain, adapted = made(one_device, Finetuning()), made(one_device)
    before = plain.evaluate(plain.init())
    assert adapted.evaluate(adapted.init()) == pytest.approx(before, abs=1e-6)


@pytest.mark.slow(but="and head")
@pytest.mark.parametrize("tuning", [LORA, BOTH], ids=["lora", "lora and head"])
def test_merged_equals_unmerged(one_device, tuning):
    trainer = made(one_device, tuning)
    state, losses = run(trainer, 30)
    assert losses[-1] < 0.8 * losses[0]
    base = trainer.initializer.frozen(trainer.layout)
    base = state._replace(frozen=base)
    merged = one_device.replicate(trainer.merged(base)[0])
    plain = made(one_device, Finetuning())
    whole = plain.init()
    assert jax.tree.structure(merged) == jax.tree.structure(whole.params)
    expected = trainer.evaluate(state)
    whole = whole._replace(params=merged)
    assert plain.evaluate(whole) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow(but="tuning1")
@pytest.mark.parametrize("tuning", [Finetuning(train=HEAD), BOTH])
def test_what_is_frozen_does_not_change(one_device, tuning):
    trainer = made(one_device, tuning, accumulate_steps=2)
    start = jax.device_get(trainer.init())
    first = start.params
    state, _ = run(trainer, 100)
    assert_same(start.frozen, jax.device_get(state.frozen))
    assert_same(
        start.frozen, jax.device_get(trainer.initializer.frozen(trainer.layout))
    )
    for path, leaf in flatten(jax.device_get(state.params)).items():
        assert not np.array_equal(leaf, flatten(first)[path]), path
    check_replicas(state)


@pytest.mark.slow(but="tuning1")
@pytest.mark.parametrize("tuning", [LORA, BOTH])
def test_optimizer_state_is_only_of_what_trains(one_device, tuning):
    trainer = made(one_device, tuning)
    state = trainer.init()
    matrices = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 3)]
    if tuning is BOTH:
        trains = sum(4 * (a + b) for a, b in matrices[:2]) + WIDTH * 3 + 3
    else:
        trains = sum(4 * (a + b) for a, b in matrices)
    assert num_bytes(state.params) == 4 * trains
    assert num_bytes(state.opt_state) == 2 * 4 * trains + 4  # And Adam's count.
    budget = memory_budget(trainer)
    whole = memory_budget(made(one_device, Finetuning()))
    head = (WIDTH * 3 + 3) * (tuning is BOTH)
    assert budget.opt_state == 2 * 4 * trains + 4
    assert budget.frozen == whole.params - 4 * head
    assert whole.frozen == 0


def test_a_base_in_bfloat16_is_never_copied_to_float32(one_device):
    tuning = LORA._replace(base_dtype="bfloat16")
    trainer = made(one_device, tuning, precision="bfloat16")
    state, losses = run(trainer, 30)
    assert losses[-1] < 0.8 * losses[0]
    base = trainer.initializer.frozen(trainer.layout)
    assert {str(x.dtype) for x in jax.tree.leaves(base)} == {"bfloat16"}
    adam = state.opt_state[0]
    trained = jax.tree.leaves((state.params, adam.mu, adam.nu))
    assert {str(x.dtype) for x in trained} == {"float32"}
    text = trainer.trace(trainer.feed.host_shapes()[0]).lower().as_text()
    assert f"tensor<64x{WIDTH}xbf16>" in text
    assert f"tensor<64x{WIDTH}xf32>" not in text
    budget, float32 = memory_budget(trainer), memory_budget(made(one_device))
    assert 2 * budget.frozen == float32.frozen
    assert budget.opt_state == float32.opt_state


@pytest.mark.slow
def test_one_device_and_four_agree(one_device, four_devices):
    results = []
    for devices in (one_device, four_devices):
        state, losses = run(made(devices, BOTH, ema_decay=0.9), 10)
        check_replicas(state)
        results.append((devices.fetch(state.params), losses))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *results)


@pytest.mark.slow
def test_staged_data_and_a_base_go_together(tmp_path, four_devices):
    trainer = made(four_devices)
    options = {"num_steps": 4, "log_every": 1}
    train(trainer, workdir=tmp_path / "host", **options)
    staged = placed(trainer, "device")
    train(staged, workdir=tmp_path / "device", **options)
    assert losses_in(tmp_path / "host") == losses_in(tmp_path / "device")
    budget = memory_budget(staged)
    assert budget.data == INPUTS.nbytes + LABELS.nbytes
    assert budget.frozen == memory_budget(trainer).frozen


def test_a_run_goes_on_with_its_adapters(tmp_path, one_device, capsys):
    trainer = made(one_device, BOTH)
    options = {"log_every": 1, "save_every": 3}
    whole = train(trainer, workdir=tmp_path / "whole", num_steps=6, **options)
    train(trainer, workdir=tmp_path / "parts", num_steps=3, **options)
    again = train(trainer, workdir=tmp_path / "parts", num_steps=6, **options)
    assert losses_in(tmp_path / "whole") == losses_in(tmp_path / "parts")
    assert_same(whole.state, again.state)
    output = capsys.readouterr().out
    assert "Fine-tuning" in output
    for what in ("trained whole", "adapters", "frozen"):
        assert what in output
    with Checkpoints(tmp_path / "whole" / "checkpoints") as checkpoints:
        saved = checkpoints.saved(6)
    assert set(saved["params"]) == {f"mlp/~/linear_{i}" for i in range(3)}
    assert set(saved["params"]["mlp/~/linear_0"]) == {"w_lora_a", "w_lora_b"}
    assert set(saved["params"]["mlp/~/linear_2"]) == {"w", "b"}
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(saved["params"])]
    assert sum(sizes) == sum(leaf.size for leaf in jax.tree.leaves(whole.state.params))


def test_multipliers_scale_the_updates(one_device):
    multipliers = (("*/linear_0/*", 0.25), ("*/b", 0.5))
    rates = []
    for tuning in (Finetuning(), Finetuning(multipliers=multipliers)):
        trainer = made(one_device, tuning, optimizer=optax.sgd(0.1))
        first = flatten(one_device.fetch(trainer.init().params))
        after = flatten(one_device.fetch(run(trainer, 1)[0].params))
        rates.append({path: after[path] - first[path] for path in first})
    for path, plain in rates[0].items():
        factor = 0.25 if "linear_0" in path else 0.5 if path.endswith("/b") else 1.0
        np.testing.assert_allclose(rates[1][path], factor * plain, atol=1e-7)
        assert np.abs(plain).max() > 1e-5


@pytest.mark.slow
def test_dropout_of_adapters_is_of_their_inputs_and_only_in_training(one_device):
    tuning = Finetuning(lora=Lora(rank=4, dropout=0.5))
    trainer = made(one_device, tuning)
    state, losses = run(trainer, 5)
    assert run(trainer, 5)[1] == losses
    same = run(made(one_device, Finetuning(lora=Lora(rank=4))), 3)[1]
    assert losses[0] == same[0]  # B is zero: there is nothing to drop.
    assert losses[2] != same[2]
    plan, base = trainer.recipe.plan, trainer.initializer.frozen(trainer.layout)
    weights = [
        np.asarray(
            plan.combine(state.params, base, np.float32, rng)["mlp/~/linear_0"][
                "w"
            ].use(np.float32)
        )
        - np.asarray(base["mlp/~/linear_0"]["w"])
        for rng in (None, jax.random.key(0), jax.random.key(1))
    ]
    whole, *dropped = weights
    for change in dropped:
        zeros = ~change.any(axis=1)
        assert 10 < zeros.sum() < 54  # Of 64 inputs, half on average.
        np.testing.assert_allclose(change[~zeros], 2 * whole[~zeros], rtol=1e-3)
    assert (dropped[0] != dropped[1]).any()


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        (
            Finetuning(train=("mlp/~/linear_22/*",)),
            r"train: the pattern 'mlp/~/linear_22/\*' fits none of the 6 that there "
            r"are; nearest is mlp/~/linear_2/",
        ),
        (
            Finetuning(lora=Lora(4, patterns=("*/b",))),
            r"lora .*'\*/b' fits none of the 3",
        ),
        (
            Finetuning(lora=Lora(4), multipliers=(("*/w", 0.1),)),
            r"multipliers: the pattern '\*/w' fits none of the 6",
        ),
        (
            Finetuning(multipliers=(("*", 0),)),
            r"\('\*', 0\); each is a pattern and a fact",
        ),
        (Finetuning(multipliers=("*",)), "each is a pattern and a factor"),
        (Finetuning(base_dtype="float8"), "'float8'; possible are float32, bfloat16"),
        (
            Finetuning(lora=Lora(2), fresh=HEAD),
            "linear_2/b.*would never learn anything",
        ),
        (Finetuning(lora=Lora(-1)), "rank=-1"),
        (
            Finetuning(lora=Lora(1, alpha=0.0)),
            "lora.alpha=0.0; possible is more than 0",
        ),
        (
            Finetuning(lora=Lora(1, dropout=1.0)),
            "lora.dropout=1.0; possible is from 0 to below 1",
        ),
    ],
)
def test_what_cannot_train_is_said_in_one_sentence(one_device, tuning, words):
    with pytest.raises(ConfigError, match=words) as caught:
        made(one_device, tuning)
    assert caught.value.exit_code == 64


def test_what_does_not_fit_names_the_base(one_device):
    trainer = made(one_device)
    with pytest.raises(ConfigError, match=r"\.frozen\['mlp/~/linear_0'\]\['w'\]"):
        check_budget(trainer, 1000)
