"""Parameters as stored: 8 and 4 bits, adapters; used where the model asks for them."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from safetensors.numpy import load_file, save_file

from configs import finetune_gpt_bytes_lora, gpt_bytes
from haiku_template import stored
from haiku_template.data import ArrayDataset, BatchSpec, Data, EvaluationSet
from haiku_template.devices import layout
from haiku_template.errors import ConfigError
from haiku_template.finetuning import Finetuning, Lora, make_plan, open_source
from haiku_template.finetuning.lora import Adapted
from haiku_template.finetuning.quantized import BLOCK, NF4, Int8, Nf4
from haiku_template.models import plain_outputs
from haiku_template.models.forms import in_form
from haiku_template.params import flatten, unflatten
from haiku_template.preflight.budget import check_budget
from haiku_template.training import Experiment, classification
from haiku_text import models as text_models
from tests.runs import run_steps

RNG = np.random.default_rng(0)
WIDTH = 64


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Top(hk.Module):
    def __call__(self, x):
        return jnp.tanh(hk.Linear(WIDTH, name="inner")(x))


def in_modules(x):
    return hk.Sequential([Top(), jnp.tanh, Top()])(x)


def shared(x):
    top = Top()
    return top(top(x))


def at_top_level(x):
    w = hk.get_parameter("w", (WIDTH, WIDTH), init=hk.initializers.RandomNormal())
    return x @ w


def remat(x):
    return hk.remat(Top())(x)


def scanned(x):
    return hk.experimental.layer_stack(3)(lambda x: Top()(x))(x)


def mapped(x):
    return hk.vmap(Top(), split_rng=False)(x[:, None])[:, 0]


def lifted(x):
    inner = hk.transform(lambda x: Top()(x))
    params = hk.lift(inner.init, name="lifted")(hk.maybe_next_rng_key(), x)
    return inner.apply(params, None, x)


def read_as_a_tree(x):
    y = Top()(x)
    return y + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(hk.get_params()))


MODELS = [in_modules, shared, at_top_level, remat, scanned, mapped, lifted]
MODELS += [read_as_a_tree]


def adapted(value):
    *stack, inputs, outputs = value.shape
    a, b = array(*stack, inputs, 2), array(*stack, 2, outputs)
    return Adapted(Int8.store(value), a, b, "each " * len(stack) + "in out")


FORMS = {"int8": Int8.store, "nf4": Nf4.store, "LoRA of int8": adapted}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("forward", MODELS, ids=lambda f: f.__name__)
def test_a_model_gets_arrays_wherever_it_asks(forward, form):
    model = hk.without_apply_rng(hk.transform(forward))
    x = array(4, WIDTH)
    params = model.init(jax.random.key(0), x)
    params = jax.tree.map(np.asarray, params)
    forms = hk.data_structures.map(lambda m, n, w: w if n == "b" else form(w), params)
    arrays = stored.used(forms, jnp.float32)
    assert any(map(stored.is_form, jax.tree.leaves(forms, is_leaf=stored.is_form)))
    assert jax.tree.structure(arrays) == jax.tree.structure(params)

    def loss(apply, params, x):
        return jnp.sum(apply(params, x) ** 2)

    apply = stored.using(model.apply, jnp.float32)
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, model.apply), 1))
    value = jax.jit(jax.value_and_grad(functools.partial(loss, apply), 1))
    for a, b in zip(value(forms, x), expected(arrays, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert hk.get_params.__module__.startswith("haiku")


@pytest.mark.parametrize("forward", MODELS, ids=lambda f: f.__name__)
def test_gradients_in_order_are_the_same(forward):
    """By any derivative: of the parameters, forward, of an example, of a gradient."""
    model = hk.without_apply_rng(hk.transform(forward))
    x = array(4, WIDTH)
    params = model.init(jax.random.key(0), x)
    ordered = stored.using(model.apply, jnp.float32, in_order=True)

    def derivatives(apply):
        loss = lambda params, x: jnp.sum(apply(params, x) ** 2)  # noqa: E731
        slope = lambda x: jnp.sum(jax.grad(loss, 1)(params, x) ** 2)  # noqa: E731
        return (
            jax.grad(loss, (0, 1))(params, x),
            jax.jvp(functools.partial(loss, params), (x,), (x,)),
            jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None]),
            jax.grad(slope)(x),
        )

    found, expected = derivatives(ordered), derivatives(model.apply)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_gradient_goes_on_after_those_of_a_module_s_parameters():
    """With `in_order` that of the inputs alone has all products of parameters, too."""
    model = hk.without_apply_rng(hk.transform(in_modules))
    x = array(4, WIDTH)
    params = model.init(jax.random.key(0), x)
    products = []
    for in_order in (False, True):
        apply = stored.using(model.apply, jnp.float32, in_order=in_order)
        slope = jax.grad(lambda x, apply=apply: jnp.sum(apply(params, x) ** 2))
        products.append(str(jax.make_jaxpr(slope)(x)).count("dot_general["))
    assert products == [4, 6]  # Two layers: forward, of the inputs, of a matrix.


def test_gradients_reach_the_factors_of_an_adapter_and_stop_there():
    model = hk.without_apply_rng(hk.transform(remat))
    x = array(4, WIDTH)
    (w,) = (v for v in flatten(model.init(jax.random.key(0), x)).values() if v.ndim > 1)
    base, a, b = Int8.store(np.asarray(w)), array(WIDTH, 2), array(2, WIDTH)

    def loss(factors, apply, make):
        tree = {"top/inner": {"w": make(*factors), "b": jnp.zeros(WIDTH)}}
        return jnp.sum(apply(tree, x) ** 2)

    form = functools.partial(Adapted, base, axes="in out")
    merged = lambda a, b: base.use(jnp.float32) + a @ b  # noqa: E731
    apply = stored.using(model.apply, jnp.float32)
    found = jax.grad(loss)((a, b), apply, form)
    expected = jax.grad(loss)((a, b), model.apply, merged)
    for x_, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x_, y, rtol=1e-4, atol=1e-5)


def test_a_model_that_reads_its_parameters_by_other_means_is_told():
    model = hk.Transformed(
        lambda rng, x: {"m": {"w": x}}, lambda p, rng, x: jnp.dot(p["m"]["w"], x)
    )
    forms = {"m": {"w": Int8.store(array(WIDTH, WIDTH))}}
    with pytest.raises(TypeError) as error:
        stored.using(model.apply, jnp.float32)(forms, None, array(WIDTH, 2))
    assert "hk.get_parameter" in " ".join(error.value.__notes__)


def test_the_16_numbers_are_those_that_were_published():
    """As bitsandbytes computes them: quantiles of a normal distribution."""
    offset = 0.9677083
    positive = scipy.stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -scipy.stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    numbers = np.sort([*positive, 0, *negative])
    np.testing.assert_allclose(NF4, numbers / np.abs(numbers).max(), atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "block"), [((8, 64), 8), ((3, 192, 32), 64), ((2, 3, 100, 64), 100)]
)
def test_int8_is_off_by_half_a_step_of_its_block_at_most(shape, block):
    values = array(*shape) * np.exp(3 * array(shape[-1]))
    values[..., 0] = 0
    form = Int8.store(values)
    blocks = values.reshape(*shape[:-2], -1, block, shape[-1])
    step = np.abs(blocks).max(-2) / 127
    assert form.values.dtype == np.int8 and form.values.shape == shape
    np.testing.assert_allclose(form.scale, step, rtol=1e-6)
    error = np.abs(form.use(jnp.float32) - values).reshape(blocks.shape)
    assert (error <= step[..., None, :] / 2 * (1 + 1e-5)).all()
    assert (np.abs(np.asarray(form.values)) <= 127).all()


@pytest.mark.parametrize("shape", [(8, 64), (3, 8, 128)])
def test_nf4_takes_the_nearest_of_16_numbers(shape):
    values = array(*shape)
    values[..., 0, :] = 0
    form = Nf4.store(values)
    assert form.pairs.nbytes * 2 == values.size
    blocks = values.reshape(*shape[:-1], -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True)
    possible = scale[..., None] * np.asarray(NF4, np.float32)
    nearest = np.abs(blocks[..., None] - possible).min(-1)
    error = np.abs(np.asarray(form.use(jnp.float32)).reshape(blocks.shape) - blocks)
    np.testing.assert_allclose(error, nearest, atol=1e-6)


@pytest.mark.parametrize("store", [Int8.store, Nf4.store])
def test_an_array_is_stored_alike_on_the_host_and_in_a_program(store):
    values = array(3, 8, 128)
    host, device = store(values), jax.jit(store)(values)
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        assert a.dtype == b.dtype
        difference = np.abs(a.astype(np.float32) - np.asarray(b).astype(np.float32))
        assert (difference > 1e-6).mean() < 0.01  # The division may round otherwise.


INPUTS = RNG.normal(size=(64, WIDTH)).astype(np.float32)
LABELS = RNG.integers(0, 3, 64).astype(np.int32)
DATA = Data(
    ArrayDataset(INPUTS, LABELS, BatchSpec(16)), EvaluationSet(INPUTS, LABELS, 16), 3
)


def forward(x):
    x = jax.nn.relu(hk.Linear(WIDTH * 2)(x))
    x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    return hk.Linear(3, name="head")(hk.Linear(WIDTH, name="embed")(x))


MODEL = hk.without_apply_rng(hk.transform(forward))
LORA = Finetuning(lora=Lora(rank=4), train=("head/*",))


def trainer_of(devices, dtype, init_from=None, precision="float32", **keys):
    tuning = LORA._replace(base_dtype=dtype, **keys)
    source = init_from and open_source(str(init_from), None, devices, tuning)
    return Experiment(
        model=MODEL,
        optimizer=optax.adam(1e-2),
        task=classification,
        data=DATA,
        finetuning=tuning,
        init_from=source,
        precision=precision,
    ).trainer(devices)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    params = flatten(MODEL.init(jax.random.key(3), INPUTS[:1]))
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file({k: np.array(x) for k, x in params.items()}, path)
    return path


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_frozen_parameters_are_read_in_their_form(devices, file, dtype):
    trainer = trainer_of(devices, dtype, file)
    state = trainer.init()
    frozen = flatten(state.frozen, is_leaf=stored.is_form)
    originals = load_file(file)
    form = {"int8": Int8, "nf4": Nf4}[dtype]
    assert type(frozen["linear/w"]) is form
    assert frozen["embed/w"].dtype == jnp.bfloat16  # By its name.
    assert frozen["linear/b"].dtype == frozen["layer_norm/scale"].dtype == jnp.bfloat16
    expected = form.store(originals["linear/w"]).use(jnp.float32)
    np.testing.assert_array_equal(frozen["linear/w"].use(jnp.float32), expected)
    size = originals["linear/w"].size
    leaves = jax.tree.leaves(frozen["linear/w"])
    values, scales = sorted((x.nbytes for x in leaves), reverse=True)
    assert values == size // (1 if dtype == "int8" else 2)
    assert scales == 4 * (size // WIDTH)  # WIDTH is of a column, and of a block.
    abstract = jax.tree.map(lambda x: (x.shape, x.dtype), trainer.abstract.frozen)
    assert abstract == jax.tree.map(lambda x: (x.shape, x.dtype), state.frozen)


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_a_run_on_quantized_parameters_is_that_on_what_they_stand_for(
    one_device, file, tmp_path, dtype
):
    trainer = trainer_of(one_device, dtype, file)
    frozen = flatten(trainer.init().frozen, is_leaf=stored.is_form)
    whole = {k: np.asarray(stored.use(x, jnp.float32)) for k, x in frozen.items()}
    whole = {k: x.astype(np.float32) for k, x in whole.items()}
    originals = load_file(file)
    save_file(originals | whole, tmp_path / "whole.safetensors")
    state, scalars = run_steps(trainer, 8)
    plain = trainer_of(one_device, "float32", tmp_path / "whole.safetensors")
    expected, expected_scalars = run_steps(plain, 8)
    for a, b in zip(scalars, expected_scalars, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    merged, _ = trainer.merged(state)
    plain_merged, _ = plain.merged(expected)
    assert flatten(merged).keys() == flatten(plain_merged).keys()
    for path, leaf in flatten(merged).items():
        np.testing.assert_allclose(
            np.asarray(leaf, np.float32), flatten(plain_merged)[path], atol=1e-4
        )


def test_adapted_matrices_at_their_use_are_those_of_a_merged_tree(
    one_device, file, monkeypatch
):
    """Merged before `apply`, as they were once; memory is tests/target's."""
    _, at_use = run_steps(trainer_of(one_device, "float32", file), 8)

    def merging(apply, dtype, in_order):
        return lambda params, *args: apply(stored.used(params, dtype), *args)

    monkeypatch.setattr(stored, "using", merging)
    _, merged = run_steps(trainer_of(one_device, "float32", file), 8)
    for a, b in zip(at_use, merged, strict=True):
        assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-6)


