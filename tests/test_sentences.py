"""Mistakes are one sentence; defects of a user's code show where they are."""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from haiku_template import cli
from haiku_template import config as configs
from haiku_template.config import default_config
from haiku_template.data import DATASETS
from haiku_template.errors import ConfigError, axis_advice, download, near
from haiku_template.finetuning.adapters import load_adapters
from haiku_template.finetuning.source import open_source
from haiku_template.models import MODELS
from haiku_template.pretrained.converting import convert
from haiku_template.registry import make, resolve, users_module
from haiku_template.runs import start
from haiku_template.training import Experiment
from haiku_template.trust import check_files
from haiku_text import huggingface
from haiku_text.data import Tokenizer
from haiku_text.data.documents import text_files
from tests.runs import run_command

ROOT = Path(__file__).parents[1]
HEAD = "from haiku_template.config import default_config\n"
GIVES = """    config = default_config()
    config.num_steps = 4
    {}
    return config
"""


def train(directory, *flags):
    config = f"--config={directory / 'mine.py'}"
    return run_command("train", config, "--workdir=run", *flags, cwd=directory)


def assert_sentence(done, *words):
    assert done.returncode == 64, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config()\n    pass\n", ["mine.py, line 1", "expected ':'"]),
        ("x = 1\n", ["mine.py has no function get_config"]),
        ("def get_config():\n    pass\n", ["get_config() of", "returns None"]),
        ("def get_config():\n    return {'a': 1}\n", ["returns a dict", "ConfigDict"]),
        (
            "import os\nx = os.environ['NOWHERE']\n",
            ["mine.py, line 2", "KeyError: 'NOWHERE'"],
        ),
        (
            "def get_config():\n    return [].foo\n",
            ["mine.py, line 2", "no attribute 'foo'"],
        ),
        ("def get_config(size):\n    return size\n", ["mine.py", "size"]),
    ],
    ids=["syntax", "no get_config", "None", "dict", "environment", "attribute", "arg"],
)
def test_a_config_file_that_gives_no_config_is_one_sentence(tmp_path, text, words):
    (tmp_path / "mine.py").write_text(text)
    done = train(tmp_path)
    done.stderr = "\n".join(
        line for line in done.stderr.splitlines() if line.startswith("error")
    )
    assert_sentence(done, *words)


def test_a_config_file_takes_an_argument_after_a_colon(tmp_path):
    text = HEAD + "def get_config(size):\n" + GIVES.format("config.num_steps = size")
    (tmp_path / "mine.py").write_text(text)
    done = run_command(
        "train", f"--config={tmp_path / 'mine.py'}:small", "--workdir=w", cwd=tmp_path
    )
    assert_sentence(done, "mine.py, line 5", "small")  # A text, where a number belongs.
    done = run_command(
        "train", f"--config={tmp_path / 'no.py'}:small", "--workdir=w", cwd=tmp_path
    )
    assert_sentence(done, "no.py does not exist", "mine.py")


@pytest.mark.slow
def test_a_data_set_is_named_on_the_command_line_with_its_own_keys(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "mine.py").write_text(
        HEAD + "def get_config():\n" + GIVES.format("config.batch_size = 8")
    )
    keys = ("--config.data.name=npz", "--config.data.path=a.npz")
    done = train(tmp_path, *keys, "--config.data.num_classes=3")
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "run/config.json").read_text())["data"]
    assert saved["path"] == "a.npz" and saved["num_classes"] == 3
    done = train(tmp_path, *keys, "--config.data.pth=a.npz", "--workdir=other")
    assert_sentence(done, "'pth'", "it takes path, num_classes")
    done = train(tmp_path, "--config.model.depth=3", "--workdir=other")
    assert_sentence(done, "'depth'", "it takes width, num_layers, dropout")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user's, and gives `name:function`."""

    def write(body, name="theirs"):
        (tmp_path / f"{name}.py").write_text(body)
        importlib.invalidate_caches()
        return f"{name}:f"

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    sys.modules.pop("theirs", None)


