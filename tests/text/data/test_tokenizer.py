"""Tokens are those of tokenizer.json, or bytes; as text, they come back whole."""

import json
import re
import sys

import numpy as np
import pytest

from haiku_template.errors import ConfigError
from haiku_text.data import Tokenizer
from haiku_text.data.tokenizer import _cut_words, learn_tokenizer

SAMPLE = "naïve café 漢字 🦊 fin\n\tx"
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
    batch = Tokenizer(folder).batch(["a bb c", "x"], context=16)
    assert batch["tokens"].tolist() == [[2, 4, 5, 6, 7, 3], [2, 1, 3, 0, 0, 0]]
    assert batch["mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert batch["tokens"].dtype == batch["mask"].dtype == np.int32


def test_a_length_pads_to_it(folder):
    tokenizer = Tokenizer(folder / "tokenizer.json")
    batch = tokenizer.batch(["a", ""], context=16, length=8)
    assert batch["tokens"].shape == (2, 8)
    assert batch["mask"].sum(axis=1).tolist() == [3, 2]


def test_no_texts_are_an_empty_batch(folder):
    batch = Tokenizer(folder).batch([], context=16)
    assert batch["tokens"].shape == (0, 0)


@pytest.mark.parametrize("limits", [{"context": 4}, {"context": 16, "length": 4}])
def test_a_text_that_is_too_long_is_refused_or_cut(folder, limits):
    tokenizer = Tokenizer(folder)
    with pytest.raises(
        ConfigError, match="begins 'a b c' has 5 tokens, and 4 are poss"
    ):
        tokenizer.batch(["a", "a b c"], **limits)
    batch = tokenizer.batch(["a b c"], cut=True, **limits)
    assert batch["tokens"].tolist() == [[2, 4, 5, 3]]
    with pytest.raises(ConfigError, match="5 tokens"):  # Cutting is for one call.
        tokenizer.batch(["a b c"], **limits)


def test_a_context_without_room_for_a_text_is_refused(folder):
    tokenizer = Tokenizer(folder)
    batch = tokenizer.batch(["a bb c"], context=3, cut=True)
    assert batch["tokens"].tolist() == [[2, 4, 3]]
    with pytest.raises(ConfigError, match="context=2 leaves no room .* the 2 tokens"):
        tokenizer.batch(["a bb c"], context=2, cut=True)


def test_special_tokens_are_added_where_they_are_asked_for(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode(["a", "b"]) == [[4], [5]]
    assert tokenizer.encode(["a", "b"], special=True) == [[2, 4, 3], [2, 5, 3]]
    assert tokenizer.encode(["a b c"], special=True, most=3) == [[2, 4, 3]]


def test_what_looks_like_a_special_token_is_one_unless_text_is_literal(tokenizer_file):
    text = "x<|endoftext|>"
    (tokens,), (literal,) = (
        Tokenizer(tokenizer_file, literal=on).encode([text]) for on in (False, True)
    )
    end = Tokenizer(tokenizer_file).end
    assert tokens[-1] == end and len(tokens) == 2
    assert end not in literal and len(literal) > 2


def test_the_end_of_a_text_is_the_usual_token_or_the_one_that_is_named(folder):
    assert Tokenizer(folder).end is None
    assert Tokenizer(folder, end="[SEP]").end == 3
    with pytest.raises(ConfigError, match="json has no token '<none>' to end a text"):
        Tokenizer(folder, end="<none>")
    assert Tokenizer(None).end == Tokenizer("bytes").end == 0


def pieces(tokenizer, tokens):
    return list(map(tokenizer.stream(), tokens))


def test_bytes_show_a_character_when_it_is_whole():
    tokenizer = Tokenizer("bytes")
    tokens, sample = tokenizer.encode(["aé🦊", SAMPLE])
    assert tokens == list("aé🦊".encode()) and tokenizer.size == 256
    assert pieces(tokenizer, tokens) == ["a", "", "é", "", "", "", "🦊"]
    assert "".join(pieces(tokenizer, sample)) == SAMPLE


def test_bytes_that_are_no_text_become_the_replacement_character():
    tokenizer = Tokenizer(None)
    assert "".join(pieces(tokenizer, b"a\xff\xe9b\xc3")) == "a\ufffd\ufffdb"
    hostile = b"\x1b[2J\x07\r\n\xc2\x9b"
    assert "".join(pieces(tokenizer, hostile)) == "\ufffd[2J\ufffd\n\ufffd"


@pytest.fixture
def tokenizer_file(tmp_path):
    """A byte-level tokenizer as GPT-2's, learnt here."""
    pytest.importorskip("tokenizers")
    texts = ["def main(args):\n    return café\n"] * 50
    (tmp_path / "tokenizer.json").write_bytes(learn_tokenizer(texts, 300))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_s_text_comes_back_a_piece_at_a_time(tokenizer_file):
    tokenizer = Tokenizer(str(tokenizer_file))
    tokens, code = tokenizer.encode([SAMPLE, "def main(args)"])
    assert max(tokens) < tokenizer.size
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == SAMPLE
    assert "\ufffd" not in "".join(shown) and "" in shown
    assert len(code) < len("def main(args)") / 2


DAMAGED = ["", "{", "[]", "{}", '{"model": {"vocab": {}}}']


@pytest.mark.parametrize("contents", DAMAGED)
def test_a_damaged_tokenizer_is_refused(tmp_path, contents):
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(
        ConfigError, match="tokenizer.json is damaged, or of another ki"
    ):
        Tokenizer(tmp_path)


def test_a_model_that_the_library_does_not_know_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    contents = '{"model": {"type": "New", "vocab": {"a": 0}}}'
    (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(
        ConfigError, match="tokenizer.json is damaged, or of another ki"
    ):
        Tokenizer(tmp_path).encode(["a"])


@pytest.mark.parametrize(("name", "number"), [("<end>", 20), ("a", 8)])
def test_an_added_token_that_the_library_numbers_otherwise_is_refused(
    folder, name, number
):
    contents = json.loads((folder / "tokenizer.json").read_text())
    added = {"id": number, "content": name, "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    contents["added_tokens"] = [added]
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    counted = {"<end>": 8, "a": 4}[name]
    words = f"'{name}' as {number}, and tokenizers reads it as {counted}; possible"
    with pytest.raises(ConfigError, match=words):
        Tokenizer(folder).encode(["a"])
    added["id"] = counted
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    assert Tokenizer(folder, end=name).end == counted
    assert Tokenizer(folder).encode(["a"]) == [[4]]


def test_a_path_without_a_tokenizer_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "other.json"):
        with pytest.raises(ConfigError, match="does not exist.*bytes.*AutoTokenizer"):
            Tokenizer(path)
    with pytest.raises(ConfigError, match="holds parameters and no tokenizer"):
        Tokenizer(tmp_path / "model.safetensors")


def test_an_empty_path_is_no_tokenizer_of_the_current_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert Tokenizer(".").size == len(VOCABULARY)
    with pytest.raises(ConfigError, match="the tokenizer '' does not exist; possible"):
        Tokenizer("")


def test_without_the_library_the_vocabulary_is_known_and_encoding_names_the_extra(
    folder, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = Tokenizer(folder)
    assert tokenizer.size == 8
    for use in (lambda: tokenizer.encode(["a"]), tokenizer.stream):
        with pytest.raises(ConfigError, match=r'pip install "haiku_template\[text\]"'):
            use()


def test_bytes_that_are_no_character_end_no_stream(tmp_path):
    """Of a tokenizer as Llama's, whose bytes are tokens beside pieces of text."""
    library = pytest.importorskip("tokenizers")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = library.Tokenizer(
        library.models.BPE(ids, [], byte_fallback=True, unk_token="<unk>")
    )
    parts = library.decoders.ByteFallback(), library.decoders.Fuse()
    tokenizer.decoder = library.decoders.Sequence(list(parts))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours, rng = Tokenizer(tmp_path), np.random.default_rng(0)
    e = [1 + byte for byte in "é".encode()]
    assert "".join(pieces(ours, [257, *e, 257])) == "aéa"
    for _ in range(50):
        tokens = rng.integers(1, 258, 60).tolist()
        assert "".join(pieces(ours, [*tokens, 257, 257])).endswith("a")
    shown = "".join(pieces(ours, [257, 1 + 0x41, 1 + 0xC3, 257, 257]))
    assert shown.startswith("aA") and shown.endswith("a") and "\ufffd" in shown


def test_a_vocabulary_is_learned_of_long_words_cut():
    """As of DNA: the library's time is quadratic in the longest word."""
    texts = [
        "ACGT" * 5_000 + " a b",
        " " * 10_000,
        "-" * 4_097,
        "plain words",
        "=_" * 5_000,
        "",
    ]
    cut = [*_cut_words(texts)]
    assert "".join(cut) == "".join(texts)
    words = (x for text in cut for x in re.findall(r"[^\W_]+|\s+|[\W_]+", text))
    assert max(map(len, words)) == 4096
    plain = ["some plain words, " * 20, "and others"]
    assert [*_cut_words(plain)] == plain
