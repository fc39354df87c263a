"""What was read is written back bit for bit; what is new is found again."""

import json
import os
import stat

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from haiku_template.errors import ConfigError, StorageError
from haiku_template.models import Rule
from haiku_template.params import flatten
from haiku_template.pretrained import check_new, writing
from haiku_text.huggingface import (
    describe,
    export,
    export_like,
    export_new,
    restore,
    to_config,
)
from haiku_text.models import bert, gpt

FAMILIES = {"bert": bert.family, "gpt2": gpt.family}
BERT = FAMILIES["bert"].rules


def load(folder, devices, num_outputs=3, fresh=(), **kwargs):
    found = describe(folder)
    if found.family is gpt.family:
        inputs = np.zeros((1, 2), np.int32)
        model = gpt(**found.arguments)
    else:
        inputs = {name: np.ones((1, 2), np.int32) for name in ("tokens", "mask")}
        model = bert(num_outputs, **found.arguments, **kwargs)

    def init():
        return model.init(jax.random.key(0), inputs, False)

    return restore(folder, init, found.family.rules, devices, fresh=fresh)


def assert_same_files(first, second):
    assert sorted(os.listdir(first)) == sorted(os.listdir(second))
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_what_was_read_is_written_back_byte_for_byte(
    references, tmp_path, devices, name
):
    """One file and shards, config and index."""
    params = load(references / name, devices)
    rules = describe(references / name).family.rules
    out = tmp_path / "new" / "out"
    export_like(references / name, out, params, rules, devices)
    for file in references.glob(f"{name}/*"):
        assert file.read_bytes() == (out / file.name).read_bytes(), file.name
    assert_same_files(references / name, out)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dtypes_and_what_the_model_does_not_use_come_back(
    copy_of, tmp_path, one_device, name, dtype
):
    """Half-precision files go through float32 parameters; buffers are copied."""

    def change(tensors):
        prefix = {"bert": "bert.", "gpt2": "transformer."}[name]
        tensors = {k.removeprefix(prefix): v.astype(dtype) for k, v in tensors.items()}
        unused = {
            "bert": {"embeddings.position_ids": np.arange(16)[None]},
            "gpt2": {
                "h.0.attn.bias": np.tril(np.ones((1, 1, 16, 16), bool)),
                "lm_head.weight": tensors.get("wte.weight"),
            },
        }
        return tensors | unused[name]

    folder = copy_of(name, change)
    params = load(folder, one_device)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    rules = describe(folder).family.rules
    export_like(folder, tmp_path / "out", params, rules, one_device)
    assert_same_files(folder, tmp_path / "out")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_what_is_written_in_half_precision_again_is_said(
    copy_of, tmp_path, one_device, caplog, dtype
):
    def halved(tensors):
        return {name: tensor.astype(dtype) for name, tensor in tensors.items()}

    folder, name = copy_of("bert", halved), np.dtype(dtype).name
    params = load(folder, one_device)
    export_like(folder, tmp_path / "same", params, BERT, one_device)
    assert f"{len(jax.tree.leaves(params))} tensors written as {name}" in (caplog.text)
    params["bert/head"]["b"] += 1e5
    if dtype == np.float16:  # bfloat16 reaches as far as float32.
        with pytest.raises(ConfigError, match="bert/head/b .* float16"):
            export_like(folder, tmp_path / "large", params, BERT, one_device)
        assert not (tmp_path / "large").exists()


def test_one_file_without_a_folder_is_written_back(references, tmp_path, one_device):
    params = load(references / "bert", one_device)
    file = references / "bert/model.safetensors"
    export_like(file, tmp_path / "out", params, BERT, one_device)
    (written,) = (tmp_path / "out").iterdir()
    assert written.name == file.name
    assert written.read_bytes() == file.read_bytes()


def test_changed_parameters_are_written_where_they_were(references, tmp_path, devices):
    folder, out = references / "bert", tmp_path / "out"
    params = load(folder, devices)
    params = devices.replicate(devices.fetch(jax.tree.map(lambda x: x + 1, params)))
    export_like(folder, out, params, BERT, devices)
    old, new = (load_file(path / "model.safetensors") for path in (folder, out))
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        np.testing.assert_array_equal(new[name], tensor + np.float32(1))


def test_a_new_head_follows_and_the_tokenizer_comes_along(
    copy_of, tmp_path, one_device
):
    def encoder_alone(tensors):
        return {
            name.removeprefix("bert."): tensor
            for name, tensor in tensors.items()
            if not name.startswith("classifier")
        }

    folder, out = copy_of("bert", encoder_alone), tmp_path / "out"
    (folder / "tokenizer.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("[]")
    (folder / "pytorch_model.bin").write_text("stale")
    params = load(folder, one_device, 5, fresh=["bert/head/*"])
    labels = {"id2label": {str(i): f"label {i}" for i in range(5)}}
    export_like(folder, out, params, BERT, one_device, config=labels)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "1_Pooling/config.json").read_text() == "[]"
    assert not (out / "pytorch_model.bin").exists()
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text()) | labels
    names = load_file(out / "model.safetensors").keys()
    before = load_file(folder / "model.safetensors").keys()
    # transformers loads the head's names beside `bert.` alone.
    assert names == {f"bert.{x}" for x in before} | {
        "classifier.weight",
        "classifier.bias",
    }
    again = load(out, one_device, 5)
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(flatten(again)[path], leaf)


ANOTHER = '{"model": {"vocab": {"a": 0, "</s>": 2}}}'