ERRORS = [ValueError, AttributeError, TypeError, KeyError, ImportError]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("key", ["data", "model"])
def test_an_error_inside_a_users_function_stays_what_it_is(module, key, error):
    name = module(f"def f(*args, **kwargs):\n    raise {error.__name__}('theirs')\n")
    with pytest.raises(error, match="theirs") as caught:
        make(key, {"name": name}, DATASETS)
    assert not hasattr(caught.value, "exit_code")


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_while_a_users_module_is_imported_stays_what_it_is(module, error):
    name = module(f"raise {error.__name__}('theirs')\n")
    with pytest.raises(error, match="theirs") as caught:
        resolve("model", name, MODELS)
    assert not hasattr(caught.value, "exit_code")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("from haiku_template.preflight import Gone", "cannot import name 'Gone'"),
        ("import haiku_text.gone", "No module named 'haiku_text.gone'"),
    ],
)
def test_a_module_that_was_written_for_another_version_is_told_so(module, body, words):
    name = module(body)
    with pytest.raises(ConfigError, match=f"{words}.*written for another version"):
        resolve("model", name, MODELS)
    with pytest.raises(ConfigError, match="config.loop='theirs'.*copied anew, and"):
        users_module("loop", "theirs", "train")
    module("import a_package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError):
        resolve("model", name, MODELS)


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        ("", "nowhere:f", "cannot be imported from here"),
        ("", "theirs.nowhere:f", "cannot be imported from here"),
        ("", "theirs.py:f", "is a file; give its module's name, 'theirs'$"),
        ("", "nets/theirs.py:f", "give its module's name, 'nets.theirs'$"),
        ("", "../theirs.py:f", "give its module's name$"),
        ("g = 1", "theirs:f", r"theirs\.py has no f"),
        ("f = 1", "theirs:f", "is of type int; it must be a function"),
        ("", ":f", "cannot be imported from here"),
        ("", ".a:f", "cannot be imported from here"),
    ],
)
def test_a_name_that_is_no_function_is_a_mistake_of_the_config(
    module, body, name, words
):
    module(body)
    with pytest.raises(ConfigError, match=words):
        resolve("model", name, MODELS)


def test_a_value_that_a_built_in_model_refuses_is_a_mistake_of_the_config():
    keys = {"name": "mlp", "width": 0}
    with pytest.raises(ConfigError, match="config.model: width=0"):
        make("model", keys, MODELS, num_outputs=3, axis_name=None)


THEIRS = (
    HEAD
    + """
import jax.numpy as jnp
import jax
import numpy as np
import haiku as hk
from haiku_template.data import BatchSpec, Split, from_split

def data(spec, kind="right"):
    x = np.zeros((32, 3), np.float32)
    y = np.arange(32, dtype=np.int32) % 3
    return [x] if kind == "list" else from_split(Split(x, y, x, y), spec, num_classes=3)

def model(num_outputs, axis_name, size=3):
    def forward(inputs, is_training):
        return hk.Linear(size)(inputs)
    return hk.transform(forward)

def task(outputs, batch):
    return jnp.mean(outputs, axis=1)

def broken(outputs, batch):
    raise ValueError("theirs")

def get_config():
    config = default_config()
    config.num_steps = 4
    config.batch_size = 8
    config.data = {"name": "mine:data"}
    return config
"""
)


@pytest.fixture
def theirs(tmp_path):
    (tmp_path / "mine.py").write_text(THEIRS)
    return tmp_path


@pytest.mark.slow(but="flags0")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--config.model.name=mine:model", "--config.model.size=2"],
            ["[8, 2]", "3 classes"],
        ),
        (["--config.task.name=mine:task"], ["the task returns", "dictionary"]),
        (["--config.task.name=language_model"], ["language_model takes", "[8, 3]"]),
        (["--config.data.kind=list"], ["mine:data returned a list", "Data"]),
        (["--config.model.name=mine:task"], ["mine:task"]),
    ],
)
def test_parts_that_do_not_fit_each_other_are_one_sentence(theirs, flags, words):
    assert_sentence(train(theirs, *flags), *words)
    assert not (theirs / "run").exists()


def test_a_defect_in_a_users_task_shows_its_traceback(theirs):
    done = train(theirs, "--config.task.name=mine:broken")
    assert done.returncode == 1
    assert 'raise ValueError("theirs")' in done.stderr and "mine.py" in done.stderr


