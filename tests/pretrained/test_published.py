"""Parameters and state of others' formats and names are read bitwise, or none are."""

import logging
import zipfile
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import joblib
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from haiku_template.errors import ConfigError
from haiku_template.finetuning import (
    Finetuning,
    make_plan,
    open_source,
    scale_updates,
)
from haiku_template.params import flatten, matching
from haiku_template.pretrained import (
    Names,
    convert,
    export_npz,
    published,
    read_published,
    tensors,
)
from haiku_template.storage import trees

ZERO = np.zeros((), np.float32)
RNG = np.random.default_rng(0)


class Block(hk.Module):
    """Modules inside of modules, with state."""

    def __call__(self, x):
        x = hk.BatchNorm(True, True, 0.9, name="norm")(x, True)
        return x + hk.nets.MLP([8, 6], name="mlp")(x)


def forward(x):
    x = Block(name="block")(hk.Linear(6, name="embed")(x))
    return hk.Linear(3, with_bias=False, name="head")(Block(name="block")(x))


MODEL = hk.transform_with_state(forward)


def random(tree):
    """Values of which no two are alike, in the dtypes of the tree."""
    return jax.tree.map(
        lambda x: (
            RNG.integers(0, 99, x.shape, np.int32)
            if x.dtype == jnp.int32
            else RNG.normal(size=x.shape).astype(x.dtype)
        ),
        tree,
    )


PARAMS, STATE = map(random, MODEL.init(jax.random.key(0), jnp.ones((2, 4))))
PATHS = [*flatten(PARAMS)]


def by_scope(tree):
    """AlphaFold 2's rule: the scope, two slashes, the name."""
    return {f"{scope}//{name}": x for scope, p in tree.items() for name, x in p.items()}


def by_colons(tree):
    """GraphCast's rule: keys of nested dictionaries, joined by colons."""
    flat = {}
    for key, value in tree.items():
        inner = by_colons(value) if isinstance(value, dict) else {"": value}
        flat |= {f"{key}:{name}".removesuffix(":"): x for name, x in inner.items()}
    return flat


CONFIG = {"model_config": {"latent_size": 512, "name": "x"}, "description": "A model"}
TREE = {"params": PARAMS, "state": STATE}


def orbax(checkpointer, tree):
    def write(path):
        with checkpointer() as opened:
            opened.save(path.absolute(), tree)

    return write


def safe(tree):
    return lambda path: save_file(
        {name: np.asarray(x, order="C") for name, x in tree.items()}, path
    )


def archive(save, tree):
    def write(path):
        with path.open("wb") as file:
            save(file, **tree)

    return write


def pickled(path):
    joblib.dump(
        {"note": "x", "model": {"params": PARAMS, "state": STATE}}, path.with_name("j")
    )
    convert(path.with_name("j"), path.with_name("j.safetensors"))
    path.with_name("j.safetensors").rename(path)


def in_two_files(path):
    path.mkdir()
    (path / "config.json").write_text('{"model": {}}')
    save_file(flatten(PARAMS), path / "model.safetensors")
    save_file(flatten(STATE), path / "state.safetensors")


fortran = {name: np.asfortranarray(x) for name, x in flatten(PARAMS).items()}
# Writers of files of parameters and state, and of parameters alone.
BOTH = {
    "GraphCast": archive(np.savez, by_colons(TREE | CONFIG)),
    "npz, compressed": archive(np.savez_compressed, flatten(TREE)),
    "Orbax, standard": orbax(ocp.StandardCheckpointer, (PARAMS, STATE)),
    "Orbax, pytree": orbax(ocp.PyTreeCheckpointer, TREE | {"opt": [1, PARAMS]}),
    "safetensors": safe(by_colons(TREE)),
    "joblib, converted": pickled,
    "two files": in_two_files,
    "npz, sections of scopes": archive(
        np.savez,
        {f"params/{k}": x for k, x in by_scope(PARAMS).items()}
        | {f"hk_state/{k}": x for k, x in by_scope(STATE).items()},
    ),
}
ALONE = {
    "AlphaFold 2": archive(np.savez, by_scope(PARAMS)),
    "npz, slashes": archive(np.savez, flatten(PARAMS)),
    "npz, Fortran": archive(np.savez, fortran),
    "npz, big endian": archive(
        np.savez, {k: x.astype(">f4") for k, x in flatten(PARAMS).items()}
    ),
    "Orbax": orbax(ocp.StandardCheckpointer, PARAMS),
    "Orbax, zarr3": orbax(lambda: ocp.PyTreeCheckpointer(use_zarr3=True), PARAMS),
    "safetensors": safe(flatten(PARAMS)),
}


