"""Fine-tuning of models with odd inputs, names, shapes and dtypes."""

import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import digits
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.errors import ConfigError
from haiku_template.finetuning import Finetuning, Lora, open_source, save_adapters
from haiku_template.finetuning.quantized import is_possible
from haiku_template.params import flatten
from haiku_template.pretrained import save_tensors
from haiku_template.runs import Run, start, train
from haiku_template.runs.export import export_adapters, export_safetensors
from haiku_template.training import Experiment, classification
from tests.runs import run_steps

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(32, 64)).astype(np.float32)
LABELS = RNG.integers(0, 3, 32)
WITH_NAN = np.where(np.arange(64) == 0, np.nan, INPUTS).astype(np.float32)


def made(devices, model, inputs=INPUTS, optimizer=None, **options):
    rows = ArrayDataset(inputs, LABELS, BatchSpec(8))
    return Experiment(
        model=hk.transform(model),
        task=classification,
        data=Data(rows, EvaluationSet(inputs, LABELS, 8), 3),
        optimizer=optimizer or optax.adam(1e-2),
        **options,
    ).trainer(devices)


class Masked(hk.Module):
    """A linear layer that leaves missing values out itself."""

    def __call__(self, x):
        w = hk.get_parameter("w", (x.shape[-1], 3), init=hk.initializers.RandomNormal())
        return jnp.where(jnp.isnan(x), 0, x) @ w


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_missing_values_that_a_module_masks_are_no_fault(one_device, dtype):
    model = lambda x: hk.Linear(3)(Masked()(x))  # noqa: E731
    tuning = Finetuning(lora=Lora(rank=2, patterns=("*/w",)), base_dtype=dtype)
    trainer = made(one_device, model, WITH_NAN, finetuning=tuning)
    _, history = run_steps(trainer, 3)
    assert all(np.isfinite(scalars["loss"]) for scalars in history)


def test_a_table_of_numpys_may_be_mapped_over_with_shares(four_devices):
    table = np.linspace(0, 1, 6 * 64, dtype=np.float32).reshape(6, 64)

    def model(x):
        places = hk.vmap(hk.Linear(128, name="places"), split_rng=False)(table)
        return hk.Linear(3)(jax.nn.relu(hk.Linear(128)(x) + places.mean(0)))

    losses = [
        [scalars["loss"] for scalars in run_steps(made(four_devices, model, **x), 3)[1]]
        for x in ({}, {"sharding": (("*", "data"),)})
    ]
    np.testing.assert_allclose(*losses, rtol=2e-6)


def test_multipliers_of_averages_that_an_optimizer_keeps_are_refused(one_device):
    model = lambda x: hk.Linear(3)(x)  # noqa: E731
    optimizer = optax.contrib.schedule_free_adamw(1e-2)
    tuning = Finetuning(multipliers=(("linear/*", 0.1),))
    with pytest.raises(ConfigError, match="its averages would be of others"):
        made(one_device, model, INPUTS, optimizer, finetuning=tuning)


@pytest.mark.parametrize(
    "entry", [("*", float("nan")), ("*", float("inf")), (1, 0.1), ("*", "1"), 0.1]
)
def test_a_multiplier_is_a_pattern_and_a_factor(one_device, entry):
    tuning = Finetuning(multipliers=(entry,))
    with pytest.raises(ConfigError, match="each is a pattern and a factor"):
        made(one_device, lambda x: hk.Linear(3)(x), finetuning=tuning)


@pytest.mark.parametrize(
    ("name", "shape", "is_so"),
    [
        ("int8", (64, 16), True),
        ("int8", (0, 64), False),
        ("int8", (64, 0), False),
        ("int8", (3, 3, 1, 64), False),  # Scales would be four fifths.
        ("int8", (1, 512), False),
        ("nf4", (0, 64), False),
        ("nf4", (5, 64), True),
        ("nf4", (5, 63), False),
        ("int8", (64,), False),
    ],
)
def test_what_scales_would_outweigh_keeps_its_form(name, shape, is_so):
    assert is_possible(name, shape) == is_so


def script(devices):
    return made(devices, lambda x: hk.Linear(3)(x)).experiment


def test_what_a_script_exports_can_be_fine_tuned(tmp_path, one_device):
    train(script(one_device).trainer(one_device), num_steps=2, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=script)
    export_safetensors(run, tmp_path / "model")
    source = open_source(str(tmp_path / "model"), None, one_device, Finetuning())
    state = made(one_device, lambda x: hk.Linear(3)(x), init_from=source).init()
    for path, leaf in flatten(state.params).items():
        np.testing.assert_array_equal(leaf, flatten(run.state.params)[path])


def test_adapters_of_a_script_are_refused_in_a_sentence(tmp_path, one_device):
    tuning = Finetuning(lora=Lora(rank=2, patterns=("*/w",)))

    def adapted(devices):
        model = lambda x: hk.Linear(3)(x)  # noqa: E731
        return made(devices, model, finetuning=tuning).experiment

    trainer = adapted(one_device).trainer(one_device)
    train(trainer, num_steps=1, workdir=tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device, experiment=adapted)
    with pytest.raises(ConfigError, match="was made by a script, without the config"):
        export_adapters(run, tmp_path / "adapters")


