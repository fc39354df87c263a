"""Names that JAX removed: gone as JAX left them, and put back when asked."""

import importlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from haiku_template import compat
from tests.runs import ROOT, run_command

REMOVED = compat.removed()

# Each is run in a process where the names are back; the last line is true.
YESTERDAY = {
    "an attribute": "jax.tree_map(lambda x: x + 1, {'a': 1}) == {'a': 2}",
    "an import": "from jax import tree_leaves\ntree_leaves((1, [2])) == [1, 2]",
    "several trees": "jax.tree_multimap(max, (1, 5), (3, 4)) == (3, 5)",
    "copies": "jax.device_put_replicated(np.ones(3), jax.devices()).shape == (4, 3)",
    "shards": "jax.device_put_sharded([1, 2, 3, 4], jax.devices()).shape == (4,)",
    "a module": "import jax.lib.xla_bridge\n"
    "jax.lib.xla_bridge.get_backend().platform == 'cpu'",
    "a module's alias": "import jax.lib.xla_bridge as xb\nxb.device_count() == 4",
    "a module of internals": "from jax.util import unzip2\n"
    "unzip2([(1, 2)]) == ((1,), (2,))",
    "jaxlib": "from jaxlib.xla_extension import XlaRuntimeError\n"
    "XlaRuntimeError is jax.errors.JaxRuntimeError",
    "config": "from jax.config import config\nconfig is jax.config",
    "config again": "import jax.config\njax.config.jax_enable_x64 is False",
    "core": "from jax.core import Primitive\nPrimitive('p').name == 'p'",
    "a type of arrays, as tensorflow_probability's": "class Mine(np.ndarray):\n"
    "    pass\n"
    "for home in (jax.interpreters.xla, jax.core):\n"
    "    home.pytype_aval_mappings[Mine] = home.pytype_aval_mappings[np.ndarray]\n"
    "jax.typeof(np.ones(2).view(Mine)).shape == (2,)",
    "types": "jnp.DeviceArray is jax.random.KeyArray is jax.Array",
    "a second argument": "jax.lax.tie_in(1, 2) == 2",
    "numbers": "(jnp.NINF, jnp.PZERO) == (-np.inf, 0)",
    "numpy": "jnp.in1d(ar1=np.ones((2, 2)), ar2=np.ones(1)).shape == (4,)",
    "sorting": "jnp.msort(np.array([[2, 1], [1, 2]])).tolist() == [[1, 1], [2, 2]]",
    "updates": "x = jax.ops.index_add(np.ones(3), jax.ops.index[1:], 2.0, True)\n"
    "x.tolist() == [1, 3, 3]",
    "x64": "with jax.experimental.enable_x64():\n"
    "    dtype = jnp.ones(2).dtype\ndtype == np.float64",
    "shuffling": "x = jax.random.shuffle(jax.random.PRNGKey(0), jnp.arange(9))\n"
    "sorted(x.tolist()) == list(range(9))",
    "stax": "from jax.experimental import stax\nlen(stax.Dense(3)) == 2",
    "NumPy's own types": "np.zeros(2, np.int).dtype.kind + np.str(3) == 'i3'",
    "NumPy's functions": "np.product([2, 3]) + np.in1d([[1]], [1]).sum() == 7",
    "NumPy's numbers": "np.NINF < np.asfarray([1])[0] < np.Inf and np.isnan(np.NaN)",
    "NumPy's by import": "from numpy import float_, row_stack\nfloat_ is np.float64",
    "optax": "import optax\nhasattr(optax.additive_weight_decay(0.1), 'update')",
    "optix": "from jax.experimental import optix\n"
    "from jax.experimental.optix import sgd\n"
    "hasattr(optix.chain(optix.clip(1.0), sgd(0.1)), 'update')",
    "optimizers": "from jax.experimental import optimizers\n"
    "init, update, get = optimizers.momentum(0.5, mass=0.9)\n"
    "get(update(0, np.ones(2), init(np.zeros(2)))).tolist() == [-0.5, -0.5]",
    "a specification": "importlib.util.find_spec('jax.util').name == 'jax.util'",
    "a miss": "not hasattr(jax, 'tree_mapp')",
    "what words replace": "not hasattr(jax, 'xla_computation')",
    "once more": "compat.install()\njax.tree_map(int, '1') == 1",
}
# Each keyword that is gone: how it was written, and what that comes to today.
KEYWORDS = {
    "jax.numpy.clip(a)": ("jnp.clip(a=X, a_min=1.0)", "np.clip(X, 1, None)"),
    "jax.numpy.clip(a_min)": ("jnp.clip(X, a_min=1.0)", "np.clip(X, 1, None)"),
    "jax.numpy.clip(a_max)": ("jnp.clip(X, 1.0, a_max=3)", "np.clip(X, 1, 3)"),
    "jax.nn.softmax(initial)": (
        "jax.nn.softmax(X, initial=-jnp.inf)",
        "np.exp(X) / np.exp(X).sum()",
    ),
    "jax.nn.log_softmax(initial)": (
        "jax.nn.log_softmax(X, initial=-jnp.inf)",
        "X - np.log(np.exp(X).sum())",
    ),
    "jax.pure_callback(vectorized)": (
        "jax.vmap(lambda x: jax.pure_callback(np.square, x, x, vectorized=True))(X)",
        "X ** 2",
    ),
    "jax.scipy.linalg.solve(sym_pos)": (
        "jax.scipy.linalg.solve(np.diag(X + 1), X, sym_pos=True)",
        "X / (X + 1)",
    ),
} | {
    f"jax.numpy.{name}(interpolation)": (
        f"jnp.{name}(X, {q}, interpolation='lower')",
        f"np.{name}(X, {q}, method='lower')",
    )
    for name, q in [("percentile", 40), ("nanpercentile", 40)]
    + [("quantile", 0.4), ("nanquantile", 0.4)]
}
EQUAL = {
    name: f"np.allclose({old}, {now}, rtol=1e-5)"
    for name, (old, now) in KEYWORDS.items()
}
# What JAX has is what it was: its own object, or its own warning.
SAME = """
modules = {}
for name in sorted(compat.HOMES.keys() | {path.rpartition(".")[0] for path in REMOVED}):
    try:
        modules[name] = importlib.import_module(name)
    except ImportError:
        pass
kept = {name: (m, dict(vars(m)), dir(m)) for name, m in modules.items()}
compat.install()
deprecated = 0
for name, (module, before, listed) in kept.items():
    changed = {k for k, v in vars(module).items() if before[k] is not v}
    lost = {path.partition("(")[0] for path in REMOVED.keys() - compat.NOT_SERVED}
    assert {f"{name}.{k}" for k in changed} <= lost and dir(module) == listed, name
    for k in changed:
        assert vars(module)[k].__wrapped__ is before[k], k
    for old, (words, value) in before.get("_deprecations", {}).items():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = getattr(module, old, None)
        if value is not None:
            assert found is value and str(seen[0].message) == words, old
            assert seen[0].filename == "<string>", old
            deprecated += 1
        elif f"{name}.{old}" not in REMOVED:
            assert found is None, old
assert len(kept) > 25 and deprecated > 3
"""


