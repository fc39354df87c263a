"""Data set `bytes`: text of files, Python's standard library or Python's help."""

import codecs
import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from haiku_template.bounded import is_dir, is_file
from haiku_template.data.dataset import BatchSpec, Data
from haiku_template.data.files import data_path, read_with
from haiku_template.errors import ConfigError
from haiku_text.data.stream import Shard, TokenStream
from haiku_text.data.tokenizer import BYTES
from haiku_text.data.windows import TokenDataset, TokenEvaluationSet, widen

# Of the standard library: other programs, tests and tables; pydoc_data, which is a
# source of its own; and what is the same again as __hello__.py.
LEFT_OUT = """__phello__ __pycache__ dist-packages encodings ensurepip idlelib
lib-dynload lib2to3 pydoc_data site-packages test tests turtledemo
"""
PIECE = 2**14  # Characters, about, that one thread works on.
LONGEST_PIECE = 2**20  # Characters, where no good place to cut is found.
NEAR = 64  # Characters before and behind a cut, whose tokens tell if it is one.
T = TypeVar("T")
D = TypeVar("D", "Document", "TextFile")


def byte_text(
    spec: BatchSpec,
    *,
    path: str | tuple[str, ...] | None = None,
    context: int = 256,  # T, bytes of a window's inputs.
    order: str = "random",  # Or `epochs`, as in `TokenDataset`.
    validation_fraction: float = 0.1,  # Of the files, to evaluate on; 0 for none.
    eval_windows: int | None = 1024,  # At most, spread evenly; None means all.
) -> Data:
    """Text as bytes of UTF-8, a vocabulary of 256, in memory; whole files held out.

    `path` is a text file, a folder or several; None is the source of Python's standard
    library, `pydoc` the topics of its help, in English. A zero byte ends each file:
    text holds none. Files are held out by a hash of their names, whatever other files
    there are; of a single file it is the end.
    """
    training, held_out = split_text(read_documents(path), validation_fraction)
    train = TokenDataset(_stream(training), context, spec, 256, order)
    evaluation = held_out and TokenEvaluationSet(
        _stream(held_out), context, spec.batch_size, 256, eval_windows
    )
    return Data(train, evaluation or None, 256, widen, BYTES)


def _stream(documents: list["Document"]) -> TokenStream:
    joined = b"".join(document.content + b"\0" for document in documents)
    name = f"{documents[0].name} and {len(documents) - 1} more"
    return TokenStream((Shard(np.frombuffer(joined, np.uint8), name),))


def prompt_file(path: str) -> list[str]:
    """Reads a prompt a line, or raises `ConfigError` if it cannot."""
    try:
        lines = Path(path).read_bytes().decode("utf-8-sig").removesuffix("\n")
        return [x.removesuffix("\r") for x in lines.split("\n")] if lines else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt_file={path} cannot be read: {error}") from None


class Document(NamedTuple):
    """Text in memory: its path below the folder that was named, and its UTF-8."""

    name: str
    content: bytes


class TextFile(NamedTuple):
    """Text file: its path below the folder that was named, and its full path."""

    name: str
    path: Path


def read_documents(path: str | tuple[str, ...] | None) -> list[Document]:
    """Reads all text of `byte_text`'s `path` into memory, sorted by name."""
    if path == "pydoc":
        return _pydoc_topics()
    files = library_files() if path is None else text_files(path)
    read = lambda path: path.read_bytes().removeprefix(codecs.BOM_UTF8)  # noqa: E731
    documents = [Document(f.name, read_with(f.path, read)) for f in files]
    texts = [document for document in documents if is_text(document.content)]
    return check_any(texts, "Python's standard library" if path is None else path)


def is_text(content: bytes) -> bool:
    """Tests for bytes of a text; other files are empty or soon hold a zero byte."""
    return bool(content) and b"\0" not in content


def check_any(items: list[T], where: str | tuple[str, ...]) -> list[T]:
    """Returns the items, or raises `ConfigError` when there are none."""
    if not items:
        hint = "a text is a file with something in it, and without zero bytes"
        raise ConfigError(f"{where} holds no text; {hint}")
    return items


def text_files(path: str | tuple[str, ...]) -> list[TextFile]:
    """Lists files, and those in folders but hidden ones, sorted by name."""
    paths = path if isinstance(path, (list, tuple)) else [path]
    kinds = "a text file, a folder of them, or several"
    return sorted(x for p in paths for x in _walk(data_path(p, "bytes", kinds)))


