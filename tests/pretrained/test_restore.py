"""What fits is read exactly, where it belongs; what does not is listed, unread."""

import json
import pickle
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import joblib
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from haiku_template.errors import ConfigError
from haiku_template.models import Rule
from haiku_template.pretrained import convert, reading, tensors
from haiku_text.huggingface import restore

RULES = (
    Rule("[model.]layer.{}.weight", "net/layer_{}/w", "transpose"),
    Rule("[model.]layer.{}.bias", "net/layer_{}/b"),
    Rule("tied.weight", "net/layer_0/w", "transpose"),
    Rule("[model.]mask*", None),
    Rule("pooler.weight", "net/pooler/w", optional=True),
)
RNG = np.random.default_rng(0)
FILE = {
    "model.layer.0.weight": RNG.normal(size=(3, 5)).astype(np.float32),
    "model.layer.0.bias": RNG.normal(size=3).astype(np.float32),
    "model.layer.11.weight": RNG.normal(size=(2, 3)).astype(np.float32),
    "model.layer.11.bias": RNG.normal(size=2).astype(np.float32),
}


def init():
    """The parameters that `FILE` is for."""
    key = jax.random.key(7)
    return {
        "net/layer_0": {"w": jax.random.normal(key, (5, 3)), "b": jnp.zeros(3)},
        "net/layer_11": {"w": jax.random.normal(key, (3, 2)), "b": jnp.ones(2)},
    }


def assert_read(params, file=FILE):
    """Asserts that every parameter is bitwise the file's tensor."""
    for i, shape in ((0, (5, 3)), (11, (3, 2))):
        weight, bias = (file[f"model.layer.{i}.{name}"] for name in ("weight", "bias"))
        leaves = params[f"net/layer_{i}"]
        assert leaves["w"].shape == shape
        np.testing.assert_array_equal(leaves["w"], weight.T.astype(leaves["w"].dtype))
        np.testing.assert_array_equal(leaves["b"], bias.astype(leaves["b"].dtype))


def refuses(*words):
    """Expects a `ConfigError` that says all of `words`, in this order."""
    pattern = "(?s)" + ".*".join(re.escape(str(word)) for word in words)
    return pytest.raises(ConfigError, match=pattern)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(FILE, path)
    return path


@pytest.fixture
def unread(monkeypatch):
    """Makes reading a value a failure, and not an error that one could catch."""
    monkeypatch.setattr(reading, "pieces", lambda _: pytest.fail("values were read"))


def test_parameters_are_read_onto_the_devices(file, devices):
    params = restore(file, init, RULES, devices)
    devices.check(params)
    assert jax.tree.structure(params) == jax.tree.structure(init())
    assert_read(params)


def test_the_folder_will_do(file, one_device):
    assert_read(restore(str(file.parent), init, RULES, one_device))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_tensor_of_many_pieces_is_whole(file, one_device, monkeypatch, rows):
    monkeypatch.setattr(tensors, "PIECE", rows * 5 * 4)
    assert_read(restore(file, init, RULES, one_device))


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_floats_become_the_skeletons_dtype(tmp_path, one_device, stored, wanted):
    stored = {name: x.astype(stored) for name, x in FILE.items()}
    save_file(stored, tmp_path / "model.safetensors")
    cast = lambda: jax.tree.map(lambda x: x.astype(wanted), init())  # noqa: E731
    params = restore(tmp_path, cast, RULES, one_device)
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(wanted)}
    assert_read(params, stored)


def test_tensors_may_lie_anywhere(tmp_path, one_device, write_raw):
    """At odd offsets, and so that their memory could be used in place."""
    for odd in (0, 1):
        header, data = {}, b"\1" * odd
        if odd:
            header["mask"] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
        for name, x in FILE.items():
            place = [len(data), len(data) + x.nbytes]
            data += x.tobytes()
            header[name] = {
                "dtype": "F32",
                "shape": list(x.shape),
                "data_offsets": place,
            }
        path = write_raw(tmp_path / "model.safetensors", header, data, align=64)
        params = restore(path, init, RULES, one_device)
        assert_read(params)
        path.write_bytes(bytes(path.stat().st_size))  # In place: the same memory.
        assert_read(params)


