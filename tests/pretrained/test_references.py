"""Models of Hugging Face's layout give the numbers that transformers gave.

`make_references.py` made the models and the numbers, and says how.
"""

import haiku as hk
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from haiku_template.params import flatten
from haiku_text.huggingface import describe, restore
from haiku_text.models import bert, gpt
from haiku_text.models.bert import Sizes, encode, pool

pytestmark = pytest.mark.usefixtures("optimized")
TOLERANCE = 1e-5  # Ten times what was seen, and a tenth of what would do.


def read_outputs(references, name):
    outputs = load_file(references / f"{name}_outputs.safetensors")
    whole = {k: np.int32(v) for k, v in outputs.items() if v.dtype == np.int64}
    return outputs | whole


def load(folder, devices, inputs, num_outputs=3, fresh=(), **kwargs):
    """The parameters on the host, and the model's function."""
    found = describe(folder)
    outputs = {} if "num_outputs" in found.arguments else {"num_outputs": num_outputs}
    make = gpt if found.family is gpt.family else bert
    model = make(**outputs, **found.arguments, **kwargs)

    def init():
        return model.init(jax.random.key(0), inputs, False)

    params = restore(folder, init, found.family.rules, devices, fresh=fresh)
    devices.check(params)
    return devices.fetch(params), jax.jit(lambda p, x: model.apply(p, None, x, False))


def encoder(arguments):
    """Hidden states and pooled output, under the names that `bert` gives."""
    sizes = Sizes(*(arguments[name] for name in Sizes._fields))

    def forward(inputs):
        with hk.name_scope("bert"):
            hidden = encode(inputs, sizes, arguments["norm_eps"])
            return hidden, pool(hidden, inputs["mask"], "cls")

    return jax.jit(hk.transform(forward).apply)


def without_prefix(tensors):
    return {
        name.removeprefix("bert.").removeprefix("transformer."): tensor
        for name, tensor in tensors.items()
    }


def in_old_names(tensors):
    """As files say that came from TensorFlow, with the buffer of old versions."""
    old = {}
    for name, tensor in tensors.items():
        norm, _, kind = name.rpartition(".")
        if norm.endswith("LayerNorm"):
            name = f"{norm}.{'gamma' if kind == 'weight' else 'beta'}"
        old[name] = tensor
    return old | {"bert.embeddings.position_ids": np.arange(16)[None]}


def pretraining(tensors):
    """With the heads of pretraining, and no classifier."""
    tensors = {k: v for k, v in tensors.items() if not k.startswith("classifier")}
    return tensors | {"cls.predictions.bias": np.zeros(48, np.float32)}


@pytest.mark.parametrize("change", [None, without_prefix, in_old_names])
def test_bert_classifies_as_transformers_does(references, copy_of, one_device, change):
    outputs = read_outputs(references, "bert")
    inputs = {name: outputs[name] for name in ("tokens", "mask", "token_types")}
    params, apply = load(copy_of("bert", change), one_device, inputs)
    logits = apply(params, inputs)
    np.testing.assert_allclose(logits, outputs["logits"], atol=TOLERANCE)


def test_bert_encodes_and_pools_as_transformers_does(references, devices):
    outputs = read_outputs(references, "bert")
    inputs = {name: outputs[name] for name in ("tokens", "mask", "token_types")}
    params, _ = load(references / "bert", devices, inputs)
    apply = encoder(describe(references / "bert").arguments)
    hidden, pooled = apply(params, None, inputs)
    seen = inputs["mask"].astype(bool)
    np.testing.assert_allclose(hidden[seen], outputs["hidden"][seen], atol=TOLERANCE)
    np.testing.assert_allclose(pooled, outputs["pooled"], atol=TOLERANCE)


def test_a_sentence_vector_is_the_normalised_mean(references, one_device):
    outputs = read_outputs(references, "bert")
    inputs = {name: outputs[name] for name in ("tokens", "mask", "token_types")}
    arguments = {"num_outputs": None, "pooling": "mean"}  # Neither pooler nor head.
    params, apply = load(references / "bert", one_device, inputs, **arguments)
    mask = outputs["mask"][:, :, None]
    mean = (outputs["hidden"] * mask).sum(axis=1) / mask.sum(axis=1)
    expected = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(apply(params, inputs), expected, atol=TOLERANCE)


def test_a_pretrained_encoder_gets_a_fresh_head(references, copy_of, one_device):
    outputs = read_outputs(references, "bert")
    inputs = {name: outputs[name] for name in ("tokens", "mask", "token_types")}
    folder = copy_of("bert", pretraining)
    params, _ = load(folder, one_device, inputs, 5, fresh=["bert/head/*"])
    hidden, pooled = encoder(describe(folder).arguments)(params, None, inputs)
    np.testing.assert_allclose(pooled, outputs["pooled"], atol=TOLERANCE)
    assert flatten(params)["bert/head/w"].shape == (32, 5)


def with_buffers_and_head(tensors):
    """As old files are: the causal mask is in them, and the tied head."""
    mask = np.tril(np.ones((1, 1, 16, 16), np.float32))
    return without_prefix(tensors) | {
        "h.0.attn.bias": mask,
        "h.1.attn.bias": mask,
        "h.1.attn.masked_bias": np.array(-1e4, np.float32),
        "lm_head.weight": tensors["transformer.wte.weight"],
    }


@pytest.mark.slow(but="four devices-with_buffers_and_head")
@pytest.mark.parametrize("change", [None, without_prefix, with_buffers_and_head])
def test_gpt2_gives_the_logits_of_transformers(references, copy_of, devices, change):
    outputs = read_outputs(references, "gpt2")
    params, apply = load(copy_of("gpt2", change), devices, outputs["tokens"])
    logits = apply(params, outputs["tokens"]).multiply_out()
    np.testing.assert_allclose(logits, outputs["logits"], atol=TOLERANCE)