def each(x):
    x = jnp.tanh(hk.Linear(24, name="first")(x))
    return hk.Linear(3, name="head")(jnp.tanh(hk.Linear(40, name="wide")(x)).mean(0))


def of_all(x):
    return hk.vmap(lambda x: each(x), split_rng=False)(x)


QUANTIZED = [{"train": ("*head/*",), "base_dtype": x} for x in ("int8", "nf4")]
STORED = [{"lora": Lora(rank=2, patterns=("*wide/w",))}, *QUANTIZED]
MAPPED = [(of_all, {}, way) for way in STORED]
MAPPED += [(each, {"per_example": True}, way) for way in (*STORED, {})]


@pytest.mark.parametrize(("forward", "keys", "way"), MAPPED)
def test_no_example_has_a_parameter_of_its_own(
    one_device, four_devices, forward, keys, way, monkeypatch
):
    """Nor one of a gradient, where a model is mapped over its examples."""
    monkeypatch.setattr(layout, "GATHERED", 0)
    x, labels = array(12, 5, 24), np.zeros(12, np.int32)
    experiment = Experiment(
        model=in_form(hk.transform(forward), keys),
        task=classification,
        data=Data(
            ArrayDataset(x, labels, BatchSpec(12)), EvaluationSet(x, labels, 12), 3
        ),
        optimizer=optax.adam(1e-2),
        finetuning=Finetuning(**way),
        sharding=() if way else (("*", "data"),),
    )
    devices = one_device if way else four_devices
    trainer = experiment.trainer(devices)
    program = str(trainer.trace(trainer.feed.host_shapes()[0]).jaxpr)
    rows = 12 // devices.num_devices
    assert f"[{rows},5,24]" in program and "[24,40]" in program
    assert f"[{rows},24,40]" not in program and f"[{rows},40,24]" not in program


