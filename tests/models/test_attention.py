"""Which implementation of attention is chosen, by data: no GPU is needed."""

import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_template.config import default_config
from haiku_template.errors import ConfigError
from haiku_template.models import attention
from haiku_template.models.attention import Hardware, attend, choose
from haiku_template.training import Experiment

CPU = Hardware("cpu", "")
TURING = Hardware("gpu", "7.5")
AMPERE = Hardware("gpu", "8.0")
HOPPER = Hardware("gpu", "9.0")
BLACKWELL = Hardware("gpu", "12.0")
AMD = Hardware("gpu", "gfx90a")


@pytest.mark.parametrize(
    ("hardware", "dtype", "head_size", "obstacle"),
    [
        (AMPERE, jnp.bfloat16, 64, None),
        (AMPERE, jnp.float16, 128, None),
        (BLACKWELL, jnp.bfloat16, 8, None),
        (CPU, jnp.bfloat16, 64, "there is no NVIDIA GPU"),
        (AMD, jnp.bfloat16, 64, "there is no NVIDIA GPU"),
        (TURING, jnp.float16, 64, "compute capability 7.5, below 8.0"),
        (AMPERE, jnp.float32, 64, "bfloat16 or float16, and the model in float32"),
        (AMPERE, jnp.bfloat16, 60, "heads of size 60 are not a multiple of 8"),
        (AMPERE, jnp.bfloat16, 256, "heads of size 256 .* up to 128"),
        (HOPPER, jnp.bfloat16, 256, None),
        (BLACKWELL, jnp.bfloat16, 256, None),
        (HOPPER, jnp.bfloat16, 264, "heads of size 264 .* up to 256"),
    ],
)
def test_cudnn_is_chosen_where_it_exists(hardware, dtype, head_size, obstacle):
    arguments = (hardware, dtype, head_size)
    assert choose("auto", *arguments) == ("xla" if obstacle else "cudnn")
    assert choose("xla", *arguments) == "xla"
    if obstacle is None:
        assert choose("cudnn", *arguments) == "cudnn"
        return
    with pytest.raises(ConfigError, match=f"attention=cudnn.*{obstacle}") as error:
        choose("cudnn", *arguments)
    assert error.value.exit_code == 64


def test_packed_windows_have_a_length_that_cudnn_computes_right():
    arguments = (HOPPER, jnp.bfloat16, 64)
    for tokens, chosen in ((128, "cudnn"), (192, "xla"), (500, "xla"), (512, "cudnn")):
        assert choose("auto", *arguments, tokens) == chosen
    with pytest.raises(ConfigError, match="windows of 192 .* not a multiple of 128"):
        choose("cudnn", *arguments, 192)


def test_this_machine_s_cpu_is_no_gpu():
    hardware = Hardware.current()
    assert hardware == CPU == Hardware.of(jax.devices())


def card(capability):
    return SimpleNamespace(platform="gpu", compute_capability=capability)


def test_of_several_cards_the_least_capable_counts():
    assert Hardware.of([card("10.0"), card("9.0"), card("8.0")]) == AMPERE


