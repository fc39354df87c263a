"""Published code, imported as it is without the packages that it names."""

import copy
import importlib.util
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from haiku_template import published
from haiku_template.errors import ConfigError

# As searchless_chess, alphagenome_research and others use what their models do not.
CODE = """
from __future__ import annotations
import abc
import apache_not_here as beam
import flow_not_here.compat.v1 as tf
from apache_not_here import coders
from flow_not_here.data import experimental
from typing import Optional, Union
import numpy as np

CODERS = {"fen": coders.StrUtf8Coder(), "pair": coders.TupleCoder((coders.Float(),))}
Array = Union[np.ndarray, tf.Tensor]
Either: tf.Tensor | None = None
Other = tf.Tensor | None
Float = tf.Float[tf.Tensor, "b t"]


class Reader(beam.DoFn):
    def process(self, element):
        return [element]


class Both(tf.Module, abc.ABC):
    pass


@tf.function
def model(x: Optional[tf.Tensor]):
    return x + 1 if not isinstance(x, tf.Tensor) else None


@experimental.checked(typechecker=beam.typed)
def other(x):
    return x


kept = experimental.checked(other, typechecker=beam.typed)


def later():
    import flow_not_here
    return flow_not_here
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of code, and the modules of the process as they were, afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def test_code_is_imported_and_its_own_functions_work(folder):
    (folder / "their_code.py").write_text(CODE)
    with published.stand_ins("apache_not_here", "flow_not_here"):
        import their_code
    assert their_code.model(1) == 2 and their_code.other(3) == their_code.kept(3) == 3
    assert their_code.Reader().process(4) == [4] and their_code.Both()
    assert "not_here.compat.v1.Tensor" in repr(copy.deepcopy(their_code.Other))
    assert not any("not_here" in name for name in sys.modules)
    for name in ("apache_not_here", "flow_not_here.data"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        their_code.later()
    with pytest.raises(ModuleNotFoundError), published.stand_ins("apache_not_here"):
        importlib.import_module("flow_not_here")


# As Beam's functions, Keras's layers, Gym's environments and TFDS's configs are.
BASES = """
import apache_not_here as beam
import flow_not_here as tf


class Own:
    def __init__(self, size=0):
        self.size = size

    def __init_subclass__(cls, tag="", **kwargs):
        super().__init_subclass__(**kwargs)
        cls.tag = tag

    def __getattr__(self, name):
        if name == "own":
            return 7
        raise AttributeError(name)


class Reader(beam.DoFn, frozen=True):
    def __init__(self, size):
        super().__init__(size, name="reader")
        self.size = size


class Layer(tf.keras.Layer, Own, tag="b"):
    def __init__(self, size):
        super().__init__(size=size)


class Mixed(tf.Module, beam.PTransform[int], Reader):
    pass
"""


def test_a_base_that_is_not_here_takes_arguments(folder):
    (folder / "their_bases.py").write_text(BASES)
    with published.stand_ins("apache_not_here", "flow_not_here"):
        import their_bases
    assert their_bases.Reader(3).size == their_bases.Mixed(3).size == 3
    layer = their_bases.Layer(4)  # What a base that is here does, it does.
    assert layer.size == 4 and layer.tag == "b" and layer.own == 7
    words = "'Mixed' object has no attribute 'setup'; of its bases flow_not_here.Module"
    with pytest.raises(AttributeError, match=f"{words}, .*apache_not_here.DoFn stands"):
        their_bases.Mixed(3).setup()
    assert copy.deepcopy(their_bases.Reader(5)).size == 5


def test_a_call_that_does_nothing_is_said_once_all_is_imported(folder, caplog):
    """As of a config of AlphaFold's: a difference of a preset is not taken over."""
    (folder / "their_config.py").write_text(
        "import configs_not_here as ml\nCONFIG = ml.ConfigDict({'a': 1})\n"
        "@ml.cached\ndef changed():\n    CONFIG.update({'a': 2})\n    return CONFIG\n"
    )
    with published.stand_ins("configs_not_here"):
        import their_config
    assert not caplog.records
    for _ in range(2):
        their_config.CONFIG.cached(their_config.changed)()
    words = "configs_not_here.ConfigDict().update() does nothing: configs_not_here is n"
    assert len(caplog.records) == 1 and words in caplog.text


def test_a_dtype_of_a_stand_in_has_none(folder):
    """NumPy before 2.4 asks for the dtype of a dtype until Python's stack is full."""
    with published.stand_ins("flow_not_here"):
        import flow_not_here
    assert not hasattr(flow_not_here.dtype, "dtype")