def fresh(code):
    """Standard output and error of a new process, which has four CPUs."""
    head = "import importlib, json, sys, warnings\nfrom haiku_template import compat\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def asked():
    """What each piece of yesterday's code came to, and what was logged."""
    code = (
        "import jax, numpy as np, jax.numpy as jnp\n"
        "jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 4)\n"
        "compat.install()\nresults = {}\n"
        "X = np.arange(5, dtype=np.float32) ** 1.5\n"
        f"for name, code in {YESTERDAY | EQUAL}.items():\n"
        "    *lines, last = code.split('\\n')\n"
        "    space = dict(globals())\n"
        "    try:\n"
        "        exec(compile('\\n'.join(lines), name, 'exec'), space)\n"
        "        results[name] = bool(eval(compile(last, name, 'eval'), space))\n"
        "    except Exception as error:\n"
        "        results[name] = repr(error)\n"
        "print(json.dumps(results))"
    )
    out, log = fresh(code)
    return json.loads(out), [line for line in log.split("\n") if "put back" in line]


@pytest.mark.parametrize("name", YESTERDAY | EQUAL)
def test_what_was_removed_works_again(asked, name):
    assert asked[0][name] is True


def test_each_keyword_of_the_table_is_served_or_says_why_not():
    rows = {path for path in REMOVED if "(" in path}
    assert rows == KEYWORDS.keys() | compat.NOT_SERVED.keys()
    assert not KEYWORDS.keys() & compat.NOT_SERVED.keys()
    assert all(compat.NOT_SERVED.values())