def test_a_model_may_be_mapped_over_nothing():
    forward = hk.transform(lambda x: hk.vmap(hk.Linear(3), split_rng=False)(x).sum())
    params = forward.init(jax.random.key(0), jnp.ones((2, 4)))
    apply = stored.using(lambda params, x: forward.apply(params, None, x), jnp.float32)
    assert apply(params, jnp.zeros((0, 4))) == 0


def test_half_precision_uses_exact_scales(one_device, file):
    trainer = trainer_of(one_device, "int8", file, precision="bfloat16")
    state, scalars = run_steps(trainer, 2)
    assert all(np.isfinite(x["loss"]) for x in scalars)
    text = trainer.trace(trainer.feed.host_shapes()[0]).jaxpr.pretty_print()
    assert f"i8[{WIDTH},{2 * WIDTH}]" in text and f"f32[1,{2 * WIDTH}]" in text


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_budget_audit_and_program_count_what_is_stored(one_device, file, dtype):
    kinds = (dtype, "float32")
    trainers = [trainer_of(one_device, kind, file, unquantized=()) for kind in kinds]
    sizes, arguments = [], []
    for trainer in trainers:
        frozen = trainer.init().frozen
        sizes.append(sum(x.nbytes for x in jax.tree.leaves(frozen)))
        assert check_budget(trainer).frozen == sizes[-1]
        assert sum(x.bytes for x in one_device.audit(frozen)) == sizes[-1]
        compiled = trainer.trace(trainer.feed.host_shapes()[0]).lower().compile()
        arguments.append(compiled.memory_analysis().argument_size_in_bytes)
    matrices, vectors = 2 * 2 * WIDTH**2, 7 * WIDTH
    scales = matrices // WIDTH  # Of blocks of 64.
    bits = {"int8": 8, "nf4": 4}[dtype]
    assert sizes == [
        matrices * bits // 8 + 4 * scales + 2 * vectors,
        4 * (matrices + vectors),
    ]
    assert arguments[1] - arguments[0] == sizes[1] - sizes[0]


