"""Readers of outside data: a census, files changed at random, and what fuzzing found.

`make fuzz` does it for ten minutes each, guided by coverage.
"""

import ast
import json
import random

import pytest

from benchmarks import fuzz
from benchmarks.fuzz import Fuzzed, change_json, watched
from benchmarks.readers import ELSEWHERE, READERS
from haiku_template import cli, config
from haiku_template.cluster.detection import detect
from haiku_template.combinations import combinations
from haiku_template.errors import ConfigError
from haiku_template.reporting.goodput import GOODPUT, goodput
from haiku_template.runs import rewind
from haiku_template.storage import checkpoint, manifest, read, workdir
from haiku_text import huggingface
from haiku_text.data import Tokenizer
from jax_doctor.machine import Requirement
from tests.runs import ROOT

# Calls that open or parse; what only writes is told by its mode.
READS = {"read_text", "read_bytes", "loads", "load", "memmap", "mmap", "recv"}
READS |= {"recv_fds", "from_file", "safe_open", "ZipFile", "read_json", "contents"}
READS |= {"opened", "literal_eval", "fromfile", "open"}
SLOW = ("checkpoint", "workdir", "trees", "inputs", "weights")


def reads():
    """`module.function` of each call of `READS` in the packages."""
    for package in ("haiku_template", "haiku_text", "jax_doctor"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if package == "haiku_template" else parts
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    for call in ast.walk(node):
                        if isinstance(call, ast.Call) and _name(call) in READS:
                            yield ".".join([*parts, node.name])


def _name(call):
    modes = [x.value for x in call.args if isinstance(x, ast.Constant)]
    if any(mode in ("w", "wb", "a", "ab", "xb") for mode in modes):
        return ""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_each_reader_is_fuzzed_or_named_with_a_reason():
    listed = {x for reader in READERS.values() for x in reader.functions.split()}
    prefixes = [*listed, *ELSEWHERE]

    def covers(prefix, name):
        return name == prefix or name.startswith(f"{prefix}.")

    names = {*reads()}
    assert [x for x in names if not any(covers(y, x) for y in prefixes)] == []
    assert [x for x in ELSEWHERE if not any(covers(x, y) for y in names)] == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in READERS],
)
def test_changed_files_are_refused_in_documented_errors(tmp_path, name, capfd):
    fuzzed, rng = Fuzzed(name, tmp_path / "files"), random.Random(0)
    for data in fuzzed.inputs():
        fuzzed.run(data)
    assert fuzzed.counts["accepted"] > 0
    for _ in range(20):
        data = rng.choice(fuzzed.inputs())
        fuzzed.run(fuzzed.mutated(data, rng.randrange(2**32)))
    assert fuzzed.findings == {}
    capfd.readouterr()


def test_counts_of_an_earlier_run_are_none_of_this_one(tmp_path):
    (tmp_path / "counts-1.json").write_text('[{"executions": 5}, {"an error": ""}]')
    assert watched("words", 0, tmp_path) == ({}, {})


def test_a_reader_that_does_not_exist_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--readers=words,weigths"])
    monkeypatch.setattr(fuzz, "fuzz", lambda *args: True)
    with pytest.raises(SystemExit, match="2"):
        fuzz.main()
    words = capsys.readouterr().err
    assert "names 'weigths'; possible are " in words and ", weights" in words


def test_a_value_of_json_changes():
    rng = random.Random(0)
    texts = {change_json(b'{"a": [1, {"b": null}]}', rng) for _ in range(50)}
    assert len(texts) > 20 and all(json.loads(x) is not ... for x in texts)


def test_a_finding_is_named_once_by_its_place(tmp_path):
    fuzzed = Fuzzed("words", tmp_path / "files")
    for text in ("a", "b"):
        try:
            Requirement.allows(None, text)
        except AttributeError as error:
            fuzzed.find(error, text.encode())
    (sentence,) = fuzzed.findings
    assert sentence.startswith("AttributeError in jax_doctor/machine.py allows line ")