@pytest.mark.parametrize("name", KEYWORDS)
def test_without_asking_a_keyword_is_gone(name):
    old, _ = KEYWORDS[name]
    if tuple(map(int, REMOVED[name].package.split()[1].split("."))) <= (
        jax.__version_info__
    ):
        # What `pure_callback` does not know it hands on to the callback.
        with pytest.raises((TypeError, NotImplementedError)):
            eval(old, {"jax": jax, "jnp": jax.numpy, "np": np, "X": np.ones(5)})


def test_each_name_is_logged_once_with_where_it_was_used_and_what_to_write(asked):
    (line,) = [line for line in asked[1] if "jax.tree_map " in line]
    assert "put back for an attribute:1: jax.tree_map was removed in jax 0.6.0" in line
    assert line.endswith("write jax.tree.map")
    (line,) = [line for line in asked[1] if "jax.numpy.clip(a_max) " in line]
    assert "put back for jax.numpy.clip(a_max):1: jax.numpy.clip(a_max) was" in line
    names = [line.split(" was removed")[0].split(": ")[-1] for line in asked[1]]
    assert len(names) == len(set(names)) and "jax.util.unzip2" in names


# What a run of yesterday's code ends with, and what is said of it.
MISSED = {
    "a function": ("jax.tree_map(int, '1')", "write jax.tree.map; or config.compat"),
    "an import": ("from jax import tree_leaves", "write jax.tree.leaves; or config"),
    "a module": ("import jax.util", "jax.util was removed in"),
    "a name of a module that is gone": ("from jax.config import config", "; or config"),
    "optax": ("import optax\noptax.additive_weight_decay", "add_decayed_weights; or"),
    "a type of NumPy's": (
        "import numpy\nnumpy.zeros(2, numpy.object)",
        "numpy.object was removed in numpy 1.24.0; write object; or config.compat",
    ),
    "a function of NumPy's": ("import numpy\nnumpy.product", "write numpy.prod; or"),
    "a keyword": ("jnp.clip(1.0, a_min=0.0)", "jax.numpy.clip(a_min) was removed in"),
    "an error behind another": (
        "try:\n    jax.tree_map\nexcept AttributeError as error:\n"
        "    raise ValueError('a layer') from error",
        "write jax.tree.map; or config.compat = True puts it back",
    ),
    "a name that nothing replaces": (
        "jax.core.typecheck(0, 1)",
        "nothing replaces it; but config.compat = True puts it back",
    ),
    "the keyword of a class": (
        "jax.ShapeDtypeStruct((1,), jnp.float32, named_shape={})",
        "ShapeDtypeStruct(named_shape) was removed in",
    ),
    "a keyword of a function of the same name": (
        "def clip(x): return x\nclip(1.0, a_min=0.0)",
        "if it was jax.numpy.clip: ",
    ),
    "an error that no sentence shows": (
        "try:\n    jax.tree_map\nexcept AttributeError:\n"
        "    raise ValueError('a layer') from None",
        "",
    ),
    "an error without words": (
        "class Mute(TypeError):\n    def __str__(self): raise RuntimeError\n"
        "try:\n    raise Mute\nexcept Mute:\n    raise ValueError('a layer')",
        "",
    ),
    "a name for which there are words": ("jax.xla_computation", 'compiler_ir("hlo")'),
    "a misspelled name": ("jax.tree_mapp", ""),
    "a name of a user's": ("Path('a').tree_map", ""),
    "a keyword of a user's": ("(lambda x: x)(a_min=1)", ""),
}


