import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from haiku_template import new as command
from skeleton import new

ROOT = Path(__file__).resolve().parents[1]
NAME = "my_thing"


def run(folder, *command, **variables):
    # A hook's variables would reach a `git` in here; and a project would not use the
    # package that it installed.
    ours = ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "PYTHONPATH")
    env = {k: v for k, v in os.environ.items() if k not in ours} | variables
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def git(folder, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = run(folder, "git", *who, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """The files of this tree that a project is made of, without git."""
    root = tmp_path_factory.mktemp("a tree") / "haiku_template"
    ignored = shutil.ignore_patterns(*new.MADE)
    for name in (*new.PACKAGED, new.SKELETON):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        else:
            root.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture(scope="session")
def checkout(tree, tmp_path_factory):
    """The same as a git checkout without a remote."""
    root = tmp_path_factory.mktemp("a checkout") / "haiku_template"
    shutil.copytree(tree, root)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=all")
    return root


def make(root, dest, *arguments):
    """Makes a project with the copy of this package that is in `root`."""
    command = [sys.executable, "skeleton/new.py", f"--name={NAME}"]
    return run(root, *command, f"--dest={dest}", *arguments)


def made(root, dest, *arguments):
    done = make(root, dest, *arguments)
    assert done.returncode == 0, done.stderr
    return dest


@pytest.fixture(scope="module")
def project(checkout, tmp_path_factory):
    return made(checkout, tmp_path_factory.mktemp("made") / "project")


@pytest.fixture(scope="module")
def ejected(checkout, tmp_path_factory):
    return made(checkout, tmp_path_factory.mktemp("made") / "project", "--eject=loop")


def files(project):
    return sorted(path for path in project.rglob("*") if path.is_file())


def requirement(project):
    values = tomllib.loads((project / "pyproject.toml").read_text())
    return values["project"]["dependencies"][0]


# What is written.


def test_a_project_is_at_most_300_lines_that_speak_of_its_own_name(project):
    names = {str(path.relative_to(project)) for path in files(project)}
    own = {f"{NAME}/{name}.py" for name in ("__init__", "model", "task", "data")}
    rest = {".gitignore", "Makefile", "README.md", "pyproject.toml", "configs/first.py"}
    assert names == own | rest | {"tests/conftest.py", "tests/test_properties.py"}
    texts = [path.read_text() for path in files(project)]
    assert sum(text.count("\n") for text in texts) <= 300
    for text in texts:
        assert not re.search(rf"\b({new.PLACEHOLDER}|{new.PIN}|LATER)\b", text)


def test_a_project_pins_the_commit_it_was_made_at(project, checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    expected = f"haiku_template[plots] @ git+{new.local(checkout)}@{commit}"
    assert requirement(project) == expected and "%20" in expected


def test_it_says_how_to_go_on_and_what_is_pinned(tree, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(tree, root)
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=all")
    dest = tmp_path / "a project"
    dest.mkdir()  # An empty directory will do.
    lines = make(root, dest).stdout.splitlines()
    assert lines[0].startswith(f"{NAME} depends on haiku_template[plots] @ git+file:")
    assert "on no remote" in lines[1] and "on this machine alone" in lines[1]
    rest = ["next:", f"cd '{dest}'", "make train", "make test"]
    assert [line.strip() for line in lines[2:]] == rest
    assert {path.name for path in tmp_path.iterdir()} == {"root", "a project"}


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("https://github.com/a/b.git", "https://github.com/a/b.git"),
        ("https://someone:secret@github.com/a/b", "https://github.com/a/b"),
        ("git@github.com:a/b.git", "ssh://git@github.com/a/b.git"),
        ("ssh://git@host:22/a/b.git", "ssh://git@host:22/a/b.git"),
        ("/srv/b.git", "file://localhost/srv/b.git"),
        ("file:///srv/b.git", "file://localhost/srv/b.git"),
        ("../b c", "file://localhost/there/b%20c"),
    ],
)
def test_a_remote_is_pinned_as_pip_takes_it_and_without_a_password(remote, expected):
    assert new.address(remote, Path("/there/here")) == expected


def test_a_remote_is_pinned_only_for_commits_that_it_has(checkout, tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(checkout), str(clone))
    commit = git(clone, "rev-parse", "HEAD")
    expected = f"haiku_template[plots] @ git+{new.local(checkout)}@{commit}"
    assert new.git_requirement(clone) == (expected, "")
    git(clone, "commit", "--quiet", "--allow-empty", "--message=not pushed")
    pinned, caution = new.git_requirement(clone)
    assert new.local(clone) in pinned and "is on no remote" in caution


def test_a_checkout_inside_another_repository_is_pinned_by_its_folder(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "a" / "b")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=all")
    commit = git(tmp_path, "rev-parse", "HEAD")
    pinned, _ = new.git_requirement(tmp_path / "a" / "b")
    assert pinned.endswith(f"{new.local(tmp_path)}@{commit}#subdirectory=a/b")


def test_what_no_commit_holds_is_no_pin(checkout, tmp_path):
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(checkout), str(clone))
    (clone / "runs").mkdir()
    (clone / "notes.txt").write_text("not installed")
    made(clone, tmp_path / "fine")
    (clone / "haiku_template" / "more.py").write_text("")
    for arguments in ([], ["--vendor"]):
        done = make(clone, tmp_path / "project", *arguments)
        assert_refused(done, "changes that no commit holds", "haiku_template/more.py")
    assert not (tmp_path / "project").exists()


def test_without_git_a_wheel_is_what_is_possible(tree, tmp_path):
    done = make(tree, tmp_path / "project")
    assert_refused(done, "git knows no commit", "VENDOR=1")
    assert not list(tmp_path.iterdir())


def test_a_tree_that_another_repository_ignores_is_without_git(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "outer" / "inner")
    (tmp_path / "outer" / ".gitignore").write_text("inner/\n")
    git(tmp_path / "outer", "init", "--quiet")
    git(tmp_path / "outer", "add", ".")
    git(tmp_path / "outer", "commit", "--quiet", "--message=all")
    done = make(tmp_path / "outer" / "inner", tmp_path / "project")
    assert_refused(done, "git knows no commit", "its files are in none", "VENDOR=1")
    assert not (tmp_path / "project").exists()


# What a project does.


@pytest.mark.slow
def test_its_own_tests_pass(project, tmp_path):
    """Of a smaller model and batch, in half the time; as they are in make test-long."""
    small = shutil.copytree(project, tmp_path / "project")
    text = (small / "configs" / "first.py").read_text()
    for before, after in (('"width": 32', '"width": 8'), ("size = 128", "size = 32")):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (small / "configs" / "first.py").write_text(text)
    done = run(
        small,
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        PYTHONPATH=str(ROOT),
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",  # It takes half as long.
    )
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


def train(project, workdir, *flags):
    return run(
        project,
        *(sys.executable, "-m", "haiku_template.train", "--config=configs/first.py"),
        *(f"--workdir={workdir}", "--device=cpu", *flags),
        *("--config.num_steps=5", "--config.optimizer.warmup_steps=1"),
        PYTHONPATH=str(ROOT),
    )


def test_nothing_that_was_ejected_is_still_imported_from_the_package(ejected, project):
    homes = new.EJECT["loop"].items()
    theirs = {f"haiku_template.{room}.{part}" for part, room in homes}
    own = {f"{NAME}/{part}.py" for part in new.EJECT["loop"]}
    assert {str(p.relative_to(ejected)) for p in files(ejected)} == own | {
        str(p.relative_to(project)) for p in files(project)
    }
    for name in own:
        for node in ast.walk(ast.parse((ejected / name).read_text())):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert not theirs & (names | {node.module}), name


@pytest.mark.slow
def test_an_ejected_loop_and_step_are_those_that_run(ejected, tmp_path):
    for name, before, line in [
        ("loop.py", "        start, state = ", "        print('a loop of mine')"),
        ("step.py", "        return new, ", "        scalars['mine'] = 7.0"),
        ("step.py", "    params = cast(params)", "    print('a forward of mine')"),
    ]:
        path = ejected / NAME / name
        text = path.read_text()
        assert text.count(before) == 1
        path.write_text(text.replace(before, f"{line}\n{before}"))
    done = train(ejected, tmp_path / "run", "--config.log_every=1")
    assert done.returncode == 0, done.stderr
    assert "a loop of mine" in done.stdout and "done      step 5" in done.stdout
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(first)["train/mine"] == 7
    command = [sys.executable, "-m", "haiku_template.predict", "--device=cpu"]
    command += [f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'out.npz'}"]
    done = run(ejected, *command, PYTHONPATH=str(ROOT))
    assert done.returncode == 0 and "a forward of mine" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_wheel_holds_every_module(checkout, tmp_path):
    project = made(checkout, tmp_path / "project", "--vendor")
    (wheel,) = (project / "vendor").iterdir()
    modules = {x for x in zipfile.ZipFile(wheel).namelist() if x.endswith(".py")}
    assert modules == {
        str(path.relative_to(ROOT))
        for package in new.PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }


def test_the_name_that_the_sentences_give_can_be_taken(checkout, tmp_path):
    made(checkout, tmp_path / "project", "--name=my_project")
    assert (tmp_path / "project/my_project/__init__.py").is_file()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arguments", [[], ["--vendor"]], ids=["git", "wheel"])
def test_make_train_and_make_test_work_in_a_new_project(checkout, tmp_path, arguments):
    project = made(checkout, tmp_path / "project", *arguments)
    if arguments:
        local = git(checkout, "rev-parse", "HEAD")[:12]
        assert requirement(project).endswith(f"+g{local}")
        (wheel,) = (project / "vendor").iterdir()
        assert f"+g{local}-" in wheel.name
    done = run(project, "make", "train", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (project / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["eval/accuracy"] >= 0.97
    done = run(project, "make", "test", f"PYTHON={sys.executable}")
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout


# What is refused.


def assert_refused(done, *words):
    assert done.returncode == 64 and not done.stdout, done.stdout
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.fixture
def refused(checkout, capsys, monkeypatch):
    """Asserts that arguments are refused in a sentence with these words."""
    monkeypatch.setattr(new, "__file__", str(checkout / "haiku_template" / "new.py"))

    def check(arguments, *words):
        code = new.main(arguments)
        done = subprocess.CompletedProcess(arguments, code, *capsys.readouterr())
        assert_refused(done, *words)

    return check


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
        ("skeleton", "choose another name"),
        ("haiku_template", "choose another name"),
        ("installed_here", "choose another name"),
    ],
)
def test_refuses_name(refused, tmp_path, monkeypatch, name, message):
    site = tmp_path / "site"
    site.mkdir()
    (site / "installed_here.py").touch()
    monkeypatch.syspath_prepend(str(site))
    arguments = [f"--dest={tmp_path / 'project'}"]
    arguments += [] if name is None else [f"--name={name}"]
    refused(arguments, message)
    assert list(tmp_path.iterdir()) == [site]


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
        ("{tmp}/full/file/project", "File exists"),
        ("{root}", "inside the template"),
        ("{root}/runs/project", "inside the template"),
    ],
)
def test_refuses_dest(refused, checkout, tmp_path, dest, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    arguments = [f"--name={NAME}"]
    if dest is not None:
        arguments.append(f"--dest={dest.format(tmp=tmp_path, root=checkout)}")
    refused(arguments, message)
    assert {p.name for p in tmp_path.rglob("*")} == {"full", "file"}
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize("arguments", [["--name"], ["--dest"], ["--nam=a"], ["a"]])
def test_refuses_unknown_arguments(refused, arguments):
    refused(arguments, "argument")


def test_refuses_to_eject_what_is_no_part(refused, tmp_path):
    dest = tmp_path / "project"
    refused([f"--name={NAME}", f"--dest={dest}", "--eject=all"], "possible is loop")


def test_a_home_folder_that_does_not_exist_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # As shells read it.
    assert new.check_dest("~no_such_user/x", ROOT) == tmp_path / "~no_such_user/x"


def test_failure_leaves_nothing(refused, tmp_path, monkeypatch):
    def full(source, target, **_):
        Path(target).mkdir()
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(shutil, "copytree", full)
    refused([f"--name={NAME}", f"--dest={tmp_path / 'a/b/project'}"], "No space left")
    assert not list(tmp_path.iterdir())


def test_runs_with_nothing_installed():
    # -S: no site-packages; -I would also hide the working directory.
    done = run(ROOT, sys.executable, "-S", "skeleton/new.py", "--name=1")
    assert_refused(done, "cannot be a package")


def test_notebooks_stand_alone_and_know_the_home_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    books = f"--notebooks={tmp_path / 'books'}"
    for more in (["my_project"], ["--vendor"], ["--bogus"], [books + "2"]):
        assert command.main([books, *more]) == 64
        assert "takes no other words" in capsys.readouterr().err
    assert command.main(["--notebooks="]) == 64 and not [*tmp_path.iterdir()]
    assert command.main(["--notebooks=~/books"]) == 0
    assert len([*(tmp_path / "books").glob("*.ipynb")]) == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["my_project", "my_project"], "unexpected argument my_project"),
        (["--notebooks", "--vendor"], "unexpected argument --notebooks"),
        (["my_project", "--dest", "--vendor"], "--dest: expected one argument"),
    ],
)
def test_words_too_many_or_too_few_are_refused(
    tmp_path, capsys, monkeypatch, words, sentence
):
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == 64
    assert sentence in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_folder_without_code_leaves_its_name_free(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / NAME).mkdir()
    new.check_name(NAME, ROOT)
    (tmp_path / NAME / "part.py").touch()
    with pytest.raises(new.ArgumentError, match="choose another name"):
        new.check_name(NAME, ROOT)


def test_notebooks_are_copied_whole_or_not_at_all(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert command.main([f"--notebooks={tmp_path / 'file/books'}"]) == 64
    assert "books cannot be written" in capsys.readouterr().err
    assert command.main([f"--notebooks={tmp_path / 'books'}/"]) == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["books", "file"]
