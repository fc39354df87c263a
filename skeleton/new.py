"""Starts a project of yours, pinned to this commit of the package.

    python3 skeleton/new.py --name=my_project --dest=DIR

The project is this folder with your name in it. `--vendor` puts a wheel of the package
into it, in place of a Git URL; `--eject=loop` copies the loop and the mathematics of a
step, to be changed. Needs the standard library alone, so that it runs before anything
is installed (`--vendor` needs pip). Exit codes: 0 done, 64 the name or the directory
cannot be used, or there is nothing to pin, and nothing was written.
"""

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "haiku_template"
SKELETON, PLACEHOLDER, PIN = "skeleton", "my_project", "PIN"
PACKAGES = (PACKAGE, "haiku_text", "jax_doctor")
PACKAGED = (*PACKAGES, "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
EXTRAS = "[plots]"  # Of the package, in a project.
LOCAL = "file://localhost"  # Why: docs/decisions/projects.md#localhost
# Modules that --eject copies, with their rooms; keys of the config name the copies.
EJECT = {"loop": {"loop": "runs", "step": "training"}}
# Files that tools make.
MADE = (".venv*", "vendor", "build", "*.egg-info", "__pycache__", ".*_cache")
IGNORED = shutil.ignore_patterns(*MADE)
# Names as they are imported and as pip spells them.
DEPENDENCIES = """absl absl_py chex dm_haiku flatbuffers flax grain haiku ipykernel jax
jax2onnx jax_cuda12_plugin jaxlib jmp matplotlib ml_collections mlflow mlflow_skinny
nbclient nbformat numpy nvidia_cudnn_cu12 onnx onnx_ir onnxruntime optax optuna orbax
orbax_checkpoint pip pyarrow pytest pytest_timeout pytest_xdist rich ruff safetensors
scikit_learn setuptools sklearn tensorboardx tokenizers wandb xdist
"""


def check_name(name: str, root: Path) -> None:
    """Asserts that `name` is a lower-case identifier, and not taken."""
    if not re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        given = f"--name={name} cannot be a package" if name else "--name is needed"
        raise ArgumentError(None, f"{given}; use lower-case letters, as in my_project")
    own = root, root / SKELETON  # Where Python finds its first script.
    elsewhere = [path for path in sys.path if Path(path).resolve() not in own]
    taken = {*sys.stdlib_module_names, *DEPENDENCIES.split(), *os.listdir(root)}
    taken |= {"configs", "runs", "tests", "vendor"}
    spec = importlib.machinery.PathFinder.find_spec(name, elsewhere)
    # A folder without code is no package, such as one that waits for the project.
    folders = getattr(spec, "submodule_search_locations", None)
    files = (file for folder in folders or () for file in Path(folder).rglob("*.py"))
    if name in taken or (spec and (not folders or any(files))):
        owner = "Python's, an installed package's or a folder of the template"
        raise ArgumentError(None, f"--name={name} is {owner}; choose another name")


def check_dest(dest: str, root: Path) -> Path:
    """Resolves `dest`, which must be a new or empty directory outside `root`."""
    path = Path(os.path.expanduser(dest)).resolve()
    if dest and not path.is_relative_to(root):
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return path
        found = f"--dest={dest} exists and is not an empty directory"
    else:
        found = f"--dest={dest} is inside the template" if dest else "--dest is needed"
    raise ArgumentError(None, f"{found}; name a new one, as in --dest=../my_project")


def git(root: Path, *arguments: str) -> str:
    """Runs git in `root`, and returns its output."""
    options = {"stderr": subprocess.PIPE, "text": True}
    try:
        return subprocess.check_output(["git", *arguments], cwd=root, **options).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        words = (getattr(error, "stderr", None) or str(error)).strip().split("\n")[-1]
        raise unpinned(root, words) from error


def unpinned(root: Path, words: str) -> ArgumentError:
    """Makes the error of a template that no commit holds."""
    found = f"git knows no commit of {root} that a project could depend on"
    remedy = "--vendor (make new VENDOR=1) puts a wheel of it into the project"
    return ArgumentError(None, f"{found} ({words}); {remedy}")


def commit_of(root: Path) -> str:
    """Commit of `root`, from which no installed file may differ."""
    commit = git(root, "rev-parse", "HEAD")
    changed = git(root, "status", "--porcelain", "--", *PACKAGED)
    if not git(root, "ls-tree", "--name-only", "HEAD", "--", *PACKAGED):
        raise unpinned(root, "its files are in none")
    if changed:
        words = "has changes that no commit holds, and a project depends on a commit; "
        words += f"commit or stash them first: {', '.join(changed.split()[1::2])}"
        raise ArgumentError(None, f"{root} {words}")
    return commit


# Why: docs/decisions/projects.md#pin
def git_requirement(root: Path) -> tuple[str, str]:
    """Makes pip's requirement of the package at this commit; and a caution, or ""."""
    commit, caution = commit_of(root), ""
    branches = git(root, "branch", "-r", "--contains", commit, "--format=%(refname)")
    if branches:
        remote = branches.split("/")[2]
        url = address(git(root, "config", "--get", f"remote.{remote}.url"), root)
    else:
        url = local(Path(git(root, "rev-parse", "--show-toplevel")))
        caution = f"commit {commit[:12]} is on no remote of {root}, so the project is "
        caution += "pinned to this folder: it installs on this machine alone"
    folder = git(root, "rev-parse", "--show-prefix").rstrip("/")
    part = f"#subdirectory={folder}" if folder else ""
    return f"{PACKAGE}{EXTRAS} @ git+{url}@{commit}{part}", caution


def installed_requirement() -> tuple[str, str]:
    """Makes pip's requirement of the package as pip installed it; and a caution, or "".

    Why: docs/decisions/projects.md#installed
    """
    distribution = importlib.metadata.distribution(PACKAGE)
    facts = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not facts:
        return f"{PACKAGE}{EXTRAS}=={distribution.version}", ""
    url, vcs = facts["url"], facts.get("vcs_info")
    url = re.sub(r"^(https?://)[^/@]*@", r"\1", url.replace("file://", LOCAL, 1))
    caution = f"{url} is a file of this machine, and the project installs here alone"
    folder = facts.get("subdirectory")
    part = f"#subdirectory={folder}" if folder else ""
    pin = f"git+{url}@{vcs['commit_id']}" if vcs else url.replace(LOCAL, "file://")
    is_local = url.startswith(LOCAL)
    return f"{PACKAGE}{EXTRAS} @ {pin}{part}", caution if is_local else ""


def address(url: str, root: Path) -> str:
    """Converts a remote's URL to pip's form, without its password."""
    if url.startswith("file:///"):
        return url.replace("file://", LOCAL, 1)
    if "://" in url:
        return re.sub(r"^(https?://)[^/@]*@", r"\1", url)
    host, colon, path = url.partition(":")
    if colon and "/" not in host:  # user@host:path
        return f"ssh://{host}/{path.lstrip('/')}"
    return local((root / url).resolve())


def local(path: Path) -> str:
    """URL of a file with a host name, which pip 23 requires."""
    return path.as_uri().replace("file://", LOCAL, 1)


def vendor(root: Path, folder: Path) -> str:
    """Builds a wheel of the package in `folder`; returns pip's requirement of it.

    No index has its version, which ends in the commit or in a hash of the files.
    """
    if not (root / "setup.cfg").exists():
        raise ArgumentError(None, "--vendor builds a wheel of a clone of the template")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch)
        for name in PACKAGES:
            shutil.copytree(root / name, source / name, ignore=IGNORED)
        for name in PACKAGED[len(PACKAGES) :]:
            shutil.copy(root / name, source)
        if (root / ".git").exists():
            local = f"g{commit_of(root)[:12]}"
        else:
            files = sorted(path for path in source.rglob("*") if path.is_file())
            content = b"".join(path.read_bytes() for path in files)
            local = f"h{hashlib.sha256(content).hexdigest()[:12]}"
        setup = (source / "setup.cfg").read_text()
        old = re.search(r"(?m)^version = .+$", setup)[0]
        (source / "setup.cfg").write_text(setup.replace(old, f"{old}+{local}", 1))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += [f"--wheel-dir={folder}", scratch]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip() or "no words"
        raise ArgumentError(None, f"`{sys.executable} -m pip wheel` failed: {words}")
    return f"{PACKAGE}{EXTRAS}=={old.removeprefix('version = ')}+{local}"


