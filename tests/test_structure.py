"""The house rules that a reader relies on, held by walking the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "haiku_template"
FILES = sorted(PACKAGE.rglob("*.py"))
# What each part may import of the package; commands may import anything.
MAY_IMPORT = {
    "doctor": set(),
    "devices": {"doctor"},
    "data": set(),
    "models": set(),
    "config": {"config_ranges"},
    "config_ranges": set(),
    "finetuning": {"devices", "models"},
    "training": {"config", "data", "devices", "finetuning", "models"},
    "generation": {"config", "data", "devices", "models", "training"},
}
# Placement has one home.
PLACEMENT = {
    "NamedSharding",
    "Mesh",
    "PartitionSpec",
    "device_put",
    "device_get",
    "pmap",
    "local_devices",
    "default_device",
    "transfer_guard",
    "shard_map",
}


def part(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    own = part(path)
    allowed = MAY_IMPORT.get(own)
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == PACKAGE.name and rest and allowed is not None:
            used = rest.split(".")[0]
            assert used in allowed | {own}, f"{own} imports {name}"
        if own in ("data", "config", "doctor"):
            assert top not in ("jax", "haiku", "optax"), f"{own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_devices_places_arrays(path):
    if part(path) == "devices":
        return
    tree = ast.parse(path.read_text())
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    # Inside a string for a child process it is another program's business.
    assert not used & PLACEMENT


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = node.body[ast.get_docstring(node) is not None :] or node.body
            assert node.end_lineno - first[0].lineno < 50, node.name


def test_the_doctor_stands_alone_and_stays_small():
    files = sorted((PACKAGE / "doctor").rglob("*.py"))
    own, standard = f"{PACKAGE.name}.doctor", sys.stdlib_module_names
    for path in files:
        for name in imports(path):
            alone = name.split(".")[0] in standard or name.startswith(own)
            assert alone, f"{path.name} imports {name}"
    assert len(files) <= 12
    assert sum(path.read_text().count("\n") for path in files) < 2400


def test_importing_starts_no_backend():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if path.parent != PACKAGE or path.stem in ("config", "cli")  # No commands.
    ]
    code = (
        f"import importlib\nfor name in {modules}: importlib.import_module(name)\n"
        f"from {PACKAGE.name}.devices import selection\n"
        "assert not selection.backend_started()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


NO_JAX = ["", ".config", ".cli", ".doctor", ".doctor.__main__", ".prepare", ".train"]
NO_JAX += [".evaluate", ".export", ".generate", ".predict"]


@pytest.mark.parametrize("module", NO_JAX)
def test_importing_the_package_and_the_commands_needs_no_jax(module):
    code = f"import sys, {PACKAGE.name}{module}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_readme_stays_short_and_its_files_exist():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    for word in text.replace("`", " ").split():
        name = word.strip("(),.:").removeprefix("--config=")
        if name.endswith((".py", ".md", ".ipynb")) and "/" in name:
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), name
