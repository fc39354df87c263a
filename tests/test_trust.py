"""What the config of a run names is code, and others may have written it."""

import ast
import json
import os
import subprocess
import sys

import pytest

from haiku_template import config as configs
from haiku_template import trust
from haiku_template.config import default_config
from haiku_template.errors import ConfigError
from haiku_template.runs import Run
from tests.runs import ROOT, run_command

KEYS = ("task", "model", "data", "optimizer", "optimizer.schedule", "step")
MINE = """
import functools, os, subprocess
from collections import OrderedDict
from subprocess import Popen
from haiku_template.storage.workdir import write_atomically
from haiku_template.training import Task, classification
from theirs import handed, wrapped

def model(num_outputs, axis_name): pass
bound = functools.partial(model, num_outputs=3)
shell = functools.partial(subprocess.run, shell=True)
task = Task(model)
decorated = functools.lru_cache(model)
system = os.system
class Own(Popen): pass
"""
OWN = {
    "__init__": "",
    "model": "from haiku_template.models import mlp\n\n"
    "def model(num_outputs, axis_name):\n    return mlp(num_outputs, width=4)\n",
    "data": "from haiku_template.data import digits\n\n"
    "def data(spec):\n    return digits(spec)\n",
    "task": "from haiku_template.training import classification\n\n"
    "def task(outputs, batch):\n    return classification.values(outputs, batch)\n",
    "config": """
from haiku_template.config import default_config

def get_config():
    config = default_config()
    config.num_steps = 2
    for key in ("model", "data", "task"):
        config[key] = {"name": f"mine.{key}:{key}"}
    return config
""",
}
THEIRS = """
import functools
def handed(**keys): pass
def wrapped(**keys): pass
"""


def saved(workdir, key, name, **keys):
    """A workdir whose config names code."""
    values = configs.to_dict(default_config())
    if key == "step":
        values["step"] = name.partition(":")[0]
    elif key == "optimizer.schedule":
        values["optimizer"] |= {"schedule": name} | keys
    else:
        values[key] = {"name": name} | keys
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(values))
    return workdir


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory on the path, with modules that tests write."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "timeit:timeit", "subprocess:getoutput", "pydoc:pipepager"),
        *("builtins:dict", "builtins:exec", "posix:system", "os.path:join"),
        *("jax:jit", "optax:adam", "numpy:load", "absl.app:run", "__main__:x"),
        *("nowhere:f", "../mine:f", ":f", "a..b:f", "no module:f"),
    ],
)
def test_what_is_not_of_the_current_directory_is_refused(here, key, name, monkeypatch):
    monkeypatch.delitem(sys.modules, "__main__")
    with pytest.raises(ConfigError, match=f"config.{key}.*{name.partition(':')[0]}"):
        configs.of_run(saved(here / "run", key, name))


COMMANDS = {
    "evaluate": [],
    "predict": ["--output=out.npz"],
    "export": ["--format=stablehlo", "--output=out"],
    "generate": [],
    "verify": ["--against=nowhere:f"],
}
SETUP = "import os; os.system('touch ran')"
RUN = {  # Keys that a function takes: with others it would not be called anyway.
    "os:system": {"command": "touch ran"},
    "timeit:timeit": {"setup": SETUP, "number": 1},
    "subprocess:getoutput": {"cmd": "touch ran"},
}


@pytest.mark.slow(but="os:system-evaluate")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", RUN)
def test_no_command_runs_what_a_config_names(tmp_path, command, name):
    for key in ("task", "optimizer")[: 2 if name == "timeit:timeit" else 1]:
        saved(tmp_path / "run", key, name, **RUN[name])
        flags = ["--workdir=run", *COMMANDS[command]]
        done = run_command(command, *flags, cwd=tmp_path, JAX_PLATFORMS="cpu")
        assert not (tmp_path / "ran").exists(), done.stderr
        assert done.returncode == 64, done.stderr
        assert "imported" in done.stderr
        assert "Traceback" not in done.stderr and "--trust" not in done.stderr


