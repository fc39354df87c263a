"""Texts in tables: CSV and Parquet by their columns, and pairs of texts."""

import csv
import json
import sys
import tracemalloc

import jax
import numpy as np
import pytest

from haiku_template.config import default_config
from haiku_template.data import BatchSpec, rows
from haiku_template.data.examples import read_examples
from haiku_template.data.rows import read_rows
from haiku_template.errors import ConfigError
from haiku_template.runs import Run, start
from haiku_template.runs.predictions import write_predictions
from haiku_text.data import tokenizer as tokenizers
from haiku_text.data.jsonl import jsonl

CLASSIFICATION = BatchSpec(4)
# What a table must keep: separators, quotes, line ends, and other scripts.
TEXTS = ["plain", 'a "quoted", comma', "two\nlines", "größe 語", "", " spaces "]
EXAMPLES = [
    {"sentence": text, "target": "ab"[i % 2], "other": i}
    for i, text in enumerate(3 * TEXTS)
]


def write_jsonl(path, examples):
    path.write_text("".join(json.dumps(x) + "\n" for x in examples))


def write_csv(path, examples):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, examples[0])
        writer.writeheader()
        writer.writerows(examples)


def write_parquet(path, examples):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(examples), path, row_group_size=5)


WRITERS = {".jsonl": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}


def assert_equal(batch, expected):
    jax.tree.map(np.testing.assert_array_equal, batch, expected)


def write(folder, kind, examples, name="a"):
    path = folder / f"{name}{kind}"
    WRITERS[kind](path, examples)
    return str(path)


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_every_format_makes_the_batches_of_json_lines(tmp_path, kind):
    keys = {"text": "sentence", "label": "target", "context": 64}
    keys |= {"tokenizer": None, "validation_fraction": 0.4}
    examples = [x for x in EXAMPLES if x["sentence"]]
    expected, data = (
        jsonl(CLASSIFICATION, path=write(tmp_path, x, examples), **keys)
        for x in (".jsonl", kind)
    )
    assert data.class_names == expected.class_names == ("a", "b")
    for step in range(6):
        assert_equal(data.train.batch(step), expected.train.batch(step))
    assert data.evaluation.num_batches == expected.evaluation.num_batches > 0
    for i in range(data.evaluation.num_batches):
        assert_equal(data.evaluation.batch(i), expected.evaluation.batch(i))


@pytest.mark.parametrize("kind", WRITERS)
def test_prompts_and_completions_have_columns_too(tmp_path, kind):
    examples = [{"q": "ab", "a": "cd", "x": 1}, {"q": "", "a": "e", "x": 2}]
    path = write(tmp_path, kind, examples)
    keys = {"prompt": "q", "completion": "a", "validation_path": path}
    batch = jsonl(BatchSpec(2, labels="tokens"), path=path, **keys).evaluation.batch(0)
    learned = zip(batch["labels"], batch["loss_mask"], strict=True)
    assert {bytes(x[mask].tolist()) for x, mask in learned} == {b"cd\0", b"e\0"}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_row_is_named_as_an_editor_counts(tmp_path, kind):
    path = write(tmp_path, kind, EXAMPLES)
    row = [*read_rows(tmp_path / f"a{kind}", ("sentence",))][3]
    # The third text has two lines.
    line = {".jsonl": "line 4", ".csv": "line 6", ".parquet": "row 4"}[kind]
    assert row.where == f"{line} of {path}" and row.values["sentence"] == "größe 語"
    assert (row.values["other"] is None) == (kind == ".parquet")


def test_whole_numbers_of_one_format_are_the_text_of_another(tmp_path):
    rows = [{"text": f"t{i}", "label": i % 3} for i in range(9)]
    path, table = (write(tmp_path, kind, rows) for kind in (".jsonl", ".csv"))
    data = jsonl(CLASSIFICATION, path=path, validation_path=table)
    batches = [data.evaluation.batch(i) for i in range(data.evaluation.num_batches)]
    labels = np.concatenate([x["labels"] for x in batches])
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_long_texts_of_a_csv_are_read_and_its_limit_stays(tmp_path):
    limit = csv.field_size_limit()
    write_csv(tmp_path / "a.csv", [{"text": "x" * (limit + 5), "label": "a"}])
    (row,) = read_rows(tmp_path / "a.csv", ())
    assert len(row.values["text"]) == limit + 5 and csv.field_size_limit() == limit