@pytest.mark.parametrize("dtype", ["int8", "nf4"])
def test_several_devices_train_alike(one_device, four_devices, file, dtype):
    losses = []
    for devices in (one_device, four_devices):
        _, scalars = run_steps(trainer_of(devices, dtype, file), 5)
        losses.append([float(x["loss"]) for x in scalars])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_what_cannot_be_quantized_is_said():
    shapes = MODEL.init(jax.random.key(0), INPUTS[:1])
    with pytest.raises(ConfigError, match="of frozen parameters, and all are to train"):
        make_plan(Finetuning(base_dtype="int8"), shapes)
    with pytest.raises(ConfigError, match="unquantized .* 'nothing/\\*' fits none"):
        make_plan(LORA._replace(base_dtype="nf4", unquantized=("nothing/*",)), shapes)
    plan = make_plan(LORA._replace(base_dtype="nf4", train=("linear/*",)), shapes)
    assert "head/w" in plan.unquantized  # [64, 3]: no blocks of 64.
    everything = make_plan(LORA._replace(base_dtype="nf4", unquantized=()), shapes)
    assert "embed/w" not in everything.unquantized


TOKENS = RNG.integers(0, 50, (2, 16)).astype(np.int32)
SIZES = {"width": 64, "num_layers": 2, "num_heads": 2, "context": 16, "dropout": 0.0}
LANGUAGE = {
    "gpt": functools.partial(text_models.gpt, num_outputs=50, **SIZES),
    "bert": functools.partial(
        text_models.bert, num_outputs=50, vocab_size=50, mlp_width=128, **SIZES
    ),
}