def library_files() -> list[TextFile]:
    """Lists the source files of Python's standard library, but for `LEFT_OUT`."""
    built = "_sysconfigdata", "config-"  # With this Python, elsewhere differently.
    files = sorted(_walk(Path(os.__file__).parent, LEFT_OUT.split()))
    return [x for x in files if x.name.endswith(".py") and not x.name.startswith(built)]


def _walk(root: Path, left_out: Collection[str] = ()) -> Iterator[TextFile]:
    if not is_dir(root):
        yield read_with(root, lambda path: TextFile(path.name, path))
        return

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"the folder {error.filename} cannot be read: {error.strerror}"
        )

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in left_out and f[0] != "."]
        for name in names:
            path = Path(folder, name)
            if name[0] != "." and is_file(path):
                yield TextFile(path.relative_to(root).as_posix(), path)


def _pydoc_topics() -> list[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        detail = "the help on its topics; some distributions package it apart"
        raise ConfigError(f"this Python has no pydoc_data.topics, {detail}") from error
    return [Document(name, text.encode()) for name, text in sorted(topics.items())]


def hold_out(
    places: np.ndarray, ranks: np.ndarray, fraction: float, alone: str
) -> np.ndarray:
    """Tells by hash which items are held out, alike on every machine: bool [N].

    `ranks` rise, each item's at its place. Holding one out does not depend on the
    others, and those of one place are on one side. One is moved where all would be; a
    single one is a `ConfigError`, which begins with `alone`.
    """
    if not 0 <= fraction < 1:
        possible = "possible is from 0 to below 1"
        raise ConfigError(f"validation_fraction={fraction}; {possible}")
    if fraction == 0:
        return np.zeros(len(places), bool)
    if len(ranks) < 2:
        raise ConfigError(f"{alone}; give several, or validation_fraction=0")
    # One at least on each side.
    return places < min(max(np.searchsorted(ranks, fraction), 1), len(ranks) - 1)


def rank(name: bytes) -> float:
    """Hashes a name to [0, 1); those below a fraction are held out."""
    # Why: docs/decisions/data.md#held-out
    return int.from_bytes(hashlib.sha256(name).digest()[:6], "big") / 2**48


def split_documents(documents: list[D], fraction: float) -> tuple[list[D], list[D]]:
    """Holds out whole documents, by their names."""
    # What a file system gives as a name need not be UTF-8; two may have the same.
    names = [document.name.encode(errors="surrogateescape") for document in documents]
    ranks = np.array([rank(name) for name in names])
    order = np.argsort(ranks, kind="stable")
    alone = f"{documents[0].name} is a single text, and whole texts are held out"
    is_held = hold_out(np.argsort(order), ranks[order], fraction, alone)
    sides: tuple[list[D], list[D]] = ([], [])
    for document, side in zip(documents, is_held.tolist(), strict=True):
        sides[side].append(document)
    return sides


def split_text(
    documents: list[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Holds out whole documents; of a single one, its end."""
    if len(documents) > 1 or not 0 < fraction < 1:
        return split_documents(documents, fraction)
    name, content = documents[0]
    cut = len(content) - max(int(len(content) * fraction), 1)
    return [Document(name, content[:cut])], [Document(name, content[cut:])]


def pieces(
    file: TextFile, splits: Callable[[str, str], bool] = lambda a, b: True
) -> Iterator[str]:
    """Reads a text of any length in pieces, which give the tokens of the whole.

    It is cut before a space between two letters, if `splits(before, behind)` says that
    a tokenizer splits there, too; anywhere if no such place comes for `LONGEST_PIECE`.
    """
    buffer = ""
    try:
        with file.path.open(encoding="utf-8-sig", newline="") as f:
            while chunk := f.read(PIECE):
                buffer += chunk
                cut = _last_cut(buffer)
                if not splits(buffer[max(0, cut - NEAR) : cut], buffer[cut:][:NEAR]):
                    cut = 0  # As Llama's, which puts a mark before each text.
                if len(buffer) > PIECE and (cut or len(buffer) >= LONGEST_PIECE):
                    yield buffer[: cut or None]
                    buffer = buffer[cut:] if cut else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file.path} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{file.path} cannot be read: {error.strerror}") from error
    if buffer:
        yield buffer


def _last_cut(text: str) -> int:
    """Position of the last space between two letters, not far back; 0 for none."""
    low = max(0, len(text) - 2 * PIECE)  # What is before was looked at.
    at = text.rfind(" ", low, len(text) - 1)
    while at > 0 and not (text[at - 1].isalpha() and text[at + 1].isalpha()):
        at = text.rfind(" ", low, at)
    return max(at, 0)
