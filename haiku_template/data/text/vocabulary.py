"""From texts to lists of tokens: through tokenizer.json, or as bytes of UTF-8."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from haiku_template.data.text.encoding import END_OF_TEXT
from haiku_template.data.text.tokenizer import FILE, read_tokenizer
from haiku_template.errors import ConfigError

Texts = Sequence[str]


class Vocabulary(NamedTuple):
    """What texts are made of.

    Attributes:
      name: `bytes`, or the path of the tokenizer.json.
      size: tokens there are, which is more than the largest.
      end: the token that ends a text; None where there is none.
      encode: (texts, most tokens or None) to tokens, with special ones and cut to most.
      encode_plain: texts to tokens, without special ones.
    """

    name: str
    size: int
    end: int | None
    encode: Callable[[Texts, int | None], list[list[int]]]
    encode_plain: Callable[[Texts], list[list[int]]]

    def check_size(self, vocab_size: int | None) -> int:
        """The size of a model's vocabulary; None means this one's.

        Raises:
          ConfigError: tokens that the model does not have.
        """
        if vocab_size is not None and vocab_size < self.size:
            raise ConfigError(
                f"{self.name} has {self.size} tokens, and vocab_size={vocab_size}; the "
                "model must know all of them"
            )
        return vocab_size or self.size


def bytes_vocabulary() -> Vocabulary:
    """The 256 bytes, without special tokens; zero ends a text."""

    def encode(texts: Texts, most: int | None) -> list[list[int]]:
        # JSON may spell half a surrogate pair; it stays what it is.
        return [list(t.encode(errors="surrogatepass")[:most]) for t in texts]

    return Vocabulary("bytes", 256, 0, encode, lambda texts: encode(texts, None))


def read_vocabulary(source: str | Path) -> Vocabulary:
    """The vocabulary of a tokenizer.json.

    Args:
      source: the file, or a folder with one.

    Raises:
      ConfigError: see `read_tokenizer`.
    """
    path = Path(source).expanduser()
    path = path / FILE if path.is_dir() else path
    tokenizer = read_tokenizer(path)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    ends = [ids[name] for name in END_OF_TEXT if name in ids]

    def encode(texts: Texts, most: int | None) -> list[list[int]]:
        if most is not None:
            tokenizer.enable_truncation(most)
        encodings = _encode_batch(tokenizer.encode_batch, path, texts)
        tokenizer.no_truncation()
        return [encoding.ids for encoding in encodings]

    def encode_plain(texts: Texts) -> list[list[int]]:
        def plain(texts: list[str]) -> list:
            return tokenizer.encode_batch(texts, add_special_tokens=False)

        return [encoding.ids for encoding in _encode_batch(plain, path, texts)]

    end = ends[0] if ends else None
    size = max(ids.values(), default=-1) + 1
    return Vocabulary(str(path.resolve()), size, end, encode, encode_plain)


def _encode_batch(encode_batch: Callable, path: Path, texts: Texts) -> list:
    try:
        return encode_batch(list(texts))
    except Exception as error:  # The package raises no other class.
        raise ConfigError(
            f"the tokenizer {path} cannot encode the texts: {error}"
        ) from error