@pytest.fixture(scope="module")
def advised():
    code = (
        "import jax, jax.numpy as jnp\nfrom pathlib import Path\nsaid = {}\n"
        f"for name, (code, _) in {MISSED}.items():\n"
        "    try:\n"
        "        exec(code)\n"
        "    except Exception as error:\n"
        "        said[name] = compat.advice(error)\n"
        "print(json.dumps(said))"
    )
    return json.loads(fresh(code)[0])


@pytest.mark.parametrize("name", MISSED)
def test_a_removed_name_is_said_to_be_one(advised, name):
    words = MISSED[name][1]
    assert words in advised[name] and bool(words) == bool(advised[name])
    words_alone = "xla_computation", "named_shape"
    is_back = not any(x in advised[name] for x in words_alone)
    assert ("config.compat" in advised[name]) == (bool(words) and is_back)


def test_what_jax_has_stays_its_own(asked):
    fresh("REMOVED = compat.removed()\n" + SAME)


def test_without_asking_jax_is_untouched():
    code = (
        "import jax, jax.numpy, haiku, optax, jax.experimental.pjit\n"
        "modules = [m for m in sys.modules.values() if m.__name__[:3] == 'jax']\n"
        "before = [(m, set(dir(m)), vars(m).get('__getattr__')) for m in modules]\n"
        "import haiku_template.runs\n"
        "for module, names, own in before:\n"
        "    assert vars(module).get('__getattr__') is own\n"
        "    new = set(dir(module)) - names\n"
        "    assert all(f'{module.__name__}.{n}' in sys.modules for n in new), new\n"
        "assert not compat.HOMES.keys() - {'jax.core'} & sys.modules.keys()\n"
        "assert not hasattr(jax, 'tree_map')"
    )
    fresh(code)


def test_the_table_has_all_names_that_numpy_says_it_removed():
    gone = importlib.import_module("numpy._expired_attrs_2_0").__expired_attributes__
    gone = {*gone, *getattr(np, "__former_attrs__", ())}
    assert len(gone) > 50 and {f"numpy.{name}" for name in gone} <= REMOVED.keys()


@pytest.mark.parametrize("row", REMOVED.values(), ids=REMOVED.keys())
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_true_of_this_jax(row):
    package, version = row.package.split()
    here = importlib.metadata.version(package).split(".")[:3]
    later = [*map(int, version.split("."))] > [int(x) for x in here if x.isdigit()]
    name, _, argument = row.name.removesuffix(")").partition("(")
    if name.startswith("import "):
        with pytest.raises(ImportError):
            importlib.import_module(name.removeprefix("import "))
    elif argument:
        assert argument not in inspect.signature(compat._find(name)).parameters
    elif later:
        compat._find(name)
    else:
        with pytest.raises((AttributeError, ImportError)):
            compat._find(name)
    if compat.PATH.fullmatch(row.instead):
        compat._find(row.instead)
    home = name if name in compat.HOMES else name.rpartition(".")[0]
    compat._find(compat.HOMES.get(home, "jax"))


MODEL = """
from jax import tree_map
from jax.config import config
from haiku_template.models import MODELS

def model(**keys):
    return tree_map(lambda make: make(**keys), MODELS["mlp"])
"""


