"""Data sets for language models, by name: token files, and text as bytes."""

from pathlib import Path
from typing import Any

import numpy as np

from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.data.files import given_path
from haiku_template.data.text.documents import Document, read_documents, split_text
from haiku_template.data.text.files import open_tokens
from haiku_template.data.text.stream import Shard, TokenStream
from haiku_template.data.text.tokenizer import BYTES, Tokenizer, find_tokenizer
from haiku_template.data.text.windows import TokenDataset, TokenEvaluationSet
from haiku_template.errors import ConfigError

PADDING = 128  # Vocabularies are rounded up to multiples of this, for faster products.


def tokens(
    spec: BatchSpec,
    *,
    path: str | None = None,
    context: int = 1024,
    order: str = "random",
    vocab_size: int | None = None,
    dtype: str = "uint16",
    tensor: str | None = None,
    validation_path: str | None = None,
    validation_fraction: float = 0.01,
    validation_tokens: int | None = None,
    eval_windows: int | None = 1024,
) -> Data:
    """Token files of any size: mapped into memory, never read whole.

    Args:
      spec: how they are cut into batches.
      path: .safetensors, .npy or .bin, or a folder of them, which are one stream.
      context: T, how many tokens a window has for inputs.
      order: of training windows, `random` or `epochs`; see `TokenDataset`.
      vocab_size: None means that of the tokenizer.json beside `path`. It may be larger
        by a padding of less than 128.
      dtype: of .bin files.
      tensor: the name of the tokens in .safetensors files.
      validation_path: evaluate on this, and train on all of `path`.
      validation_fraction: else evaluate on this part of `path`, its end; 0 for none.
      validation_tokens: else on so many tokens at its end; 0 for none.
      eval_windows: evaluate on at most so many windows, spread evenly; None means all.
    """
    what = "a .safetensors, .npy or .bin file of tokens, or a folder of them"
    source = given_path(path, "tokens", what)
    files = {"dtype": dtype, "tensor": tensor}
    training, held_out = open_tokens(source, random=True, **files), None
    if validation_path is not None:
        path = Path(validation_path).expanduser()
        held_out = open_tokens(path, random=False, **files)
    elif count := _count_held_out(training, validation_fraction, validation_tokens):
        # Mapped once more: evaluation goes forward, and reading ahead helps it.
        whole, end = open_tokens(source, random=False, **files), len(training)
        held_out = whole.part(end - count, end)
        training = training.part(0, end - count)
    tokenizer = find_tokenizer(source)
    size = _vocab_size(vocab_size, tokenizer, source)
    train = TokenDataset(training, context, spec, size, order)
    evaluation = held_out and TokenEvaluationSet(
        held_out, context, spec.batch_size, size, eval_windows
    )
    return Data(train, evaluation, size, widen, tokenizer and tokenizer.name)


def _count_held_out(stream: TokenStream, fraction: float, count: int | None) -> int:
    """How many tokens at the end of a stream are not trained on."""
    if count is None and 0 <= fraction < 1:
        return max(int(len(stream) * fraction), 1) if fraction else 0
    if count is not None and 0 <= count < len(stream):
        return count
    given = f"fraction={fraction}" if count is None else f"tokens={count}"
    raise ConfigError(
        f"validation_{given} of the {len(stream)} tokens from {stream.locate(0)} on "
        "leaves none to train on; hold out a smaller part, or 0 for none"
    )


def _vocab_size(given: int | None, tokenizer: Tokenizer | None, source: Path) -> int:
    """The size of the vocabulary: as given, and as the tokenizer has it."""
    if tokenizer is None:
        if given is None or given < 1:
            raise ConfigError(
                f"vocab_size={given}, and no tokenizer.json lies beside {source} to "
                "say it; give --config.data.vocab_size (GPT-2's tokens, which nanoGPT "
                "writes, have 50257)"
            )
        return given
    size = tokenizer.size
    if given is not None and not size <= given < size + PADDING:
        raise ConfigError(
            f"vocab_size={given}, and the tokenizer {tokenizer.name} has {size} "
            f"tokens; possible is {size}, or more by less than {PADDING} as padding"
        )
    return given or size


def byte_text(
    spec: BatchSpec,
    *,
    path: str | tuple[str, ...] | None = None,
    context: int = 256,
    order: str = "random",
    validation_fraction: float = 0.1,
    eval_windows: int | None = 1024,
) -> Data:
    """Text as bytes of UTF-8, a vocabulary of 256, in memory; whole files held out.

    A zero byte ends each file: text holds none. What is held out is chosen by a hash of
    its name, and stays when other files come and go; of a single file it is the end.

    Args:
      spec: how it is cut into batches.
      path: a text file, a folder or several; None for the source of Python's standard
        library, `pydoc` for the topics of its help, in English.
      context: T, how many bytes a window has for inputs.
      order: of training windows, `random` or `epochs`; see `TokenDataset`.
      validation_fraction: of the files, to evaluate on; 0 for none.
      eval_windows: evaluate on at most so many windows, spread evenly; None means all.
    """
    training, held_out = split_text(read_documents(path), validation_fraction)
    train = TokenDataset(_stream(training), context, spec, 256, order)
    evaluation = None
    if held_out:
        evaluation = TokenEvaluationSet(
            _stream(held_out), context, spec.batch_size, 256, eval_windows
        )
    return Data(train, evaluation, 256, widen, BYTES)


def _stream(documents: list[Document]) -> TokenStream:
    joined = b"".join(document.content + b"\0" for document in documents)
    name = f"{documents[0].name} and {len(documents) - 1} more"
    return TokenStream((Shard(np.frombuffer(joined, np.uint8), name),))


def widen(inputs: Any) -> Any:
    """Tokens of any width to int32; on the device, so that few bytes travel."""
    return inputs.astype(np.int32)