@pytest.mark.parametrize("kind", ["the source's", "another", "bytes"])
def test_the_vocabulary_and_the_tokenizer_are_the_run_s(
    copy_of, tmp_path, one_device, kind
):
    folder, out = copy_of("gpt2"), tmp_path / "out"
    theirs = {"tokenizer.json": '{"model": {"vocab": {"a": 0}}}', "merges.txt": "a b"}
    for name, content in theirs.items():
        (folder / name).write_text(content)
    (tmp_path / "another.json").write_text(ANOTHER)
    tokenizers = {"another": tmp_path / "another.json", "bytes": "bytes"}
    sizes, params = describe(folder).arguments, load(folder, one_device)
    if kind != "the source's":
        params["gpt/embed"]["embeddings"] = jnp.ones((7, 32))
        sizes |= {"num_outputs": 7}
    export(
        *(out, params, gpt.family, one_device),
        source=folder,
        arguments=sizes,
        class_names=(),
        tokenizer=str(tokenizers.get(kind, folder)),
    )
    if kind == "the source's":
        return assert_same_files(folder, out)
    assert load(out, one_device)["gpt/embed"]["embeddings"].shape == (7, 32)
    old, new = (describe(x).config for x in (folder, out))
    end = {"another": 2, "bytes": 0}[kind]
    assert new == old | {"vocab_size": 7, "bos_token_id": None, "eos_token_id": end}
    files = {path.name: path for path in out.iterdir()}
    assert not {"merges.txt", "generation_config.json"} & files.keys()
    assert ("tokenizer.json" in files) == (kind == "another")
    if kind == "another":
        assert files["tokenizer.json"].read_text() == ANOTHER
    return None


def test_the_index_counts_what_was_added(copy_of, tmp_path, one_device):
    folder, out = copy_of("gpt2"), tmp_path / "out"
    params = load(folder, one_device) | {"extra": {"w": jnp.ones(3)}}
    rules = [*describe(folder).family.rules, Rule("extra.weight", "extra/w")]
    export_like(folder, out, params, rules, one_device)
    old, new = (
        json.loads((path / "model.safetensors.index.json").read_text())
        for path in (folder, out)
    )
    last = {"extra.weight": "model-00003-of-00003.safetensors"}
    assert new["weight_map"] == old["weight_map"] | last
    assert new["metadata"] == {"total_size": old["metadata"]["total_size"] + 12}


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_model_made_here_is_written_and_found_again(
    references, tmp_path, devices, shard_bytes
):
    folder, out = references / "bert", tmp_path / "out"
    params = load(folder, devices)
    arguments = describe(folder).arguments
    config = to_config(bert.family, arguments)
    export_new(out, params, BERT, devices, config=config, shard_bytes=shard_bytes)
    assert describe(out, bert.family).arguments == arguments
    files = sorted(file.name for file in out.glob("*.safetensors"))
    if shard_bytes == 10**9:
        assert files == ["model.safetensors"]
        new, old = (load_file(path / "model.safetensors") for path in (out, folder))
        assert new.keys() == old.keys()
    else:
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        sizes = [sum(x.nbytes for x in load_file(out / f).values()) for f in files]
        assert len(files) > 1
        assert max(sizes) <= shard_bytes
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
    again = load(out, devices)
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(flatten(again)[path], leaf)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_config_json_goes_both_ways(references, tmp_path, name):
    found = describe(references / name)
    config = to_config(FAMILIES[name], found.arguments)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(tmp_path).arguments == found.arguments
    shared = config.keys() & found.config.keys() - {"architectures"}
    assert len(shared) > 8
    assert {k: config[k] for k in shared} == {k: found.config[k] for k in shared}


def test_nothing_is_overwritten(references, tmp_path, one_device):
    params = load(references / "bert", one_device)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    arguments = (references / "bert", out, params, BERT, one_device)
    with pytest.raises(ConfigError, match="out exists, and nothing is overwritten"):
        export_like(*arguments)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_write_that_fails_leaves_nothing(
    references, tmp_path, one_device, monkeypatch
):
    params = load(references / "gpt2", one_device)
    rules, calls = FAMILIES["gpt2"].rules, []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("No space left on device")
        save_file(*args)

    monkeypatch.setattr(writing, "save_file", full)
    with pytest.raises(StorageError, match="cannot be written: No space left") as error:
        export_like(references / "gpt2", tmp_path / "out", params, rules, one_device)
    assert error.value.exit_code == 74
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_is_refused(references, tmp_path, one_device):
    params = load(references / "bert", one_device)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        export_new(tmp_path / "file/out", params, BERT, one_device, config={})


def test_a_parameter_without_a_name_is_refused(references, tmp_path, one_device):
    params = load(references / "bert", one_device) | {"odd": {"w": jnp.ones(1)}}
    for write in (
        lambda: export_new(tmp_path / "out", params, BERT, one_device, config={}),
        lambda: export_like(
            references / "bert", tmp_path / "out", params, BERT, one_device
        ),
    ):
        with pytest.raises(ConfigError, match="names no tensor for odd/w; nothing"):
            write()
    assert not (tmp_path / "out").exists()


def test_others_may_read_what_is_written(references, tmp_path, one_device):
    params = load(references / "bert", one_device)
    old = os.umask(0o022)
    try:
        export_new(tmp_path / "out", params, BERT, one_device, config={})
    finally:
        os.umask(old)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")
    }
    assert modes == {"out": 0o755, "config.json": 0o644, "model.safetensors": 0o644}


def test_a_name_that_is_too_long_is_one_sentence(tmp_path):
    with pytest.raises(StorageError, match="cannot be written: File name too long"):
        check_new(tmp_path / ("x" * 300))


def test_a_model_without_dropout_is_exported_without_it():
    arguments = gpt.family.sizes({"width": 16, "num_heads": 2})
    assert to_config(gpt.family, arguments)["resid_pdrop"] == 0.0
