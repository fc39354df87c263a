"""What tokens stand for: bytes of UTF-8, or the pieces of a tokenizer."""

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from haiku_template.data.text.tokenizer import FILE
from haiku_template.errors import ConfigError

BYTES = "bytes"
# What would move a terminal's cursor, change its colours or ring its bell.
CONTROLS = {c: "\ufffd" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
CONTROLS[ord("\r")] = ""


class Text(NamedTuple):
    """Text as tokens, and tokens as text.

    Attributes:
      name: of the tokenizer, for errors.
      size: tokens are numbers below this.
      encode: gives the tokens of a text.
      stream: starts a text; gives a function that takes its tokens, one at a time, and
        returns what each adds. A character shows once all of its bytes are there.
    """

    name: str
    size: int
    encode: Callable[[str], list[int]]
    stream: Callable[[], Callable[[int], str]]


def make_text(tokenizer: str) -> Text:
    """Tokens of UTF-8 bytes for `bytes`, else those of a tokenizer.json.

    Args:
      tokenizer: `bytes`, the file, or a folder with one.

    Raises:
      ConfigError: the file cannot be read, or the package `tokenizers` is missing.
    """
    if tokenizer == BYTES:
        return Text(BYTES, 256, lambda text: list(text.encode()), _byte_stream)
    path = Path(tokenizer).expanduser()
    return _tokenizer_text(path / FILE if path.is_dir() else path)


def _byte_stream() -> Callable[[int], str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: decoder.decode(bytes([token])).translate(CONTROLS)


def _tokenizer_text(path: Path) -> Text:
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import DecodeStream
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package tokenizers, 0.21.1 or newer, which is not "
            'installed: pip install "haiku_template[text]"'
        ) from error
    if not path.is_file():
        raise ConfigError(
            f"the tokenizer {path} is not a file; give --tokenizer=PATH of a "
            "tokenizer.json, or --tokenizer=bytes"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library has no class of its own for it.
        raise ConfigError(f"{path} is no tokenizer.json: {error}") from error

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def stream() -> Callable[[int], str]:
        decoder = DecodeStream(skip_special_tokens=False)
        return lambda token: (decoder.step(tokenizer, token) or "").translate(CONTROLS)

    size = max(tokenizer.get_vocab().values()) + 1
    return Text(str(path), size, encode, stream)