def read(path, devices, params=PARAMS, state=STATE, skip=(), **names):
    """Reads as a run does that starts from a file."""
    shapes = [x and devices.abstract(lambda x=x: x) for x in (params, state)]
    source = open_source(str(path), None, devices, Finetuning(**names))
    return source(shapes[0], skip, shapes[1])


def assert_same(found, expected):
    found, expected = flatten(found), flatten(expected)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype
        assert np.asarray(found[name]).tobytes() == np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("name", BOTH)
def test_parameters_and_state_are_read_bitwise(tmp_path, devices, name):
    BOTH[name](tmp_path / "file")
    leaves, state = read(tmp_path / "file", devices)
    devices.check((leaves, state))
    assert_same(leaves, flatten(PARAMS))
    assert_same(state, STATE)


@pytest.mark.parametrize("name", ALONE)
def test_parameters_alone_are_read_bitwise_and_state_starts_afresh(
    tmp_path, one_device, caplog, monkeypatch, name
):
    monkeypatch.setattr(tensors, "PIECE", 40)  # A row or two.
    ALONE[name](tmp_path / "file")
    leaves, state = read(tmp_path / "file", one_device)
    assert_same(leaves, flatten(PARAMS))
    assert state is None and "network state starts afresh" in caplog.text


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["npz", "Orbax"])
def test_floats_become_the_dtype_that_is_asked_for(
    tmp_path, one_device, stored, wanted, kind
):
    whole = {"net": {"w": RNG.normal(size=(5, 3)).astype(stored), "s": stored(2.5)}}
    whole = jax.tree.map(np.asarray, whole)
    if kind == "npz":
        np.savez(tmp_path / "file.npz", **by_scope(whole))
    else:
        orbax(ocp.PyTreeCheckpointer, whole)(tmp_path / "file.npz")
    shapes = jax.tree.map(lambda x: np.zeros(x.shape, wanted), whole)
    leaves, _ = read(tmp_path / "file.npz", one_device, shapes, None)
    assert_same(leaves, flatten(jax.tree.map(lambda x: x.astype(wanted), whole)))


def test_the_rest_of_a_tree_is_ignored_by_name(tmp_path, one_device, caplog):
    BOTH["GraphCast"](tmp_path / "file")
    read(tmp_path / "file", one_device)
    (record,) = caplog.records
    assert record.message.endswith("is not read: model_config, description")
    assert record.levelno == logging.WARNING
    caplog.clear()
    read(tmp_path / "file", one_device)
    assert not caplog.records  # It is said once.


def test_a_model_may_have_a_module_that_is_called_like_a_section(tmp_path, one_device):
    params = {"params": {"w": np.ones(2, np.float32)}, "state/linear": {"w": ZERO}}
    np.savez(tmp_path / "a.npz", **by_scope(params))
    assert_same(read(tmp_path / "a.npz", one_device, params, None)[0], flatten(params))


def changed(**leaves):
    """AlphaFold's names with some arrays changed, and others added."""
    return {"params//" + k: x for k, x in (by_scope(PARAMS) | leaves).items()} | {
        "state//" + k: x for k, x in by_scope(STATE).items()
    }