def eject(root: Path, folder: Path, name: str, parts: dict[str, str]) -> None:
    """Copies modules of the template into a project, whose config names the copies."""
    config = folder / "configs" / "first.py"
    lines = "".join(f'    config.{part} = "{name}.{part}"\n' for part in parts)
    config.write_text(config.read_text().replace("    return", f"{lines}    return"))
    package = root / PACKAGE
    if parts and not package.exists():
        package = Path(importlib.util.find_spec(PACKAGE).origin).parent
    for part, home in parts.items():
        text = (package / home / f"{part}.py").read_text()
        for other, place in parts.items():
            text = re.sub(rf"\b{PACKAGE}\.{place}\.{other}\b", f"{name}.{other}", text)
        (folder / name / f"{part}.py").write_text(text)


@contextlib.contextmanager
def beside(dest: Path) -> Iterator[str]:
    """A scratch folder beside `dest`; those above it that stay empty go again."""
    absent = [folder for folder in dest.parents if not folder.exists()]
    dest.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=dest.parent) as scratch:
            yield scratch
    finally:
        for folder in absent:
            with contextlib.suppress(OSError):  # It holds the project.
                folder.rmdir()


def make(root: Path, dest: Path, name: str, vendored: bool, what: str) -> list[str]:
    """Makes the project at `dest`, whole or not at all; returns lines to print."""
    with beside(dest) as scratch:
        partial = Path(scratch, name)
        if vendored:
            requirement, caution = vendor(root, partial / "vendor"), ""
        elif (root / "setup.cfg").exists():
            requirement, caution = git_requirement(root)
        else:  # Beside an installed package.
            requirement, caution = installed_requirement()
        ignored = shutil.ignore_patterns(*MADE, "runs", Path(__file__).name)
        shutil.copytree(root / SKELETON, partial, ignore=ignored, dirs_exist_ok=True)
        (partial / PLACEHOLDER).rename(partial / name)
        for path in partial.rglob("*"):
            if path.is_file() and path.suffix != ".whl":
                text = path.read_text().replace(PLACEHOLDER, name)
                path.write_text(text.replace(f'"{PIN}"', f'"{requirement}"'))
        eject(root, partial, name, EJECT.get(what, {}))
        partial.rename(dest)
    return [f"{name} depends on {requirement}", *filter(None, [caution])]


def main(arguments: list[str] | None = None) -> int:
    """Makes the project that the command line asks for; returns the exit code."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--name", default="", help="of the package, as in my_project")
    parser.add_argument("--dest", default="", help="a new directory for the project")
    parser.add_argument("--vendor", action="store_true", help="a wheel and no Git URL")
    parser.add_argument("--eject", default="", help=f"copies {', '.join(EJECT)}")
    root = Path(__file__).resolve().parents[1]
    try:
        values, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise ArgumentError(None, f"unexpected argument {unknown[0]}")
        check_name(values.name, root)
        dest = check_dest(values.dest, root)
        if values.eject not in ("", *EJECT):
            possible = f"possible is {', '.join(EJECT)}, or nothing"
            raise ArgumentError(None, f"--eject={values.eject}; {possible}")
        said = make(root, dest, values.name, values.vendor, values.eject)
    except (ArgumentError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    first = f"  cd {shlex.quote(str(dest))}"
    print(*said, "next:", first, "  make train", "  make test", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