def test_commands_that_run_a_config_s_code_are_all_here():
    files = [
        x for name in ("template", "text") for x in ROOT.glob(f"haiku_{name}/*.py")
    ]
    opening = {file.stem for file in files if "cli.open_run(" in file.read_text()}
    assert opening == {*COMMANDS}


@pytest.fixture(scope="module")
def of_one_s_own(tmp_path_factory):
    """A folder with a package, and a run of its config, which names three files."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine").mkdir()
    for name, text in OWN.items():
        (folder / "mine" / f"{name}.py").write_text(text)
    done = run_command(
        "train", "--config=mine/config.py", "--workdir=run", "--device=cpu", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert "names code" not in done.stderr  # One's own command line names it.
    return folder


@pytest.mark.slow(but="evaluate")
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_says_once_whose_code_it_runs(of_one_s_own, command):
    flags = ["--workdir=run", "--device=cpu", *COMMANDS[command]]
    done = run_command(command, *flags, cwd=of_one_s_own)
    lines = [x for x in done.stderr.splitlines() if f"{of_one_s_own / 'mine'}" in x]
    names = [f"{of_one_s_own / 'mine' / name}.py" for name in OWN if name != "config"]
    assert len(lines) == 1 and "run names code, which is run: " in lines[0], done.stderr
    assert [lines[0].count(name) for name in names] == [1] * len(names)


@pytest.mark.parametrize("key", KEYS[:-1])
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("model", None),
        ("bound", None),
        ("task", None),
        ("decorated", None),
        ("classification", None),
        ("Own", None),
        ("handed", None),  # Of another file of the current directory.
        ("Popen", "subprocess"),
        ("OrderedDict", "collections"),
        ("system", "posix"),
        ("shell", "subprocess"),
        ("write_atomically", "haiku_template.storage.workdir"),
        ("__class__", "builtins"),
    ],
)
def test_a_module_hands_on_nothing_that_it_imports(
    here, one_device, key, name, home, monkeypatch
):
    (here / "mine.py").write_text(MINE)
    (here / "theirs.py").write_text(THEIRS)
    workdir = saved(here / "run", key, f"mine:{name}")
    if home is None:
        Run.open(workdir, one_device)
        return
    with pytest.raises(ConfigError, match=f"is of {home}, which mine only imports"):
        Run.open(workdir, one_device)


def test_a_dotted_function_is_none(here, one_device):
    (here / "mine.py").write_text("import os\n")
    for name in ("mine:os.system", "mine:os", "mine:"):
        with pytest.raises(ConfigError, match="has no |of type module"):
            Run.open(saved(here / "run", "task", name), one_device)


@pytest.mark.parametrize("name", ["haiku_template.storage.workdir:write_atomically"])
def test_of_this_project_only_its_tables_are_named(here, one_device, name):
    with pytest.raises(ConfigError, match="was not called"):
        Run.open(saved(here / "run", "task", name), one_device)
    Run.open(saved(here / "run", "model", "haiku_text.models:gpt"), one_device)


@pytest.mark.parametrize("name", ["mlp", "wide", "gpt", "small"])
def test_a_file_may_bind_the_keys_of_a_model_that_a_table_holds(here, one_device, name):
    (here / "mine.py").write_text(
        "from functools import partial\nfrom haiku_template.models import mlp\n"
        "from haiku_text.models.gpt import gpt\n"
        "small, wide = partial(gpt, num_layers=1), partial(mlp, width=16)\n"
    )
    Run.open(saved(here / "run", "model", f"mine:{name}"), one_device)


@pytest.fixture(params=["site-packages", "a virtual environment", "elsewhere"])
def outside(request, here, tmp_path_factory, monkeypatch):
    """A folder on the path that is not trusted; two of the three lie right here."""
    folder = here / "env/lib/site-packages"
    if request.param == "a virtual environment":
        folder = here / "env/code"
        (here / "env").mkdir()
        (here / "env/pyvenv.cfg").touch()
    elif request.param == "elsewhere":
        folder = tmp_path_factory.mktemp("elsewhere")
    package = folder / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "models.py").write_text("def model(**keys): pass")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return package


@pytest.mark.parametrize("root", ["package", "folder", "file"])
def test_what_lies_elsewhere_is_trusted_by_name_or_path(
    here, one_device, outside, root, caplog
):
    workdir = saved(here / "run", "model", "package.models:model")
    with pytest.raises(ConfigError, match="--trust=package adds it"):
        Run.open(workdir, one_device)
    if root == "file":  # Its package is imported first.
        with pytest.raises(ConfigError, match=r"__init__\.py, and was not imported"):
            configs.of_run(workdir, [str(outside / "models.py")])
        return
    (outside / "__init__.py").write_text("")
    roots = [root if root == "package" else str(outside)]
    Run.open(workdir, one_device, trust=roots)
    [line] = [x.getMessage() for x in caplog.records]
    assert line == f"{workdir} names code, which is run: " + ", ".join(
        str(outside / name) for name in ("__init__.py", "models.py")
    )
    with pytest.raises(ConfigError, match="--trust=nowhere is neither"):
        Run.open(workdir, one_device, trust=["nowhere"])


def test_what_lies_inside_of_a_workdir_is_refused(here):
    """Below the current directory too, and whatever is trusted beside it."""
    workdir = saved(here / "run", "model", "run.theirs:model")
    (workdir / "theirs.py").write_text("raise SystemExit('imported')")
    for roots in ([], ["run.theirs"], [str(workdir)]):
        with pytest.raises(ConfigError, match=r"inside that very .*theirs\.py"):
            configs.of_run(workdir, roots)


@pytest.mark.slow
def test_trust_is_a_flag(tmp_path, tmp_path_factory):
    elsewhere, workdir = tmp_path_factory.mktemp("elsewhere"), tmp_path / "run"
    (elsewhere / "theirs.py").write_text("")
    saved(workdir, "model", "theirs:model")
    for flags in (["--trust=json", "--trust=jax,theirs"], [f"--trust=jax,{elsewhere}"]):
        done = run_command(
            "evaluate",
            f"--workdir={workdir}",
            *flags,
            cwd=tmp_path,
            PYTHONPATH=f"{ROOT}{os.pathsep}{elsewhere}",
        )
        assert done.returncode == 64 and "theirs.py has no model" in done.stderr


RESOLVERS = "resolve", "make", "users_module"  # Functions of `registry.py`.


def test_every_name_that_is_resolved_is_checked_in_a_saved_config():
    """The census: a new key with a name of code must be checked, too."""
    trains = {"writers", "hooks", "loop", "--experiment", "--against", "--inputs"}
    known = {"model", "data", "task", "optimizer", "optimizer.schedule", "step"}
    asked = set()
    for path in [*ROOT.glob("haiku_t*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", None)
            name = name or getattr(getattr(node, "func", None), "attr", None)
            if isinstance(node, ast.Call) and name in RESOLVERS:
                key, *names = [*node.args, None]
                is_ours = names and isinstance(names[0], ast.Constant)
                if isinstance(key, ast.Constant) and not is_ours:
                    asked.add(key.value)
            elif isinstance(node, ast.Call) and name == "import_module":
                if isinstance(node.args[0], ast.Constant):
                    continue  # Named here, and by no config.
                assert path.name in ("registry.py", "compat.py", "published.py"), path
    assert asked == known | trains
    values = default_config()
    for key in ("model", "data", "task", "optimizer"):
        values[key].name = "a:b"
    values.optimizer.schedule, values.step = "a:b", "a"
    found = {key.removesuffix(".name") for key in configs.code_names(values)}
    assert found == known


# In a process of its own: an audit hook stays. What it hears of is what must not be.
WALK = """
import json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import haiku, jax, optax, orbax.checkpoint  # What a command has.
import haiku_text.data, haiku_text.models, haiku_text.tasks
from haiku_template import config, trust
from haiku_template.training import experiment
from haiku_template.errors import ConfigError

