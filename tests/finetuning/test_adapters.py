"""Files of adapters, and the frozen parameters that they belong to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from haiku_template.errors import ConfigError, StorageError
from haiku_template.finetuning.adapters import fingerprint, load_adapters, save_adapters
from haiku_template.finetuning.lora import Lora
from haiku_template.finetuning.plan import Finetuning, make_plan

LORA = Lora(rank=2, alpha=4.0)


@pytest.fixture
def parts(request):
    """Trainable and frozen parameters of a small model, on the test's devices."""
    names = {"devices", "one_device"} & set(request.fixturenames)
    devices = request.getfixturevalue(names.pop())

    def whole():
        w = jax.random.normal(jax.random.key(0), (6, 5))
        head = {"w": w[:, :2], "temperature": jnp.float32(2)}
        return {"a/b": {"w": w, "b": jnp.zeros(5)}, "head": head}

    plan = make_plan(Finetuning(train=("head/*",), lora=LORA), devices.abstract(whole))
    params = devices.init(lambda: plan.init_params(whole(), jax.random.key(1)))
    return params, devices.init(lambda: plan.split(whole())[1])


def abstract(devices, tree):
    return devices.abstract(lambda x: x, tree)


def test_adapters_come_back_bitwise(tmp_path, devices, parts):
    params, frozen = parts
    file = tmp_path / "new" / "adapters.safetensors"
    save_adapters(file, params, frozen, LORA, devices, step=3)
    assert set(load_file(file)) == {
        *("a/b/w_lora_a", "a/b/w_lora_b"),
        *("head/w", "head/temperature"),
    }
    loaded = load_adapters(file, abstract(devices, params), frozen, LORA, devices)
    devices.check(loaded)
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), loaded, params)
    assert all(jax.tree.leaves(same))


def test_the_fingerprint_is_of_names_dtypes_shapes_and_values(devices, parts):
    _, frozen = parts
    w, b = frozen["a/b"]["w"], frozen["a/b"]["b"]
    others = [
        {"a/b": {"w": w.at[0, 0].add(1e-6), "b": b}},
        {"a/c": {"w": w, "b": b}},
        {"a/b": {"w": w.reshape(5, 6), "b": b}},
        {"a/b": {"w": w.view(jnp.int32), "b": b}},
        {"a/b": {"w": w.astype(jnp.bfloat16), "b": b}},
        {"a/b": {"w": w}},
    ]
    found = {fingerprint(devices, devices.replicate(x)) for x in [frozen, *others]}
    assert len(found) == 7
    again = {"a/b": {"b": b, "w": w}}
    assert fingerprint(devices, again) == fingerprint(devices, frozen)


def test_adapters_of_other_frozen_parameters_are_refused(tmp_path, devices, parts):
    params, frozen = parts
    file = tmp_path / "adapters.safetensors"
    save_adapters(file, params, frozen, LORA, devices, step=3)
    other = devices.replicate(jax.tree.map(lambda x: x.at[0].add(1), frozen))
    skeleton = abstract(devices, params)
    with pytest.raises(ConfigError, match="other frozen parameters: their SHA"):
        load_adapters(file, skeleton, other, LORA, devices)
    for lora, words in (
        (LORA._replace(rank=3), "have rank 2, and here it is 3"),
        (LORA._replace(alpha=5.0), r"have alpha 4\.0, and here it is 5\.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_adapters(file, skeleton, frozen, lora, devices)
    more = skeleton | {"more": skeleton["head"]}
    with pytest.raises(ConfigError, match="2 missing(.|\n)*more/w"):
        load_adapters(file, more, frozen, LORA, devices)


def test_files_that_are_no_adapters_are_refused(tmp_path, one_device, parts):
    params, frozen = parts
    skeleton = abstract(one_device, params)
    file = tmp_path / "weights.safetensors"
    facts = {"rank": "2", "alpha": "4.0", "base_sha256": "0", "step": "x"}
    for metadata in (None, facts, facts | {"rank": ""}):
        save_file({"w": np.zeros(3, np.float32)}, file, metadata)
        with pytest.raises(ConfigError, match="do not give rank, alpha, base_sha"):
            load_adapters(file, skeleton, frozen, LORA, one_device)
    file.write_bytes(b"no header")
    with pytest.raises(ConfigError, match="truncated, damaged"):
        load_adapters(file, skeleton, frozen, LORA, one_device)


def test_nothing_is_overwritten_and_nothing_is_left_half(tmp_path, one_device, parts):
    params, frozen = parts
    file = tmp_path / "adapters.safetensors"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="exists, and nothing is overwritten"):
        save_adapters(file, params, frozen, LORA, one_device, step=3)
    assert file.read_text() == "mine"
    with pytest.raises(StorageError, match="cannot be written"):
        save_adapters(file / "inside", params, frozen, LORA, one_device, step=3)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
