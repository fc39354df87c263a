"""The tables of docs/coming_from.md: what each row says is there."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shlex

import haiku as hk
import jax
import optax
import pytest

from haiku_template import cli, compat, config, data, devices, runs, training
from haiku_template.errors import ConfigError
from tests.runs import ROOT, run_command

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
ROWS = [
    tuple(re.split(r"(?<!\\) \| ", line[2:-2]))
    for line in PAGE.splitlines()
    if line.startswith("| ")
]
ROWS = [row for row in ROWS if row[1] != "here"]
PLACES = (training, runs, data, devices)  # Whose names stand without their module.
LIBRARIES = {"hk": hk, "jax": jax, "optax": optax}
MAKES = ("config.optimizer", "config.precision", "config.sharding", "config.ema")
WORDS = {"module:function", "params"}  # Of a config; an argument of a task.


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


@functools.cache
def flags_of(command):
    """Flags that a command knows; all of the package print them."""
    done = run_command(command, "--help")
    assert done.returncode == 0 and "--help" in done.stdout
    return {*re.findall(r"--(?:\[no\])?(\w+)", done.stdout)}


def check_command(text):
    command, *words = shlex.split(text.removeprefix("python -m haiku_template."))
    assert (ROOT / "haiku_template" / f"{command}.py").is_file(), command
    for word in words if command != "compat" else ():
        name = word.removeprefix("--").partition("=")[0]
        if name.startswith("config."):
            check_key(word[2:])
        elif word.startswith("--"):
            assert name in flags_of(command), f"{command} has no --{name}"


def check_key(text):
    """Sets a key of the default config, which is then as good as before."""
    key, _, value = text.partition("=")
    values = config.default_config()
    *folders, name = key.removeprefix("config.").split(".")
    inner = values
    for folder in folders:
        inner = inner[folder]
    assert name in inner, key
    if value:
        inner[name] = ast.literal_eval(value)
        config.check(values)
    if key.startswith(MAKES):  # Their values are looked at where the parts are made.
        one = devices.DeviceManager.create("cpu", num_devices=1)
        training.Experiment.from_config(values, one).trainer(one)
    for part in inner[name] if name in ("writers", "hooks") else ():
        tables = ("reporting.trackers", "WRITERS"), ("runs.hooks", "HOOKS")
        module, table = tables[name == "hooks"]
        module = importlib.import_module(f"haiku_template.{module}")
        assert part in getattr(module, table), text


def find(path):
    """What a dotted name is, of a library, of this package, or without its module."""
    first, *names = path.split(".")
    if first in LIBRARIES:
        value = LIBRARIES[first]
    elif first == "haiku_template":
        return compat._find(path)
    else:
        value = next(vars(place)[first] for place in PLACES if first in vars(place))
    for name in names:
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        if not hasattr(value, name) and name in {x.name for x in fields}:
            return None
        value = getattr(value, name)
    return value


def check_name(text):
    path, _, arguments = text.partition("(")
    value = find(path)
    for name in re.findall(r"(\w+)=", arguments):
        assert name in inspect.signature(value).parameters, text


def check(text):
    """Asserts that what is quoted on this side of a table is there."""
    if text.startswith("python -m haiku_template."):
        check_command(text)
    elif text.startswith("config."):
        check_key(text)
    elif text.startswith("--"):
        assert text[2:] in flags_of("train")
    elif "/" in text:
        assert (ROOT / text).is_file(), text
    elif text not in WORDS:
        check_name(text)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_row_says_is_there(row):
    _, here = row
    names = quoted(here)
    for name in names:
        check(name)
    assert names or here.startswith("a value in the dictionary"), here


# Words of others that are no one key here.
NO_KEY = {"experiment_kwargs", "best_model_eval_metric_higher_is_better", "mode"}
NO_KEY |= {"strategy", "optimizer", "loss", "metrics", "restore_best_weights"}


def keywords(cell):
    """Words of a program of others: keyword arguments, and keys of a config."""
    for text in quoted(cell):
        yield from re.findall(r"[(,] ?(\w+)=", text)
        yield from re.findall(r"^config\.(\w+)$", text)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_agrees_with_what_the_commands_answer(row):
    others, here = row
    for word in keywords(others):
        if word in config.ALIASES:
            assert f"config.{config.ALIASES[word]}" in here, word
        elif word in cli.OTHER_FLAGS:
            flag = cli.OTHER_FLAGS[word].partition("=")[0].partition(" ")[0]
            assert flag in here or "resumes" in cli.OTHER_FLAGS[word], word
        elif "`config." in here:  # A command is to answer with the key, too.
            assert word in (*NO_KEY, *config.default_config()), word


def test_the_tables_are_whole():
    titles = [row[0] for row in ROWS]
    assert len(titles) == len(set(zip(titles, (x[1] for x in ROWS), strict=True))) > 80
    known = [w for row in ROWS for w in keywords(row[0]) if w in config.ALIASES]
    assert len(known) >= 8  # Else the test above compares nothing.


REMOVED = [name for row in ROWS for name in quoted(row[0]) if name.startswith("jax.")]


@pytest.mark.parametrize("name", sorted({*REMOVED} - {"jax.jit", "jax.pmap"}))
def test_names_that_jax_removed_are_put_back(name):
    assert name in compat.removed()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("config.num_step=3", AssertionError),
        ("config.log_every=-1", ConfigError),
        ('config.task.name="classify"', ConfigError),
        ('config.writers=("excel",)', AssertionError),
        ('config.optimizer.name="adamant"', ConfigError),
        ('config.optimizer.schedule="plateau"', ConfigError),
        ('config.precision="bf16"', ConfigError),
        ('config.sharding=(("*", "model"),)', ConfigError),
        ("python -m haiku_template.training", AssertionError),
        ("python -m haiku_template.train --worksdir=a", AssertionError),
        ("python -m haiku_template.train --config.nun_steps=3", AssertionError),
        ("--jaxline_mode", AssertionError),
        ("configs/none.py", AssertionError),
        ("Experiment(losses=...)", AssertionError),
        ("Run.opened", AttributeError),
        ("Trainers", StopIteration),
    ],
)
def test_a_row_that_rots_is_noticed(text, error):
    with pytest.raises(error):
        check(text)