TYPED = """
import haiku as hk
import jax.numpy as jnp

def typed(num_outputs, axis_name):
    def forward(inputs, is_training):
        init = hk.initializers.RandomNormal()
        x = inputs.reshape(len(inputs), -1)
        w = hk.get_parameter("w", (x.shape[1], 16), jnp.bfloat16, init)
        return hk.Linear(num_outputs)(x @ w.astype(x.dtype))
    return hk.transform(forward)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Config of a run of digits, whose model has a matrix in bfloat16."""
    (tmp_path / "mine_typed.py").write_text(TYPED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_typed", raising=False)
    config = digits.get_config()
    config.num_steps, config.eval_batches = 2, 1
    config.model = {"name": "mine_typed:typed"}
    return config


def test_a_parameter_of_another_dtype_is_read_from_a_run(tmp_path, one_device, config):
    start.run(config, one_device, str(tmp_path / "run"))
    further = config.copy_and_resolve_references()
    further.init_from = str(tmp_path / "run")
    start.run(further, one_device, str(tmp_path / "further"))
    run = Run.open(tmp_path / "further", one_device, trust=["mine_typed"])
    assert run.state.params["~"]["w"].dtype == jnp.bfloat16


def test_a_part_of_the_evaluation_set_is_no_change(
    tmp_path, one_device, config, caplog
):
    start.run(config, one_device, str(tmp_path / "run"))
    assert Run.open(tmp_path / "run", one_device, trust=["mine_typed"]).trainer
    assert "was edited since" not in caplog.text


@pytest.mark.parametrize("name", ["w:0", "w[0]", "{w}", "w*", "w{0}", "[w]", "w.ü"])
def test_odd_names_are_read_back_as_they_were_written(tmp_path, one_device, name):
    def model(x):
        w = hk.get_parameter(name, (64, 16), init=hk.initializers.RandomNormal())
        return hk.Linear(3)(x @ w)

    written = flatten(made(one_device, model).init().params)
    arrays = {path: np.asarray(leaf) + 1 for path, leaf in written.items()}
    save_tensors(tmp_path / "a.safetensors", arrays, None)
    source = open_source(str(tmp_path / "a.safetensors"), None, one_device)
    state = made(one_device, model, init_from=source).init()
    for path, leaf in flatten(state.params).items():
        np.testing.assert_array_equal(leaf, arrays[path])


def test_a_slash_in_a_name_is_refused_where_parameters_are_chosen(one_device):
    def model(x):
        w = hk.get_parameter("a/w", (64, 16), init=hk.initializers.RandomNormal())
        return hk.Linear(3)(x @ w)

    assert np.isfinite(run_steps(made(one_device, model), 1)[1][0]["loss"])
    with pytest.raises(ConfigError, match="the parameter 'a/w' of the module ~ has a"):
        made(one_device, model, finetuning=Finetuning(train=("linear/*",)))
    with pytest.raises(ConfigError, match="the parameter 'a/w' of the module ~ has a"):
        made(one_device, model, init_from=lambda *_: pytest.fail("It was read."))


def test_fresh_parameters_are_not_read_from_adapters_either(tmp_path, one_device):
    tuning = Finetuning(lora=Lora(2, patterns=("base/w",)), train=("head/*",))
    model = lambda x: hk.Linear(3, name="head")(hk.Linear(8, name="base")(x))  # noqa: E731
    trainer = made(one_device, model, finetuning=tuning)
    state, _ = run_steps(trainer, 2)
    frozen, lora = state.frozen, trainer.recipe.plan.lora
    file = tmp_path / "a.safetensors"
    save_adapters(file, state.params, frozen, lora, one_device, step=2)
    again = made(
        one_device,
        model,
        finetuning=tuning._replace(adapters=str(file), fresh=("head/*",)),
    ).init()
    seed, saved = flatten(trainer.init().params), flatten(state.params)
    for path, leaf in flatten(again.params).items():
        expected = seed if path.startswith("head/") else saved
        np.testing.assert_array_equal(leaf, expected[path])
        assert path == "head/b" or (seed[path] != saved[path]).any()


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"base_dtype": "bfloat16"}, "'bfloat16' is of frozen parameters, and all"),
        ({"train": "head/*"}, r"train='head/\*'; possible are several patterns"),
        ({"train": (1,)}, r"train=\(1,\); possible are several patterns"),
        ({"lora": Lora(2, patterns="*/w")}, r"lora.patterns='\*/w'; possible are"),
        ({"train": ("*",), "lora": Lora(2)}, "fits none of the 0 that there are$"),
    ],
)
def test_options_that_would_do_nothing_are_refused(one_device, tuning, words):
    with pytest.raises(ConfigError, match=words):
        made(one_device, lambda x: hk.Linear(3)(x), finetuning=Finetuning(**tuning))


@pytest.mark.parametrize(
    ("key", "value"), [("alpha", 32.0), ("patterns", ("*/q/w",)), ("dropout", 0.1)]
)
def test_adapters_without_a_rank_are_refused(one_device, config, key, value):
    config.finetuning.lora[key] = value
    with pytest.raises(ConfigError, match=f"lora.{key}=.* is of adapters, which"):
        Experiment.from_config(config, one_device)


def test_a_run_of_another_model_is_named(tmp_path, one_device, config):
    start.run(config, one_device, str(tmp_path / "run"))
    other = config.copy_and_resolve_references()
    other.init_from, other.model = str(tmp_path / "run"), {"name": "mlp"}
    with pytest.raises(
        ConfigError, match="init_from=.*run: .* does not fit this mod.*fresh"
    ):
        start.run(other, one_device, str(tmp_path / "other"))