def test_parameters_can_be_donated(file, devices):
    """Memory that was taken over from the host is not written to by a step."""
    params = restore(file, init, RULES, devices)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    new = step(params)
    jax.block_until_ready(new)
    assert jax.tree.leaves(params)[0].is_deleted()
    np.testing.assert_array_equal(
        new["net/layer_0"]["b"], FILE["model.layer.0.bias"] + 1
    )
    assert_read(restore(file, init, RULES, devices))


def test_scalars_and_empty_tensors_are_read(tmp_path, one_device):
    file = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 3), np.float32)}
    save_file(file, tmp_path / "model.safetensors")
    rules = [Rule("scalar", "a/s"), Rule("empty", "a/e")]
    shapes = {"a": {"s": jnp.zeros(()), "e": jnp.zeros((0, 3))}}
    params = restore(tmp_path, lambda: shapes, rules, one_device)
    assert params["a"]["s"] == 2.5
    assert params["a"]["e"].shape == (0, 3)


def test_what_starts_fresh_is_as_init_makes_it(tmp_path, devices):
    file = {k: v for k, v in FILE.items() if "11" not in k}
    save_file(file, tmp_path / "model.safetensors")
    params = restore(tmp_path, init, RULES, devices, fresh=["net/layer_1?/*"])
    devices.check(params)
    expected = devices.fetch(devices.init(init))["net/layer_11"]
    np.testing.assert_array_equal(params["net/layer_11"]["w"], expected["w"])
    np.testing.assert_array_equal(params["net/layer_11"]["b"], expected["b"])
    np.testing.assert_array_equal(
        params["net/layer_0"]["w"], FILE["model.layer.0.weight"].T
    )


def test_what_starts_fresh_is_not_read_though_the_file_has_it(file, one_device):
    params = restore(file, init, RULES, one_device, fresh=["net/layer_11/b"])
    np.testing.assert_array_equal(params["net/layer_11"]["b"], np.ones(2))


def test_a_fresh_pattern_without_parameters_is_refused(file, one_device, unread):
    with refuses("fresh='net/layer_12/*' fits no parameter", "nearest is net/layer_1"):
        restore(file, init, RULES, one_device, fresh=["net/layer_12/*"])


def test_everything_that_does_not_fit_is_listed_and_nothing_read(
    tmp_path, one_device, unread
):
    save_file(
        {
            "model.layer.0.weights": FILE["model.layer.0.weight"],
            "model.layer.0.bias": np.zeros(3, np.int32),
            "model.layer.1.bias": np.zeros(4, np.float16),
            "model.layer.11.weight": np.zeros((3, 2), np.float32),
            "model.layer.11.bias": np.zeros(2, np.float32),
            "pooler.weight": np.zeros(1, np.float32),  # Optional, and not there.
            "mask.1": np.zeros(1, np.int64),  # Skipped.
        },
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ConfigError) as caught:
        restore(tmp_path, init, RULES, one_device)
    first, *lines = str(caught.value).split("\n")
    assert "nothing was read: 1 missing, 2 extra, 2 mismatched" in first
    assert [line.strip() for line in lines] == [
        "missing  net/layer_0/w float32[5, 3]: model.layer.0.weight is not in the "
        "files; nearest is model.layer.0.weights",
        "extra    model.layer.1.bias F16[4]; nearest is model.layer.0.weight",
        "extra    model.layer.0.weights F32[3, 5]; nearest is model.layer.0.weight",
        "mismatch model.layer.11.weight F32[3, 2] for net/layer_11/w float32[3, 2]: "
        "shape [2, 3] is needed in the file",
        "mismatch model.layer.0.bias I32[3] for net/layer_0/b float32[3]: one of F64, "
        "F32, F16, BF16 is needed in the file",
    ]


def test_a_parameter_without_a_rule_is_named(file, one_device, unread):
    more = lambda: init() | {"other": {"w": jnp.zeros(3)}}  # noqa: E731
    with refuses("missing  other/w float32[3]: no rule leads to it"):
        restore(file, more, RULES, one_device)


