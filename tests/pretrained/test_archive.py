"""The way back: archives that a publisher's own loader reads, and init_from again."""

import functools
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from haiku_template.config import default_config
from haiku_template.data import Split, from_split
from haiku_template.devices import DeviceManager
from haiku_template.errors import ConfigError
from haiku_template.params import flatten
from haiku_template.pretrained import MARK, Names, export_npz, read_published
from haiku_template.runs import Run
from haiku_template.runs import export_npz as export_run
from haiku_template.runs.start import run

RNG = np.random.default_rng(0)
PARAMS = {
    "net/~/norm": {"scale": RNG.normal(size=3).astype(np.float32)},
    "net": {"w": RNG.normal(size=(2, 3)).astype(np.float32)},
}
STATE = {"net/~/norm/~/mean_ema": {"average": RNG.normal(size=3).astype(np.float32)}}
NO_NAMES = Names()
OTHERS = {"model_config:depth": np.array(3), "license": np.array("CC BY 4.0")}


@pytest.fixture(scope="module")
def one():
    return DeviceManager.create("cpu", num_devices=1)


def alphafold(file):
    """As `flat_params_to_haiku` of alphafold/model/utils.py reads its names."""
    params = {}
    with np.load(file) as arrays:
        for path, array in arrays.items():
            scope, name = path.split("//")
            params.setdefault(scope, {})[name] = array
    return {"params": params}


def graphcast(file):
    """As `checkpoint.load` of weathernext/utils/checkpoint.py reads its names."""
    tree = {}
    with np.load(file) as arrays:
        for path, array in arrays.items():
            *keys, last = path.split(":")
            node = functools.reduce(lambda node, k: node.setdefault(k, {}), keys, tree)
            node[last] = array
    return tree


def read(one, file, names=NO_NAMES, state=STATE):
    """What init_from reads, and how: params, state, source."""
    source = functools.partial(read_published, file, devices=one, rules=(), names=names)
    leaves, read_state = source(PARAMS, (), state)
    return one.fetch((leaves, read_state)), source


def leaves_of(params, state):
    return flatten(params) | {MARK + k: x for k, x in flatten(state).items()}


