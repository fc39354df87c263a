"""From text to tokens with Hugging Face's tokenizers, in bounded memory."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from haiku_template.data.files import read_with
from haiku_template.data.text.documents import TextFile
from haiku_template.data.text.writer import TokenWriter
from haiku_template.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 2**14  # Characters, about, that one thread works on.
LONGEST_PIECE = 2**20  # Characters, where no good place to cut is found.
BATCH = 2**19  # Characters that are handed to the tokenizer's threads at once.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


def load_tokenizer(path: Path) -> "Tokenizer":
    """Reads a tokenizer.json.

    Raises:
      ConfigError: it is missing or damaged, or the package `tokenizers` is.
    """
    library = _tokenizers()
    return read_with(path, lambda file: library.Tokenizer.from_file(str(file)))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Learns a byte-level BPE vocabulary, as GPT-2's, from text.

    Args:
      texts: what to learn from.
      vocab_size: tokens at most; the 256 bytes and the end of a text are among them.

    Raises:
      ConfigError: too small a vocabulary, or `tokenizers` is not installed.
    """
    if vocab_size < 257:
        raise ConfigError(
            f"a vocabulary of {vocab_size} is too small: 256 bytes and the end of a "
            "text make 257"
        )
    library = _tokenizers()
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT[0]],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: "Tokenizer", name: str | None) -> int | None:
    """The token that ends each text; None for a tokenizer without one.

    Args:
      tokenizer: where it is looked up.
      name: None means the first of `END_OF_TEXT` that the tokenizer has.

    Raises:
      ConfigError: the tokenizer has no token `name`.
    """
    ids = [tokenizer.token_to_id(n) for n in ([name] if name else END_OF_TEXT)]
    known = [i for i in ids if i is not None]
    if name and not known:
        raise ConfigError(f"the tokenizer has no token {name!r} to end a text with")
    return known[0] if known else None


def write_tokens(
    files: list[TextFile],
    tokenizer: "Tokenizer",
    writer: TokenWriter,
    end: int | None,
    report: Callable[[int], None],
) -> None:
    """Writes the tokens of all files, one after another.

    What looks like a special token in a text is text.

    Args:
      files: UTF-8 text.
      tokenizer: adds no tokens of its own here, such as those that begin a text.
      writer: takes the tokens.
      end: the token after each file; None for none.
      report: called with the number of bytes that were worked on since the last call.

    Raises:
      ConfigError: a file that cannot be read or is not UTF-8, or that the tokenizer
        cannot encode.
    """
    tokenizer.encode_special_tokens = True
    for batch in _batches(files):
        texts = [text for text, _ in batch]
        try:
            encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # The package raises no other class.
            raise ConfigError(
                f"the tokenizer cannot encode the text: {error}"
            ) from error
        for (_, is_last), encoding in zip(batch, encoded, strict=True):
            writer.write(encoding.ids)
            if is_last and end is not None:
                writer.write([end])
        report(sum(len(text.encode()) for text in texts))


def _batches(files: list[TextFile]) -> Iterator[list[tuple[str, bool]]]:
    """Groups of pieces, each with whether it is the last of its file."""
    batch, length = [], 0
    for file in files:
        for piece in pieces(file):
            batch.append((piece, False))
            length += len(piece)
            if length >= BATCH:
                yield batch
                batch, length = [], 0
        batch.append(("", True))
    yield batch


def pieces(file: TextFile) -> Iterator[str]:
    """Reads a text of any length in pieces; a short one is one piece.

    It is cut before a space between two letters. Tokenizers split there, or take the
    space with what follows, so that the pieces give the tokens of the whole. Only text
    without such a place for `LONGEST_PIECE` characters is cut anywhere.

    Raises:
      ConfigError: it cannot be read or is not UTF-8.
    """
    held = ""
    try:
        with file.path.open(encoding="utf-8", newline="") as f:
            while chunk := f.read(PIECE):
                held += chunk
                cut = _last_cut(held)
                if len(held) > PIECE and (cut or len(held) >= LONGEST_PIECE):
                    yield held[: cut or None]
                    held = held[cut:] if cut else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.path} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {error.strerror}") from error
    if held:
        yield held


def _last_cut(text: str) -> int:
    """The last position of a space between two letters; 0 for none."""
    at = text.rfind(" ", 0, len(text) - 1)
    while at > 0 and not (text[at - 1].isalpha() and text[at + 1].isalpha()):
        at = text.rfind(" ", 0, at)
    return max(at, 0)


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "tokenizing text needs Hugging Face's tokenizers, which is not installed: "
            'pip install "haiku_template[text]"'
        ) from error
    return tokenizers
