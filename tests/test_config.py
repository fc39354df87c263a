import copy
import functools
import json
import re

import haiku as hk
import pytest
from ml_collections import config_dict

from haiku_template import config
from haiku_template.config import default_config
from haiku_template.data import DATASETS
from haiku_template.errors import ConfigError
from haiku_template.models import MODELS
from haiku_template.training import Experiment
from haiku_template.training.tasks import TASKS
from tests.runs import run_command


def test_saved_and_read_again_it_is_the_same(tmp_path):
    values = default_config()
    values.model = {"name": "resnet", "channels": (16, 32), "nested": {"a": None}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(values)))
    again = config.load(path)
    assert again.model.channels == (16, 32)
    assert config.to_dict(again) == config.to_dict(values)
    assert config.differences(config.to_dict(values), config.to_dict(again)) == []


def test_a_config_from_before_a_key_means_what_it_meant(tmp_path):
    values = config.to_dict(default_config())
    assert config.completed({}) == {}
    for path in config.flatten(values):
        *parents, key = path.split(".")
        if parents and parents[0] in config.NAMED and key == "name":
            continue  # Each config has it.
        keys = older = copy.deepcopy(values)
        for parent in parents:
            keys = keys[parent]
        del keys[key]
        assert config.completed(older) == values, path
    older = {k: v for k, v in values.items() if k not in ("finetuning", "optimizer")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(older))
    assert config.to_dict(config.load(path)) == values


def test_keys_that_earlier_versions_had_are_left_out():
    values = config.to_dict(default_config())
    older = copy.deepcopy(values)
    older["finetuning"] |= {"features": "head", "features_dir": "runs/features"}
    assert config.completed(older) == values


@pytest.mark.parametrize("key", ["finetuning", "finetuning.lora", "optimizer"])
def test_a_value_instead_of_keys_is_one_sentence(key):
    values = config.to_dict(default_config())
    *parents, last = key.split(".")
    (values[parents[0]] if parents else values)[last] = 3
    with pytest.raises(ConfigError, match=f"config.{key}=3; it must have its own keys"):
        config.completed(values)


def test_differences_name_every_key_that_changed():
    old = {"a": 1, "model": {"name": "mlp", "width": 8}, "gone": 2}
    new = {"a": 1, "model": {"name": "mlp", "width": 9}, "new": None}
    assert config.differences(old, new) == [
        "gone: 2 there, 'absent' now",
        "model.width: 8 there, 9 now",
        "new: 'absent' there, None now",
    ]
    assert not config.differences({"a": float("nan")}, {"a": float("nan")})


def changed(key, value):
    values = default_config()
    with values.ignore_type(), values.unlocked():
        values.update_from_flattened_dict({key: value})
    return values


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("finetuning.rename", (("a", 1),), "rename=.*; possible is a tuple of pairs"),
        ("finetuning.rename", ("a", "b"), "rename=.*; possible is a tuple of pairs"),
        ("finetuning.lora.axes", ((3, "in out"),), "axes=.* is a tuple of pairs"),
        ("finetuning.lora.axes", ("*/w", "in out"), "axes=.* is a tuple of pairs"),
        ("finetuning.ignore", (1,), "ignore=.*; possible is a tuple of patterns"),
        ("num_steps", 0, "num_steps=0; possible is 1 or more"),
        ("num_steps", 1e3, r"num_steps=1000\.0 has the wrong type.*a whole number"),
        ("num_steps", True, "num_steps=True has the wrong type"),
        ("num_steps", None, "num_steps=None has the wrong type"),
        ("eval_every", 0, "eval_every=0"),
        ("seed", -1, "seed=-1; possible is 0 to"),
        ("optimizer.learning_rate", float("nan"), "learning_rate=nan"),
        ("optimizer.learning_rate", "3e-4", "a number"),
        ("ema_decay", 1.0, "from 0 to below 1"),
        ("best_mode", "best", "min or max"),
        ("precision", 16, "precision=16 has the wrong type; possible is text"),
        ("model", "mlp", "model must have a name"),
        ("init_from", 1, "init_from=1 has the wrong type; possible is text or None"),
        (
            "finetuning.train",
            "*",
            r"train='\*' has the wrong type; possible is a tuple",
        ),
        ("finetuning.train", (1,), r"train=\(1,\); possible is a tuple of patterns"),
        ("finetuning.lora.rank", -1, "rank=-1; possible is None, or 0 or more"),
        ("finetuning.lora.dropout", 1.0, "from 0 to below 1"),
        ("finetuning.lora", 4, "finetuning.lora must have"),
        ("finetuning.rank", 4, "unknown key finetuning.rank"),
    ],
)
def test_values_that_cannot_be_are_refused(key, value, words):
    with pytest.raises(ConfigError, match=words):
        config.check(changed(key, value))


