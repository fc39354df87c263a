"""Pickles become safetensors bit for bit; what could run is named, and not run."""

import base64
import bz2
import collections
import copyreg
import dataclasses
import functools
import gzip
import io
import itertools
import os
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from typing import NamedTuple
from unittest.mock import Mock

import jax.numpy as jnp
import joblib
import ml_dtypes
import numpy as np
import optax
import pytest
from haiku._src.data_structures import FlatMap
from safetensors.numpy import load_file, save_file

from haiku_template.conversion import __main__ as child
from haiku_template.conversion import files, pickles
from haiku_template.errors import ConfigError
from haiku_template.pretrained import convert

RNG = np.random.default_rng(0)
W = RNG.normal(size=(5, 3)).astype(np.float32)
PARAMS = {
    "net/~/linear": {"w": W, "b": RNG.normal(size=3)},
    "net/~/half": {"w": W.astype(np.float16), "v": W.astype(ml_dtypes.bfloat16)},
    "net/~/odd": {
        "fortran": np.asfortranarray(W),
        "big": W.astype(">f4"),
        "column": W[:, 1],
        "count": np.array(3, np.int32),
        "mask": W > 0,
        "empty": np.zeros((0, 4), np.uint8),
        "large": RNG.normal(size=(300, 200)).astype(np.float32),
    },
}
STATE = {"net/~/norm/~/mean_ema": {"average": W[0], "counter": np.int64(7)}}


def flat(params, prefix=""):
    """Arrays by the names that a converted file has."""
    return {f"{prefix}{m}/{k}": x for m, p in params.items() for k, x in p.items()}


def assert_same(file, expected):
    found = load_file(file)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        x = np.asarray(x)
        x = x.astype(x.dtype.newbyteorder("="))
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


def saved(save, *arrays, **named):
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


def pickled(protocol):
    return lambda path, tree: path.write_bytes(pickle.dumps(tree, protocol=protocol))


def dumped(compress):
    return lambda path, tree: joblib.dump(tree, path, compress=compress)


WRITERS = {f"pickle {n}": pickled(n) for n in range(6)}
WRITERS |= {f"joblib {c}": dumped(c) for c in (0, 3, ("gzip", 3), ("bz2", 9))}
WRITERS |= {f"joblib {c}": dumped((c, 3)) for c in ("xz", "lzma")}
WRITERS["joblib, an object"] = lambda path, tree: joblib.dump(
    np.array(tree, object), path
)
WRITERS["npy"] = lambda path, tree: path.write_bytes(
    saved(np.save, np.array(tree, object))
)
WRITERS["npz"] = lambda path, tree: path.write_bytes(saved(np.savez_compressed, **tree))
WRITERS["gz"] = lambda path, tree: path.write_bytes(gzip.compress(pickle.dumps(tree)))
WRITERS["bz2"] = lambda path, tree: path.write_bytes(bz2.compress(pickle.dumps(tree)))


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Converts as the child does, here and without its limits."""
    monkeypatch.setattr(child, "limit", lambda size: None)

    def run(source, key=""):
        out = tmp_path / "out.safetensors"
        facts = child.main(str(source), str(out), key)
        assert ("refused" in facts) == (not out.exists())
        assert not [*tmp_path.glob("tmp*")]
        return facts

    return run


@pytest.mark.parametrize("name", WRITERS)
def test_arrays_come_out_bit_for_bit(tmp_path, converted, name):
    WRITERS[name](tmp_path / "file", PARAMS)
    facts = converted(tmp_path / "file")
    assert "refused" not in facts, facts
    assert facts["arrays"] == 11 and facts["taken"] == "" and facts["left"] == []
    assert_same(tmp_path / "out.safetensors", flat(PARAMS))


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("axes", [(1, 2, 0), (0, 2, 1), (2, 1, 0)])
def test_permuted_axes_stay_permuted(tmp_path, converted, protocol, axes):
    permuted = RNG.normal(size=(2, 3, 4)).astype(">f4").transpose(axes)
    pickled(protocol)(tmp_path / "file", {"net": {"w": permuted}})
    converted(tmp_path / "file")
    assert_same(tmp_path / "out.safetensors", {"net/w": permuted})


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_jax_and_ordered_dictionaries_are_known(
    tmp_path, converted, protocol
):
    leaves = {"w": jnp.asarray(W), "half": jnp.asarray(W, jnp.bfloat16)}
    tree = collections.OrderedDict({"net": collections.OrderedDict(leaves)})
    pickled(protocol)(tmp_path / "file", tree)
    converted(tmp_path / "file")
    assert_same(tmp_path / "out.safetensors", flat({"net": leaves}))


def test_the_dictionaries_of_earlier_haiku_are_known(tmp_path, converted):
    tree = FlatMap({"net": {"w": W}})
    assert b"haiku._src.data_structures" in pickle.dumps(tree)
    pickled(4)(tmp_path / "file", tree)
    converted(tmp_path / "file")
    assert_same(tmp_path / "out.safetensors", {"net/w": W})


@pytest.mark.parametrize(
    "tree",
    [(PARAMS, STATE), {"params": PARAMS, "state": STATE, "step": 3, "opt": (1, {})}],
    ids=["tuple", "dict"],
)
def test_parameters_and_state_are_kept_apart(tmp_path, converted, tree):
    pickled(4)(tmp_path / "file", tree)
    facts = converted(tmp_path / "file")
    assert facts["left"] == (["step", "opt"] if isinstance(tree, dict) else [])
    expected = flat(PARAMS, "params/") | flat(STATE, "state/")
    assert_same(tmp_path / "out.safetensors", expected)


def test_state_may_be_trees_inside_of_its_modules(tmp_path, converted):
    pickled(4)(tmp_path / "file", (PARAMS, {"net": {"carry": {"h": W, "more": (W,)}}}))
    assert converted(tmp_path / "file")["left"] == []
    state = {"state/net/carry/h": W, "state/net/carry/more/0": W}
    assert_same(tmp_path / "out.safetensors", flat(PARAMS, "params/") | state)


@pytest.mark.parametrize("key", ["", "model_state_dict"])
def test_the_only_parameters_are_found_and_the_rest_named(tmp_path, converted, key):
    tree = {"num_edges": 48, "noise_level": 0.2, "model_state_dict": PARAMS}
    joblib.dump(tree, tmp_path / "file")
    facts = converted(tmp_path / "file", key)
    assert facts["taken"] == "model_state_dict"
    assert facts["left"] == ["num_edges", "noise_level"]
    assert_same(tmp_path / "out.safetensors", flat(PARAMS))


def test_a_key_chooses_among_several(tmp_path, converted):
    tree = {"a": {"x/y": PARAMS}, "ema": STATE, "note\n": "text"}
    pickled(4)(tmp_path / "file", tree)
    words = converted(tmp_path / "file")["refused"]
    assert "2 sets of parameters" in words and "--key=ema or --key=a/x/y" in words
    assert (
        "nearest is ema; in it are a, ema"
        in converted(tmp_path / "file", "emas")["refused"]
    )
    assert "inside a are x/y" in converted(tmp_path / "file", "a/z")["refused"]
    assert "note? is a str;" in converted(tmp_path / "file", "note\n")["refused"]
    facts = converted(tmp_path / "file", "a/x/y")
    assert facts["left"] == ["ema", "note?"]
    assert_same(tmp_path / "out.safetensors", flat(PARAMS))


def test_flat_names_are_joined_by_slashes(tmp_path, converted):
    names = {f"{m}//{k}": x for m, p in PARAMS.items() for k, x in p.items()}
    pickled(4)(tmp_path / "file", names | {"note": "text"})
    assert converted(tmp_path / "file")["left"] == ["note"]
    assert_same(tmp_path / "out.safetensors", flat(PARAMS))


class Own:
    """A class that its pickle names."""


class Row(NamedTuple):
    """A train state as scripts and jaxline's experiments have it."""

    params: dict
    state: dict
    opt_state: tuple