def without(name):
    return {k: x for k, x in changed().items() if not k.endswith(name)}


MEAN = "block/norm/~/mean_ema//average"
# What is wrong with a file, what is asked besides, and the words of the sentence.
MISFITS = {
    "missing": (without("head//w"), {}, "missing  head/w float32[6, 3]: head/w is not"),
    "missing, near": (
        without("head//w") | {"params//heads//w": ZERO},
        {},
        "head/w is not in the files; nearest is heads/w",
    ),
    "missing state": (
        without(MEAN),
        {},
        "missing  state:block/norm/~/mean_ema/average",
    ),
    "left over": (
        changed(**{"tail//w": ZERO}),
        {},
        "extra    tail/w: params//tail//w F32[]",
    ),
    "left over state": (
        changed() | {"state//tail//w": ZERO},
        {},
        "extra    state:tail/w: state//tail//w F32[]",
    ),
    "shape": (
        changed(**{"head//w": np.zeros((3, 6), np.float32)}),
        {},
        "params//head//w F32[3, 6] for head/w float32[6, 3]: shape [6, 3] is needed",
    ),
    "shape of state": (
        changed() | {"state//" + MEAN: np.zeros(6, np.float32)},
        {},
        "for state:block/norm/~/mean_ema/average float32[1, 6]: shape [1, 6] is needed",
    ),
    "transposed": (
        changed(**{"embed//w": PARAMS["embed"]["w"].T}),
        {},
        "params//embed//w F32[6, 4] for embed/w float32[4, 6]",
    ),
    "dtype": (
        changed(**{"head//w": np.zeros((6, 3), np.int32)}),
        {},
        "params//head//w I32[6, 3] for head/w float32[6, 3]: one of F64, F32",
    ),
    "dtype of state": (
        changed() | {"state//block/norm/~/mean_ema//counter": np.float32(1)},
        {},
        "mean_ema/counter int32[]: int32 is needed",
    ),
    "complex": (
        changed(**{"head//w": np.zeros((6, 3), np.complex64)}),
        {},
        "params//head//w complex64[6, 3] for head/w",
    ),
    "text": (
        changed(**{"head//w": np.array("x")}),
        {},
        "params//head//w <U1[] for head/w",
    ),
    "pickle": (
        changed(**{"head//w": np.array([{}], object)}),
        {},
        "holds params//head//w as a pickle, which can run any code",
    ),
    "two names": (
        changed(**{"head/w": ZERO}),
        {},
        "params//head//w and params//head/w, which are one path, params/head/w",
    ),
    "ignored nothing": (
        changed(),
        {"ignore": ["heads/*"]},
        "ignore: the pattern 'heads/*' fits none of the 27 that there are; nearest",
    ),
    "renamed nothing": (
        changed(),
        {"rename": [("old/*", "new/*")]},
        "rename: the pattern 'old/*' fits none of the 27 that there are; they are "
        f"{PATHS[0]}, ",
    ),
    "fresh nothing": (
        changed(),
        {"fresh": ["state:blok/*"]},
        "fresh: the pattern 'state:blok/*' fits none of the 12 that",
    ),
    "renamed to one name": (
        changed(),
        {"rename": [("embed/b", "embed/w")]},
        "rename gives embed/b and embed/w one name, embed/w",
    ),
    "renamed away": (
        changed(),
        {"rename": [("head/*", "tail/*")]},
        "of paths, MODULE/NAME)\n  missing  head/w float32[6, 3]: head/w is not",
    ),
    "other wildcards": (
        changed(),
        {"rename": [("*/w", "new/w")]},
        "('*/w', 'new/w') has other wildcards in its new name",
    ),
    "ignored and needed": (
        without("head//w"),
        {"ignore": ["embed/*"]},
        "1 missing, 0 extra, 0 mismatched",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_one_sentence_that_names_the_leaf(
    tmp_path, one_device, monkeypatch, name
):
    content, names, words = MISFITS[name]
    np.savez(tmp_path / "a.npz", **content)
    monkeypatch.setattr(published, "load", lambda *_: pytest.fail("values were read"))
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "a.npz", one_device, **names)
    assert words in str(caught.value)


def test_what_may_be_missing_left_over_and_renamed(tmp_path, one_device):
    tree = {"params": {f"old/~/{k}": v for k, v in PARAMS.items()}, "state": {}}
    tree["params"] |= {"head_2/x": {"w": ZERO}, "block/a": {"b": ZERO}}
    tree["params"].pop("old/~/head")
    tree["state"] = {f"ema/{k}": v for k, v in STATE.items() if "_1" not in k}
    tree["state"]["ema/other"] = {"x": ZERO}
    np.savez(tmp_path / "a.npz", **by_colons(tree))
    leaves, state = read(
        tmp_path / "a.npz",
        one_device,
        skip={"head/w"},
        fresh=["head/*", "state:block_1/*"],
        ignore=["head_?/*", "block/a/b", "state:*/other/*"],
        rename=[("state:ema/*", "state:*"), ("old/~/*", "*")],
    )
    assert_same(leaves, {k: x for k, x in flatten(PARAMS).items() if k != "head/w"})
    assert_same(state, {k: v for k, v in STATE.items() if "_1" not in k})


def test_what_starts_from_the_seed_is_said(tmp_path, one_device, caplog):
    np.savez(tmp_path / "a.npz", **flatten(TREE))
    read(tmp_path / "a.npz", one_device)
    read(
        tmp_path / "a.npz",
        one_device,
        state=None,
        fresh=["*"],
        skip=PATHS,
        ignore=["*"],
    )
    assert not caplog.messages
    names = {"fresh": ["*"], "ignore": ["*"], "skip": PATHS}
    assert read(tmp_path / "a.npz", one_device, **names) == ({}, {})
    (words,) = caplog.messages
    assert f"fresh starts 27 of 27 leaves from the seed: {PATHS[0]}, " in words


def test_wildcards_are_carried_over_in_order(tmp_path, one_device):
    params = {
        "new_2/b/x": {"w": np.ones(2, np.float32)},
        "kept": {"w": np.zeros(2, np.float32)},
    }
    np.savez(
        tmp_path / "a.npz",
        **{"b/old2//x_w": np.ones(2, np.float32), "kept//w": np.zeros(2, np.float32)},
    )
    rename = [("*/old?/*[_]w", "new_?/*/*[_]w"), ("b/*", "never/*")]
    with pytest.raises(ConfigError, match="other wildcards"):
        read(tmp_path / "a.npz", one_device, params, None, rename=rename)
    rename = [("?/old?/?_w", "new_?/?/?/w")]
    with pytest.raises(ConfigError, match="missing  new_2/b/x/w"):
        read(tmp_path / "a.npz", one_device, params, None, rename=rename)
    np.savez(
        tmp_path / "a.npz",
        **{"2/old_b//x_w": np.ones(2, np.float32), "kept//w": np.zeros(2, np.float32)},
    )
    rename = [("?/old_?/?_w", "new_?/?/?/w"), ("?/*", "never?/*")]
    leaves, _ = read(tmp_path / "a.npz", one_device, params, None, rename=rename)
    assert_same(leaves, flatten(params))


def test_a_tree_that_many_devices_wrote_is_read_on_any_number(
    tmp_path, devices, monkeypatch
):
    monkeypatch.setattr(trees, "PIECE", 100)
    mesh = jax.sharding.Mesh(jax.devices()[:4], "x")
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = {"net": {"w": RNG.normal(size=(96, 3, 2)).astype(np.float32)}}
    split = {"net": {"w": jax.device_put(whole["net"]["w"], split)}}
    orbax(ocp.StandardCheckpointer, split)(tmp_path / "tree")
    leaves, _ = read(tmp_path / "tree", devices, whole, None)
    assert_same(leaves, flatten(whole))


def test_state_is_left_alone_where_it_is_not_asked_for(tmp_path, one_device):
    np.savez(tmp_path / "a.npz", **flatten(TREE))
    leaves, state = read(tmp_path / "a.npz", one_device, state=None)
    assert state is None and leaves.keys() == set(PATHS)
    with pytest.raises(ConfigError, match=r"extra    state:block/norm/~/mean_ema"):
        read(tmp_path / "a.npz", one_device, state={})
    assert read(tmp_path / "a.npz", one_device, state={}, ignore=["state:*"])[1] == {}


def test_damaged_archives_are_one_sentence(tmp_path, one_device):
    path = tmp_path / "a.npz"
    np.savez(path, **by_scope(PARAMS))
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="truncated|damaged"):
            read(path, one_device, state=None)
    values = PARAMS["head"]["w"].tobytes()[20:]
    path.write_bytes(whole.replace(values, values[::-1]))
    with pytest.raises(ConfigError, match="Bad CRC-32 for file 'head//w"):
        read(path, one_device, state=None)
    rest = b", 'fortran_order': False, 'shape': ()}"
    for header in (b"{'shape': 1}", b"{'descr': '<f4'", b"{'descr': ','" + rest):
        with zipfile.ZipFile(path, "w") as opened:
            begin = np.lib.format.magic(1, 0) + bytes([len(header), 0])
            opened.writestr("a.npy", begin + header)
        with pytest.raises(ConfigError, match=r"truncated, damaged.*at a\.npy: ."):
            read(path, one_device, state=None)
    long = np.lib.format.magic(2, 0) + (60000).to_bytes(4, "little") + 60000 * b"("
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("b.npy", long)
    with pytest.raises(ConfigError, match=r"at b\.npy: Header info.*securely\.$"):
        read(path, one_device, state=None)


