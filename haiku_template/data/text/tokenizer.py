"""Text to tokens, through Hugging Face's `tokenizers` and a folder's tokenizer.json.

Shapes: B texts, T tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from haiku_template.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"


def read_tokenizer(source: str | Path) -> "Tokenizer":
    """A tokenizer that neither cuts nor pads by itself.

    Args:
      source: a tokenizer.json, or a Hugging Face folder with one.

    Raises:
      ConfigError: `tokenizers` is not installed, or tokenizer.json is missing or
        damaged.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "tokenizer.json is read by tokenizers, which is not installed: pip install "
            '"haiku_template[text]"'
        ) from error
    path = Path(source) / FILE if Path(source).is_dir() else Path(source)
    if path.suffix == ".safetensors":
        raise ConfigError(
            f"{path} holds parameters and no tokenizer; config.data.tokenizer is a "
            "tokenizer.json, a folder with one, or None for bytes"
        )
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; a folder with only a vocab.txt or merges.txt gets "
            "one from transformers' AutoTokenizer, with save_pretrained"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing more exact.
        raise ConfigError(f"{path} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(
    tokenizer: "Tokenizer",
    texts: Sequence[str],
    *,
    context: int,
    length: int | None = None,
    cut: bool = False,
) -> dict[str, np.ndarray]:
    """Texts as a padded batch, with the special tokens that the tokenizer adds.

    Args:
      tokenizer: from `read_tokenizer`.
      texts: B of them.
      context: the most tokens that the model has positions for.
      length: T; None means that of the longest text.
      cut: whether longer texts are cut, special tokens kept, instead of refused.

    Returns:
      `tokens` (int32 [B, T], 0 where padded) and `mask` (int32 [B, T], 0 there).

    Raises:
      ConfigError: a text has more tokens than `context`, or than `length`.
    """
    most = context if length is None else min(context, length)
    if cut:
        tokenizer.enable_truncation(most)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    tokenizer.no_truncation()
    sizes = np.array([len(row) for row in rows])
    if sizes.max(initial=0) > most:
        index = int(sizes.argmax())
        raise ConfigError(
            f"the text that begins {texts[index][:40]!r} has {sizes[index]} tokens, "
            f"and {most} are possible: cut it, or give cut=True"
        )
    width = sizes.max(initial=0) if length is None else length
    mask = np.arange(width)[None] < sizes[:, None]
    tokens = np.zeros(mask.shape, np.int32)
    tokens[mask] = np.concatenate(rows) if rows else ()
    return {"tokens": tokens, "mask": mask.astype(np.int32)}