@dataclasses.dataclass
class Fields:
    """The same by names."""

    params: dict
    state: dict
    opt_state: tuple


class Slots:
    """The same without a dictionary of attributes."""

    __slots__ = ("opt_state", "params", "state")

    def __init__(self, params, state, opt_state):
        self.params, self.state, self.opt_state = params, state, opt_state


NET = {"net": {"w": W}}
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adam)(optax.constant_schedule(1e-3)),
).init(NET)
FORMS = {
    "tuple": lambda *values: values,
    "dict": lambda *values: dict(zip(Row._fields, values, strict=True)),
    "named tuple": Row,
    "dataclass": Fields,
    "slots": Slots,
    "jaxline": lambda *values: {"experiment_state": Row(*values), "step": 7},
}


@pytest.mark.parametrize(
    ("form", "protocol"),
    [x for x in itertools.product(FORMS, [0, 2, 4]) if x != ("slots", 0)],
)
def test_states_of_training_give_their_parameters(tmp_path, converted, form, protocol):
    state = {"net/norm": {"average": W[0]}}
    pickled(protocol)(tmp_path / "file", FORMS[form](NET, state, OPTIMIZER))
    facts = converted(tmp_path / "file")
    assert {*facts["left"]} in ({"opt_state"}, {"2"}, {"step", "2"}), facts
    expected = {"params/net/w": W, "state/net/norm/average": W[0]}
    assert_same(tmp_path / "out.safetensors", expected)


@pytest.mark.parametrize("second", [OPTIMIZER, OPTIMIZER[1], OPTIMIZER[0]])
def test_parameters_beside_an_optimizer_s_state_are_the_only_ones(
    tmp_path, converted, second
):
    pickled(4)(tmp_path / "file", (NET, second))
    facts = converted(tmp_path / "file")
    assert facts["taken"] == "0" and facts["left"] == ["1"], facts
    assert_same(tmp_path / "out.safetensors", {"net/w": W})


@pytest.mark.parametrize("count", [2, 3])
def test_parameters_beside_their_averages_are_chosen_by_key(tmp_path, converted, count):
    averages = {"net": {"w": W + 1}}
    pickled(4)(tmp_path / "file", (NET, averages, OPTIMIZER)[:count])
    assert "--key=0 or --key=1" in converted(tmp_path / "file")["refused"]
    assert converted(tmp_path / "file", "1")["taken"] == "1"
    assert_same(tmp_path / "out.safetensors", {"net/w": W + 1})