modules, heard = set(sys.modules), []
def hook(event, args):
    if not hearing:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    if event == "import" and args[0] in modules:
        return
    if writes or event in EVENTS or event.startswith(("os.spawn", "os.exec")):
        heard.append((event, str(args)[:200], asked))
EVENTS = ["import", "subprocess.Popen", "os.system", "os.posix_spawn", "os.fork"]
EVENTS += ["os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link"]
EVENTS += ["socket.connect", "socket.bind", "ctypes.dlopen", "exec", "compile"]
EVENTS += ["shutil.rmtree", "webbrowser.open", "pty.spawn", "os.kill", "os.chmod"]

names = json.loads(Path(sys.argv[1]).read_text())
workdir, count, asks, hearing = Path(sys.argv[2]), 0, 0, False
workdir.mkdir()
sys.addaudithook(hook)
saved, seen = config.default_config(), set()
for key in ("task", "model", "data", "optimizer"):
    saved[key].name = "a:b"
saved.optimizer.schedule, saved.step = "a:b", "a"
keys = [*config.code_names(saved)]
for number, asked in enumerate(names):
    module = asked.partition(":")[0]
    # Each key for the first callable of a module, and by turns for the others.
    for key in keys if module not in seen else [keys[number % len(keys)]]:
        asks, hearing = asks + 1, True
        try:
            trust.check_files(key, asked, workdir, ())
        except ConfigError:
            count += 1
        else:
            heard.append(("passed", key, asked))
        hearing = False
    seen.add(module)
