"""The house rules that a reader relies on, held by walking the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "haiku_template"
TEXT = ROOT / "haiku_text"  # Language models: a package of its own, which plugs in.
DOCTOR = ROOT / "jax_doctor"  # For every user of JAX: a package of its own.
FILES = sorted(PACKAGE.rglob("*.py"))
TEXT_FILES = sorted(TEXT.rglob("*.py"))
DOCTOR_FILES = sorted(DOCTOR.rglob("*.py"))
# What each room may import of the package; commands, which live beside them, anything.
GROUND = {"bounded", "errors", "params", "registry", "signals"}
LOW = {"devices", "data", "models"}
MAY_IMPORT = {
    "signals": set(),
    "xla_flags": set(),
    "compat": set(),
    "published": {"errors"},
    "cluster": {"errors", "signals"},
    "errors": set(),
    "params": set(),
    "bounded": set(),
    "config": {"bounded", "errors", "trust"},
    "trust": {"errors"},
    "registry": {"errors"},
    "devices": GROUND,
    "data": GROUND,
    "conversion": {"errors"},
    "models": GROUND,
    "storage": GROUND | LOW | {"config"},
    "pretrained": GROUND | LOW | {"config"},
    "finetuning": GROUND | LOW | {"config", "storage", "pretrained"},
    "reporting": GROUND | LOW | {"finetuning", "storage"},
}
MAY_IMPORT["training"] = MAY_IMPORT["finetuning"] | {
    "compat",
    "finetuning",
    "registry",
    "reporting",
    "trust",
}
MAY_IMPORT["preflight"] = MAY_IMPORT["training"] | {"training"}
MAY_IMPORT["runs"] = MAY_IMPORT["preflight"] | {"preflight"}
# The hour: what a run does, from the command to a batch and back.
CORE = (
    "train.py",
    "training/experiment.py",
    "runs/loop.py",
    "training/step.py",
    "training/state.py",
    "training/tasks.py",
    "devices/manager.py",
    "data/dataset.py",
)
# These rooms are seen by the core through their faces alone.
ANNEXES = {"finetuning", "pretrained", "preflight"}
# Lines of the package without the doctor: what the rebuild was meant to leave, and what
# capabilities have cost since. Who adds one gives it a line here.
COSTS = {
    "the house after the rebuild": 10_000,
    "--target: programs for GPUs that are not here": 493,
    "convert: published pickles to safetensors, none of them run": 883,
    "init_from: npz and Orbax trees, with state, in names that may differ": 511,
    "own_loss, per_example, batches of any tree, bucketed by length": 511,
    "compat: names that JAX removed, put back when asked": 156,
    "LoRA of convolutions and of tensors of more axes": 134,
    "remat of any Haiku module by name, tried by the memory budget": 204,
    "optimizer moments in bfloat16, and states sharded by a layout": 241,
    "attention pads by lengths": 8,
    "attention of packed examples, and a word on how full their windows are": 51,
    "heads from features of a frozen trunk, computed once": 681,
    "several processes: they meet, share batches, and stop after the same step": 790,
    "heartbeat: a lost process ends the others, each in a sentence": 327,
    "--stall_seconds: a process that hangs, or a link cut between others, too": 78,
    "several processes of one device each: steps without pmap's time for a leaf": 66,
    "gradient buckets: small leaves of an all-reduce travel as one": 28,
    "reduce_dtype: gradients in half precision on their way": 33,
    "a stranger's reading: trees where arrays are, unknown keys, fixed norms": 53,
    "right numbers, obeyed signals, no strangers": 2_597,
    "rooms: preflight and runs, each file with its imports": 80,
}
DOCTOR_COSTS = {
    "after the rebuild": 2_400,
    "--code: removed names, found in a folder": 686,
    "a jaxlib that miscomputes": 136,
    "a package of its own: a command, signals and advice for any user of JAX": 28,
}
TEXT_COSTS = {
    "language models": 2_639,
    "BERT pads by lengths": 42,
    "packing": 124,
    "Hugging Face's folders and names, which haiku_template had": 420,
}
SEES_CONFIG_DICT = {
    "cli.py",
    "config.py",
    "registry.py",
    "training/experiment.py",
    "runs/run.py",
    "runs/start.py",
    "testing.py",
}
# Placement has one home.
PLACEMENT = {
    "NamedSharding",
    "Mesh",
    "PartitionSpec",
    "device_put",
    "make_array_from_single_device_arrays",
    "make_array_from_callback",
    "device_get",
    "pmap",
    "local_devices",
    "default_device",
    "transfer_guard",
    "shard_map",
}


def relative(path):
    return str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT))


def room(path):
    return relative(path).partition("/")[0].removesuffix(".py")


def is_command(path):
    if path.parent == TEXT:  # Behind the command of the same name.
        return (PACKAGE / path.name).exists()
    starts = path.stem == "__main__" or '__name__ == "__main__"' in path.read_text()
    return path.parent == PACKAGE and starts


def lines(path):
    return path.read_text().count("\n")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


each_file = pytest.mark.parametrize(
    "path", FILES + TEXT_FILES + DOCTOR_FILES, ids=relative
)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_one_way(path):
    own = room(path)
    allowed = None if is_command(path) else MAY_IMPORT.get(own)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == PACKAGE.name and rest and allowed is not None:
            used = rest.split(".")[0]
            assert used in allowed | {own}, f"{own} imports {name}"
        # It is named in tables, and imported when a config asks for it.
        assert top != TEXT.name or is_command(path), f"{own} imports {name}"
        if own in ("data", "config", "conversion", "errors", "registry"):
            assert top not in ("jax", "haiku", "optax"), f"{own} imports {name}"


@pytest.mark.parametrize("path", DOCTOR_FILES, ids=relative)
def test_the_doctor_imports_the_standard_library_alone(path):
    allowed = sys.stdlib_module_names | {DOCTOR.name}
    assert {name.partition(".")[0] for name in imports(path)} <= allowed


def test_the_doctor_needs_no_installed_package():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in DOCTOR_FILES
    ]
    command = [sys.executable, "-S", "-c", f"import {', '.join(modules)}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("path", [TEXT / "__init__.py", *TEXT.glob("data/*.py")])
def test_data_of_text_import_no_jax(path):
    allowed, rooms = {PACKAGE.name, TEXT.name}, {"bounded", "data", "errors"}
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in ("jax", "haiku", "optax"), name
        assert top not in allowed or not rest or rest[0] in rooms, name


def test_every_room_has_its_place_in_the_order():
    rooms = {room(path) for path in FILES if not is_command(path)}
    assert rooms - {"__init__", "cli", "testing"} == set(MAY_IMPORT)


@pytest.mark.parametrize("name", CORE)
def test_the_core_sees_annexes_through_their_faces(name):
    for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(PACKAGE.name):
            parts = node.module.split(".")[1:]
            assert not (parts and parts[0] in ANNEXES and len(parts) > 1), node.module


@each_file
def test_only_devices_places_arrays(path):
    if room(path) != "devices":
        # Inside a string for a child process it is another program's business.
        assert not set(names(path)) & PLACEMENT


@each_file
def test_only_devices_asks_jax_for_devices(path):
    # A model that no trainer compiles is asked to run on whatever JAX has.
    if room(path) == "devices" or relative(path) == "models/attention.py":
        return
    if path in DOCTOR_FILES:  # There `jax` is what a child said of it.
        return
    asks = {"devices", "local_devices", "default_backend", "make_mesh"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in asks:
            assert not (isinstance(node.value, ast.Name) and node.value.id == "jax")


@each_file
def test_nothing_unpickles(path):
    # Why: docs/decisions/finetuning.md#unpickler
    allowed = {"pickle"} if relative(path) == "conversion/pickles.py" else set()
    unpicklers = {"pickle", "joblib", "cloudpickle", "dill"}
    assert set(imports(path)) & unpicklers == allowed
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert node.value.value is False


def test_the_loop_and_the_step_import_little():
    for name, most in (("runs/loop.py", 8), ("training/step.py", 4)):
        tree = ast.parse((PACKAGE / name).read_text())
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert sum(m.startswith(PACKAGE.name) for m in modules) <= most, name


@each_file
def test_functions_stay_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = node.body[ast.get_docstring(node) is not None :] or node.body
            assert node.end_lineno - first[0].lineno < 50, node.name


def test_the_house_stays_small():
    assert sum(map(lines, DOCTOR_FILES)) <= sum(DOCTOR_COSTS.values())
    assert sum(map(lines, FILES)) <= sum(COSTS.values())
    assert sum(map(lines, TEXT_FILES)) <= sum(TEXT_COSTS.values())


def test_a_config_dict_is_seen_where_parts_are_made_and_nowhere_below():
    seen = {
        relative(path)
        for path in FILES + TEXT_FILES
        if not is_command(path) and set(names(path)) & {"ConfigDict", "config_dict"}
    }
    assert seen <= SEES_CONFIG_DICT


@pytest.mark.parametrize("files", [FILES, TEXT_FILES], ids=["the package", "text"])
def test_importing_starts_no_backend_and_needs_no_annex(files):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in files
        if not is_command(path) and path.stem != "__main__"
    ]
    absent = "sys.modules['haiku_text'] = None" if files is FILES else ""
    code = (
        f"import importlib, sys\n{absent}\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "from haiku_template.devices import selection\n"
        "assert not selection.backend_started()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


NO_JAX = ["", ".config", ".cli", ".doctor", ".prepare", ".train", ".predict"]
NO_JAX += [".evaluate", ".export", ".generate", ".registry", ".convert"]
NO_JAX += [".verify", ".published"]
NO_JAX += [".conversion.files", ".compat"]


@pytest.mark.parametrize("module", NO_JAX)
def test_importing_the_package_and_the_commands_needs_no_jax(module):
    code = f"import sys, haiku_template{module}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_readme_stays_short_and_its_files_exist():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 100
    for word in re.split(r"[\s`()\[\]]+", text):
        name = word.strip(",.:").removeprefix("--config=")
        if name.endswith((".py", ".md", ".ipynb")) and "/" in name:
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), name