def test_tied_tensors_must_be_equal(tmp_path, one_device):
    path = tmp_path / "model.safetensors"
    weight = FILE["model.layer.0.weight"]
    save_file(FILE | {"tied.weight": weight}, path)
    assert_read(restore(path, init, RULES, one_device))
    alone = {k: v for k, v in FILE.items() if k != "model.layer.0.weight"}
    save_file(alone | {"tied.weight": weight}, path)
    assert_read(restore(path, init, RULES, one_device))
    for other in (np.nextafter(weight, 9), weight.astype(np.float16)):
        save_file(FILE | {"tied.weight": other}, path)
        with refuses("tied.weight", "differ", "net/layer_0/w", "must be equal"):
            restore(path, init, RULES, one_device)


def test_a_missing_shard_is_named(copy_of, one_device, unread):
    folder = copy_of("gpt2")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with refuses("names 3 files, and of these model-00002-of-00003.safetensors cannot"):
        restore(folder, init, RULES, one_device)


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


def test_an_index_that_its_files_belie_is_refused(copy_of, one_device, unread):
    def change(content):
        places = content["weight_map"]
        places["transformer.wte.weight"] = "model-00002-of-00003.safetensors"
        places["ghost"] = "model-00003-of-00003.safetensors"

    with refuses("disagree on the place of ghost, transformer.wte.weight"):
        restore(change_index(copy_of("gpt2"), change), init, RULES, one_device)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b", ""])
def test_an_index_names_only_its_own_folder(copy_of, one_device, unread, name):
    folder = copy_of("gpt2")
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder.parent / "secret")
    change_index(folder, lambda content: content["weight_map"].update(a=name))
    with refuses(f"names {name!r}, which is no file of its own folder"):
        restore(folder, init, RULES, one_device)


def test_a_name_in_an_index_may_be_one_that_no_file_can_have(
    copy_of, one_device, unread
):
    name = "9" * 300
    folder = change_index(copy_of("gpt2"), lambda x: x["weight_map"].update(a=name))
    with refuses(f"of these {name} cannot be found"):
        restore(folder, init, RULES, one_device)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', "[" * 9999])
