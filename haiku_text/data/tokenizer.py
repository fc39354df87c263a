"""Tokenizers: text to tokens and back, through tokenizer.json or as bytes of UTF-8.

Shapes: B texts, T tokens.
"""

import codecs
import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from haiku_template.bounded import at_home, is_dir, is_file, read_json
from haiku_template.data.files import read_with
from haiku_template.errors import ConfigError, counted, download

BYTES, FILE = "bytes", "tokenizer.json"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
# What would move a terminal's cursor, change its colors or ring its bell.
CONTROLS = {c: "\ufffd" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
CONTROLS[ord("\r")] = ""
BATCH = 2**19  # Characters for the tokenizer's threads at once.
LONG_WORD = re.compile(r"[^\W_]{4096}|\s{4096}|(?:[^\w\s]|_){4096}")
T = TypeVar("T")


class Tokenizer:
    """Tokenizer: a tokenizer.json, or the 256 bytes (`source` None or `bytes`).

    Only encoding and decoding need the package `tokenizers`; without it they are a
    `ConfigError`, as a tokenizer.json that is missing, damaged or without `end`.
    """

    def __init__(
        self,
        source: str | Path | None,
        *,
        end: str | None = None,  # Name of the token that ends a text, or a usual one.
        literal: bool = False,  # Encode names of special tokens in a text as text.
    ) -> None:
        self.name = BYTES  # Or the path of the tokenizer.json.
        self.size = 256  # Tokens are numbers below this.
        self.end: int | None = 0  # Token that ends a text, if there is one.
        self._literal = literal
        if source in (None, BYTES):
            return
        path = at_home(source or "''")  # Else it is the current folder.
        path = path / FILE if is_dir(path) else path
        if path.suffix == ".safetensors":
            possible = "a tokenizer.json, a folder with one, or None for bytes"
            hint = "holds parameters and no tokenizer; config.data.tokenizer is"
            raise ConfigError(f"{path} {hint} {possible}")
        if not is_file(path):
            raise ConfigError(
                f"the tokenizer {path} does not exist; possible are a tokenizer.json, "
                "a folder with one, and bytes; of a folder with only a vocab.txt or "
                "merges.txt, transformers' AutoTokenizer makes one with save_pretrained"
                + download(path)
            )
        ids, self._added = read_with(path, _read_ids)
        ends = [ids[name] for name in ([end] if end else END_OF_TEXT) if name in ids]
        if end and not ends:
            raise ConfigError(f"{path} has no token {end!r} to end a text with")
        self.name, self.size = str(path.resolve()), max(ids.values()) + 1
        self.end = ends[0] if ends else None

    @functools.cached_property
    def _library(self) -> Any:
        read = _tokenizers().Tokenizer.from_file
        with self._errors("read"):
            tokenizer = read_with(Path(self.name), lambda path: read(str(path)))
        for token, number in self._added.items():  # The package counts them itself.
            if (counted := tokenizer.token_to_id(token)) != number:
                raise ConfigError(
                    f"{self.name} has the added token {token!r} as {number}, and "
                    f"tokenizers reads it as {counted}; possible are the numbers of "
                    "the vocabulary, and those that follow it without a hole"
                )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = self._literal
        return tokenizer

    def encode(
        self, texts: Sequence[str], *, special: bool = False, most: int | None = None
    ) -> list[list[int]]:
        """Encodes texts, with special tokens if `special`, in `most` tokens each."""
        if self.name == BYTES:
            # JSON may spell half a surrogate pair; it stays what it is.
            return [list(t.encode(errors="surrogatepass")[:most]) for t in texts]
        return [x.ids for x in self._encodings(texts, special, most)]

    def splits(self, before: str, behind: str) -> bool:
        """Tests if two texts have the tokens that they have as one."""
        whole, *parts = self.encode([before + behind, before, behind])
        return whole == sum(parts, [])

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, most: int | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Encodes pairs of texts with special tokens, in `most` tokens each.

        The longer text of a pair is cut first. Returns tokens, and for each of them the
        number of its text, 0 or 1. Bytes are a `ConfigError`: nothing parts two texts.
        """
        if self.name == BYTES:
            raise ConfigError(
                "pairs of texts are joined as a tokenizer.json says, and bytes have "
                "none; set config.data.tokenizer, or leave config.data.text_pair out"
            )
        encodings = self._encodings(pairs, True, most)
        return [x.ids for x in encodings], [x.type_ids for x in encodings]

    def _encodings(self, texts: Sequence[Any], special: bool, most: int | None) -> Any:
        library = self._library
        pairs = any(isinstance(text, tuple) for text in texts[:1])
        added = library.num_special_tokens_to_add(pairs) if special else 0
        if most is not None and most <= added:  # Which the package cuts nothing to.
            raise ConfigError(
                f"context={most} leaves no room for a text beside the "
                f"{counted(added, 'tokens')} that {self.name} adds to each"
            )
        with self._errors("encode the texts"):
            if most is not None:
                library.enable_truncation(most)
            try:
                return library.encode_batch_fast(
                    list(texts), add_special_tokens=special
                )
            finally:
                library.no_truncation()

    @contextlib.contextmanager
    def _errors(self, work: str) -> Iterator[None]:
        """Turns what the package raises into `ConfigError`."""
        try:
            yield
        except ConfigError:
            raise
        except BaseException as error:  # A panic of its Rust is no `Exception`.
            is_panic = type(error).__name__ == "PanicException"
            if not (is_panic or isinstance(error, Exception)):
                raise
            sentence = f"the tokenizer {self.name} cannot {work}: {error}"
            raise ConfigError(sentence) from error

    def batch(
        self,
        texts: Sequence[str],
        *,
        context: int,  # Most tokens that the model has positions for.
        length: int | None = None,  # T; None means that of the longest text.
        cut: bool = False,  # Truncate longer texts instead of a `ConfigError`.
    ) -> dict[str, np.ndarray]:
        """Encodes B texts for an encoder: padded `tokens` and `mask`, int32 [B, T]."""
        most = context if length is None else min(context, length)
        rows = self.encode(texts, special=True, most=most if cut else None)
        sizes = [len(row) for row in rows]
        if (longest := max(sizes, default=0)) > most:
            raise ConfigError(
                f"the text that begins {texts[sizes.index(longest)][:40]!r} has "
                f"{longest} tokens, and {most} are possible: cut it, or give cut=True"
            )
        mask = np.arange(length or longest) < np.array(sizes, int)[:, None]
        tokens = np.zeros(mask.shape, np.int32)
        tokens[mask] = list(itertools.chain(*rows))
        return {"tokens": tokens, "mask": mask.astype(np.int32)}

    def stream(self) -> Callable[[int], str]:
        """Makes a decoder of one text: from each token to the whole characters it adds.

        Control characters are never among them.
        """
        if self.name == BYTES:
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            return lambda token: decoder.decode(bytes([token])).translate(CONTROLS)
        library = self._library
        new = _tokenizers().decoders.DecodeStream
        decoder = new(skip_special_tokens=False)

        def decode(token: int) -> str:
            nonlocal decoder
            try:
                text = decoder.step(library, token) or ""
            except Exception:  # Of bytes that end in the middle of a character.
                decoder = new(skip_special_tokens=False)
                text = "\ufffd" + (decoder.step(library, token) or "")
            return text.translate(CONTROLS)

        return decode


def batches(texts: Iterable[T], size: Callable[[T], int] = len) -> Iterator[list[T]]:
    """Parts texts to encode: as the package has their tokens, memory holds few."""
    batch, length = [], 0
    for text in texts:
        batch.append(text)
        length += size(text)
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def learn_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a byte-level BPE vocabulary, as GPT-2's: the bytes of a tokenizer.json."""
    if vocab_size < 257:
        least = "256 bytes and the end of a text make 257"
        raise ConfigError(f"a vocabulary of {vocab_size} is too small: {least}")
    learned = _tokenizers().ByteLevelBPETokenizer()
    learned.train_from_iterator(
        _cut_words(texts),
        vocab_size,
        min_frequency=0,
        special_tokens=[END_OF_TEXT[0]],
        show_progress=False,
    )
    return learned.to_str(pretty=True).encode()


def _cut_words(texts: Iterable[str]) -> Iterator[str]:
    """Cuts words that are very long, as of DNA: learning is quadratic in their length.

    What is learned differs where they are cut alone.
    """
    for text in texts:
        start = 0
        for word in LONG_WORD.finditer(text):
            yield text[start : word.end()]
            start = word.end()
        yield text[start:]


def _read_ids(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Reads the numbers of all tokens, and of the added ones, by name."""
    contents = read_json(path, most=2**28)
    vocab = contents["model"]["vocab"]
    if isinstance(vocab, list):  # With a score for each, as in Unigram models.
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    added = {x["content"]: x["id"] for x in contents.get("added_tokens") or []}
    ids = vocab | added
    if not ids:
        raise ValueError("its vocabulary is empty")
    if not all(type(number) is int and 0 <= number < 2**31 for number in ids.values()):
        raise ValueError("its tokens are no whole numbers from 0")
    return ids, added


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
        from tokenizers.decoders import DecodeStream  # noqa: F401  # Since 0.21.1.
    except ImportError as error:
        raise ConfigError(
            "tokenizer.json is read by Hugging Face's tokenizers, 0.21.1 or newer, "
            'which is not installed: pip install "haiku_template[text]"'
        ) from error
    return tokenizers