# As published, but for the vocabularies: there errors of twelve layers add up.
REAL = {"width": 768, "num_layers": 12, "num_heads": 12, "context": 64, "dropout": 0.0}
REAL = {
    "real gpt2": functools.partial(text_models.gpt, num_outputs=8_000, **REAL),
    "real bert": functools.partial(
        text_models.bert, num_outputs=50, vocab_size=8_000, mlp_width=3072, **REAL
    ),
}
DRAWS = 4  # Of noise, whose error in few logits is not the same twice.


def rounded(name, model):
    """Errors of logits with matrices in int8, and with as much noise as 8 bits need."""
    inputs = TOKENS if "gpt" in name else {"tokens": TOKENS, "mask": TOKENS >= 0}
    params = model.init(jax.random.key(0), inputs, False)
    plan = make_plan(Finetuning(lora=Lora(rank=0), base_dtype="int8"), params)
    leaves = flatten(params)
    forms = {k: plan.store(k, x) for k, x in leaves.items()}
    matrices = {k for k, x in forms.items() if stored.is_form(x)}
    assert len(matrices) >= 8
    apply, rng = stored.using(model.apply, jnp.float32), np.random.default_rng(0)

    def noisy():
        return leaves | {
            k: leaves[k] + 2**-8 * leaves[k].std() * rng.normal(size=leaves[k].shape)
            for k in matrices
        }

    def logits(leaves):
        return plain_outputs(apply(unflatten(leaves), None, inputs, False))

    expected, in_int8 = np.asarray(logits(leaves)), np.asarray(logits(forms))
    with_noise = np.stack([logits(noisy()) for _ in range(DRAWS)])
    return [
        np.sqrt(np.mean((x - expected) ** 2) / np.mean(expected**2))
        for x in (in_int8, with_noise)
    ]


@pytest.mark.parametrize("name", LANGUAGE)
def test_logits_are_within_a_percent_in_int8(name):
    assert 0 < rounded(name, LANGUAGE[name](axis_name=None))[0] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_logits_of_twelve_layers_are_as_close_as_8_bits_allow(name):
    """No code of 8 bits a number has less noise: its share of normal ones is 2^-8."""
    error, least = rounded(name, REAL[name](axis_name=None))
    assert 0.01 < least < error < 0.02


def stack_of_vectors(x):
    return hk.experimental.layer_stack(3)(lambda x: hk.Linear(WIDTH)(x))(x)


def test_a_quantized_vector_of_a_stack_of_layers_is_said():
    model = hk.without_apply_rng(hk.transform(stack_of_vectors))
    x = array(4, WIDTH)
    forms = jax.tree.map(Int8.store, model.init(jax.random.key(0), x))
    with pytest.raises(ValueError) as error:
        stored.using(model.apply, jnp.float32)(forms, x)
    assert "config.finetuning.unquantized" in " ".join(error.value.__notes__)


def trained(config, devices, num_steps):
    """The trainer of a config after its steps, the state and the held-out loss."""
    config.num_steps = num_steps
    trainer = Experiment.from_config(config, devices).trainer(devices)
    state, _ = run_steps(trainer, num_steps)
    return trainer, state, trainer.evaluate(state)["eval/loss"]


@pytest.mark.long
def test_lora_learns_on_quantized_parameters_what_it_learns_on_bfloat16(
    one_device, tmp_path
):
    """300 steps of `gpt_bytes`, then 150 of `finetune_gpt_bytes_lora` on each form."""
    _, base, _ = trained(gpt_bytes.get_config(), one_device, 300)
    file = tmp_path / "base.safetensors"
    save_file({k: np.array(x) for k, x in flatten(base.params).items()}, file)
    losses = {}
    for dtype in ("bfloat16", "int8", "nf4"):
        config = finetune_gpt_bytes_lora.get_config()
        config.init_from, config.finetuning.base_dtype = str(file), dtype
        trainer, _, losses[dtype] = trained(config, one_device, 150)
    untrained = trainer.evaluate(trainer.init())["eval/loss"]
    assert losses["bfloat16"] < 0.9 * untrained
    assert losses["int8"] <= 1.01 * losses["bfloat16"]
    assert losses["nf4"] <= 1.03 * losses["bfloat16"]
