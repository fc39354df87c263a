"""JSON-lines: what is read, what is refused, and which batches they make."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from haiku_template.data import BatchSpec, each_shape
from haiku_template.data.buckets import BucketedDataset
from haiku_template.errors import ConfigError
from haiku_text.data.jsonl import jsonl
from haiku_text.data.texts import Texts, Tokens, choose_lengths

RNG = np.random.default_rng(0)
CLASSIFICATION = BatchSpec(8)
LANGUAGE = BatchSpec(4, labels="tokens")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def labelled(tmp_path):
    """53 different texts of 1 to 60 bytes in three classes, short ones mostly."""
    sizes = np.minimum(RNG.geometric(0.1, 53), 60)
    rows = [
        {"text": f"{i:02}"[: max(n, 2)] + "x" * max(n - 2, 0), "label": "cab"[i % 3]}
        for i, n in enumerate(sizes)
    ]
    return write(tmp_path / "labelled.jsonl", rows)


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "so", "[EOS]"]
    ids = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(ids, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def texts_of(batch):
    inputs = batch["inputs"]
    rows = zip(inputs["tokens"], inputs["mask"].astype(bool), strict=True)
    return [bytes(tokens[mask].tolist()).decode() for tokens, mask in rows]


def test_each_epoch_holds_every_example_once_and_each_batch_has_a_bucket(labelled):
    data = jsonl(CLASSIFICATION, path=labelled, context=64, validation_fraction=0)
    lengths, per_epoch = data.train.lengths, -(-53 // 8)
    assert 1 < len(lengths) <= 4 and data.evaluation is None
    seen, shapes = [], set()
    for step in range(per_epoch * 53):  # So many blocks are a whole number of epochs.
        batch = data.train.batch(step)
        shapes.add(batch["inputs"]["tokens"].shape)
        seen += texts_of(batch)
    assert shapes == {(8, length) for length in lengths}
    _, counts = np.unique(seen, return_counts=True)
    assert len(counts) == 53 and set(counts) == {per_epoch * 8}


def test_padding_goes_no_further_than_the_bucket_of_the_longest(labelled):
    data = jsonl(CLASSIFICATION, path=labelled, context=64, validation_fraction=0)
    lengths = np.array(data.train.lengths)
    mixed = 0
    for step in range(60):
        mask = data.train.batch(step)["inputs"]["mask"]
        sizes = mask.sum(axis=1)
        assert mask.shape[1] == lengths[lengths >= sizes.max()][0]
        buckets = np.searchsorted(lengths, sizes)
        mixed += len(set(buckets)) > 1
    # Of a block's batches, only those at the edge of two buckets hold both.
    assert mixed <= -(-60 // -(-53 // 8)) * (len(lengths) - 1)


def test_a_batch_is_a_function_of_seed_and_step(labelled):
    first, again, other = (
        jsonl(BatchSpec(8, seed), path=labelled, context=64).train for seed in (1, 1, 2)
    )
    wanted = [texts_of(first.batch(step)) for step in range(20)]
    assert [texts_of(again.batch(step)) for step in reversed(range(20))] == wanted[::-1]
    assert [texts_of(other.batch(step)) for step in range(20)] != wanted
    epochs = [wanted[i : i + 5] for i in (0, 5)]
    assert epochs[0] != epochs[1]


def test_processes_share_each_batch_in_one_shape(labelled):
    def batches(index, count):
        spec = BatchSpec(8, process_index=index, process_count=count)
        train = jsonl(spec, path=labelled, context=64).train
        return [train.batch(step) for step in range(12)]

    shares = [batches(i, 4) for i in range(4)]
    for step, whole in enumerate(batches(0, 1)):
        joined = [share[step]["inputs"]["tokens"] for share in shares]
        np.testing.assert_array_equal(np.concatenate(joined), whole["inputs"]["tokens"])
    with pytest.raises(ConfigError, match="8 examples cannot be shared evenly by 3"):
        batches(0, 3)


def test_fewer_examples_than_a_batch_fill_it_again_and_again():
    tokens = Tokens.create([[1], [2, 2], [3, 3, 3]])
    texts = Texts(tokens, np.arange(3, dtype=np.int32))
    train = BucketedDataset(texts, (8,), BatchSpec(8))
    labels = np.concatenate([train.batch(step)["labels"] for step in range(3)])
    assert np.bincount(labels).tolist() == [8, 8, 8]


def test_shapes_are_told_before_with_the_largest_first(labelled):
    train = jsonl(CLASSIFICATION, path=labelled, context=64).train
    told = [batch["inputs"]["tokens"].shape for batch in each_shape(train)]
    seen = {train.batch(step)["inputs"]["tokens"].shape for step in range(60)}
    assert told == sorted(seen, reverse=True)


def test_what_is_held_out_is_evaluated_once_in_full_batches_but_the_last(labelled):
    data = jsonl(CLASSIFICATION, path=labelled, context=64, validation_fraction=0.4)
    held_out = data.evaluation
    batches = [held_out.batch(i) for i in range(held_out.num_batches)]
    evaluated = [text for batch in batches for text in texts_of(batch)]
    trained = {t for step in range(60) for t in texts_of(data.train.batch(step))}
    assert len(set(evaluated)) == len(evaluated) > 8
    assert len(trained) + len(evaluated) == 53 and not trained & set(evaluated)
    assert [len(batch["labels"]) for batch in batches[:-1]] == [8] * (len(batches) - 1)
    assert {b["inputs"]["tokens"].shape[1] for b in batches} <= set(data.train.lengths)


def test_the_same_text_is_never_on_both_sides_and_a_line_never_changes_sides(tmp_path):
    rows = [{"text": f"text {i % 30}", "label": i % 2} for i in range(60)]
    path = write(tmp_path / "a.jsonl", rows)

    def held_out(path):
        data = jsonl(CLASSIFICATION, path=path, validation_fraction=0.3)
        batches = map(data.evaluation.batch, range(data.evaluation.num_batches))
        return [text for batch in batches for text in texts_of(batch)]

    before = held_out(path)
    assert all(before.count(text) == 2 for text in before)
    more = [{"text": f"more {i}", "label": 0} for i in range(30)]
    after = held_out(write(tmp_path / "b.jsonl", more + rows))
    assert [text for text in after if text.startswith("text")] == before


def test_a_small_file_still_has_both_sides(tmp_path):
    rows = [{"text": text, "label": 1} for text in ("a", "b")]
    for fraction in (1e-9, 1 - 1e-9):
        path = write(tmp_path / "a.jsonl", rows)
        data = jsonl(CLASSIFICATION, path=path, validation_fraction=fraction)
        sides = data.train.batch(0), data.evaluation.batch(0)
        assert {text for side in sides for text in texts_of(side)} == {"a", "b"}


def test_classes_are_the_sorted_labels_with_their_names(tmp_path):
    rows = [{"text": f"{i}", "label": label} for i, label in enumerate((10, 9, 10, -1))]
    path = write(tmp_path / "a.jsonl", rows)
    data = jsonl(CLASSIFICATION, path=path, validation_fraction=0)
    assert data.class_names == ("-1", "9", "10") and data.num_outputs == 3
    batch = data.train.batch(0)
    for text, label in zip(texts_of(batch), batch["labels"], strict=True):
        assert data.class_names[label] == str(rows[int(text)]["label"])


def test_tokens_are_those_of_tokenizer_json(tmp_path, tokenizer):
    rows = [{"text": "good film", "label": "+"}, {"text": "so bad", "label": "-"}]
    path = write(tmp_path / "a.jsonl", rows)
    data = jsonl(
        BatchSpec(2), path=path, tokenizer=tokenizer, validation_path=path, context=4
    )
    batch = data.evaluation.batch(0)
    assert batch["inputs"]["tokens"].tolist() == [[2, 4, 6, 3], [2, 7, 5, 3]]
    assert batch["labels"].tolist() == [0, 1] and data.vocab_size == 9
    cut = jsonl(
        BatchSpec(2),
        path=path,
        tokenizer=tokenizer,
        validation_path=path,
        context=3,
        truncate=True,
    )
    assert cut.evaluation.batch(0)["inputs"]["tokens"].tolist() == [
        [2, 4, 3],
        [2, 7, 3],
    ]
    with pytest.raises(ConfigError, match="has 9 tokens, and vocab_size=8"):
        jsonl(BatchSpec(2), path=path, tokenizer=tokenizer, vocab_size=8)


def test_the_loss_is_of_the_completion_and_the_end_alone(tmp_path):
    rows = [{"prompt": "ab", "completion": "cde"}, {"prompt": "", "completion": "xy"}]
    path = write(tmp_path / "a.jsonl", rows)
    data = jsonl(LANGUAGE, path=path, validation_path=path, context=16)
    assert (data.num_outputs, data.class_names, data.text) == (256, (), "bytes")
    batch = data.evaluation.batch(0)
    learned = {
        bytes(labels[mask].tolist())
        for labels, mask in zip(batch["labels"], batch["loss_mask"], strict=True)
    }
    assert learned == {b"cde\0", b"xy\0"}
    inputs = {bytes(row.tolist()).rstrip(b"\0") for row in batch["inputs"]}
    assert inputs == {b"abcde", b"\0xy"}
    assert batch["inputs"].shape == batch["labels"].shape == (2, 8)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])


def test_a_prompt_that_is_too_long_loses_its_beginning(tmp_path):
    rows = [{"prompt": "0123456789", "completion": "ab"}]
    path = write(tmp_path / "a.jsonl", rows)
    options = {"path": path, "validation_path": path, "context": 4}
    batch = jsonl(LANGUAGE, truncate=True, **options).evaluation.batch(0)
    assert bytes(batch["inputs"][0].tolist()) == b"89ab"
    assert bytes(batch["labels"][0][batch["loss_mask"][0]].tolist()) == b"ab\0"
    with pytest.raises(ConfigError, match="line 1 of .*12 tokens.*context=4.*truncate"):
        jsonl(LANGUAGE, **options)


def test_completions_of_a_tokenizer_begin_without_special_tokens(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "so", "completion": "good film"}])
    data = jsonl(LANGUAGE, path=path, validation_path=path, tokenizer=tokenizer)
    batch = data.evaluation.batch(0)
    assert batch["inputs"][0, :5].tolist() == [2, 7, 3, 4, 6]
    assert batch["labels"][0][batch["loss_mask"][0]].tolist() == [4, 6, 8]
    assert data.num_outputs == 9 and data.text == f"{tokenizer}/tokenizer.json"


def test_bucket_lengths_hold_equal_shares():
    sizes = np.arange(1, 101)
    assert choose_lengths(sizes, 4, 512, 100) == (32, 56, 80, 104)
    assert choose_lengths(sizes, 4, 100, 100) == (32, 56, 80, 100)
    assert choose_lengths(sizes, 1, 512, 130) == (136,)
    assert choose_lengths(np.full(9, 5), 4, 512, 5) == (8,)
    with pytest.raises(ConfigError, match="num_buckets=0"):
        choose_lengths(sizes, 0, 512, 100)


GOOD = '{"text": "a", "label": "x"}'
REFUSED = {
    "bad JSON": (GOOD + "\n\n{'text': 1}", "line 3 of .* is no JSON: Expecting"),
    "nested": (GOOD + "\n" + "[" * 100_000, "line 2 of .* is no JSON"),
    "a list": ('[\n{"text": "a"}]', "line 1 .* no JSON.*an object, not one of a list"),
    "no object": ("[1]", r"line 1 of .* is no JSON object but \[1\]"),
    "no label": (GOOD + '\n{"text": "b"}', "line 2 of .* has no label, only text"),
    "mixed": (
        GOOD + '\n{"prompt": "a", "completion": "b"}',
        "line 2 .* no text and no label, only prompt, completion.*=language_model",
    ),
    "text": ('{"text": 3, "label": "x"}', "line 1 of .* has text=3; text is needed"),
    "label": ('{"text": "", "label": [1]}', r"label=\[1\]; text or a whole number"),
    "truth": ('{"text": "", "label": true}', "label=true; text or a whole number"),
    "kinds": (
        GOOD + '\n{"text": "b", "label": 1}',
        "line 2 of .* has the label 1 and line 1 of .* the label 'x'",
    ),
    "empty": ("\n \n", "is empty"),
    "no tokens": ('{"text": "", "label": 1}', "line 1 of .* has a text of no tokens"),
    "long": (
        GOOD + '\n{"text": "' + "b" * 17 + '", "label": "x"}',
        "line 2 of .* with 17 tokens .*context=16.*truncate=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_lines_are_refused_by_their_number(tmp_path, name):
    content, words = REFUSED[name]
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        jsonl(CLASSIFICATION, path=str(path), context=16, validation_fraction=0)


@pytest.mark.parametrize("columns", [{}, {"text": "talk"}, {"prompt": "talk"}])
def test_chats_are_told_what_makes_texts_of_them(tmp_path, monkeypatch, columns):
    chats = [
        [{"role": role, "content": f"{role} {n}"} for role in ("user", "assistant") * n]
        for n in (1, 2, 3)
    ]
    monkeypatch.chdir(tmp_path)
    path = write(Path("my chats.jsonl"), [{"id": "a", "talk": x} for x in chats])
    with pytest.raises(ConfigError, match="is needed|needs ") as refused:
        jsonl(LANGUAGE, path=path, **columns)
    command = str(refused.value).partition("writes: python")[2]
    subprocess.run(f"'{sys.executable}'{command}", shell=True, check=True)
    rows = [
        json.loads(line)
        for line in Path("my chats.texts.jsonl").read_text().splitlines()
    ]
    assert rows[0] == {
        "prompt": "user: user 1\nassistant:",
        "completion": " assistant 1",
    }
    assert len(rows) == 3 and rows[2]["prompt"].count("\n") == 5
    jsonl(LANGUAGE, path="my chats.texts.jsonl")
    with pytest.raises(ConfigError) as refused:  # A classifier needs labels.
        jsonl(CLASSIFICATION, path=path, text="talk", label="id")
    assert "chats are read" not in str(refused.value)


def test_other_mistakes_are_refused(tmp_path, labelled):
    def refuse(words, spec=CLASSIFICATION, **options):
        with pytest.raises(ConfigError, match=words):
            jsonl(spec, **{"path": labelled, "context": 64} | options)

    (tmp_path / "latin.jsonl").write_bytes(f"{GOOD}\n".encode() + b'{"text": "\xe9"}')
    refuse("line 2 of .* is not UTF-8", path=str(tmp_path / "latin.jsonl"))
    refuse("none.jsonl does not exist; .* holds", path=str(tmp_path / "none.jsonl"))
    refuse("config.data.path=PATH", path=None)
    refuse("config.data.validation_path=PATH", validation_path="")
    refuse("validation_fraction=1", validation_fraction=1)
    refuse("context=0", context=0)
    refuse("config.task.name is regression", BatchSpec(8, labels="numbers"))
    refuse("no prompt and no completion.*=classification", LANGUAGE)
    refuse("does not exist", tokenizer=str(tmp_path / "none"))
    unseen = write(tmp_path / "unseen.jsonl", [{"text": "a", "label": "d"}])
    refuse("line 1 of .*unseen.* label 'd'.*have a, b, c", validation_path=unseen)
    same = write(tmp_path / "same.jsonl", [{"text": "a", "label": "d"}] * 3)
    refuse("same text", path=same)
    nothing = write(tmp_path / "n.jsonl", [{"prompt": "a", "completion": ""}])
    data = jsonl(LANGUAGE, path=nothing, validation_fraction=0)
    assert data.train.batch(0)["loss_mask"].sum(axis=1).tolist() == [1] * 4


@pytest.mark.parametrize("packing", [False, True])
def test_a_language_model_takes_texts_alone_as_completions_of_nothing(
    tmp_path, packing
):
    words = ["".join(chr(97 + (i * j) % 26) for j in range(3 + i)) for i in range(20)]
    alone = write(tmp_path / "a.jsonl", [{"text": x, "id": 3} for x in words])
    pairs = [{"prompt": "", "completion": x} for x in words]
    whole = write(tmp_path / "b.jsonl", pairs)
    options = {"context": 64, "packing": packing, "validation_fraction": 0}
    ours, theirs = (jsonl(LANGUAGE, path=x, **options) for x in (alone, whole))
    for step in range(6):
        trees = ours.train.batch(step), theirs.train.batch(step)
        for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_array_equal(a, b)
    split = jsonl(LANGUAGE, path=alone, context=64, validation_fraction=0.3)
    assert split.evaluation.num_batches > 0  # By their own hashes.
    new = Path(write(tmp_path / "new.jsonl", [{"text": "abc"}, {"text": "d"}]))
    assert split.read(new).batch(0)["loss_mask"].sum(axis=1).tolist() == [4, 2]
    write(new, [{"text": "abc"}, {"story": "d"}])
    with pytest.raises(ConfigError, match="line 2 of .* has no text, only story"):
        split.read(new)


def test_a_new_text_may_be_longer_than_those_of_the_training_set(tmp_path):
    rows = [{"text": "abcdefgh"[:n], "label": n % 2} for n in range(3, 9)]
    path = write(tmp_path / "a.jsonl", rows)
    data = jsonl(CLASSIFICATION, path=path, context=64, validation_fraction=0)
    for size, length in ((3, 8), (60, 64)):
        new = tmp_path / "new.jsonl"
        write(new, [{"text": "a" * size}, {"text": "b"}])
        batch = data.read(new).batch(0)
        assert batch["inputs"]["tokens"].shape == (2, length)
        assert texts_of(batch) == ["a" * size, "b"]
    write(new, [{"text": "a" * 65}])
    with pytest.raises(ConfigError, match="with 65 tokens .*, and context=64"):
        data.read(new)


def test_classes_have_the_order_that_is_given(tmp_path):
    rows = [{"text": str(n), "label": n} for n in (10, 9, 100)]
    path = write(tmp_path / "a.jsonl", rows)
    text = "text,label\n" + "".join(f"{n},{n}\n" for n in (10, 9, 100))
    (tmp_path / "a.csv").write_text(text)
    for file in (path, str(tmp_path / "a.csv")):
        options = {"path": file, "validation_fraction": 0}
        data = jsonl(CLASSIFICATION, classes=(100, 7, 9, 10), **options)
        assert data.class_names == ("100", "7", "9", "10") and data.num_outputs == 4
        batch = data.train.batch(0)
        names = [data.class_names[label] for label in batch["labels"]]
        assert names == texts_of(batch)
        with pytest.raises(ConfigError, match="lacks the labels (9, 100|100, 9)"):
            jsonl(CLASSIFICATION, classes=("10",), **options)


def test_a_tokenizer_that_ends_no_text_is_told(tmp_path, tokenizer, caplog):
    """Completions then learn no end, and `generate` never stops."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "so", "completion": "good film"}])
    options = {"path": path, "validation_path": path, "tokenizer": tokenizer}
    jsonl(LANGUAGE, **options)
    assert "no completion learns its end" not in caplog.text
    file = Path(tokenizer) / "tokenizer.json"
    file.write_text(file.read_text().replace("[EOS]", "[STOP]"))
    jsonl(LANGUAGE, **options)
    assert "tokenizer.json ends no text: no completion learns its end" in caplog.text