@pytest.mark.parametrize("key", ["0", "model.0", "model.names.0"])
@pytest.mark.parametrize("others", [(), ("a",)])
def test_keys_that_are_no_text_are_refused_by_where_they_are(key, others):
    values = default_config()
    where, _, number = f"config.{key}".rpartition(".")
    with values.unlocked():
        values.model.names = {}
        section = functools.reduce(getattr, where.split(".")[1:], values)
        section[int(number)] = "cat"
        for other in others:
            section[other] = "dog"
    with pytest.raises(ConfigError, match=f"^{where} has a key that is no text"):
        config.check(values)


def test_keys_that_are_no_text_are_refused_within_tuples_too():
    values = changed("model", {"name": "mlp", "parts": ("a", ({0: "cat"},))})
    with pytest.raises(ConfigError, match=r"^config.model.parts.1.0 has a key that is"):
        config.check(values)


def test_numbers_that_can_be_pass():
    config.check(default_config())
    config.check(changed("optimizer.learning_rate", 0))  # An int for a float.
    config.check(changed("eval_every", 10))


def test_missing_and_unknown_keys_are_named():
    values = default_config()
    del values.seed
    with pytest.raises(ConfigError, match="no key seed"):
        config.check(values)
    values = default_config()
    values.finetuning.multiplier = ()
    words = r"finetuning\.multiplier \(did you mean multipliers\?\)"
    with pytest.raises(ConfigError, match=words):
        config.check(values)
    values = default_config()
    values.optimizer.learning_rat = 1.0
    words = r"optimizer\.learning_rat \(did you mean learning_rate\?\)"
    with pytest.raises(ConfigError, match=words):
        config.check(values)


def test_an_unknown_key_of_the_optimizer_is_named_before_data_is_read(one_device):
    values = default_config()
    values.optimizer.epsroot = 1.0
    values.data = {"name": "npz", "path": "nowhere"}
    config.check(values)  # It takes the optimizer's own keys, whatever they are.
    words = r"config\.optimizer: adamw takes no epsroot; nearest is eps_root"
    with pytest.raises(ConfigError, match=words):
        Experiment.from_config(values, one_device)


def test_a_value_that_cannot_be_saved_is_named():
    values = config_dict.ConfigDict({"model": {"activation": max}})
    with pytest.raises(ConfigError, match=r"config\.model\.activation is a builtin"):
        config.to_dict(values)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"'])
def test_a_damaged_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        config.load(tmp_path / "config.json")


def test_the_names_that_are_known_without_jax_are_those_of_the_tables():
    tables = {"model": MODELS, "data": DATASETS, "task": TASKS}
    assert {key: set(names) for key, names in config.NAMED.items()} == {
        key: set(table) for key, table in tables.items()
    }


MISTAKES = {
    "--config.optimizer.lerning_rate=1": "did you mean learning_rate?",
    "--config.batch_size=big": "a whole number is needed",
    "--config.keep_best=-1": "config.keep_best=-1; possible is 0 or more",
    "--config.model.name=mpl": "did you mean mlp?",
    "--config.data.name=digts": "did you mean digits?",
    "--config.task.name=clasification": "did you mean classification?",
    "--config.data.pth=data.npz": "digits got an unexpected keyword argument 'pth'",
    "--config=configs/digts.py": "the config file configs/digts.py does not exist",
    "--profile=20:10": "--profile=20:10 is no interval",
    "--config.num_epochs=inf": "possible is None, or more than 0, and finite",
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_mistakes_are_found_before_jax_is_imported(flag, tmp_path):
    flags = ["--config=configs/digits.py", f"--workdir={tmp_path}", flag]
    done = run_command("train", *flags, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == ConfigError.exit_code
    modules, _, sentence = done.stderr.rpartition("error: ")
    assert MISTAKES[flag] in sentence and "\n" not in sentence.strip()
    assert not re.search(r"\| +(jax|jaxlib|haiku|optax)$", modules, re.MULTILINE)


def listed(num_outputs, sizes, **_):
    assert isinstance(sizes, tuple) and isinstance(sizes[1], tuple), sizes
    return hk.transform(lambda x, is_training: hk.nets.MLP(sizes[1] + (10,))(x))


def test_a_list_is_the_tuple_that_it_is_in_a_run_that_is_read_again(one_device):
    values = default_config()
    values.model = {"name": f"{__name__}:listed", "sizes": [1, [8, 4]]}
    experiment = Experiment.from_config(values, one_device)
    read_again = config.to_dict(values)["model"]["sizes"]
    assert read_again == [1, [8, 4]] and experiment.model is not None
