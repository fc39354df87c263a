"""Exceptions whose message is a sentence for the user, each with its exit code.

A command shows the sentence without a traceback; an exception without an `exit_code` is
a defect and shows its traceback. So it is in a cell of a notebook.
"""

import difflib
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

NEAREST, MEANT = "; nearest is {}", " (did you mean {}?)"
# NAME or ORG/NAME on Hugging Face's hub, and endings that tell a file.
HUB_ID = re.compile(r"(?:([A-Za-z0-9][\w.-]*)/)?([A-Za-z0-9][\w.-]*)", re.ASCII)
GPT2 = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # Of no ORG.
FILE_ENDINGS = {".safetensors", ".npz", ".npy", ".json", ".jsonl", ".csv", ".txt"}
FILE_ENDINGS |= {".parquet", ".bin", ".pt", ".pkl", ".pickle", ".joblib", ".py"}
PLURAL = re.compile("(?<=s)es$|(?<=ch)es$|s$")  # Of classes, batches, steps.
CHAIN = 20  # Errors behind an error, at most.
PACKAGES = ("haiku_template", "haiku_text")
# Files whose lines a cell does not show: of this project, and of Python.
_OURS = tuple(f"{Path(__file__).parents[1] / x}{os.sep}" for x in PACKAGES)
_OTHERS = (*_OURS, "<frozen", "<string>", sysconfig.get_path("stdlib"))


class _Sentence(Exception):
    """Base of errors that IPython shows as commands do."""

    def _render_traceback_(self) -> list[str]:  # IPython's name.
        """Makes the lines for a cell: those of the user's code, and the sentence."""
        sentence = f"{type(self).__name__}: {self}"
        return [*_users_lines(self), sentence, *getattr(self, "__notes__", ())]


def _users_lines(error: BaseException) -> list[str]:
    """Lines of the user's code that an error passed through, each with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    frames = [x for x in frames if "site-packages" not in x.filename]
    return [
        f"{_place(x.filename)}, line {x.lineno}: {x.line}"
        for x in frames
        if not x.filename.startswith(_OTHERS)
    ]


def _place(filename: str) -> str:
    """Names a file; a cell as IPython does, such as `Cell In[3]`."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    name = shell and shell.compile.format_code_name(filename)
    return " ".join(name) if name else filename


def clear_frames(error: BaseException | None) -> None:
    """Clears the frames of an error that passed through this project.

    They hold the arrays of a run that failed, beside those of the next.
    """
    for each in chain(error):
        frames = traceback.walk_tb(each.__traceback__)
        if any(x.f_code.co_filename.startswith(_OURS) for x, _ in frames):
            traceback.clear_frames(each.__traceback__)


