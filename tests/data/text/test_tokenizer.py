"""Tokens are those of tokenizer.json, whatever it says of cutting and padding."""

import sys

import numpy as np
import pytest

from haiku_template.data.text.tokenizer import encode, read_tokenizer
from haiku_template.errors import ConfigError

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b", "c"]


@pytest.fixture
def folder(tmp_path):
    """A folder with a WordPiece tokenizer, as BERT's, that cuts at 3 and pads to 9."""
    tokenizers = pytest.importorskip("tokenizers")
    ids = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(ids, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(
        ("[SEP]", 3), ("[CLS]", 2)
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_texts_become_a_padded_batch(folder):
    batch = encode(read_tokenizer(folder), ["a bb c", "x"], context=16)
    assert batch["tokens"].tolist() == [[2, 4, 5, 6, 7, 3], [2, 1, 3, 0, 0, 0]]
    assert batch["mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert batch["tokens"].dtype == batch["mask"].dtype == np.int32


def test_a_length_pads_to_it(folder):
    batch = encode(
        read_tokenizer(folder / "tokenizer.json"), ["a", ""], context=16, length=8
    )
    assert batch["tokens"].shape == (2, 8)
    assert batch["mask"].sum(axis=1).tolist() == [3, 2]


def test_no_texts_are_an_empty_batch(folder):
    batch = encode(read_tokenizer(folder), [], context=16)
    assert batch["tokens"].shape == (0, 0)


@pytest.mark.parametrize("limits", [{"context": 4}, {"context": 16, "length": 4}])
def test_a_text_that_is_too_long_is_refused_or_cut(folder, limits):
    tokenizer = read_tokenizer(folder)
    with pytest.raises(
        ConfigError, match="begins 'a b c' has 5 tokens, and 4 are poss"
    ):
        encode(tokenizer, ["a", "a b c"], **limits)
    batch = encode(tokenizer, ["a b c"], cut=True, **limits)
    assert batch["tokens"].tolist() == [[2, 4, 5, 3]]
    with pytest.raises(ConfigError, match="5 tokens"):  # Cutting is for one call.
        encode(tokenizer, ["a b c"], **limits)


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.json is damaged"):
        read_tokenizer(folder)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="does not exist.*AutoTokenizer"):
        read_tokenizer(tmp_path)


def test_without_the_library_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install "haiku_template\[text\]"'):
        read_tokenizer(tmp_path)