def test_an_archive_that_claims_much_allocates_nothing(tmp_path, one_device):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as opened, opened.open("net//w.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (10**10,)}
        )
    with pytest.raises(ConfigError, match="of 40,000,000,000 bytes, and has 0"):
        read(path, one_device, {"net": {"w": np.zeros(3)}}, None)


def test_damaged_trees_and_folders_of_steps_are_one_sentence(tmp_path, one_device):
    with ocp.CheckpointManager((tmp_path / "steps").absolute()) as manager:
        manager.save(5, args=ocp.args.StandardSave(PARAMS))
    with pytest.raises(ConfigError, match=r"of the steps 5; give .*steps/5"):
        read(tmp_path / "steps", one_device)
    assert_same(read(tmp_path / "steps/5", one_device)[0], flatten(PARAMS))
    folder = tmp_path / "steps/5/default"
    for file in folder.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match="Orbax tree in .* is damaged"):
        read(folder, one_device, state=None)
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as opened:
        opened.save((tmp_path / "old").absolute(), PARAMS)
    assert_same(read(tmp_path / "old", one_device)[0], flatten(PARAMS))
    (tmp_path / "old/head.w/0.0").unlink()  # Orbax reads zeros there.
    with pytest.raises(ConfigError, match="Orbax tree in .* is damaged"):
        read(tmp_path / "old", one_device)
    (folder / "_METADATA").write_text("{")
    with pytest.raises(ConfigError, match="Orbax tree in .* is damaged"):
        read(folder, one_device, state=None)