@pytest.mark.parametrize(
    "use",
    [
        bool,
        iter,
        len,
        int,
        float,
        list,
        np.asarray,
        lambda x: x + 1,
        lambda x: 1 * x,
        lambda x: x < 1,
        lambda x: -x,
        lambda x: 2.0 * x,
        lambda x: 3 in x,
        lambda x: x.__setitem__("a", 1),
        lambda x: x.__enter__(),
        lambda x: [1, 2][x],
        lambda x: jax.numpy.sum(x),
        lambda x: jax.jit(lambda y: y)(x),
        lambda x: np.zeros(3) + x,
    ],
)
def test_a_stand_in_never_becomes_a_value(folder, use):
    with published.stand_ins("flow_not_here"):
        import flow_not_here
    with pytest.raises((TypeError, ValueError), match="[sS]tand.?[iI]n") as raised:
        use(x := flow_not_here.a.constant(2))
    # JAX has sentences of its own.
    if not ("jax" in str(raised.traceback[-1].path) or "jax.jit" in str(raised.value)):
        assert "flow_not_here.a.constant()" in str(raised.value)
    assert x == x != 1 and x not in (1, 2) and {x: 1}[x] == 1
    assert flow_not_here.float32 == flow_not_here.float32 != flow_not_here.float16


def test_what_a_stand_in_lacks_is_said_with_its_name():
    """As where an installed package asks for what it could import, and now can."""
    with published.stand_ins("flow_not_here"):
        import flow_not_here
    with pytest.raises(AttributeError, match="for flow_not_here.ones has no __qualn"):
        _ = flow_not_here.ones.__qualname__
    assert repr(copy.copy(flow_not_here.ones)) == repr(flow_not_here.ones)


def test_what_is_installed_is_never_stood_in_for():
    import json as real

    with published.stand_ins("json", "numpy"):
        import json

        import numpy
    assert json is real and numpy is np


def test_what_must_work_is_given(folder):
    (folder / "their_tree.py").write_text(
        "import tree_not_here as tree\nx = tree.map_structure(lambda x: x + 1, [1])\n"
    )
    with published.stand_ins(tree_not_here={"map_structure": jax.tree.map}):
        import their_tree
    assert their_tree.x == [2]


def test_an_error_in_their_code_leaves_nothing(folder):
    (folder / "broken.py").write_text("import flow_not_here\n1 / 0\n")
    finders = list(sys.meta_path)
    with pytest.raises(ZeroDivisionError), published.stand_ins("flow_not_here"):
        importlib.import_module("broken")
    assert sys.meta_path == finders and "flow_not_here" not in sys.modules


def test_a_module_is_imported_without_the_init_of_its_packages(folder):
    inner = folder / "theirs_whole" / "model"
    inner.mkdir(parents=True)
    for package in (inner, inner.parent):
        (package / "__init__.py").write_text("raise ImportError('another model')\n")
    (inner / "net.py").write_text("from theirs_whole.model import sizes\nx = sizes.n\n")
    (inner / "sizes.py").write_text("n = 7\n")
    net = published.import_module("theirs_whole.model.net", folder)
    assert net.x == 7 and Path(net.__file__) == inner / "net.py"
    for name, where in (("theirs_whole.model.no", folder), ("a.b", folder / "no")):
        with pytest.raises(ConfigError, match=f"holds no {name.replace('.', '/')}.py"):
            published.import_module(name, where)


def test_a_name_of_an_init_that_was_left_out_is_said_to_be_one(folder):
    """As of Jumanji's environments, which its networks take from their package."""
    (folder / "theirs_emptied").mkdir()
    (folder / "theirs_emptied" / "__init__.py").write_text("class Env:\n    pass\n")
    for name, line in (
        ("net", "from theirs_emptied import Env"),
        ("no", "import absnt"),
    ):
        (folder / "theirs_emptied" / f"{name}.py").write_text(f"{line}\n")
    with pytest.raises(ImportError) as caught:
        published.import_module("theirs_emptied.net", folder)
    words = "theirs_emptied was imported without its __init__, as import_module does"
    assert caught.value.__notes__[0].startswith(words)
    with pytest.raises(ImportError) as caught:
        published.import_module("theirs_emptied.no", folder)
    assert not hasattr(caught.value, "__notes__")


def test_a_stand_in_of_a_part_leaves_its_package(folder):
    (folder / "theirs_partly").mkdir()
    (folder / "theirs_partly" / "__init__.py").touch()
    with published.stand_ins("theirs_partly.absent"):
        from theirs_partly import absent
    assert "theirs_partly.absent" in repr(absent.x)
    with pytest.raises(ImportError):
        from theirs_partly import absent


def test_a_module_of_a_folder_is_no_other_of_its_name(folder):
    """Nor does an import of one folder change where another's packages are."""
    for home in ("one", "two.py"):
        (folder / home / "theirs_src" / "deep").mkdir(parents=True)
        (folder / home / "theirs_alone.py").write_text(f"home = {home!r}\n")
        (folder / home / "theirs_src" / "net.py").write_text(
            "import theirs_src.deep.part\nx = theirs_src.deep.part.x\n"
        )
        (folder / home / "theirs_src" / "deep" / "part.py").write_text("x = 3\n")
        (folder / home / "json.py").touch()
    first, second = folder / "two.py", folder / "one"
    for name in ("theirs_src.deep.part", "theirs_src.net", "theirs_alone"):
        module = published.import_module(name, first)
        assert Path(module.__file__).is_relative_to(first)
        assert published.import_module(name, first) is module
        with pytest.raises(ConfigError, match=r"cannot be imported, since another is,"):
            published.import_module(name, second)
    with pytest.raises(ConfigError, match="json of .* a process imports one module"):
        published.import_module("json", first)