def saved_config(workdir, name, key="model"):
    values = configs.to_dict(default_config())
    values[key] = {"name": name} if key == "model" else name
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("name", ["evaluate", "export", "generate"])
def test_nothing_inside_a_workdir_is_imported(tmp_path, name):
    payload = "open('ran', 'w')\ndef model(**_):\n    pass\n"
    workdir = tmp_path / "shared_run"
    saved_config(workdir, "shared_run.payload:model")
    (workdir / "payload.py").write_text(payload)
    (workdir / "__init__.py").write_text(payload)
    flags = ["--format=safetensors", "--output=out"] if name == "export" else []
    done = run_command(name, "--workdir=shared_run", *flags, cwd=tmp_path)
    assert_sentence(done, "config.model.name='shared_run.payload:model'", "is inside")
    saved_config(workdir, "payload:model")
    done = run_command(name, "--workdir=.", *flags, cwd=workdir)
    assert_sentence(done, "payload.py", "is inside")
    assert not (tmp_path / "ran").exists() and not (workdir / "ran").exists()


def test_a_link_from_or_into_a_workdir_does_not_hide_where_a_module_is(
    tmp_path, monkeypatch
):
    workdir = tmp_path / "run"
    saved_config(workdir, "linked:model")
    (workdir / "payload.py").write_text("")
    (tmp_path / "linked.py").symlink_to(workdir / "payload.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="is inside"):
        configs.of_run(workdir)


def test_a_step_inside_a_workdir_is_refused(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    saved_config(workdir, "payload", "step")
    (workdir / "payload.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(workdir)
    with pytest.raises(ConfigError, match="config.step='payload'.* is inside"):
        configs.of_run(workdir)


def test_a_step_that_cannot_be_imported_is_named(one_device):
    values = default_config()
    values.step = "nowhere.steps"
    with pytest.raises(ConfigError, match=r"config\.step='nowhere\.steps' cannot be"):
        Experiment.from_config(values, one_device).trainer(one_device)


def test_the_file_that_a_saved_config_imports_is_told(tmp_path, monkeypatch, caplog):
    (tmp_path / "honest.py").write_text("raise SystemExit('imported')")
    saved_config(tmp_path / "run", "honest:model")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    configs.of_run(tmp_path / "run")
    run, file = tmp_path / "run", tmp_path / "honest.py"
    assert f"{run} names code, which is run: {file}\n" in caplog.text


@pytest.mark.parametrize(
    "table", [MODELS, DATASETS, ("adam", "adamw", "lion")], ids=len
)
def test_capitals_do_not_count_for_what_was_meant(table):
    for name in table:
        for typed in (name.upper(), name.capitalize(), name[:-1] + name[-1].upper()):
            assert near(typed, table, "{}") == name


COMMANDS = [
    path
    for folder in ("haiku_template", "benchmarks", "launch", "skeleton")
    for path in sorted((ROOT / folder).glob("*.py"))
]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_help_shows_each_example_as_it_is_typed(path):
    """Help is the docstring, in which a backslash at a line's end joins two lines."""
    node = ast.parse(path.read_text()).body[0]
    words = node.value.value
    assert words.count("\n") == node.end_lineno - node.lineno


PARSES = [x for x in COMMANDS if x.parent.name == "haiku_template"]
PARSES = [x for x in PARSES if "cli.run(" in x.read_text() and x.stem != "cli"]


def examples(path):
    """Commands in the docstring of a file, with what is optional in them."""
    text = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", " ")
    for line in re.findall(r"(?m)^    python -m (.*)$", text):
        module, *words = shlex.split(re.sub("[][]", "", line))
        assert module == f"{path.parent.name}.{path.stem}"
        yield words


@pytest.mark.parametrize("path", PARSES, ids=lambda path: path.stem)
def test_flags_of_each_example_in_help_are_there(path):
    commands = [["command", *words] for words in examples(path)]
    code = f"import {path.parent.name}.{path.stem}\nfrom absl import flags\n"
    code += f"for words in {commands}: flags.FLAGS(words)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert commands and done.returncode == 0, done.stderr


HUB = "google-bert/bert-base-uncased"


@pytest.mark.parametrize(
    "place",
    [
        lambda devices: open_source(HUB, None, devices),
        lambda devices: load_adapters(HUB, {}, {}, None, devices),
        lambda devices: convert(HUB, "new.safetensors"),
        lambda devices: huggingface.restore(HUB, dict, (), devices),
        lambda devices: huggingface.describe(HUB),
        lambda devices: Tokenizer(HUB),
    ],
    ids=["init_from", "adapters", "convert", "restore", "describe", "tokenizer"],
)
def test_a_hugging_face_id_gets_the_command_that_downloads_it(
    tmp_path, monkeypatch, one_device, place
):
    monkeypatch.chdir(tmp_path)
    command = f"`hf download {HUB} --local-dir bert-base-uncased`"
    with pytest.raises(ConfigError, match=command):
        place(one_device)
    with pytest.raises(ConfigError, match="hf download gpt2 --local-dir gpt2"):
        open_source("gpt2", None, one_device)
    assert not download("gpt2_corpus") and not download("gpt2", "dataset")
    (tmp_path / "google-bert").mkdir()  # It is a path of this machine.
    with pytest.raises(ConfigError, match=r"^((?!hf download).)*$"):
        place(one_device)


@pytest.mark.parametrize(
    "path",
    [
        "bert",
        "./bert",
        "/a/b",
        "../a/b",
        "a/b/c",
        "a/model.safetensors",
        "a/b d",
        "~/a",
    ],
)
def test_what_is_no_hugging_face_id_gets_no_command(path):
    assert download(path) == ""


@pytest.mark.slow
def test_the_command_is_one_that_the_hub_s_own_program_knows():
    pytest.importorskip("huggingface_hub.cli.hf")  # It comes with tokenizers.
    words = shlex.split(re.search("`hf (.*?)`", download(HUB, "dataset"))[1])
    assert words[:4] == ["download", HUB, "--repo-type", "dataset"]
    code = "from huggingface_hub.cli.hf import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0 and "Download files" in done.stdout, done.stderr


LONG = "x" * 300  # No file system has such a name; what may not be read is alike.
LONG_PATHS = {
    "runs": [LONG],
    "train config": [f"--config={LONG}.py", "--workdir=run"],
    "train init_from": [
        "--config=digits",
        "--workdir=run",
        f"--config.init_from={LONG}",
    ],
    "train workdir": ["--config=digits", f"--workdir={LONG}"],
    "convert": [f"--input={LONG}.pkl", "--output=new.safetensors"],
    "checkpoints": [f"--workdir={LONG}"],
    "evaluate": [f"--workdir={LONG}"],
    "predict": [f"--workdir={LONG}", "--inputs=new.npy"],
    "compat": [f"{LONG}.py"],
}


@pytest.mark.slow(but="runs")
@pytest.mark.parametrize("name", LONG_PATHS)
def test_a_path_that_may_not_be_looked_at_is_one_sentence(tmp_path, name):
    command, _, _ = name.partition(" ")
    done = run_command(command, *LONG_PATHS[name], cwd=tmp_path)
    assert_sentence(done, LONG)


def test_a_path_that_others_code_looked_at_is_their_defect():
    def error_of(look):
        with pytest.raises(OSError, match="too long") as caught:
            look()
        return caught.value

    assert cli._unseen(error_of(lambda: Path(LONG).stat())) is None
    ours = error_of(lambda: convert(f"{LONG}.pkl", "new.safetensors"))
    assert str(cli._unseen(ours)) == f"{LONG}.pkl cannot be used: File name too long"


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ["--config=~/none.py", "--workdir=run"]),
        ("train", ["--config=digits", "--workdir=run", "--config.init_from=~/none"]),
        ("train", ["--config=mnist", "--workdir=run", "--config.data.path=~/none"]),
        (
            "train",
            [
                "--config=digits",
                "--workdir=run",
                "--config.init_from=~/none",
                "--config.finetuning.adapters=~/none",
            ],
        ),
        ("evaluate", ["--workdir=~/none"]),
        ("evaluate", ["--workdir", "~/none"]),
        ("predict", ["--workdir=~/none", "--inputs=~/x.npy"]),
        ("export", ["--workdir=~/none", "--format=npz", "--output=~/x.npz"]),
        ("convert", ["--input=~/none.pkl", "--output=~/x.safetensors"]),
        ("prepare", ["--input=~/none", "--tokenizer=~/none", "--output=x.safetensors"]),
        ("generate", ["--workdir=~/run", "--prompt_file=~/none"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].split("=")[0],
)
def test_a_flag_may_name_a_file_of_the_home_folder(tmp_path, command, flags):
    (tmp_path / "home").mkdir()
    done = run_command(command, *flags, cwd=tmp_path, HOME=str(tmp_path / "home"))
    done.stderr = done.stderr.strip().splitlines()[-1]
    assert_sentence(done, f"{tmp_path}/home/none")


# Every flag that takes text, of all commands, and every key of the shipped configs.
STRINGS = re.compile(r"DEFINE_(?:multi_)?string\(\s*\"(\w+)\"")
CODE = [
    p for room in ("haiku_template", "haiku_text") for p in (ROOT / room).rglob("*.py")
]
NAMES = {name for path in CODE for name in STRINGS.findall(path.read_text())}
KEYS = {
    f"config.{key}"
    for path in sorted((ROOT / "configs").glob("*.py"))
    for key in configs.flatten(
        importlib.import_module(f"configs.{path.stem}").get_config().to_dict()
    )
}
TEXT = {"prompt", "config.model.remat"}  # No paths: one may begin with a ~.


@pytest.mark.parametrize("name", sorted({"config", *NAMES, *KEYS, *TEXT}))
def test_the_home_folder_is_found_in_the_value_of_any_flag(monkeypatch, name):
    monkeypatch.setenv("HOME", "/a/home")
    for word, expected in [
        (f"--{name}=~/b c", f"--{name}=/a/home/b c"),
        (f"--{name}\0~/b", f"--{name}\0/a/home/b"),
        (f"-{name}=~", f"-{name}=/a/home"),
        (f"--{name}=b/~/c", f"--{name}=b/~/c"),
        (f"--{name}=~b*", f"--{name}=~b*"),
    ]:
        words = f"command\0{word}\0--other=1"
        found = cli.HOME.sub(cli._at_home, words)
        assert (
            found == words if name in TEXT else found == words.replace(word, expected)
        )


USER = "~no.such.user/x"  # A shell leaves such a word as it is.
READERS = {
    "texts": lambda: text_files((USER,)),
    "tokenizer": lambda: Tokenizer(USER),
    "trust": lambda: check_files("model", "json:loads", Path(), [USER]),
}


@pytest.mark.parametrize("name", READERS)
def test_the_home_of_no_user_is_a_folder_that_is_not_there(name):
    assert not start.is_copied(USER)
    with pytest.raises(ConfigError, match="not exist|not there|neither"):
        READERS[name]()


def test_a_mirror_in_the_home_of_no_user_is_refused(tmp_path):
    flags = ["--config=digits", "--workdir=run", "--device=cpu"]
    done = run_command("train", *flags, f"--config.mirror={USER}", cwd=tmp_path)
    assert_sentence(done, f"config.mirror={USER}: there is no such user")
    assert not [*tmp_path.glob("~*")]


def test_a_variable_with_a_value_that_jax_refuses_is_one_sentence(tmp_path):
    flags = ["--config=digits", "--workdir=run", "--device=cpu"]
    done = run_command("train", *flags, cwd=tmp_path, JAX_TRANSFER_GUARD="no")
    assert_sentence(done, "JAX_TRANSFER_GUARD=no is no value that JAX takes; unset it")
    assert not (tmp_path / "run").exists()


def test_an_axis_of_published_code_is_said_to_be_its_own():
    """Of jaxline's `jax.pmap`, say; a run binds that of its devices alone."""
    with pytest.raises(NameError) as caught:
        jax.make_jaxpr(lambda x: jax.lax.pmean(x, "i"))(1.0)
    for way in ("published.norms_over(axis_name)", "collectives_over(axis_name, "):
        assert way in axis_advice(caught.value)
    assert axis_advice(NameError("name 'i' is not defined")) == ""
