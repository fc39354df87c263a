"""Tokens as text: whole characters alone, and nothing that a terminal would obey."""

import importlib.util
import sys

import pytest

from haiku_template.errors import ConfigError
from haiku_template.generation import make_text

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed"
)
SAMPLE = "naïve café 漢字 🦊 fin\n\tx"


def pieces(text, tokens):
    stream = text.stream()
    return [stream(token) for token in tokens]


def test_bytes_show_a_character_when_it_is_whole():
    text = make_text("bytes")
    tokens = text.encode("aé🦊")
    assert tokens == list("aé🦊".encode()) and text.size == 256
    assert pieces(text, tokens) == ["a", "", "é", "", "", "", "🦊"]
    assert "".join(pieces(text, text.encode(SAMPLE))) == SAMPLE


def test_bytes_that_are_no_text_become_the_replacement_character():
    text = make_text("bytes")
    assert "".join(pieces(text, b"a\xff\xe9b\xc3")) == "a\ufffd\ufffdb"
    assert (
        "".join(pieces(text, b"\x1b[2J\x07\r\n\xc2\x9b")) == "\ufffd[2J\ufffd\n\ufffd"
    )


@pytest.fixture
def tokenizer_file(tmp_path):
    """A byte-level tokenizer as GPT-2's, learnt here."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["def main(args):\n    return café\n"] * 50, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@needs_tokenizers
def test_a_tokenizer_s_text_comes_back_a_piece_at_a_time(tokenizer_file):
    text = make_text(str(tokenizer_file))
    tokens = text.encode(SAMPLE)
    assert max(tokens) < text.size
    shown = pieces(text, tokens)
    assert "".join(shown) == SAMPLE
    assert "\ufffd" not in "".join(shown) and "" in shown
    assert len(text.encode("def main(args)")) < len("def main(args)") / 2


@needs_tokenizers
def test_a_damaged_tokenizer_is_one_sentence(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": ')
    with pytest.raises(ConfigError, match=r"tokenizer.json is no tokenizer.json"):
        make_text(str(path))
    with pytest.raises(ConfigError, match="is not a file; give --tokenizer=PATH"):
        make_text(str(tmp_path / "other.json"))


def test_without_the_package_the_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[text\]") as error:
        make_text(str(tmp_path / "tokenizer.json"))
    assert error.value.exit_code == 64