@pytest.mark.parametrize(
    "rows",
    [
        '{"began": 1}\n{"time": 2, "step": 3}',
        '{"began": 1, "time": 2, "step": 0}\n{"time": "a", "step": 1}',
        '{"began": 1, "time": 2, "step": 0}\n{"time": 1' + "0" * 400 + ', "step": 1}',
    ],
)
def test_rows_of_goodput_that_no_run_wrote_are_left_out(tmp_path, rows):
    (tmp_path / GOODPUT).write_text(rows)
    assert set(goodput(tmp_path)) <= {"starting"}


@pytest.mark.parametrize("value", ['"a"', "[1]", "1" + "0" * 400, "Infinity", "{}"])
def test_a_line_of_metrics_has_numbers_alone(tmp_path, value):
    lines = f'{{"step": 1, "eval/loss": {value}}}\n{{"step": 2, "eval/loss": null}}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert read(tmp_path / "metrics.jsonl") == [{"step": 2, "eval/loss": None}]


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "two"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"MASTER_ADDR": "a", "RANK": "", "WORLD_SIZE": "2"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a"},
        {"JOB_COMPLETION_INDEX": "x"},
    ],
)
def test_a_launcher_s_variables_that_are_not_as_it_sets_them(variables):
    with pytest.raises(ConfigError, match="is set, and what its launcher sets beside"):
        detect(variables)


@pytest.mark.parametrize("value", [1.5, "Other", {"a": 1}])
def test_architectures_that_are_no_list(tmp_path, value):
    content = {"model_type": "gpt2", "architectures": value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="describes the architecture"):
        huggingface.describe(tmp_path)


def test_metrics_of_a_checkpoint_that_hold_a_checksum_alone(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/metrics").write_text('{"crc32": 1}')
    assert checkpoint.metrics_of(tmp_path) == {}


@pytest.mark.parametrize("name", ["leaves", "files", "facts"])
def test_a_sealed_manifest_of_other_kinds_is_damaged(tmp_path, name):
    values = dict.fromkeys(manifest.SEALED, {}) | {name: True}
    (tmp_path / "manifest").mkdir()
    (tmp_path / "manifest/manifest").write_text(json.dumps(manifest.sealed(values)))
    with pytest.raises(ValueError, match="other fields than it was saved with"):
        manifest.read(tmp_path)


@pytest.mark.parametrize("value", [{"a": 1}, [None], "12", [1.5]])
def test_steps_of_a_run_that_are_none(tmp_path, value):
    workdir.write_json(tmp_path / "run.json", {"left_out": value, "id": "a"})
    workdir.write_json(tmp_path / rewind.RECORD, {"steps": value})
    for call in (workdir.left_out, lambda x: rewind.steps_of("auto", x)):
        with pytest.raises(ConfigError, match="are no steps"):
            call(tmp_path)


def test_words_of_a_sweep_that_nest_deeply_are_text(tmp_path):
    with pytest.raises(ConfigError, match=r"init_from|does not fit|name"):
        combinations(config.default_config(), tmp_path, ["seed=" + "(" * 5000])
    with pytest.raises(ValueError, match="cannot be read; possible is a tuple"):
        cli._literal("model.remat", "(" * 5000)


def test_a_requirement_without_a_name_is_none_of_a_package():
    assert Requirement.read(" ; extra == 'a'").name == ""


def test_a_panic_of_the_tokenizer_is_a_sentence(tmp_path):
    READERS["tokenizer"].write(tmp_path)
    contents = json.loads((tmp_path / "wordpiece.json").read_text())
    del contents["post_processor"]["special_tokens"]["[CLS]"]
    (tmp_path / "a.json").write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match=r"a\.json cannot (encode|read)"):
        Tokenizer(tmp_path / "a.json").encode(["text"], special=True)
    contents["model"]["vocab"]["t"] = "x"
    (tmp_path / "a.json").write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match="no whole numbers"):
        Tokenizer(tmp_path / "a.json")