@pytest.fixture
def traced(monkeypatch):
    """What JAX is asked for: implementations and dtypes. The CPU computes by XLA."""
    asked, compute = [], jax.nn.dot_product_attention

    def record(query, *args, implementation, **kwargs):
        asked.append((implementation, str(query.dtype)))
        return compute(query, *args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return asked


def make_gpt(tmp_path, devices, **changes):
    tokens = np.zeros(400, np.uint8)
    np.save(tmp_path / "tokens.npy", tokens)
    config = default_config()
    config.task.name, config.batch_size = "language_model", 8
    config.data = {"name": "tokens", "path": str(tmp_path / "tokens.npy")}
    config.data.update({"context": 8, "vocab_size": 256, "validation_fraction": 0.1})
    config.model = {"name": "gpt", "num_layers": 1, "width": 16, "num_heads": 2}
    config.model.update({"context": 8, "attention": "cudnn"})
    config.update(changes)
    return Experiment.from_config(config, devices).trainer(devices)


def lower(trainer):
    trainer.trace(trainer.feed.host_shapes()[0]).lower()


def test_a_program_asks_for_the_attention_of_the_devices_that_it_is_compiled_for(
    tmp_path, devices, monkeypatch, traced
):
    """The process's first device is a CPU here. First parameters are of float32."""
    monkeypatch.setattr(Hardware, "of", lambda those: AMPERE)
    lower(make_gpt(tmp_path, devices, precision="bfloat16"))
    assert ("cudnn", "bfloat16") in traced
    assert set(traced) <= {("cudnn", "bfloat16"), ("xla", "float32")}
    with pytest.raises(ConfigError, match="cannot be had: .* the model in float32"):
        lower(make_gpt(tmp_path, devices))


@pytest.mark.parametrize(
    ("hardware", "dtype", "computed"),
    [
        (TURING, "bfloat16", "float32"),
        (TURING, "float16", "float16"),
        (AMPERE, "bfloat16", "bfloat16"),
        (AMD, "bfloat16", "bfloat16"),
    ],
)
def test_xla_is_asked_for_products_that_a_card_has(
    monkeypatch, traced, hardware, dtype, computed
):
    monkeypatch.setattr(Hardware, "current", lambda: hardware)
    inputs = jnp.zeros((3, 2, 5, 2, 8), dtype)
    assert jax.eval_shape(functools.partial(attend, "xla"), *inputs).dtype == dtype
    assert traced == [("xla", computed)]


def test_cudnn_on_a_cpu_is_refused_when_the_step_is_traced(tmp_path, one_device):
    with pytest.raises(ConfigError, match="there is no NVIDIA GPU"):
        lower(make_gpt(tmp_path, one_device, precision="bfloat16"))


@pytest.mark.slow(but="True-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_is_computed_on_the_cpu_too(dtype, masked):
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 5, 2, 8))
    mask = np.tri(5, dtype=bool)[None, None] if masked else None
    exact = attend("auto", *(jnp.float32(x) for x in (query, key, value)))
    inputs = (jnp.asarray(x, dtype) for x in (query, key, value))
    outputs = jax.jit(attend, static_argnums=0)("auto", *inputs, mask)
    assert outputs.dtype == dtype
    np.testing.assert_allclose(np.float32(outputs), exact, atol=0.03)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Has cuDNN chosen, and JAX's own XLA compute it; gives what it is asked for."""
    asked, compute = [], jax.nn.dot_product_attention

    def record(*args, implementation, **kwargs):
        asked.append((implementation, kwargs))
        return compute(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(attention, "choose", lambda *args: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    return asked


def with_gradients(weights, **options):
    """Outputs of attention, and gradients for queries, keys and values."""
    arrays = np.random.default_rng(0).normal(size=(3, *weights.shape)).astype("f4")

    def total(arrays):
        outputs = attend("auto", *arrays, **options)
        return jnp.sum(outputs * weights), outputs

    grads, outputs = jax.jit(jax.grad(total, has_aux=True))(arrays)
    return np.asarray(outputs), np.asarray(grads)


LENGTHS = np.array([6, 3, 0, 1], np.int32)  # A row of padding alone, too.


def test_padding_by_lengths_is_that_of_the_mask(request):
    seen = np.arange(6) < LENGTHS[:, None]
    mask = seen[:, None, None]
    # What comes out at padding is used nowhere, so that nothing comes back.
    weights = np.random.default_rng(1).normal(size=(4, 6, 2, 8)) * seen[..., None, None]
    expected, expected_grads = with_gradients(weights, mask=mask)
    asked = request.getfixturevalue("on_a_gpu")
    outputs, grads = with_gradients(weights, mask=mask, lengths=LENGTHS)
    np.testing.assert_allclose(outputs[seen], expected[seen], atol=1e-5)
    np.testing.assert_allclose(grads, expected_grads, atol=1e-5)
    assert np.all(grads[:, ~seen] == 0) and np.all(np.isfinite(outputs))
    ((implementation, options),) = asked
    assert implementation == "cudnn"
    assert options["mask"] is None and not options["is_causal"]


@pytest.mark.parametrize("size", [1, 40, 300, 1200])
def test_segments_are_a_mask_computed_in_blocks_or_by_cudnn(request, size):
    rng = np.random.default_rng(size)
    segments = np.sort(rng.integers(0, 1 + size // 9, (1, size)), axis=1)
    mask = (segments[:, None, :, None] == segments[:, None, None]) & np.tri(
        size, dtype=bool
    )
    weights = rng.normal(size=(1, size, 1, 4))
    expected, expected_grads = with_gradients(weights, mask=mask)
    for fixture in (None, "on_a_gpu"):
        asked = fixture and request.getfixturevalue(fixture)
        outputs, grads = with_gradients(weights, segments=segments)
        np.testing.assert_allclose(outputs, expected, atol=1e-5)
        np.testing.assert_allclose(grads, expected_grads, atol=1e-5)
    ((implementation, options),) = asked
    assert implementation == "cudnn" and options["is_causal"]


def test_segments_by_xla_take_the_memory_of_a_block():
    size = 2048
    shape = jax.ShapeDtypeStruct((1, size, 4, 8), jnp.float32)

    def temporaries(compute):
        def total(query, segments):
            return jnp.sum(compute(query, segments) ** 2)

        numbers = jax.ShapeDtypeStruct((1, size), jnp.int32)
        made = jax.jit(jax.grad(total)).lower(shape, numbers).compile()
        return made.memory_analysis().temp_size_in_bytes

    def blocks(query, segments):
        return attend("xla", query, query, query, segments=segments)

    def dense(query, segments):
        mask = segments[:, None, :, None] == segments[:, None, None]
        mask &= jnp.tri(size, dtype=bool)
        return jax.nn.dot_product_attention(query, query, query, mask=mask)

    assert temporaries(blocks) < 0.5 * temporaries(dense)


@pytest.mark.parametrize("size", [12, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_form_for_cpus_is_jax_s_own_attention(monkeypatch, size, masked):
    """A row of the mask hides every token: its softmax is uniform, as JAX has it."""
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, size, 3, 8)).astype("f4")
    key, value = rng.normal(size=(2, 2, 12 if masked else size, 3, 8)).astype("f4")
    mask = rng.random((2, 1, size, 12)) < 0.5 if masked else None
    if masked:
        mask[0, 0, 1] = False

    def run():
        def outputs(*arrays):
            return attend("xla", *arrays, mask)

        values, gradient = jax.vjp(jax.jit(outputs), query, key, value)
        return values, *gradient(10 * np.cos(values))

    ours = run()
    monkeypatch.setattr(Hardware, "current", lambda: attention.ANY)
    for array, expected in zip(ours, run(), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
    assert any(np.any(a != b) for a, b in zip(ours, run(), strict=True))


def test_no_array_of_pairs_of_tokens_is_transposed_on_a_cpu():
    shape = jax.ShapeDtypeStruct((2, 64, 2, 8), jnp.float32)

    def total(*arrays):
        return jnp.sum(attend("xla", *arrays) ** 2)

    lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(shape, shape, shape)
    program = lowered.compile().as_text()
    pairs = re.findall(r"f32\[2,2,64,64\]\{([\d,]+)\}", program)
    assert pairs and set(pairs) == {"3,2,1,0"}
    assert not re.search(r"f32\[2,2,64,64\]\S* transpose\(", program)