def test_a_damaged_index_is_refused(tmp_path, one_device, unread, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with refuses("index.json is damaged"):
        restore(tmp_path, init, RULES, one_device)


def entry(shape, first, last, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


HOSTILE = {
    "longer than the file": ({"a": entry([4], 0, 16)}, b"x" * 8, None),
    "shorter than the file": ({"a": entry([1], 0, 4)}, b"x" * 8, None),
    "another shape than bytes": ({"a": entry([3], 0, 8)}, b"x" * 8, None),
    "a negative size": ({"a": entry([-2], 0, 8)}, b"x" * 8, None),
    "a size that overflows": ({"a": entry([2**62, 2**62], 0, 8)}, b"x" * 8, None),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, b"x" * 8, None),
    "a gap": ({"a": entry([1], 4, 8)}, b"x" * 8, None),
    "no such dtype": ({"a": entry([2], 0, 8, "F33")}, b"x" * 8, None),
    "no JSON": (b"{]", b"", None),
    "no text": (b"\xff\xfe", b"", None),
    "deep nesting": (b'{"a":' * 9999, b"", None),
    "an endless header": ({}, b"", 2**60),
    "a header beyond the end": ({}, b"", 5 * 10**7),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, one_device, write_raw, unread, what):
    header, data, size = HOSTILE[what]
    path = write_raw(tmp_path / "model.safetensors", header, data, size)
    with refuses(path, "is truncated, damaged, or no safetensors file"):
        restore(path, init, RULES, one_device)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(file, one_device, unread, size):
    data = file.read_bytes()
    file.write_bytes(data[:size])
    with refuses(file, "is truncated"):
        restore(file, init, RULES, one_device)


def test_a_file_truncated_while_it_is_read_is_refused(file, one_device, monkeypatch):
    headers = reading.read_headers

    def truncating(source):
        found = headers(source)
        file.write_bytes(file.read_bytes()[:-8])
        return found

    monkeypatch.setattr(reading, "read_headers", truncating)
    with refuses(file, "was truncated while it was read"):
        restore(file, init, RULES, one_device)


def test_the_header_of_a_file_is_read_once_for_all_of_its_tensors(
    tmp_path, monkeypatch
):
    path, opens = tmp_path / "many.safetensors", []
    arrays = {f"layer_{i}/w": np.full((2, 3), i, np.float32) for i in range(50)}
    save_file(arrays, path)
    real = tensors.safe_open
    monkeypatch.setattr(
        tensors, "safe_open", lambda *args, **kw: opens.append(1) or real(*args, **kw)
    )
    for name, tensor in tensors.read_headers(path).items():
        np.testing.assert_array_equal(tensors.read_tensor(tensor), arrays[name])
    assert len(opens) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
def test_a_pickle_is_refused_with_how_to_convert_it(tmp_path, one_device, name):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    for source in (tmp_path, tmp_path / name):
        with refuses(name, "is a pickle", "refused", "save_pretrained('converted')"):
            restore(source, init, RULES, one_device)


def test_a_folder_without_tensors_is_refused(tmp_path, one_device):
    (tmp_path / "README.md").touch()
    with refuses(tmp_path, "no folder with model.safetensors", "holds README.md"):
        restore(tmp_path, init, RULES, one_device)
    with refuses("nothing is there"):
        restore(tmp_path / "nowhere", init, RULES, one_device)


def test_a_dtype_that_numpy_lacks_matters_only_where_it_is_read(
    tmp_path, one_device, write_raw
):
    data = b"".join(x.tobytes() for x in FILE.values()) + b"x"
    header, first = {}, 0
    for name, x in FILE.items():
        header[name] = entry(list(x.shape), first, first + x.nbytes)
        first += x.nbytes
    header["mask"] = entry([1], first, first + 1, "F8_E4M3")
    path = write_raw(tmp_path / "model.safetensors", header, data)
    assert_read(restore(path, init, RULES, one_device))
    last = header.pop("model.layer.11.bias")
    header["mask"] |= {"dtype": "BOOL"}
    header["model.layer.11.bias"] = last | {"dtype": "F8_E4M3", "shape": [8]}
    with refuses("mismatch model.layer.11.bias F8_E4M3[8]"):
        restore(write_raw(path, header, data), init, RULES, one_device)


def save_published(path, params):
    """As Haiku parameters are published: names to arrays, or modules of them."""
    nested = params
    if path.suffix == ".npz":
        ((module, leaves),) = params.items()
        np.savez(path, **{f"{module}//{name}": x for name, x in leaves.items()})
    elif path.suffix == ".npy":
        np.save(path, np.array(nested, object), allow_pickle=True)
    elif path.suffix == ".joblib":
        joblib.dump(nested, path)
    else:
        path.write_bytes(pickle.dumps(nested))


@pytest.mark.parametrize(
    "name", ["a.npz", "a.npy", "a.joblib", "a.pickle", "a.pkl", "a"]
)
def test_published_haiku_parameters_are_named_with_the_command_that_converts_them(
    tmp_path, one_device, name
):
    rng = np.random.default_rng(0)
    params = {
        "net/~/linear": {
            "w": rng.normal(size=(3, 2)).astype(np.float32).T.copy().T,
            "b": rng.normal(size=2).astype(np.float32),
        }
    }
    save_published(tmp_path / name, params)
    with refuses(name, "Haiku") as caught:
        restore(tmp_path / name, init, RULES, one_device)
    words = str(caught.value)
    assert "truncated" not in words and "damaged" not in words
    (line,) = words.splitlines()[1:]
    program, _, name, *flags = shlex.split(line)
    assert (program, name) == ("python", "haiku_template.convert")
    source, output = (flag.partition("=")[2] for flag in flags)
    convert(source, output)
    found = load_file(output)
    for key, x in params["net/~/linear"].items():
        np.testing.assert_array_equal(found[f"net/~/linear/{key}"], x)