@pytest.mark.slow
def test_a_run_whose_model_uses_removed_names_trains_and_is_evaluated(tmp_path):
    (tmp_path / "third_party.py").write_text(MODEL)
    words = [f"--config={ROOT}/configs/digits.py", "--workdir=run", "--device=cpu"]
    words += ["--config.num_steps=2", "--config.model.name=third_party:model"]
    done = run_command("train", *words, cwd=tmp_path)
    assert done.returncode == 1 and "cannot import name 'tree_map'" in done.stderr
    assert "write jax.tree.map; or config.compat = True puts it back" in done.stderr
    done = run_command("train", *words, "--config.compat=True", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"put back for {tmp_path}/third_party.py:2: jax.tree_map was" in done.stderr
    done = run_command("evaluate", "--workdir=run", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 0 and "third_party.py:2" in done.stderr, done.stderr


def test_a_config_file_that_needs_a_removed_name_is_told_how(tmp_path):
    (tmp_path / "old.py").write_text("import jax\nx = jax.tree_map(abs, 1)")
    done = run_command("train", "--config=old.py", "--workdir=run", cwd=tmp_path)
    assert done.returncode == 64 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: old.py, line 2: module 'jax' has no attribut")
    assert "config.compat = True puts it back, and in a config file" in done.stderr


OLD = """'''An old script.'''
import os
import sys
os.environ["JAX_NUM_CPU_DEVICES"] = "3"  # JAX reads it as it is imported.
{imports}
import jax
import pickle
from beside import word
from absl import app, flags

flags.DEFINE_integer("number", 1, "A number.")

class Example:
    pass

def main(argv):
    assert type(pickle.loads(pickle.dumps(Example()))) is Example
    print(argv, flags.FLAGS.number, word, jax.device_count())
    print(__name__, __file__, __doc__, sys.argv, sys.path[0])
    print({uses})
    sys.exit(7)

if __name__ == "__main__":
    app.run(main)
"""
USES = "jax.tree_map(abs, -1), optix.adam(0.1).init, optimizers.adam(0.1).update_fn"


def run_old(folder, *words, **variables):
    """Runs Python in another folder than the script's."""
    return subprocess.run(
        [sys.executable, *words, "scripts/old.py", "a", "--number=4"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def scripts(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("word = 'beside'")
    return tmp_path / "scripts"


def test_the_command_runs_a_script_as_python_does(scripts):
    (scripts / "old.py").write_text(OLD.format(imports="", uses="1"))
    plain = run_old(scripts.parent, PYTHONPATH=str(ROOT))
    words = ("-m", "haiku_template.compat")
    done = run_old(scripts.parent, *words, PYTHONPATH=str(ROOT))
    assert plain.returncode == done.returncode == 7, plain.stderr + done.stderr
    assert done.stdout == plain.stdout and "] 4 beside 3\n" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "first",
    [
        "import haiku",
        pytest.param("import optax", marks=pytest.mark.slow),
        pytest.param("import jax.experimental.stax", marks=pytest.mark.slow),
    ],
)
def test_the_command_runs_a_script_with_removed_names(scripts, first):
    imports = f"{first}\nfrom jax.experimental import optix, optimizers"
    (scripts / "old.py").write_text(OLD.format(imports=imports, uses=USES))
    done = run_old(scripts.parent, PYTHONPATH=str(ROOT))
    assert done.returncode == 1 and "Error: " in done.stderr
    words = ("-m", "haiku_template.compat")
    done = run_old(scripts.parent, *words, PYTHONPATH=str(ROOT))
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 <function "), done.stdout
    for line, name in ((6, "experimental.optix"), (21, "tree_map")):
        assert f"put back for scripts/old.py:{line}: jax.{name} was" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "a script is needed; possible is python -m haiku_template.compat"),
        (["none.py", "--a=1"], "none.py cannot be read; possible is"),
    ],
)
def test_without_a_script_the_command_is_a_sentence(words, sentence):
    done = run_command("compat", *words)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith(f"error: {sentence}") and done.stderr.count("\n") == 1