def test_patterns_of_state_hold_where_a_pass_leaves_it_out(tmp_path, one_device):
    """Frozen parameters are read without it, from the file beside which it is."""
    in_two_files(tmp_path / "model")
    found, state = read(tmp_path / "model", one_device, state=None, ignore=("state:*",))
    assert found.keys() == flatten(PARAMS).keys() and state is None


@pytest.mark.parametrize("name", ["lr=1%2C2", "a#b", "d%zz", "50% of a", "q?a=b"])
def test_the_path_of_a_tree_is_no_url(tmp_path, name):
    for i, folder in enumerate(
        ("lr=1,2", name)
    ):  # The first is what it would decode to.
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / folder, {"w": np.full((3, 2), i, np.float32)})
    (leaf,) = trees.leaves(tmp_path / name)
    pieces = [value for _, value in leaf.read(leaf)]
    np.testing.assert_array_equal(np.concatenate(pieces), np.ones((3, 2)))


def test_a_path_that_would_be_another_is_refused(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", {"w": np.ones(3)})
    (tmp_path / "old").rename(tmp_path / "old\\a")
    with pytest.raises(ConfigError, match="has a backslash"):
        trees.leaves(tmp_path / "old\\a")


def test_steps_with_a_prefix_are_steps(tmp_path):
    options = ocp.CheckpointManagerOptions(
        step_prefix="ckpt", step_format_fixed_length=8
    )
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 12):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}))
    with pytest.raises(ConfigError, match="steps ckpt_00000001, ckpt_00000012; give"):
        trees.is_tree(tmp_path)