MOMENTS = {"m": {"net": {"w": W}}, "v": {"net": {"w": W}}}


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ((NET, MOMENTS), "0 or --key=1/m or --key=1/v"),
        ((NET, MOMENTS | {"count": np.float32(3)}, 3), "0 or --key=1/m or --key=1/v"),
        ((NET, {"adam": MOMENTS}, 3), "0 or --key=1/adam/m or --key=1/adam/v"),
    ],
)
def test_moments_in_a_dictionary_are_no_state(tmp_path, converted, values, keys):
    pickled(4)(tmp_path / "file", values)
    words = converted(tmp_path / "file")["refused"]
    assert words.endswith(f"sets of parameters; choose one: --key={keys}"), words


@pytest.mark.parametrize("state", [{"w": W[0]}, {"w": W, "count": W[0]}])
def test_a_state_may_share_names_with_parameters(tmp_path, converted, state):
    """As codes of a quantizer, learned or averaged, are `embeddings`."""
    pickled(4)(tmp_path / "file", (NET, {"net": state}, 3))
    assert converted(tmp_path / "file")["left"] == ["2"]
    expected = {"params/net/w": W} | flat({"net": state}, "state/")
    assert_same(tmp_path / "out.safetensors", expected)


def test_an_object_of_arrays_is_no_module(tmp_path, converted):
    tree = {"model": NET, "statistics": Row(W, W, W)}
    pickled(4)(tmp_path / "file", tree)
    assert converted(tmp_path / "file")["taken"] == "model"
    (tmp_path / "out.safetensors").unlink()
    pickled(4)(tmp_path / "file", NET | {"statistics": Row(W, W, W)})
    assert "it holds no parameters" in converted(tmp_path / "file")["refused"]


# dill.dumps(TrainState({"net": {"w": w}}, {"norm": {"average": w[0]}}, (adam's,))) of
# dill 0.4.1, which is not installed; w = arange, [2, 3]; a named tuple in a script.
DILL = (
    "c-n1HJx{|h5Y0zJOIsuaRn-9r#;{~!U_heKjYt_NyX7V>j+8i&;{X|u%1}xrZyY=S6zqhmNO1B!f"
    "8V|L7Ojt-Wz-?NQJf?m(g^YZg`8kP5W^{nM42Z9-a&TnIF8v=s2h+wIp#PmKsrTpu$$!qHR~0~4n"
    "nDVjF8&g!ZS#l5us=E5vU>eHXShMxKhPkIb>y;R~`y8PQ0{CMBLoTKH?<ISRr^B3eCf*UxIA2X!G"
    "4SmM}4As+sGXzUAAmKnK!^M3vXnt@#<O-!v81x21UjK@i-0si?s>1kBcxQRBtpQo&dal?#=hV-OG"
    "s^|vULfELSms+F|y1L63d0Nr=#AsuQCbks1g)$({f>Hn^{twJriKMiq0uB)pEr$3H5VOBDsxTd87"
    "R%#mu%2fR1p@N5=;FuM2-CXPV+w_zkNh?0z>ZB+CsqB~yDPzNj_GoVfFR%oS-ZuzE${_"
)


def test_a_named_tuple_of_dill_is_read_by_its_fields(tmp_path, converted):
    (tmp_path / "file").write_bytes(zlib.decompress(base64.b85decode(DILL)))
    assert converted(tmp_path / "file")["left"] == ["opt_state"]
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = {"params/net/w": w, "state/norm/average": w[0]}
    assert_same(tmp_path / "out.safetensors", expected)


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


STAND_INS = {key: x for key, x in pickles.NAMES.items() if callable(x)}
MARK = "touch ran"
HOSTILE = {
    "posix.system": lambda: Runs(os.system, MARK),
    "Popen": lambda: Runs(subprocess.Popen, ["touch", "ran"]),
    "eval": lambda: Runs(eval, "open('ran', 'w')"),
    "getattr": lambda: Runs(getattr, "text", "format"),
    "numpy.load": lambda: Runs(np.load, "file"),
    "functools.partial": lambda: functools.partial(print),
    "joblib.numpy_pickle.load": lambda: Runs(joblib.load, "file"),
    "Own": lambda: Runs(Own),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "writer", ["pickle 0", "pickle 2", "pickle 4", "joblib 3", "npy"]
)
def test_what_could_run_is_named_and_not_run(
    tmp_path, converted, monkeypatch, name, writer
):
    monkeypatch.chdir(tmp_path)
    tree = {"net": {"w": W, "v": HOSTILE[name]()}}
    WRITERS[writer](tmp_path / "file", tree)
    words = converted(tmp_path / "file")["refused"]
    assert re.match(rf"it names ([\w.]+\.)?{name}, and nothing but arrays", words)
    assert "nothing was run" in words and "save {module: {name: array}}" in words
    assert not (tmp_path / "ran").exists()


def claim(size):
    """A pickle of one array, whose bytes claim to be many."""
    whole = pickle.dumps({"net": {"w": W}}, protocol=4)
    data = b"C" + bytes([W.nbytes]) + W.tobytes()
    assert data in whole
    return whole.replace(data, b"\x8e" + struct.pack("<Q", size) + W.tobytes())