def test_what_was_read_is_written_as_it_was(one, tmp_path):
    first = tmp_path / "first.npz"
    leaves = leaves_of(PARAMS, STATE)
    export_npz(first, leaves, PARAMS, None, one, "graphcast")
    with np.load(first) as arrays:
        np.savez(tmp_path / "published.npz", **arrays, **OTHERS)
    (params, state), source = read(one, tmp_path / "published.npz")
    again = tmp_path / "again.npz"
    export_npz(again, params | leaves_of({}, state), PARAMS, source, one, "graphcast")
    with zipfile.ZipFile(again) as archive:  # The same bytes at any time.
        assert {x.date_time for x in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    expected = {
        "params": PARAMS,
        "state": STATE,
        "model_config": {"depth": np.array(3)},
    }
    expected["license"] = np.array("CC BY 4.0")
    jax.tree.map(np.testing.assert_array_equal, graphcast(again), expected)
    assert params.keys() == flatten(PARAMS).keys()


def test_what_is_copied_of_a_damaged_file_is_named(one, tmp_path):
    published, words = tmp_path / "published.npz", "words of a licence. " * 500
    export_npz(
        tmp_path / "a.npz", leaves_of(PARAMS, STATE), PARAMS, None, one, "graphcast"
    )
    with np.load(tmp_path / "a.npz") as arrays:
        np.savez(published, **arrays, license=np.array(words))
    data = bytearray(published.read_bytes())
    data[data.rfind(b"w\0\0\0o\0\0\0r")] ^= 1
    published.write_bytes(data)
    (params, state), source = read(one, published)
    leaves = params | leaves_of({}, state)
    with pytest.raises(
        ConfigError, match="published.npz: license.npy is damaged: Bad C"
    ):
        export_npz(tmp_path / "b.npz", leaves, PARAMS, source, one, "graphcast")
    assert not (tmp_path / "b.npz").exists()


@pytest.mark.parametrize("form", ["haiku", "alphafold"])
def test_names_are_the_publishers_again_and_what_was_left_out_is_kept(
    one, tmp_path, form
):
    old = {"theirs/" + k.removeprefix("net/"): x for k, x in flatten(PARAMS).items()}
    old["theirs/old_head/b"] = np.ones(2, np.float32)
    file, again = tmp_path / "published.npz", tmp_path / "again.npz"
    export_npz(file, old, PARAMS, None, one, form)
    names = Names((("theirs/*", "net/*"),), ("theirs/old_head/*",))
    (params, _), source = read(one, file, names, None)
    np.testing.assert_array_equal(params["net/w"], PARAMS["net"]["w"])
    changed = {k: x + 1 for k, x in params.items()} | {"head/w": np.zeros(2)}
    export_npz(again, changed, PARAMS, source, one, form)
    with np.load(file) as before, np.load(again) as after:
        new = {"haiku": "head/w", "alphafold": "head//w"}[form]
        assert {*after} == {*before, new}
        for name, array in before.items():
            more = 0 if "old_head" in name else 1
            np.testing.assert_array_equal(after[name], array + more)
    if form == "alphafold":
        tree = alphafold(again)["params"]
        assert tree["theirs/~/norm"]["scale"].dtype == np.float32


def test_bfloat16_is_written_as_float32(one, tmp_path):
    leaf = jax.numpy.asarray(PARAMS["net"]["w"], "bfloat16")
    export_npz(tmp_path / "a.npz", {"net/w": leaf}, PARAMS, None, one, "haiku")
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["net/w"].dtype == np.float32
        np.testing.assert_array_equal(arrays["net/w"], leaf.astype("float32"))


@pytest.mark.parametrize("form", ["haiku", "alphafold"])
def test_state_without_a_place_is_refused(one, tmp_path, form):
    with pytest.raises(ConfigError, match="no place for network state, such as net"):
        file = tmp_path / "a.npz"
        export_npz(file, leaves_of(PARAMS, STATE), PARAMS, None, one, form)
    assert not any(tmp_path.iterdir())


def data(spec):
    x, y = RNG.normal(size=(24, 3)).astype(np.float32), np.arange(24) % 2
    return from_split(Split(x[:16], y[:16], x[16:], y[16:]), spec)


def config_of(**changes):
    config = default_config()
    config.num_steps, config.batch_size = 2, 8
    config.model = {"name": "mlp", "width": 4}
    config.data = {"name": f"{__name__}:data"}
    config.update_from_flattened_dict(changes)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("names", ["haiku", "alphafold", "graphcast"])
def test_a_run_that_starts_from_what_another_wrote_has_its_numbers(
    one, tmp_path, names, command
):
    run(config_of(), one, str(tmp_path / "run"))
    first = Run.open(tmp_path / "run", one)
    assert export_run(first, tmp_path / "a.npz", names) == 2
    start = config_of(init_from=str(tmp_path / "a.npz"), num_steps=1)
    start.optimizer.learning_rate = 0.0
    run(start, one, str(tmp_path / "next"))
    second = Run.open(tmp_path / "next", one)
    a, b = (one.fetch(x.parameters()[0]) for x in (first, second))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    export_run(second, tmp_path / "b.npz", names)
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        assert {*a} == {*b}
        assert all(x.tobytes() == b[k].tobytes() for k, x in a.items())
    flags = [f"--workdir={tmp_path / 'run'}", "--format=npz", f"--names={names}"]
    if names == "haiku":
        here = {"cwd": Path(__file__).parent}  # Where the code is that the run names.
        done = command("export", *flags, f"--output={tmp_path / 'c'}", **here)
        assert done.returncode == 64 and "does not end in .npz" in done.stderr
        flags += ["--batch_size=1", f"--output={tmp_path}/c.npz"]
        done = command("export", *flags, **here)
        assert done.returncode == 64, done.stderr
        assert "--batch_size is not for --format=npz" in done.stderr
