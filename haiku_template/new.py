"""Starts a project: a copy of this template under a package name of yours.

    python3 -m haiku_template.new --name=my_project --dest=DIR

Needs the standard library alone, so that it runs before anything is installed. Exit
codes: 0 done, 64 the name or the directory cannot be used, and nothing was written.
"""

import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentError, ArgumentParser
from pathlib import Path

TEMPLATE = "haiku_template"  # In a copy, this line too has the new name.
# What tools make; left out where git cannot be asked.
MADE = ".git .venv* runs build dist *.egg-info __pycache__ .*_cache"
# As they are imported and as pip spells them.
DEPENDENCIES = """absl absl_py chex dm_haiku flatbuffers grain haiku ipykernel jax
jaxlib jmp matplotlib ml_collections nbclient nbformat numpy optax orbax
orbax_checkpoint pip pytest pytest_timeout pytest_xdist rich ruff safetensors
scikit_learn setuptools sklearn tensorboardx tokenizers xdist
"""


def check_name(name: str, root: Path) -> None:
    """Asserts that `name` can be the package of a project like the one in `root`.

    Raises:
      ArgumentError: not a lower-case identifier, or the name of something else.
    """
    if not re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        given = f"--name={name} cannot be a package" if name else "--name is needed"
        raise ArgumentError(None, f"{given}; use lower-case letters, as in my_project")
    if name in {*sys.stdlib_module_names, *DEPENDENCIES.split(), *os.listdir(root)}:
        owners = "a module of Python's, a dependency or a folder of the template"
        raise ArgumentError(None, f"--name={name} is {owners}; choose another name")


def check_dest(dest: str, root: Path) -> Path:
    """The absolute path of `dest`, where nothing is yet.

    Raises:
      ArgumentError: not a new or empty directory outside `root`.
    """
    path = Path(dest).expanduser().resolve()
    if dest and not path.is_relative_to(root):
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return path
        found = f"--dest={dest} exists and is not an empty directory"
    else:
        found = f"--dest={dest} is inside the template" if dest else "--dest is needed"
    raise ArgumentError(None, f"{found}; name a new one, as in --dest=../my_project")


def project_files(root: Path) -> list[Path]:
    """The files of the project in `root`: what git tracks or does not ignore."""
    names = []
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "ls-files", "-z", "-co", "--exclude-standard"]
        done = subprocess.run(command, cwd=root, capture_output=True, check=False)
        names = os.fsdecode(done.stdout).split("\0")[:-1]
    if not names:
        made = shutil.ignore_patterns(*MADE.split())
        for folder, folders, files in os.walk(root):
            folders[:] = set(folders) - made(folder, folders)
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return [Path(name) for name in sorted(set(names)) if (root / name).is_file()]


def copy_project(root: Path, dest: Path, name: str) -> None:
    """Copies the project in `root` to `dest`, where its package is called `name`.

    Raises:
      OSError: something cannot be read or written; nothing is left at `dest`.
    """
    partial = dest.with_name(f".{dest.name}.{os.getpid()}")
    try:
        for path in project_files(root):
            target = partial / str(path).replace(TEMPLATE, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = (root / path).read_bytes()
            if b"\0" not in content:  # A text file, as git tells them.
                content = content.replace(TEMPLATE.encode(), name.encode())
            target.write_bytes(content)
            shutil.copymode(root / path, target)
        partial.rename(dest)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: list[str] | None = None) -> int:
    """Makes the project that the command line asks for; returns the exit code."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--name", default="", help="of the package, as in my_project")
    parser.add_argument("--dest", default="", help="a new directory for the project")
    root = Path(__file__).resolve().parents[1]
    try:
        values, unknown = parser.parse_known_args(arguments)
        if unknown:
            raise ArgumentError(None, f"unexpected argument {unknown[0]}")
        if not (root / "setup.cfg").is_file():
            raise ArgumentError(None, f"{root} is not a checkout; run this in one")
        check_name(values.name, root)
        dest = check_dest(values.dest, root)
        copy_project(root, dest, values.name)
    except (ArgumentError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print(f"{values.name} is made; go on with\n  cd {shlex.quote(str(dest))}")
    print("  make train\n  make test")
    return 0


if __name__ == "__main__":
    sys.exit(main())
