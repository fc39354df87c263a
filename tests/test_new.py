import configparser
import os
import re
import shutil
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from haiku_template import new

ROOT = Path(__file__).resolve().parents[1]
# In no file, so that a copy of this file, in which names have changed, passes too.
NAME = f"n{zlib.crc32(new.TEMPLATE.encode()):08x}"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the real tree."""
    dest = tmp_path_factory.mktemp("made") / "project"
    assert new.main([f"--name={NAME}", f"--dest={dest}"]) == 0
    return dest


def run(project, *command):
    # Make's own variables would reach a `make` in here.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        command, cwd=project, env=env, capture_output=True, text=True, check=False
    )


def test_project_has_the_new_name_everywhere(project):
    old = new.TEMPLATE.encode()
    files = new.project_files(ROOT)
    assert Path(new.TEMPLATE, "training", "loop.py") in files
    for path in files:
        copy = project / str(path).replace(new.TEMPLATE, NAME)
        content = (ROOT / path).read_bytes()
        assert copy.read_bytes() == content.replace(old, NAME.encode()), path
        assert stat.S_IMODE(copy.stat().st_mode) == stat.S_IMODE(
            (ROOT / path).stat().st_mode
        ), path
    assert os.access(project / ".ci" / "run", os.X_OK)
    copies = new.project_files(project)
    assert len(copies) == len(files)
    assert not [path for path in copies if new.TEMPLATE in str(path)]
    assert not [path for path in copies if old in (project / path).read_bytes()]


def test_project_trains(project, tmp_path):
    train = [sys.executable, "-m", f"{NAME}.train"]
    done = run(project, *train, "--help")
    assert f"python -m {NAME}.train --config=" in done.stdout, done.stderr
    done = run(
        project,
        *train,
        "--config=configs/digits.py",
        f"--workdir={tmp_path / 'run'}",
        "--device=cpu",
        "--config.num_steps=20",
        "--config.optimizer.warmup_steps=5",
    )
    assert done.returncode == 0, done.stderr
    assert "done      step 20" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_project_passes_its_own_tests(project, tmp_path):
    venv = tmp_path / "venv"
    done = run(project, "make", "test", f"PYTHON={sys.executable}", f"VENV={venv}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_says_how_to_go_on(tmp_path, capsys):
    dest = tmp_path / "a project"
    dest.mkdir()  # An empty directory will do.
    assert new.main([f"--name={NAME}", f"--dest={dest}"]) == 0
    lines = [f"{NAME} is made; go on with", f"cd '{dest}'", "make train", "make test"]
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == lines
    assert list(tmp_path.iterdir()) == [dest]


@pytest.mark.parametrize("with_git", [True, False], ids=["git", "no git"])
def test_leaves_out_what_tools_make(tmp_path, with_git):
    mine = [".gitignore", "Makefile", "a/b.py", "new file.txt"]
    made = [".venv/x.py", "runs/1/log", "x.egg-info/y", "a/__pycache__/b", ".x_cache/y"]
    for name in mine + made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "gone").symlink_to("nowhere")
    ignored = {Path(name).parts[-2] for name in made} | {"runs"}
    (tmp_path / ".gitignore").write_text("".join(f"{name}/\n" for name in ignored))
    if with_git:
        if not shutil.which("git"):
            pytest.skip("git is not installed")
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        subprocess.run(["git", "add", "a"], cwd=tmp_path, check=True)
    assert new.project_files(tmp_path) == sorted(map(Path, mine))


def test_copies_binary_files_unchanged(tmp_path):
    source, dest = tmp_path / "source", tmp_path / "dest"
    source.mkdir()
    binary = b"\x89PNG\0" + new.TEMPLATE.encode()
    (source / "picture").write_bytes(binary)
    (source / "latin").write_bytes(b"\xe4 " + new.TEMPLATE.encode() + b"\r\n")
    new.copy_project(source, dest, NAME)
    assert (dest / "picture").read_bytes() == binary
    assert (dest / "latin").read_bytes() == b"\xe4 " + NAME.encode() + b"\r\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "--name is needed"),
        ("", "--name is needed"),
        ("My_Project", "cannot be a package"),
        ("my-project", "cannot be a package"),
        ("2nd", "cannot be a package"),
        ("_mine", "cannot be a package"),
        ("../mine", "cannot be a package"),
        ("größe", "cannot be a package"),
        ("lambda", "cannot be a package"),
        ("json", "choose another name"),
        ("jax", "choose another name"),
        ("sklearn", "choose another name"),
        ("configs", "choose another name"),
        ("tests", "choose another name"),
        (new.TEMPLATE, "choose another name"),
    ],
)
def test_refuses_name(tmp_path, capsys, name, message):
    arguments = [f"--dest={tmp_path / 'project'}"]
    arguments += [] if name is None else [f"--name={name}"]
    assert refused(arguments, capsys, message)
    assert not list(tmp_path.iterdir())


def refused(arguments, capsys, message):
    code = new.main(arguments)
    out, err = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]+\n", err) and message in err
    return code == 64 and not out


def test_refuses_names_of_dependencies():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = setup["options"]["install_requires"] + "\n"
    text += "\n".join(setup["options.extras_require"].values())
    known_to_pip = re.findall(r"(?m)^[A-Za-z][\w-]*", text)
    assert {"jax", "dm-haiku", "pytest"} <= set(known_to_pip)
    for name in [*known_to_pip, "absl", "haiku", "orbax", "sklearn"]:
        with pytest.raises(new.ArgumentError, match="choose another name"):
            new.check_name(name.replace("-", "_").lower(), ROOT)


@pytest.mark.parametrize(
    ("dest", "message"),
    [
        (None, "--dest is needed"),
        ("", "--dest is needed"),
        ("{tmp}/full", "is not an empty directory"),
        ("{tmp}/full/file", "is not an empty directory"),
        ("{tmp}/full/file/project", "Not a directory"),
        ("{root}", "inside the template"),
        ("{root}/runs/project", "inside the template"),
    ],
)
def test_refuses_dest(tmp_path, capsys, dest, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    arguments = [f"--name={NAME}"]
    if dest is not None:
        arguments.append(f"--dest={dest.format(tmp=tmp_path, root=ROOT)}")
    assert refused(arguments, capsys, message)
    assert {p.name for p in tmp_path.rglob("*")} == {"full", "file"}
    assert not (ROOT / "runs" / "project").exists()


@pytest.mark.parametrize("arguments", [["--name"], ["--dest"], ["--nam=a"], ["a"]])
def test_refuses_unknown_arguments(capsys, arguments):
    assert refused(arguments, capsys, "argument")


def test_failure_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copymode", full)
    dest = tmp_path / "project"
    assert refused([f"--name={NAME}", f"--dest={dest}"], capsys, "No space left")
    assert not list(tmp_path.iterdir())


def test_needs_a_checkout(tmp_path, capsys, monkeypatch):
    installed = tmp_path / new.TEMPLATE / "new.py"
    monkeypatch.setattr(new, "__file__", str(installed))
    arguments = [f"--name={NAME}", f"--dest={tmp_path / 'project'}"]
    assert refused(arguments, capsys, "is not a checkout")


def test_runs_with_nothing_installed(tmp_path):
    # -S: no site-packages; -I would also hide the working directory.
    command = [sys.executable, "-S", "-m", f"{new.TEMPLATE}.new", "--name=1"]
    done = run(ROOT, *command)
    assert done.returncode == 64, done.stderr
    assert "cannot be a package" in done.stderr