def axis_advice(error: BaseException) -> str:
    """Says what to do about an axis of published code's own, if it is that."""
    if not any("unbound axis name" in str(x) for x in chain(error)):
        return ""
    return (
        "a model is given the axis of the devices as axis_name, None on one device; "
        "where code that stays as it is names another, "
        "haiku_template.published.norms_over(axis_name) gives hk.BatchNorm that one, "
        'and collectives_over(axis_name, "i") the collectives of jax.lax over "i" that '
        "modules name, in a backward function if it is entered around the gradient"
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the one behind it, and so on."""
    for _ in range(CHAIN):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


class ConfigError(_Sentence, ValueError):
    """A configuration, data or a pretrained model that cannot be used as asked."""

    exit_code = 64


class PlacementError(_Sentence, ValueError):
    """Arrays that cannot be, or are not, where a run needs them."""

    exit_code = 64


class UnequalError(PlacementError):
    """A step of which each device made another, so that none is saved."""


class ReplicaError(PlacementError):
    """A replica of the state that came to differ from the others."""

    exit_code = 71


class DeviceError(_Sentence, RuntimeError):
    """A device that was asked for and cannot be had."""

    exit_code = 69


class NonFiniteError(_Sentence, RuntimeError):
    """A loss or a part of the train state that is infinite or NaN."""

    exit_code = 70


class EvaluationError(NonFiniteError):
    """A loss of an evaluation that is infinite or NaN, of a state that is neither."""


class ReplayError(_Sentence, RuntimeError):
    """A step that gave other bits when it was made again."""

    exit_code = 72


class MemoryFullError(_Sentence, RuntimeError):
    """A device whose memory was full while a run was made, or ran."""

    exit_code = 77


def is_exhausted(error: BaseException) -> bool:
    """True for an error of XLA's that says a device had no memory left."""
    is_xlas = any(x.__name__ == "JaxRuntimeError" for x in type(error).__mro__)
    return is_xlas and "RESOURCE_EXHAUSTED" in str(error)  # gRPC has it of quotas.


def memory_full(error: BaseException) -> MemoryFullError | None:
    """Sentence of such an error, with the user's last line; None for another."""
    if not is_exhausted(error):
        return None
    reason = str(error).strip().split("\n")[0][:200]
    lines = [f" ({x})" for x in _users_lines(error)[-1:]]
    return MemoryFullError(f"the memory of a device was full: {reason}{''.join(lines)}")


class StorageError(_Sentence, RuntimeError):
    """A checkpoint or a file that cannot be written or read."""

    exit_code = 74


class MisfitError(StorageError):
    """A checkpoint with other leaves than the model's, of which nothing was loaded."""


class DamagedError(StorageError):
    """A checkpoint that is not what was saved; another of the run may be."""


class DataError(_Sentence, RuntimeError):
    """Batches that cannot be made, whose processes end."""

    exit_code = 71


class Interrupted(_Sentence, RuntimeError):
    """A signal that stopped the run after its state was saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def near(
    name: str, names: Iterable[str], template: str = NEAREST, cutoff: float = 0.6
) -> str:
    """Formats `template` with the most similar of the names; "" if none is similar.

    Capitals do not count.
    """
    originals = {x.casefold(): x for x in itertools.islice(names, 1000)}
    matches = difflib.get_close_matches(name.casefold(), originals, 1, cutoff)
    return template.format(originals[matches[0]]) if matches else ""


def need_package(name: str, use: str, requirement: str) -> None:
    """Raises `ConfigError` if the package that is for a `use` is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{use}, which is not installed: pip install {requirement}")


def some(names: Iterable[object], most: int = 3, separator: str = ", ") -> str:
    """Lists the first names, and the number of the others."""
    first, others = (names := [*map(str, names)])[:most], len(names) - most
    return separator.join(first) + f" and {others} more" * (others > 0)


def counted(number: int | str, noun: str) -> str:
    """Number and noun, which is given in the plural: `2 batches`, `1 batch`."""
    text = number if isinstance(number, str) else f"{number:,}"
    return f"{text} {PLURAL.sub('', noun) if text == '1' else noun}"


def printable(text: str) -> str:
    """Text of others, such as a process, without a terminal's control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)


def download(path: str | Path, kind: str = "model") -> str:
    """Names the command that downloads a Hugging Face id; "" for what looks like none.

    Args:
      path: what was asked for and does not exist: ORG/NAME, where no folder is ORG, or
        the name of a model of GPT-2.
      kind: the hub's `model` or `dataset`.
    """
    match = HUB_ID.fullmatch(str(path))
    if not match or Path(path).suffix in FILE_ENDINGS:
        return ""
    known = GPT2 if kind == "model" else ()
    if os.path.exists(match[1]) if match[1] else match[2] not in known:
        return ""
    option = "" if kind == "model" else f" --repo-type {kind}"
    return (
        "; nothing is downloaded here: if this is a Hugging Face id, get it with "
        f"`hf download {path}{option} --local-dir {match[2]}` (pip install "
        f"huggingface_hub) and give {match[2]}{'/FILE' * bool(option)}"
    )