def shaped(rows):
    """A pickle whose array claims many rows."""
    whole = pickle.dumps({"net": {"w": W}}, protocol=4)
    return whole.replace(b"K\5K\3", b"J" + struct.pack("<i", rows) + b"K\3")


def wrapped(rows):
    """A joblib file whose wrapper claims many rows."""
    file = io.BytesIO()
    joblib.dump({"net": {"w": W}}, file)
    return file.getvalue().replace(b"K\5K\3", b"J" + struct.pack("<i", rows) + b"K\3")


def of_numpy(shape):
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + W.tobytes()


DOUBLED = b"K\1" + 60 * b"q\0h\0\x86"
CLAIMS = {
    "bytes": (claim(10**10), "claims 10,000,000,000 bytes, and"),
    "endless bytes": (claim(2**63), "claims 9,223,372,036,854,775,808 bytes"),
    "joblib": (wrapped(10**9), "claims 12,000,000,000 bytes, and"),
    "shape": (shaped(10**9), "[1000000000, 3] of 12,000,000,000 bytes, and holds 60"),
    "header": (of_numpy((10**9, 3)), "[1000000000, 3] of 12,000,000,000 bytes"),
    "text": (b"\x80\x04X" + struct.pack("<I", 2**32 - 1), "claims 4,294,967,295 bytes"),
    "number": (b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1), "claims 2,147,483,647"),
    "nothing": (b"", "claims 1 bytes, and 0 are left"),
    "text file": (b"import os\n", "no pickle"),
    "lz4": (b"\x04\x22\x4d\x18" + bytes(20), "compressed with LZ4"),
    "old joblib": (b"ZF0x123", "joblib before 0.10"),
    "bomb": (zlib.compress(bytes(2**26 + 1), 9), "grows beyond 67,108,864 bytes"),
    "compressed twice": (gzip.compress(gzip.compress(b"N.")), "compressed twice"),
    "unfinished": (zlib.compress(pickle.dumps(PARAMS))[:-9], "truncated or damaged"),
    "no array": (pickle.dumps({"a": {"b": "text"}}), "no parameters"),
    "a leaf": (pickle.dumps({"a": {"b": W, "c": "text"}}), "no parameters"),
    "names": (
        pickle.dumps({"a/b": {"c": W}, "a": {"b/c": W}}),
        "two arrays whose name",
    ),
    "complex": (pickle.dumps({"a": {"b": W + 1j}}), "a/b is of dtype complex64"),
    "fields": (
        pickle.dumps({"a": {"b": np.zeros(2, [("x", "f4")])}}),
        "named fields",
    ),
    "dates": (pickle.dumps({"a": {"b": np.zeros(2, "M8[s]")}}), "dtype M8"),
    "axes": (
        pickle.dumps({"a": {"b": np.zeros((2, 3, 4)).transpose(1, 0, 2)}}, 5).replace(
            b"K\1K\0K\2", b"K\1K\1K\2"
        ),
        "axes are (1, 1, 2)",
    ),
    "escapes": (pickle.dumps({"a\n\x1b[2J": 1}), "but a dict of a??[2J"),
    "long header": (
        np.lib.format.magic(2, 0) + struct.pack("<I", 60000) + 60000 * b"(",
        "header is damaged: Header info length",
    ),
    # Tuples in tuples that double: nobody waits for their hash.
    "open header": (
        np.lib.format.magic(1, 0) + b"\x0f\0{'descr': '<f4'",
        "header is damaged",
    ),
    "no dtype": (of_numpy((5, 3)).replace(b"'<f4'", b"',f4'"), "header is damaged"),
    "keys": (b"\x80\2}" + DOUBLED + b"Ns.", "tuples of tuples"),
    "keys of pairs": (
        b"\x80\2ccollections\nOrderedDict\n]" + DOUBLED + b"N\x86a\x85R.",
        "tuples of tuples",
    ),
    "names of tuples": (b"\x80\4" + DOUBLED + b"\x8c\1a\x93.", "STACK_GLOBAL requires"),
    "archive": (b"PK\3\4" + bytes(50), "truncated or damaged"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_what_a_file_cannot_hold_is_one_sentence(tmp_path, converted, name):
    content, expected = CLAIMS[name]
    if name == "axes" and b"K\1K\1K\2" not in content:
        pytest.skip("NumPy before 2.3 pickles no order of axes")
    (tmp_path / "file").write_bytes(content)
    words = converted(tmp_path / "file")["refused"]
    assert expected in words and "\n" not in words


def text(value):
    """A text on the stack."""
    return b"X" + struct.pack("<I", len(value)) + value


def number(value):
    """An integer of any size on the stack."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def array_of(shape, dtype, data):
    """An array, of opcodes; its dtype is left in the memo as 9."""
    new = b"cnumpy.core.multiarray\n_reconstruct\n)R"
    return new + b"(K\1" + shape + dtype + b"q\x09\x89" + data + b"tb"


FLOATS = b"cnumpy\ndtype\n" + text(b"f4") + b"\x85R"
OBJECTS = b"cnumpy\ndtype\n" + text(b"O") + b"\x85R"
ENCODE, WRAPPER = b"c_codecs\nencode\n", b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n"
# State of an object without a dictionary, as the library takes it: (None, attributes).
SLOTS = b"N}" + text(b"__defaults__") + text(b"x") + b"\x85s\x86b."
NESTED = WRAPPER + b")R}" + text(b"dtype") + OBJECTS + b"sb"
# What a table of names alone would let by.
ATTACKS = {
    "a code for a name": (b"\x82\xf0.", "opcode 0x82"),
    "a code of two bytes": (b"\x83\xf0\0.", "opcode 0x83"),
    "a code of four bytes": (b"\x84\xf0\0\0\0.", "opcode 0x84"),
    "a persistent name": (b"Pfile\n.", "opcode 0x50"),
    "a persistent value": (b"NQ.", "opcode 0x51"),
    "an old instance": (b"(iposix\nsystem\n.", "opcode 0x69"),
    "an old object": (b"(" + ENCODE + b"o.", "opcode 0x6f"),
    "a new object by keywords": (ENCODE + b")}\x92.", "opcode 0x92"),
    "a buffer of others": (b"\x97.", "opcode 0x97"),
    "a set": (b"\x8f.", "it holds a set"),
    "attributes of a function": (ENCODE + SLOTS, "sets attributes of a function"),
    "attributes of a class": (b"cnumpy\ndtype\n" + SLOTS, "sets attributes of a type"),
    "attributes of an array": (
        array_of(b")", FLOATS, text(4 * b"x"))
        + SLOTS.replace(b"__defaults__", b"values______"),
        "no pickle, or a damaged one",
    ),
    "attributes of a name": (b"cposix\nsystem\n" + SLOTS, "attributes of posix.system"),
    "a call of an object": (
        b"cposix\nsystem\n)\x81)R.",
        "it calls an object of posix.system",
    ),
    "an object of an array's class": (b"cnumpy\nndarray\n)\x81.", "it calls numpy.nd"),
    "an object of text": (
        b"ccopyreg\n_reconstructor\n(" + text(b"x") + b"NNtR.",
        "it makes an object of x",
    ),
    "attributes of an object that are text": (
        b"cposix\nsystem\n)\x81" + text(b"xy") + b"b.",
        "an object of posix.system has xy for its attributes",
    ),
    # Of pairs, whose keys may be tuples that double: nobody waits for their hash.
    "attributes in pairs": (
        b"cposix\nsystem\n)\x81](K\1\x85\x85N\x86eb.",
        "an object of posix.system has a list for its attributes",
    ),
    "a named tuple of a very long name": (
        b"cdill._dill\n_create_namedtuple\n("
        + (text(b"x" * 10**6) + text(b"a") + b"\x85" + text(b"m") + b"tR)R."),
        "a damaged one, at byte 1,000,0",
    ),
    "a named tuple of too few values": (
        b"cdill._dill\n_create_namedtuple\n("
        + text(b"x")
        + (text(b"a") + text(b"b") + b"\x86")
        + text(b"m")
        + b"tR)\x81.",
        "no pickle, or a damaged one",
    ),
    "a named tuple of numbers": (
        b"cdill._dill\n_create_namedtuple\n(K\1K\2K\3tR.",
        "no pickle, or a damaged one",
    ),
    "attributes of text": (text(b"x") + SLOTS, "sets attributes of x"),
    "a call of text": (text(b"print") + b")R.", "it calls print"),
    "a call of an array's class": (b"cnumpy\nndarray\n)R.", "it calls numpy.ndarray"),
    "a call of a number": (b"K\1)\x81.", "it calls a int"),
    "a function of JAX's": (
        b"cjax._src.array\n_reconstruct_array\n" + ENCODE + b")))tR.",
        "no pickle, or a damaged one",
    ),
    "an encoding": (
        ENCODE + text(b"x") + text(b"zlib") + b"\x86R.",
        "encodes text as zlib",
    ),
    "bytes of a number": (
        b"cbuiltins\nbytes\n" + number(10**10) + b"\x85R.",
        "no pickle, or a damaged one",
    ),
    "a hundred axes": (
        array_of(b"(" + 100 * b"K\1" + b"t", FLOATS, text(4 * b"x")) + b".",
        "dimension",
    ),
    "a shape less than nothing": (
        array_of(number(-1) + number(-1) + b"\x86", FLOATS, text(4 * b"x")) + b".",
        "claims an array of shape (-1, -1)",
    ),
    "a shape of huge numbers": (
        array_of(3 * number(2**2**20) + b"\x87", FLOATS, text(4 * b"x")) + b".",
        "no pickle, or a damaged one",
    ),
    "a shape of tuples": (array_of(DOUBLED, FLOATS, b"N") + b".", "claims an array of"),
    "a dtype of tuples": (
        b"cnumpy\ndtype\n" + DOUBLED + b"\x85R" + b"q\1}" + b"b.",
        "no pickle, or a damaged one",
    ),
    "a dtype of a gigabyte": (
        array_of(b")", FLOATS.replace(b"f4", b"V9"), b"N") + b".",
        "dtype V9",
    ),
    "lists in lists": (100_000 * b"]" + 99_999 * b"a" + b".", "no parameters"),
    "tuples in tuples": (b"K\1" + 100_000 * b"\x85" + b".", "no parameters"),
    "wrappers in wrappers": (10_000 * NESTED + b".", "recursion depth"),
    "objects of themselves": (
        b"]q\1" + array_of(b")", OBJECTS, b"h\1") + b"h\1a.",
        "no pickle, or a damaged one",
    ),
    "pairs of themselves": (
        b"]q\1h\1ah\1accollections\nOrderedDict\nh\1\x85R.",
        "unhashable",
    ),
    "values of a number": (b"K\1(K\1K\2u.", "no pickle, or a damaged one"),
    "items of a function": (ENCODE + b"K\1a.", "no pickle, or a damaged one"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_a_table_of_names_does_not_stop_is_refused(
    tmp_path, converted, monkeypatch, name
):
    monkeypatch.setitem(copyreg._inverted_registry, 0xF0, ("posix", "system"))
    content, expected = ATTACKS[name]
    (tmp_path / "file").write_bytes(b"\x80\x02" + content)
    before = {key: dict(vars(x)) for key, x in STAND_INS.items()}
    defaults = {key: getattr(x, "__defaults__", None) for key, x in STAND_INS.items()}
    words = converted(tmp_path / "file")["refused"]
    assert expected in words and "\n" not in words and len(words) < 400
    assert before == {key: dict(vars(x)) for key, x in STAND_INS.items()}
    assert defaults == {
        key: getattr(x, "__defaults__", None) for key, x in STAND_INS.items()
    }


def test_opcodes_are_a_table_and_names_are_never_imported(monkeypatch):
    allowed = {
        code
        for code, method in pickles.Reader.dispatch.items()
        if method is not pickles.Reader._refuse
    }
    assert len(allowed) == 54 and len(pickles.Reader.dispatch) == 256
    assert not allowed & {*b"PQio2", *b"\x82\x83\x84\x8f\x90\x91\x92\x97\x98"}
    monkeypatch.setattr("builtins.__import__", None)
    reader = pickles.Reader(io.BytesIO())
    for module, name in pickles.NAMES:
        assert reader.find_class(module, name) is pickles.NAMES[module, name]
    monkeypatch.undo()
    for module, name in [("numpy", "dtype.mro"), ("posix", "system"), ("os", "path")]:
        reader.stack = [reader.find_class(module, name), ()]
        assert type(reader.stack[0]) is pickles.Name
        with pytest.raises(ConfigError, match=f"it names {module}.{name}, and nothing"):
            reader._call()


@pytest.mark.parametrize(
    "writer", ["pickle 2", "pickle 5", "joblib 0", "joblib 3", "npz"]
)
def test_a_truncated_or_changed_file_is_one_sentence(tmp_path, converted, writer):
    WRITERS[writer](tmp_path / "file", {"net": {"w": W, "v": W[0]}})
    whole = (tmp_path / "file").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "file").write_bytes(whole[:size])
        assert "\n" not in converted(tmp_path / "file")["refused"]
    for place in range(0, len(whole), 5):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        (tmp_path / "file").write_bytes(changed)
        facts = converted(tmp_path / "file")  # Any other error fails.
        assert "\n" not in facts.get("refused", "")
        (tmp_path / "out.safetensors").unlink(missing_ok=True)


def test_one_array_named_many_times_does_not_grow_the_file(tmp_path, converted):
    big = np.zeros(2**18, np.float32)
    pickled(4)(tmp_path / "file", {f"m{i}": {"w": big} for i in range(99)})
    assert "names the same arrays again" in converted(tmp_path / "file")["refused"]
    cycle = {}
    cycle["a"] = {"b": cycle, "c": [cycle, {"d": cycle}]}
    pickled(4)(tmp_path / "file", cycle)
    assert "no parameters" in converted(tmp_path / "file")["refused"]
    assert "8 deep" in converted(tmp_path / "file", "a")["refused"]
    shared = {f"w{i}": W for i in range(400)}
    pickled(4)(tmp_path / "file", {f"m{i}": shared for i in range(400)})
    assert "more than 100,000" in converted(tmp_path / "file")["refused"]


def test_the_function_writes_all_or_nothing(tmp_path, monkeypatch):
    source, output = tmp_path / "a.pkl", tmp_path / "new/a.safetensors"
    pickled(4)(source, {"net": {"w": Runs(os.system, f"touch {tmp_path}/ran")}})
    with pytest.raises(ConfigError, match="nothing is written: it names posix.system"):
        convert(source, output)
    assert {*tmp_path.rglob("*")} == {source, output.parent}
    pickled(4)(source, PARAMS)
    assert convert(source, output)["numbers"] == sum(
        np.size(x) for x in flat(PARAMS).values()
    )
    assert_same(output, flat(PARAMS))
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        convert(source, output)
    with pytest.raises(ConfigError, match="no file that is there"):
        convert(tmp_path / "none", tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match="config.init_from reads an Orbax tree as it"):
        convert(tmp_path, tmp_path / "b.safetensors")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="may be re"):
        patch.setattr("os.access", lambda path, mode: path != source)
        convert(source, tmp_path / "b.safetensors")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="status -9$"):
        (tmp_path / "killed").write_text("#!/bin/sh\nkill -9 $$\n")
        (tmp_path / "killed").chmod(0o700)
        patch.setattr("sys.executable", str(tmp_path / "killed"))
        convert(source, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        convert(source, tmp_path / "b.npz")


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_file_that_grows_in_memory_is_refused(tmp_path, is_packed):
    """Four megabytes of text would become bytes four hundred times."""
    text, function = (
        b"X" + struct.pack("<I", 2**22) + bytes(2**22),
        b"c_codecs\nencode\n",
    )
    source, again = tmp_path / "a.pkl", b"h\1h\0\x85R"
    bomb = b"\x80\x02" + text + b"q\0" + function + b"q\1" + 400 * again
    source.write_bytes(gzip.compress(bomb) + bytes(2**17) if is_packed else bomb)
    with pytest.raises(ConfigError, match="asks for more memory"):
        convert(source, tmp_path / "a.safetensors")


@pytest.mark.slow(but="gz")
@pytest.mark.parametrize("kind", ["gz", "npz"])
def test_what_compression_made_small_is_converted(tmp_path, kind):
    """Of pruned weights, say: of 400 MiB, most of them zeros, 4 MiB are left."""
    source, zeros = tmp_path / "a.pkl.gz", np.zeros(100 * 2**20, np.float32)
    tree = {"net": {"w": zeros}} if kind == "gz" else {"net/w": zeros}
    if kind == "gz":
        with gzip.open(source, "wb", compresslevel=1) as file:
            pickle.dump(tree, file, protocol=4)
    else:
        rest = np.random.default_rng(0).integers(255, size=4 * 2**20, dtype=np.uint8)
        with source.open("wb") as file:
            np.savez_compressed(file, **tree, rest=rest)
    with source.open("r+b") as file:  # What is beyond the stream is let be.
        file.truncate(max(source.stat().st_size, 5 * 2**20 * (kind == "gz")))
    facts = convert(source, tmp_path / "a.safetensors")
    assert facts["bytes"] == 400 * 2**20 + 4 * 2**20 * (kind == "npz")


def within_a_second(source):
    """Converts with one second of a processor, and those that its bytes add.

    Its memory is no limit: a fast machine would meet it first.
    """
    code = (
        "import sys; from haiku_template.conversion import __main__ as m; "
        "m.SECONDS, m.ROOM = 1, 2**35; m.limit_time(0); print(m.main(*sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, source, source.with_suffix(".safetensors"), ""],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_processor_time_goes_by_what_a_file_holds(tmp_path):
    """Of 512 MiB of zeros half a MiB is left, and they take more than a second."""
    source = tmp_path / "a.pkl"
    with gzip.open(source, "wb", compresslevel=1) as file:
        pickle.dump({"net": {"w": np.zeros(2**29, np.uint8)}}, file, protocol=4)
    with source.open("r+b") as file:  # What is beyond the stream is let be.
        file.truncate(6 * 2**20)
    done = within_a_second(source)
    assert "'bytes': 536870912" in done.stdout, done.stdout


@pytest.mark.slow
def test_the_slowest_form_of_a_file_has_its_time(tmp_path):
    """Of weights in bfloat16, bzip2 makes 8 MiB in a second."""
    source = tmp_path / "a.pkl"
    weights = np.random.default_rng(0).normal(size=2**24).astype(ml_dtypes.bfloat16)
    with bz2.open(source, "wb") as file:
        pickle.dump({"net": {"w": weights.view(np.uint16)}}, file, protocol=4)
    done = within_a_second(source)
    assert "'bytes': 33554432" in done.stdout, done.stdout


def test_a_file_that_takes_too_long_is_refused(tmp_path):
    """Five megabytes of marks took 37 seconds; here the limit is one."""
    source = tmp_path / "a.pkl"
    source.write_bytes(b"\x80\x02" + b"(" * 5_000_000 + b".")
    done = within_a_second(source)
    assert "'refused': 'it takes more than 3 seconds of a processor" in done.stdout
    assert [*tmp_path.iterdir()] == [source]  # Nothing is left of its scratch.


def test_the_first_replica_is_taken_and_what_differs_is_refused(tmp_path, command):
    """Parameters are the same on all devices; the state of a norm may not be."""
    odd = np.array([np.nan, -0.0], np.float32)
    tree = {
        "params": {"net": {"w": np.stack([W] * 4), "odd": np.stack([odd] * 4)}},
        "state": {"norm": {"average": np.arange(8.0).reshape(4, 2)}},
    }
    source, output = tmp_path / "a.pickle", tmp_path / "a.safetensors"
    flags = f"--input={source}", f"--output={output}", "--unreplicate"
    source.write_bytes(pickle.dumps(tree))
    assert command("convert", *flags).returncode == 0
    average = np.arange(2.0)
    expected = {"params/net/w": W, "params/net/odd": odd, "state/norm/average": average}
    assert_same(output, expected)
    output.unlink()
    for other in (np.stack([W, W + 1]), np.float32(1), np.zeros((0, 2))):
        tree["params"]["net"]["w"] = other
        source.write_bytes(pickle.dumps(tree))
        ran = command("convert", *flags)
        assert ran.returncode == 64 and "is not the same on all devices" in ran.stderr
        assert not output.exists()
    tree["params"]["net"]["w"] = np.stack([W] * 4)
    tree["state"]["norm"]["average"] = np.zeros((0, 2))
    source.write_bytes(pickle.dumps(tree))
    assert (
        "state/norm/average float64[0, 2] is not" in command("convert", *flags).stderr
    )


def test_replicas_are_compared_in_the_memory_of_one():
    rows = np.arange(10**5)
    tracemalloc.start()
    try:
        assert not child.are_equal(rows) and child.are_equal(rows[:1])
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 4
    finally:
        tracemalloc.stop()


def test_the_command_says_what_it_took_and_left_out(tmp_path, command):
    source, output = tmp_path / "a.joblib", tmp_path / "a.safetensors"
    joblib.dump({"edges": 48, "model": PARAMS}, source)
    ran = command("convert", f"--input={source}", f"--output={output}")
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith(f"{output}: 11 arrays, 60,099 numbers")
    assert first.endswith(f"from model of {source}")
    assert second == "left out: edges"
    ran = command("convert", f"--input={source}", f"--output={output}")
    assert ran.returncode == 64 and "nothing is overwritten" in ran.stderr


def test_a_file_that_needs_no_conversion_says_so(tmp_path):
    save_file({"w": W}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="config.init_from reads as it is"):
        convert(tmp_path / "a.safetensors", tmp_path / "new.safetensors")


def test_a_name_that_an_archive_has_twice_is_refused(tmp_path):
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        warnings.simplefilter("ignore", UserWarning)  # Of the name.
        for value in (W, W + 1):
            buffer = io.BytesIO()
            np.save(buffer, value)
            file.writestr("w.npy", buffer.getvalue())
    with pytest.raises(ConfigError, match="it holds w twice"):
        convert(tmp_path / "a.npz", tmp_path / "new.safetensors")


def test_a_lying_size_of_an_archive_has_a_reason(tmp_path):
    np.savez(tmp_path / "a.npz", w=W)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    place = content.index(b"PK\1\2")  # The directory's sizes, packed and not.
    content[place + 20 : place + 28] = struct.pack("<2I", 2**31, 2**31)
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="is truncated or damaged: .") as caught:
        convert(tmp_path / "a.npz", tmp_path / "new.safetensors")
    assert not str(caught.value).rstrip().endswith(":")


def test_an_archive_that_ends_too_early_has_a_reason(tmp_path, monkeypatch):
    """As zipfile says it before Python 3.13, which compares the sizes: in no word."""
    np.savez(tmp_path / "a.npz", w=W)
    monkeypatch.setattr(zipfile.ZipExtFile, "read", Mock(side_effect=EOFError))
    with pytest.raises(ConfigError, match=r"ends too early \(EOFError\)"):
        files.load(tmp_path / "a.npz", tmp_path)


def test_pickles_one_after_another_are_all_read(tmp_path):
    """As parameters and state, each dumped to the same open file."""
    with (tmp_path / "two.pkl").open("wb") as file:
        for value in (
            {"linear": {"w": np.ones((2, 3))}},
            {"norm": {"mean": np.ones(3)}},
        ):
            pickle.dump(value, file)
    first, second = pickles.load(tmp_path / "two.pkl")
    assert (*first, *second) == ("linear", "norm")
    with (tmp_path / "two.pkl").open("ab") as file:
        file.write(b"\x00" * 9)  # Padding is none.
    assert len(pickles.load(tmp_path / "two.pkl")) == 2


@pytest.mark.parametrize("step", [np.int64(7), np.array(7), np.float32(0.5)])
def test_a_counter_beside_modules_is_left_out_and_not_taken_for_them(
    tmp_path, command, step
):
    source, output = tmp_path / "a.pickle", tmp_path / "a.safetensors"
    source.write_bytes(pickle.dumps(PARAMS | {"step": step}))
    ran = command("convert", f"--input={source}", f"--output={output}")
    assert ran.returncode == 0, ran.stderr
    first, second = ran.stdout.splitlines()
    assert first.startswith(f"{output}: 11 arrays, 60,099 numbers")
    assert second == "left out: step"


def test_keys_of_one_name_are_refused(tmp_path, command):
    source, output = tmp_path / "a.pickle", tmp_path / "a.safetensors"
    source.write_bytes(pickle.dumps({1: {"w": np.ones(2)}, "1": {"w": np.zeros(2)}}))
    ran = command("convert", f"--input={source}", f"--output={output}")
    assert ran.returncode == 64 and "two of its keys have one name" in ran.stderr


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        ({"a"}, "it holds a set, and nothing but arrays"),
        (frozenset("ab"), "it holds a set, and nothing but arrays"),
        (np.ones(2, ml_dtypes.float8_e4m3fn), "array}} of it as float32 by numpy.save"),
        (np.ones(2, ml_dtypes.int4), "it names ml_dtypes.int4.* as float32"),
    ],
)
def test_what_is_whole_and_not_read_is_called_so(tmp_path, beside, words):
    source = tmp_path / "a.pickle"
    source.write_bytes(pickle.dumps({"params": PARAMS, "beside": beside}))
    with pytest.raises(ConfigError, match=words):
        pickles.load(source)
