"""Removed names in a folder of code: each is found, and nothing else."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_doctor import __main__ as doctor
from jax_doctor.code import files
from jax_doctor.code.names import REMOVED

ROOT = Path(__file__).parents[2]
# A line of code, and of the name that is gone: itself, its version, what to write.
GONE = """
import jax; jax.tree_map(f, x)
> jax.tree_map, jax 0.6.0, jax.tree.map
from jax import tree_multimap
> jax.tree_multimap, jax 0.3.16, jax.tree.map
from jax import numpy as np, tree_leaves as leaves
> jax.tree_leaves, jax 0.6.0, jax.tree.leaves
def f(): from jax import tree_flatten
> jax.tree_flatten, jax 0.6.0, jax.tree.flatten
import jax as J; class_ = [J.tree_unflatten for _ in x]
> jax.tree_unflatten, jax 0.6.0, jax.tree.unflatten
import jax; jax.device_put_replicated(x, devices=d)
> jax.device_put_replicated, jax 0.10.0, jax.device_put(numpy.stack([x] *
import jax; x = jax.device_put_sharded
> jax.device_put_sharded, jax 0.10.0, jax.device_put(numpy.stack(shards), sharding)
import jax.numpy as jnp; x: jnp.DeviceArray = 1
> jax.numpy.DeviceArray, jax 0.4.14, jax.Array
from jax import numpy; numpy.in1d(a, b)
> jax.numpy.in1d, jax 0.4.24, jax.numpy.isin, which keeps the shape
import jax.numpy as jnp; jnp.clip(x, a_min=0)
> jax.numpy.clip(a_min), jax 0.10.0, min
from jax.numpy import percentile as p; p(x, 5, interpolation="linear")
> jax.numpy.percentile(interpolation), jax 0.8.0, method
from jax.scipy import linalg; linalg.solve(a, b, sym_pos=True)
> jax.scipy.linalg.solve(sym_pos), jax 0.4.21, assume_a="pos"
import jax.lib.xla_bridge
> jax.lib.xla_bridge, jax 0.8.0, jax.extend.backend
import jax; f"{jax.lib.xla_bridge.get_backend().platform}"
> jax.lib.xla_bridge.get_backend, jax 0.8.0, jax.extend.backend.get_backend
from jax.lib.xla_client import Device
> jax.lib.xla_client.Device, jax 0.5.0, jax.Device
from jax.config import config
> jax.config.config, jax 0.4.25, from jax import config
import jax.config
> import jax.config, jax 0.4.29, import jax, then jax.config
from jax.experimental import host_callback as hcb
> jax.experimental.host_callback, jax 0.8.0, jax.pure_callback
from jax.experimental.maps import xmap
> jax.experimental.maps.xmap, jax 0.4.31, jax.shard_map
from jax.experimental import optimizers; optimizers.adam(1e-3)
> jax.experimental.optimizers, jax 0.3.16, jax.example_libraries.optimizers
import jax; jax.ops.index_update(x, jax.numpy.s_[1], y)
> jax.ops.index_update, jax 0.3.2, x.at[i].set(y)
from jax import random; random.KeyArray
> jax.random.KeyArray, jax 0.4.24, jax.Array
from jax import linear_util as lu; lu.wrap_init(f)
> jax.linear_util, jax 0.4.24, jax.extend.linear_util
from jax.util import safe_map, unzip2
> jax.util, jax 0.8.0, a copy
from jax import core; core.Primitive("p")
> jax.core.Primitive, jax 0.6.0, jax.extend.core.Primitive
import jax; isinstance(x, jax.core.ConcreteArray)
> jax.core.ConcreteArray, jax 0.4.36, nothing
from jax.sharding import PositionalSharding
> jax.sharding.PositionalSharding, jax 0.7.0, jax.sharding.NamedSharding
import jax; lax = jax.lax; y = lax.tie_in(x, y)
> jax.lax.tie_in, jax 0.4.29, its second argument
import jax; a = b = jax; b.tree_leaves(x)
> jax.tree_leaves, jax 0.6.0, jax.tree.leaves
import jax; a: object = jax; a.tree_leaves(x)
> jax.tree_leaves, jax 0.6.0, jax.tree.leaves
from jax.interpreters import pxla; pxla.Mesh(devices, names)
> jax.interpreters.pxla.Mesh, jax 0.4.11, jax.sharding.Mesh
import jax; jax.xla_computation(f)(x)
> jax.xla_computation, jax 0.4.34, jax.jit(f).lower
import haiku as hk; hk.experimental.named_call(f)
> haiku.experimental.named_call, dm-haiku 0.0.10, jax.named_call
import optax; optax.additive_weight_decay(0.1)
> optax.additive_weight_decay, optax 0.1.8, optax.add_decayed_weights
from jaxlib.xla_extension import XlaRuntimeError
> jaxlib.xla_extension.XlaRuntimeError, jaxlib 0.6.1, jax.errors.JaxRuntimeError
"""
CASES = re.findall(r"(.*)\n> (\S+|import \S+), (\S+ \S+), (.*)\n", GONE)
LOOK_ALIKES = [
    "import jax\njax.tree_util.tree_map(f, x); jax.tree.map(f, x)",
    "import jax\ndef tree_map(f, x): ...\ntree_map(f, x)",
    "import jax\nclass A:\n    def f(self): self.jax.tree_map(x)",
    "import jax\n# jax.tree_map\n'jax.tree_map'; x = '''import jax.util'''",
    "import jax\ndef f(jax): jax.tree_map(x)",
    "import jax\ndef f():\n    jax = Mine()\n    return lambda: jax.tree_map(x)",
    "import jax\n[jax.tree_map for jax in xs]",
    "import jax\nwith mine() as jax.x, mine() as y: y.tree_map",
    "from . import jax\njax.tree_map(f, x)",
    "from .jax.config import config",
    "import mine as jax\njax.tree_map(f, x)",
    "import numpy as jnp  # not jax\njnp.DeviceArray(x); jnp.clip(x, a_min=0)",
    "import jax\njax.config.update('jax_enable_x64', True)\nfrom jax import config",
    "import jax\nx.device_put_sharded; x.jax.util; jax.numpy.clip(x, 0, max=1)",
    "import jax\ndict(a_min=jax.numpy.clip(x)); jax.numpy.max(x, interpolation=1)",
    "try:\n    from jax import tree_map\nexcept ImportError:\n"
    "    from jax.tree_util import tree_map",
    "try:\n    from jax.tree_util import tree_map\nexcept (ImportError, KeyError):\n"
    "    from jax import tree_map",
    "try:\n    from jax.experimental import optimizers\nexcept ImportError:\n"
    "    from jax.example_libraries import optimizers\noptimizers.adam",
    "import jax\ntree_map = jax.tree.map if hasattr(jax, 'tree') else jax.tree_map",
    "import jax\nif jax.__version_info__ < (0, 6):\n    jax.tree_map(f, x)",
    "import jax\ndef f():\n    if hasattr(jax, 'tree'):\n        return jax.tree.map\n"
    "    return jax.tree_map",
    "from contextlib import suppress\nwith suppress(ImportError):\n"
    "    from jax import tree_map",
    "from mine import JAX_VERSION\nimport jax\nif JAX_VERSION > (0, 6): ...\n"
    "else:\n    jax.tree_map(f, x)",
    "import jax\njax.tree_map = jax.tree.map\njax.tree_map(f, x)",
    "import jax\nif not hasattr(jax, 'tree_map'):\n    jax.tree_map = jax.tree.map",
    "import jax.numpy as jnp\nclass A:\n    jnp = 3\njnp.round(x)",
    "def f(): import jax\njax.tree_map  # Of nobody.",
]


def found(folder):
    report = files.report(folder)
    assert not report["not_read"]
    return [
        (Path(row["file"]).name, row["line"], row["name"]) for row in report["names"]
    ]


@pytest.mark.parametrize(("code", "name", "version", "instead"), CASES)
def test_a_removed_name_is_found_with_its_version_and_what_to_write(
    tmp_path, code, name, version, instead
):
    (tmp_path / "a.py").write_text(f"\n\n{code}")
    report = files.report(tmp_path)
    (row,) = report["names"]
    assert (row["name"], row["removed_in"]) == (name, version) and not report["works"]
    assert row["line"] == 3 and row["instead"].startswith(
        instead.replace("nothing", "")
    )
    (line, _) = files.lines(report)
    words = f"write {instead}" if instead != "nothing" else "nothing replaces it"
    assert f"a.py:{row['line']}: {name} was removed in {version}; {words}" in line


@pytest.mark.parametrize("code", LOOK_ALIKES)
def test_what_only_looks_like_a_removed_name_is_no_finding(tmp_path, code):
    (tmp_path / "a.py").write_text(code)
    assert found(tmp_path) == []


def test_each_line_counts_once_and_a_more_precise_name_again(tmp_path):
    code = "from jax.lib import xla_bridge as xb\nxb.get_backend()\nxb.foo()\n"
    code += "from jax.util import a, b\nimport jax\njax.tree_map(jax.tree_map, x)\n"
    code += "(jax\n .tree_leaves)(x)"
    (tmp_path / "a.py").write_text(code)
    assert found(tmp_path) == [
        ("a.py", 1, "jax.lib.xla_bridge"),
        ("a.py", 2, "jax.lib.xla_bridge.get_backend"),
        ("a.py", 4, "jax.util"),
        ("a.py", 6, "jax.tree_map"),
        ("a.py", 8, "jax.tree_leaves"),
    ]


OLD = "import jax\njax.tree_map"


def test_the_code_of_others_is_left_out_unless_it_is_asked_for(tmp_path):
    for name in (".git", ".venv", "site-packages", "env", "mine", ".hidden"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / f"{name.strip('.')}.py").write_text(OLD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert [name for name, *_ in found(tmp_path)] == ["hidden.py", "mine.py"]
    inside = tmp_path / "site-packages"
    assert found(inside) == [("site-packages.py", 2, "jax.tree_map")]
    assert found(inside / "deep" / "site-packages.py") == found(inside)


def test_links_are_read_once_and_never_in_circles(tmp_path):
    (tmp_path / "a.py").write_text(OLD)
    (tmp_path / "b.py").symlink_to("a.py")
    (tmp_path / "round").symlink_to(tmp_path)
    assert found(tmp_path) == [("a.py", 2, "jax.tree_map")]


def test_what_cannot_be_read_is_one_line_and_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 2000)
    contents = {
        "python2.py": "import jax\nprint 'jax'",
        "binary.py": "jax \0",
        "huge.py": "import jax" + " " * 2000,
        "deep.py": "jax" + "(" * 900,
        "wrong.ipynb": '{"jax": 1}',
        "text.ipynb": "jax",
        "good.py": OLD,
        "unrelated.py": "print 'no mention'",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"x = 'jax \xe9'")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    report = files.report(tmp_path)
    unread = {Path(row["file"]).name: row for row in report["not_read"]}
    assert unread.keys() == {*contents, "latin.py", "gone.py", "pipe.py"} - {
        "good.py",
        "unrelated.py",
    }
    assert unread["python2.py"]["line"] == 2
    assert "larger than" in unread["huge.py"]["why"]
    assert unread["gone.py"]["why"] == "No such file or directory"
    assert [row["line"] for row in report["names"]] == [2]
    *lines, last = files.lines(report)
    assert len(lines) == 10 and "names: 1;" in last and "not read: 9" in last


def test_a_deep_expression_and_a_string_that_warns_are_read(tmp_path, recwarn):
    code = "import jax\nx = " + " + ".join(["jax.tree_map"] * 600) + "\n'\\d'"
    (tmp_path / "a.py").write_text(code)
    assert found(tmp_path) == [("a.py", 2, "jax.tree_map")] and not recwarn.list


def test_cells_of_a_notebook_share_their_imports(tmp_path):
    cells = [
        ["%matplotlib inline\n", "!pip install \\\n", "  jax\n", "import jax, os\n"],
        ["%%bash\n", "jax.tree_map ("],
        "# A comment\n%%html\n<jax.tree_map>",
        [
            "%%time\n",
            "jax?\n",
            "x = !ls\n",
            "y = (5\n",
            "  % 3)\n",
            "jax.tree_map(f, x)",
        ],
        "jax.tree_map if else",
        "from jax import tree_leaves",
    ]
    cells = [{"cell_type": "code", "source": source} for source in cells]
    cells.insert(1, {"cell_type": "markdown", "source": "jax.tree_map"})
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    report = files.report(tmp_path)
    places = [(row["cell"], row["line"], row["name"]) for row in report["names"]]
    assert places == [(5, 6, "jax.tree_map"), (7, 1, "jax.tree_leaves")]
    assert [(row["cell"], row["line"]) for row in report["not_read"]] == [(6, 1)]
    assert f"{tmp_path}/a.ipynb:cell 5:6: jax.tree_map was" in files.lines(report)[0]


FOLDERS = ("benchmarks", "configs", "docs", "examples", "haiku_template", "haiku_text")
FOLDERS += ("jax_doctor", "launch", "notebooks", "skeleton", "tests")


@pytest.mark.parametrize("folder", FOLDERS)
def test_this_repository_uses_no_removed_name(folder):
    assert found(ROOT / folder) == []  # Not build/, with the code of others.


def test_the_command_prints_a_line_for_each_place_and_imports_no_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('imported')")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xc3\xbc.py")).write_text(OLD)
    command = [sys.executable, "-m", "haiku_template.doctor", "--code", "."]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    run["env"] = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, check=False, **run)
    first, last = done.stdout.splitlines()
    assert done.returncode == doctor.UNAVAILABLE and not done.stderr
    words = "jax.tree_map was removed in jax 0.6.0; write jax.tree.map"
    assert first == rf"\udcff\xfc.py:2: {words}"
    assert re.fullmatch(
        r"--code=\.: uses of removed names: 1; files: 2, 1 with .*", last
    )


def test_a_reader_that_has_read_enough_is_no_error(tmp_path):
    (tmp_path / "a.py").write_text("import jax" + "\njax.tree_map" * 2000)
    command = f"{sys.executable} -m haiku_template.doctor --code {tmp_path} | true"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_json_and_exit_codes(tmp_path, capsys):
    (tmp_path / "a.py").write_text(OLD)
    assert doctor.main([f"--code={tmp_path}", "--json"]) == doctor.UNAVAILABLE
    (row,) = json.loads(capsys.readouterr().out)["names"]
    assert row == {
        "file": f"{tmp_path}/a.py",
        "cell": 0,
        "line": 2,
        "name": "jax.tree_map",
        "removed_in": "jax 0.6.0",
        "instead": "jax.tree.map",
    }
    (tmp_path / "a.py").write_text("import jax")
    assert doctor.main([f"--code={tmp_path}"]) == doctor.WORKS
    assert "uses of removed names: none; files: 1 (" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--code=nowhere"])
    assert ended.value.code == doctor.USAGE
    assert "--code=nowhere does not exist" in capsys.readouterr().err


def test_the_table_has_the_names_that_published_models_use():
    assert len(REMOVED) > 400 and len(CASES) >= 30