print(json.dumps({"refused": count, "asks": asks, "heard": heard[:20]}))
"""
LIST = """
import contextlib, importlib, io, json, pkgutil, sys, warnings
warnings.simplefilter("ignore")
SIDE_EFFECTS = ("antigravity", "this", "idlelib", "test", "turtle", "tkinter", "__")
found = sorted(sys.stdlib_module_names)
for name in list(found):
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()):
        if not name.startswith(SIDE_EFFECTS):
            path = importlib.import_module(name).__path__
            found += [f"{name}.{x.name}" for x in pkgutil.iter_modules(path)]
found += ["jax", "jax.numpy", "numpy", "optax", "absl.app", "haiku", "pip", "pytest"]
names = []
for name in found:
    names.append(f"{name}:main")
    with contextlib.suppress(BaseException), contextlib.redirect_stdout(io.StringIO()):
        if not any(p.startswith(SIDE_EFFECTS) for p in name.split(".")):
            module = importlib.import_module(name)
            names += [f"{name}:{x}" for x in dir(module) if callable(vars(module)[x])]
sys.stdout.write(json.dumps(names))
sys.stdout.flush()
import os; os._exit(0)
"""


def child(code, *args, cwd):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_callable_of_python_is_reached_under_an_audit_hook(tmp_path):
    names = child(LIST, cwd=tmp_path)
    assert len(json.loads(names)) > 5000
    (tmp_path / "names.json").write_text(names)
    walked = json.loads(child(WALK, "names.json", "run", cwd=tmp_path))
    assert walked["heard"] == []
    assert walked["refused"] == walked["asks"] > len(json.loads(names)) + 1000


def test_the_files_of_a_module_are_found_without_running_any(here):
    package = here / "package"
    package.mkdir()
    for name in ("__init__", "inner"):
        (package / f"{name}.py").write_text("raise SystemExit('imported')")
    files = [package / "__init__.py", package / "inner.py"]
    assert trust.files_of("package.inner") == files
    for name in (
        "posix",
        "os",
        "package..inner",
        "package.nowhere",
        "nowhere",
        "",
        ".",
    ):
        assert trust.files_of(name) == []
