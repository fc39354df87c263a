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
GROUND = {"bounded", "errors", "params", "registry", "signals", "stored"}
LOW = {"devices", "data", "models"}
MAY_IMPORT = {
    "signals": set(),
    "shipped": {"bounded"},
    "xla_flags": set(),
    "program_cache": {"bounded"},
    "published": {"bounded", "errors"},
    "cluster": {"bounded", "errors", "signals"},
    "errors": set(),
    "params": set(),
    "bounded": set(),
    "stored": set(),
    "config": {"bounded", "errors", "registry", "trust"},
    "combinations": {"config", "errors"},
    "trust": {"bounded", "errors"},
    "registry": {"errors"},
    "devices": {*GROUND, "xla_flags"},
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
# The files that are read first: the way from the command to a metric.
TABLE = (ROOT / "README.md").read_text().partition("## Read this")[2]
CORE = re.findall(r"`([a-z/]+\.py)`", TABLE.partition("\nIn the step's")[0])
# These rooms are seen by the core through their faces alone.
ANNEXES = {"finetuning", "pretrained", "preflight"}
# Lines of each package: they may fall; who adds a capability says so where they rise.
HOUSES = {PACKAGE: 28_892, TEXT: 3_714, DOCTOR: 3_413}
# Names that say nothing of a value: participles and pronouns. And of all names those
# that may be such, and calls with arguments packed into a local tuple or dictionary.
VAGUE = {"found", "given", "kept", "own", "words", "known", "whole", "what", "made"}
VAGUE |= {
    "taken",
    "shown",
    "placed",
    "held",
    "asked",
    "named",
    "done",
    "needed",
    "more",
}
VAGUE |= {"wanted", "left", "told", "seen", "tried", "chosen", "rest", "others", "each"}
VAGUE |= {"both", "parts", "part", "said", "ours", "theirs"}
VAGUE_NAMES, PACKED_CALLS = 0.015, 5
SEES_CONFIG_DICT = {
    "combinations.py",
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
    return (path.parent == PACKAGE and starts) or path == PACKAGE / "runs/__main__.py"


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


def test_stored_parameters_become_used_in_one_place():
    """All else calls `stored.use`, also the forms of those that they are made of."""

    def uses(node):
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        return is_method and node.func.attr == "use" and ast.unparse(node.func.value)

    modules = {"stored", "program_cache", False}
    found = {
        relative(path): calls
        for path in FILES + TEXT_FILES
        if (calls := {*map(uses, ast.walk(ast.parse(path.read_text())))} - modules)
    }
    assert found == {"stored.py": {"leaf"}}


@each_file
def test_nothing_unpickles(path):
    # Why: docs/decisions/finetuning.md#unpickler; of a run's own processes alone:
    # docs/decisions/data.md#shared-memory
    unpickles = relative(path) in ("conversion/pickles.py", "data/shared.py")
    allowed = {"pickle"} if unpickles else set()
    unpicklers = {"pickle", "joblib", "cloudpickle", "dill"}
    assert set(imports(path)) & unpicklers == allowed
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert node.value.value is False


def test_paths_are_looked_at_by_functions_that_know_no_from_not_known():
    """On Python 3.14 `Path`'s methods are false where they may not look."""
    looks = {"exists", "is_file", "is_dir", "is_symlink"}
    methods = {
        f"{relative(path)}:{node.lineno}"
        for path in FILES + TEXT_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and not node.args
        if isinstance(node.func, ast.Attribute) and node.func.attr in looks
    }
    assert not methods


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


@pytest.mark.parametrize("package", HOUSES, ids=lambda package: package.name)
def test_the_house_stays_small(package):
    assert sum(map(lines, package.rglob("*.py"))) <= HOUSES[package]


def test_values_have_nouns_for_names():
    names = [
        node.arg if isinstance(node, ast.arg) else node.id
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    ]
    vague = [name for name in names if name.strip("_") in VAGUE]
    assert len(vague) <= VAGUE_NAMES * len(names), sorted(vague)


def packed_calls(function):
    """Arguments that are a local tuple or dictionary, starred into a call."""
    packed = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            starred = [x.value for x in call.args if isinstance(x, ast.Starred)]
            starred += [k.value for k in call.keywords if k.arg is None]
            yield from (x for x in starred if getattr(x, "id", None) in packed)


def test_calls_are_written_out():
    packed = [
        (relative(path), call.lineno)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for call in packed_calls(node)
    ]
    assert len(packed) <= PACKED_CALLS, packed


def imported_files(path):
    """Files of the package that a file imports as it is imported itself."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith(PACKAGE.name):
            for name in [f"{node.module}.{a.name}" for a in node.names] + [node.module]:
                file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                if file.exists() and file != path:
                    yield file


def test_no_imports_go_in_circles():
    graph = {path: set(imported_files(path)) for path in FILES}
    while leaves := [path for path, files in graph.items() if not files & graph.keys()]:
        for path in leaves:
            del graph[path]
    assert not graph, sorted(map(relative, graph))


def test_what_tests_and_benchmarks_import_exists():
    """Also what the processes of tests import, which no other test imports."""
    known = {}
    for path in (*FILES, *TEXT_FILES, *DOCTOR_FILES):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        stored = {x.id for x in nodes if isinstance(x, ast.Name)}
        aliases = (x for n in nodes for x in getattr(n, "names", ()))
        imported = {x.asname or x.name for x in aliases if isinstance(x, ast.alias)}
        defined = {x.name for x in nodes if hasattr(x, "body") and hasattr(x, "name")}
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        known[module.removesuffix(".__init__")] = stored | imported | defined
    for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in known:
                names = {x.name for x in node.names} - known[node.module]
                assert not {x for x in names if f"{node.module}.{x}" not in known}, path
        gone = [*_gone_attributes(ast.parse(path.read_text()), {}, known)]
        assert not gone, (path, gone)


def _gone_attributes(scope, modules, known):
    """Yields `module.name` that is used in a scope, where the module has no such name.

    `modules` maps names outside of the scope to modules of the packages.
    """
    inner, nodes = [], [*ast.iter_child_nodes(scope)]
    for node in nodes:  # Grows.
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            inner.append(node)
        else:
            nodes += ast.iter_child_nodes(node)
    bound = {
        x.id
        for x in nodes
        if isinstance(getattr(x, "ctx", None), ast.Store) and isinstance(x, ast.Name)
    }
    bound |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    modules = {k: x for k, x in modules.items() if k not in bound}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names = {x.asname or x.name: x.name for x in node.names}
            paths = {
                alias: f"{node.module}.{name}"
                for alias, name in names.items()
                if alias not in bound and name not in known.get(node.module, ())
            }
            modules |= {alias: x for alias, x in paths.items() if x in known}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            names = known.get(module, {node.attr})
            is_own = node.attr.startswith("__") or f"{module}.{node.attr}" in known
            if node.attr not in names and not is_own:
                yield f"{module}.{node.attr}"
    for node in inner:
        yield from _gone_attributes(node, modules, known)


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


def test_commands_that_tests_import_have_no_flag_twice():
    """One process collects all tests; a command defines its flags as it is imported."""
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FILES + TEXT_FILES
        if is_command(path)
    }
    tests = (ROOT / "tests").rglob("test_*.py")
    used = sorted(commands & {name for path in tests for name in imports(path)})
    code = f"import importlib\nfor name in {used}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def anchors(page):
    """Anchors of a page of Markdown: GitHub's of headings, and named ones."""
    text = page.read_text()
    for heading in re.findall(r"(?m)^#+ (.*)$", text):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    yield from re.findall(r'<a id="([^"]+)"></a>', text)


def references():
    """Places in this project, and the pages and anchors that they name."""
    folders = [PACKAGE, TEXT, DOCTOR, ROOT / "docs", ROOT / "tests", ROOT / "configs"]
    folders += [ROOT / "benchmarks", ROOT / "examples", ROOT / "notebooks"]
    folders += [ROOT / "launch", ROOT / "skeleton"]
    files = [*ROOT.glob("*.md"), *(x for folder in folders for x in folder.rglob("*"))]
    for file in files:
        if file.suffix not in (".py", ".md", ".ipynb"):
            continue
        text = file.read_text()
        for page, anchor in re.findall(r"(docs/[\w/]+\.md)(?:#([\w\-]+))?", text):
            yield file, ROOT / page, anchor
        if file.suffix == ".md":
            links = re.findall(r"\]\(([\w./\-]+\.md)?(?:#([\w\-]+))?\)", text)
            for page, anchor in links:
                yield file, file.parent / page if page else file, anchor


def test_pages_and_anchors_that_are_named_exist():
    count = 0
    for file, page, anchor in references():
        assert page.is_file(), f"{file} names {page}"
        assert not anchor or anchor in anchors(page), f"{file}: {page}#{anchor}"
        count += bool(anchor)
    assert count > 40


def test_anchors_of_decisions_are_one_each():
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        names = list(anchors(page))
        assert len(set(names)) == len(names), page


def test_the_readme_has_one_line_for_each_command():
    lines = (ROOT / "README.md").read_text().splitlines()
    files = [*PACKAGE.glob("[a-z]*.py"), PACKAGE / "runs" / "__main__.py"]
    names = [
        path.stem.replace("__main__", "runs")
        for path in files
        if "\nif __name__ ==" in path.read_text()
    ]
    assert len(names) > 12
    for name in names:
        shown = [
            x for x in lines if x.startswith(f"    python -m haiku_template.{name} ")
        ]
        assert len(shown) == 1, name


def test_the_readme_stays_short_and_its_files_exist():
    assert len(CORE) > 10
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 100
    for word in re.split(r"[\s`()\[\]]+", text):
        name = word.strip(",.:").removeprefix("--config=")
        if name.endswith((".py", ".md", ".ipynb")) and "/" in name:
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), name