SHELL = {  # Patterns as in a shell, and which of 0, 1, ], ^ and - they fit.
    "[01]": "01",
    "[!0]": "1]^-",
    "[^0]": "1]^-",
    "[]0]": "0]",
    "[!]]": "01^-",
    "[^]]": "01^-",
    "[0-1]": "01",
    "[1-]": "1-",
    "[0^]": "0^",
    "?": "01]^-",
    "*": "01]^-",
}


@pytest.mark.parametrize("pattern", SHELL)
def test_a_pattern_means_the_same_wherever_there_are_patterns(pattern):
    paths = {x: f"l_{x}/w" for x in "01]^-"}
    renamed = published._rename(
        paths.values(),
        published.Names([(f"l_{pattern}/w", f"new_{pattern}/w")], (), ()),
    )
    shapes = {f"l_{x}": {"w": jax.ShapeDtypeStruct((2, 2), np.float32)} for x in paths}
    found = {
        "matching": matching(f"l_{pattern}/w", paths.values()),
        "rename": {old for new, old in renamed.items() if new.startswith("new_")},
        "train": make_plan(Finetuning(train=(f"l_{pattern}/w",)), shapes).trained,
    }
    rates = scale_updates([(f"l_{pattern}/w", 2.0)])
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    updates, _ = rates.update(ones, rates.init(ones))
    found["multipliers"] = {k for k, x in flatten(updates).items() if x[0, 0] == 2}
    for key, fits in found.items():
        assert {*fits} == {paths[x] for x in SHELL[pattern]}, key


def test_an_archive_holds_each_leaf_once_and_its_own_names(tmp_path, one_device):
    """Also a head of one's own, whose name a published head had."""
    arrays = {"trunk/w": np.ones((2, 2)), "head/w": np.ones(3), "step": np.array(3)}
    np.savez(tmp_path / "theirs.npz", **arrays)
    names = Names(rename=(("head/*", "old/*"),), fresh=("head/*",), ignore=("step",))
    model = {k: {"w": arrays["trunk/w"]} for k in ("trunk", "old", "head")}
    source = partial(
        read_published,
        tmp_path / "theirs.npz",
        devices=one_device,
        rules=(),
        names=names,
    )
    leaves = {"trunk/w": np.zeros((2, 2)), "old/w": np.zeros(3)}
    for form in ("haiku", "alphafold", "graphcast"):
        file = tmp_path / f"{form}.npz"
        export_npz(file, leaves, model, source, one_device, form)
        with np.load(file) as written:
            assert "step" in written and len(written.files) == 3
        for both in (
            {"head/w": np.ones(3), **leaves},
            {**leaves, "head/w": np.ones(3)},
        ):
            absent = tmp_path / "absent.npz"
            with pytest.raises(ConfigError, match="would both be .*head.* in the file"):
                export_npz(absent, both, model, source, one_device, form)
            assert not absent.exists()