def test_readers_that_are_not_finished_leave_the_limit_of_csv(tmp_path):
    limit, path = csv.field_size_limit(), tmp_path / "a.csv"
    write_csv(path, [{"text": "x" * (limit + 5), "label": "a"}] * 3)
    first, second = read_rows(path, ()), read_rows(path, ())
    assert next(first).values == next(second).values
    assert csv.field_size_limit() == limit
    first.close()
    assert len([*second]) == 2


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "so"]
    ids = {word: i for i, word in enumerate(words)}
    model = tokenizers.models.WordLevel(ids, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


PAIRS = [
    {"text": "so good", "second": "film", "label": "yes"},
    {"text": "bad", "second": "so good film", "label": "no"},
]


@pytest.mark.parametrize("kind", WRITERS)
def test_pairs_are_joined_as_the_tokenizer_says(tmp_path, tokenizer, kind):
    path = write(tmp_path, kind, PAIRS)
    keys = {"path": path, "validation_path": path, "tokenizer": tokenizer}
    data = jsonl(BatchSpec(2), text_pair="second", **keys)
    inputs = data.evaluation.batch(0)["inputs"]
    rows = {
        tuple(tokens[mask > 0].tolist()): (types[mask > 0].tolist(), types.sum())
        for tokens, mask, types in zip(
            *(inputs[x] for x in ("tokens", "mask", "token_types")), strict=True
        )
    }
    assert rows == {  # 2 begins a text, 3 ends each; padding is of the first.
        (2, 7, 4, 3, 6, 3): ([0, 0, 0, 0, 1, 1], 2),
        (2, 5, 3, 7, 4, 6, 3): ([0, 0, 0, 1, 1, 1, 1], 4),
    }
    alone = jsonl(BatchSpec(2), **keys).evaluation.batch(0)["inputs"]
    assert {*alone} == {"tokens", "mask"}


def test_a_pair_that_is_too_long_loses_words_of_its_longer_text(tmp_path, tokenizer):
    path = write(tmp_path, ".jsonl", PAIRS[1:])
    keys = {"path": path, "validation_path": path, "tokenizer": tokenizer}
    keys |= {"text_pair": "second", "context": 6}
    with pytest.raises(ConfigError, match="7 tokens .* context=6"):
        jsonl(BatchSpec(2), **keys)
    data = jsonl(BatchSpec(2), truncate=True, **keys)
    tokens = data.evaluation.batch(0)["inputs"]["tokens"][0]
    assert tokens.tolist()[:6] == [2, 5, 3, 7, 4, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_a_classifier_of_pairs_trains_and_predicts(
    tmp_path, tokenizer, one_device, kind
):
    """Whether the second text repeats the first is in no text alone."""
    words, rng = np.array(["good", "bad"]), np.random.default_rng(0)
    ids = rng.integers(0, 2, (400, 2))
    rows = [
        {"text": words[a], "second": words[b], "label": ["other", "same"][int(a == b)]}
        for a, b in ids
    ]
    config = default_config()
    config.num_steps, config.batch_size, config.log_every = 150, 32, 50
    config.data = {
        "name": "jsonl",
        "path": write(tmp_path, kind, rows),
        "validation_path": write(tmp_path, kind, rows[:40], "held_out"),
        "text_pair": "second",
        "tokenizer": tokenizer,
        "context": 16,
    }
    sizes = {"vocab_size": 8, "width": 32, "num_layers": 2, "num_heads": 2}
    sizes |= {"mlp_width": 64, "context": 16, "dropout": 0.0}
    config.model = {"name": "bert", **sizes}
    config.optimizer.learning_rate = 3e-3
    config.seed = 1  # One in six stays on the plateau of the first steps.
    start.run(config, one_device, tmp_path / "run")
    run = Run.open(tmp_path / "run", one_device)
    data = run.trainer.experiment.data
    new = [{k: x[k] for k in ("text", "second")} for x in rows[:8]]
    examples = read_examples(write(tmp_path, kind, new, "new"), data, 4)
    write_predictions(run, tmp_path / "out.npz", examples)
    with np.load(tmp_path / "out.npz") as archive:
        outputs = archive["outputs"]
    labels = [data.class_names.index(x["label"]) for x in rows[:8]]
    assert outputs.argmax(axis=1).tolist() == labels


REFUSED = {
    "a line with fewer": ("text,label\na\n", "line 2 .* 1 value, .* 2 columns: text"),
    "a quote": ('text,label\n"a\n', "line 2 of .* is no CSV: unexpected end"),
    "a quote in a text": (
        'text,label\n"a"b,c\n',
        "line 2 .* is no CSV: ',' expected",
    ),
    "a header alone": ("text,label\n\n", "is empty"),
    "nothing": ("", "is empty"),
    "columns of one name": ("text,text\na,b\n", "names a column twice: text, text"),
    "no such column": ("review,label\na,b\n", "has no text, only review, label; the"),
    "no label": ("text,label\na,\n", 'label=""; text or a whole number is needed'),
    "Latin": (b"text,label\n\xe9,a\n", "line 2 of .* is not UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_in_a_csv_is_named_by_its_line(tmp_path, name):
    content, words = REFUSED[name]
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        jsonl(CLASSIFICATION, path=str(tmp_path / "a.csv"))


def test_a_row_that_is_not_as_a_task_needs_it_is_named(tmp_path):
    def refuse(words, rows, **keys):
        path = write(tmp_path, ".parquet", rows)
        with pytest.raises(ConfigError, match=words):
            jsonl(CLASSIFICATION, path=path, **keys)

    good = {"text": "a", "label": 1}
    refuse("row 2 of .* has text=null; text is needed", [good, good | {"text": None}])
    refuse(r"row 1 of .* has label=0\.5; text or a", [good | {"label": 0.5}])
    refuse(r"has label=true; text or a whole", [good | {"label": True}])
    refuse("has text=.*b'a'.*; text is needed", [good | {"text": b"a"}])
    refuse("has no pair, only text, label; .* text and pair", [good], text_pair="pair")
    other = {"review": "a", "stars": 1}
    refuse("no text and no label, only review, stars; the task", [other])
    refuse(r"other columns are named by config\.data\.text, label", [other])
    keys = {"text_pair": "text", "validation_fraction": 0}
    refuse("bytes have none; set config.data.tok", [good], **keys)


def test_a_parquet_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=r"a\.parquet is damaged, or of another kind"):
        next(read_rows(tmp_path / "a.parquet", ()))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'pip install "haiku_template\[parquet\]"'):
        next(read_rows(tmp_path / "a.parquet", ()))


def test_an_id_of_a_data_set_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "hf download stanfordnlp/imdb --repo-type dataset --local-dir imdb"
    with pytest.raises(ConfigError, match=words):
        jsonl(CLASSIFICATION, path="stanfordnlp/imdb")


@pytest.mark.slow(but="jsonl")
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("labels", ["classes", "tokens"])
def test_memory_holds_a_small_multiple_of_a_file(tmp_path, monkeypatch, labels, kind):
    """As lists of Python's objects, short lines took 17 to 21 times their file."""
    names = ("prompt", "completion") if labels == "tokens" else ("text", "label")
    examples = [{names[0]: f"line {i} {'x' * 40}", names[1]: "y"} for i in range(9000)]
    path = write(tmp_path, kind, examples)
    size = sum(len(x[names[0]]) for x in examples)
    monkeypatch.setattr(tokenizers, "BATCH", 2**12)
    monkeypatch.setattr(rows, "PIECE_BYTES", 2**12)
    monkeypatch.setattr(rows, "PIECE", 2**6)
    jsonl(BatchSpec(4, labels=labels), path=path)  # Imports what it needs.
    tracemalloc.start()
    try:
        data = jsonl(BatchSpec(4, labels=labels), path=path)
        data.read(tmp_path / f"a{kind}")
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()
