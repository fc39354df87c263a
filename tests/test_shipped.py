"""The wheel without a clone: configs by name, a new project, notebooks."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from haiku_template import cli, shipped
from skeleton import new
from tests.runs import ROOT, run_command

BUILT = (*new.PACKAGED, "configs", "notebooks", "skeleton")


# With it the environment has what pip installs with the wheel, and nothing of this one.
EMPTY = os.environ.get("EMPTY_ENVIRONMENT")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment that has the wheel, and of this one what it needs."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in BUILT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--wheel-dir", "out", "."]
    subprocess.run([sys.executable, *pip, *build], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    wheel = next((folder / "out").glob("*.whl"))
    if EMPTY:
        needs = [f"haiku_template[plots,examples] @ {wheel.as_uri()}", "ipython"]
        done = run(python, folder, *pip[1:], "install", *needs)
        assert done.returncode == 0, done.stderr
        return python
    site = next((folder / "env").glob("lib/python*/site-packages"))
    # Its packages, and not this editable one, whose own .pth is not read there.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ["install", "--no-deps", "--no-index", "--force-reinstall", wheel]
    subprocess.run([python, *pip, *install], check=True)
    return python


def run(python, folder, *words, **variables):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    return subprocess.run(
        [python, "-m", *words], cwd=folder, env=env, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_shipped_config_trains_in_an_empty_folder(installed, tmp_path):
    flags = ["--config=digits", "--workdir=run", "--device=cpu"]
    done = run(installed, tmp_path, "haiku_template.train", *flags, "--check")
    assert done.returncode == 0, done.stderr
    assert "check     loss " in done.stdout
    flags += ["--config.num_steps=5"]
    done = run(installed, tmp_path, "haiku_template.train", *flags)
    assert done.returncode == 0, done.stderr
    done = run(
        installed, tmp_path, "haiku_template.evaluate", "--workdir=run", "--device=cpu"
    )
    assert json.loads(done.stdout)["step"] == 5
    done = run(installed, tmp_path, "haiku_template.train", "--config=dgits")
    assert done.returncode == 64 and "by name there are cifar10_resnet" in done.stderr


@pytest.mark.slow
def test_the_first_cell_of_a_notebook_installs_what_is_not_there(installed, tmp_path):
    """As on Colab, but for its network: `pip` gets the wheel from a file."""
    wheel = next(installed.parents[2].glob("out/*.whl"))
    run(installed, tmp_path, "pip", "uninstall", "--yes", "--quiet", "haiku_template")
    notebook = json.loads((ROOT / "notebooks" / "own_model.ipynb").read_text())
    cell = next(x for x in notebook["cells"] if x["cell_type"] == "code")
    lines = [*cell["source"], "\nfrom configs import digits\nprint(digits.__file__)\n"]
    (tmp_path / "first.ipy").write_text("".join(lines))
    variables = {"HAIKU_TEMPLATE": f"file://{wheel}", "PIP_NO_INDEX": "1"}
    variables["IPYTHONDIR"] = str(tmp_path)
    done = run(installed, tmp_path, "IPython", "first.ipy", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    place = installed.parents[1] / "share" / "haiku_template" / "configs" / "digits.py"
    assert str(place) in done.stdout


@pytest.mark.published
def test_the_published_models_first_cell_clones_installs_and_fetches(
    installed, tmp_path
):
    """As on Colab, from a repository of this working tree."""
    source, folder = tmp_path / "source", tmp_path / "colab"
    for name in (*BUILT, "examples", "tests/published"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "as it is"]):
        subprocess.run([*git, *words], cwd=source, check=True)
    run(installed, tmp_path, "pip", "uninstall", "--yes", "--quiet", "haiku_template")
    notebook = json.loads((ROOT / "notebooks" / "published_model.ipynb").read_text())
    cells = [
        "".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"
    ]
    folder.mkdir()
    begin = [cells[0], cells[1], "print(published.experiment.data.evaluation)"]
    (folder / "first.ipy").write_text("\n".join(begin))
    variables = {"HAIKU_TEMPLATE": f"file://{source}", "IPYTHONDIR": str(tmp_path)}
    done = run(installed, folder, "IPython", "first.ipy", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = folder / "clone" / "build" / "published"
    assert (fetched / "v_48_020.safetensors").stat().st_size > 6_000_000
    assert "put back for build/published/colabdesign" in done.stdout


@pytest.mark.slow
def test_a_project_of_an_installed_wheel_depends_on_it(installed, tmp_path):
    done = run(installed, tmp_path, "haiku_template.new", "my_first", "--eject=loop")
    assert done.returncode == 0, done.stderr
    project = (tmp_path / "my_first" / "pyproject.toml").read_text()
    assert "haiku_template[plots] @ file:///" in project and ".whl" in project
    assert "on this machine" in done.stdout or "installs here alone" in done.stdout
    assert (tmp_path / "my_first" / "my_first" / "loop.py").is_file()
    flags = ["--config=configs/first.py", "--workdir=run", "--check", "--device=cpu"]
    done = run(installed, tmp_path / "my_first", "haiku_template.train", *flags)
    assert done.returncode == 0, done.stderr
    done = run(installed, tmp_path, "haiku_template.new", "--notebooks=books")
    names = {path.name for path in (tmp_path / "books").iterdir()}
    assert done.returncode == 0 and names >= {"quickstart.ipynb", "devices.ipynb"}
    for words in (["my_first"], ["--notebooks=books"], ["other", "--vendor"]):
        done = run(installed, tmp_path, "haiku_template.new", *words)
        assert done.returncode == 64 and done.stderr.startswith("error: ")
        assert not (tmp_path / "other").exists()


def test_configs_are_found_by_name_in_a_clone(tmp_path):
    assert shipped.config_file("digits") == ROOT / "configs" / "digits.py"
    assert shipped.config_file("configs/digits.py") == ROOT / "configs" / "digits.py"
    for name in ("nothing", "../digits", "/configs/digits.py", "configs/digits.txt"):
        assert shipped.config_file(name) is None
    words = ["train", "--config=digits:a", "--workdir=digits", "--config", "digits"]
    words += ["--workdir", "digits"]
    named = shipped.with_shipped(words, Path("digits"))
    file = ROOT / "configs" / "digits.py"
    assert named == [
        *("train", f"--config={file}:a", "--workdir=digits", "--config"),
        *(str(file), "--workdir", "digits"),
    ]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("mine", "configs/mine.py"),
        ("configs/mine", "configs/mine.py"),
        ("configs.mien", "configs/mine.py"),
        ("own", "own.py"),
        ("digit", "digits"),
    ],
)
def test_the_config_that_a_name_means_is_suggested(word, meant, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    for name in ("configs/mine.py", "own.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"not exist \(did you mean --config={meant}"):
        cli._shipped([], Path(word))


def test_a_config_of_the_folder_comes_before_a_shipped_one(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits.py").write_text("raise ValueError('mine')")
    done = run_command(
        "train", "--config=configs/digits.py", "--workdir=w", cwd=tmp_path
    )
    assert done.returncode == 64 and "mine" in done.stderr


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (None, "haiku_template[plots]==0.1.0"),
        (
            {
                "url": "https://me:secret@host/a.git",
                "vcs_info": {"vcs": "git", "commit_id": "abc"},
            },
            "haiku_template[plots] @ git+https://host/a.git@abc",
        ),
        (
            {"url": "file:///srv/a.whl", "archive_info": {}},
            "haiku_template[plots] @ file:///srv/a.whl",
        ),
    ],
)
def test_the_pin_is_what_pip_installed(monkeypatch, facts, expected):
    class Distribution:
        version = "0.1.0"

        def read_text(self, name):
            return facts and json.dumps(facts)

    monkeypatch.setattr(
        new.importlib.metadata, "distribution", lambda name: Distribution()
    )
    assert new.installed_requirement()[0] == expected


def test_windows_gets_one_line():
    code = "import sys; sys.platform = 'win32'; import haiku_template"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "install it in WSL" in done.stderr


@pytest.mark.parametrize("version", ["3.8.10", "3.15.2"])
def test_a_python_without_wheels_gets_one_line_from_make(tmp_path, version):
    """Of 3.15 pip said on two pages that Bazel does not build tensorstore."""
    python, info = tmp_path / "python3", tuple(map(int, version.split(".")))
    python.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if sys.argv[1] == '-V': sys.exit(print('Python {version}'))\n"
        f"sys.version_info = {info}\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    done = subprocess.run(
        ["make", f"PYTHON={python}", f"VENV={tmp_path / 'env'}", "train"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and not (tmp_path / "env").exists()
    line = next(x for x in done.stderr.splitlines() if x.startswith("error: "))
    assert "Python 3.11 to 3.14 is needed" in line and f"Python {version};" in line
    # What pip goes by, in a project that has no make.
    assert "python_requires = >=3.11,<3.15\n" in (ROOT / "setup.cfg").read_text()
