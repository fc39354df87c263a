"""The command `haiku_template.prepare`: text to token files, in bounded memory."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import flags

from haiku_template import cli, signals
from haiku_template.bounded import exists, is_dir
from haiku_template.data.files import read_with
from haiku_template.errors import ConfigError, StorageError, counted
from haiku_text.data import documents
from haiku_text.data.documents import TextFile, pieces
from haiku_text.data.files import TokenWriter, check_same, write_new
from haiku_text.data.tokenizer import BYTES, FILE, Tokenizer, batches, learn_tokenizer

REPORT_SECONDS = 10  # Between lines where there is no terminal.
BINARY_BYTES = 8192  # Searched for a zero byte, which text has not.

FLAGS = cli.FLAGS
flags.DEFINE_string("input", None, "A text file, or a folder of them.")
flags.DEFINE_string("tokenizer", None, "A tokenizer.json.")
flags.DEFINE_string("output", None, "The .safetensors file to write.")
flags.DEFINE_integer("train_vocab_size", None, "Learn so many; write --tokenizer.")
flags.DEFINE_string("validation_output", None, "The same for tokens of held-out files.")
flags.DEFINE_float("validation_fraction", 0.01, "Of the files to hold out.", 0.0, 1.0)
flags.DEFINE_string("end_of_text", None, "Token after each file; else a usual one.")


def main() -> None:
    """Checks the paths, gets a tokenizer, and writes the token files.

    Raises:
      ConfigError: flags, text or tokenizer do not fit; no token file was written.
      StorageError: a folder cannot be written, and no token file was.
    """
    cli.need("input", "tokenizer", "output")
    if FLAGS.tokenizer == BYTES:
        raise ConfigError(
            "--tokenizer=bytes has no use here: the data set bytes reads text as it "
            "is, without a token file; possible is a tokenizer.json"
        )
    for name in ("validation_output", "end_of_text"):
        if FLAGS[name].value == "":
            raise ConfigError(f"--{name}= is empty; give a value, or leave it out")
    outputs = [Path(x) for x in (FLAGS.output, FLAGS.validation_output) if x]
    source = Path(FLAGS.tokenizer)
    beside = outputs[0].parent / FILE
    _check_paths(source, beside, outputs)
    file_sets = _read_input({path.resolve() for path in (source, beside, *outputs)})
    try:
        if FLAGS.train_vocab_size is not None:
            with _progress("learn", file_sets[0]) as report:
                texts = _pieces(file_sets[0], report)
                contents = learn_tokenizer(texts, FLAGS.train_vocab_size)
            write_new(source, contents)
        tokenizer = Tokenizer(source, end=FLAGS.end_of_text, literal=True)
        contents = Path(tokenizer.name).read_bytes()
        check_same(beside, contents)
        lines = _write(tokenizer, outputs, file_sets, beside, contents)
    except OSError as error:
        where = Path(error.filename or outputs[0]).parent  # Of a temporary file.
        raise StorageError(f"{where} cannot be written: {error.strerror}") from error
    print(*lines, sep="\n")  # Of a full disk beneath it the command has its sentence.


def _write(
    tokenizer: Tokenizer,
    outputs: list[Path],
    file_sets: list[list[TextFile]],
    beside: Path,
    contents: bytes,
) -> list[str]:
    """Writes a token file for each part, all or none, and the tokenizer `beside`."""
    dtype = "uint16" if tokenizer.size <= 2**16 else "uint32"
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(TokenWriter(path, dtype)) for path in outputs]
        for writer in writers:
            stack.enter_context(signals.called(writer.__exit__))
        for writer, files in zip(writers, file_sets, strict=True):
            with _progress("write", files) as report:
                write_tokens(files, tokenizer, writer, report)
        for writer in writers:
            writer.complete()
        write_new(beside, contents)
        for writer in writers:
            writer.publish()
    return [
        f"{writer.path}: {counted(writer.size, 'tokens')} ({dtype}) of "
        f"{counted(len(files), 'files')}; "
        f"the vocabulary has {tokenizer.size}"
        for writer, files in zip(writers, file_sets, strict=True)
    ]


def write_tokens(
    files: list[TextFile],
    tokenizer: Tokenizer,
    writer: TokenWriter,
    report: Callable[[int], None],
) -> None:
    """Writes the tokens of all files, each with its end.

    `report` is called with the number of bytes done since its last call.

    Raises:
      ConfigError: a file cannot be read, is not UTF-8, or cannot be encoded.
    """
    end = [] if tokenizer.end is None else [tokenizer.end]
    for batch in batches(_pieces(files, report, tokenizer.splits)):
        for text, ids in zip(batch, tokenizer.encode(batch), strict=True):
            writer.write(ids if text else end)


def _pieces(
    files: list[TextFile], report: Callable[[int], None], *splits: Callable[..., bool]
) -> Iterator[str]:
    """Reads the pieces of all files, with an empty one at the end of each."""
    for file in files:
        for piece in pieces(file, *splits):
            yield piece
            report(len(piece.encode()))
        yield ""


def _read_input(own_paths: set[Path]) -> list[list[TextFile]]:
    """Lists files to train on and to hold out; `own`, the command's, are no input."""

    def begin(path: Path) -> bytes:
        with path.open("rb") as f:
            return f.read(BINARY_BYTES)

    files = documents.text_files(FLAGS.input)
    files = [f for f in files if f.path.resolve() not in own_paths]
    files = [f for f in files if documents.is_text(read_with(f.path, begin))]
    documents.check_any(files, FLAGS.input)
    if not FLAGS.validation_output:
        if FLAGS["validation_fraction"].present:
            sentence = "--validation_fraction needs --validation_output, which is for"
            raise ConfigError(f"{sentence} tokens of the files that it holds out")
        return [files]
    if FLAGS.validation_fraction == 0:
        rule = "holds no files when --validation_fraction is 0"
        raise ConfigError(f"--validation_output {rule}; give more, or leave it out")
    return list(documents.split_documents(files, FLAGS.validation_fraction))


def _check_paths(tokenizer: Path, beside: Path, outputs: list[Path]) -> None:
    """Raises `ConfigError` if a file would be overwritten or cannot be written."""
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise ConfigError(f"--output and --validation_output are both {outputs[0]}")
    for path in [*outputs, *[tokenizer, beside] * (FLAGS.train_vocab_size is not None)]:
        if exists(path):
            hint = ", or leave out --train_vocab_size to use it" * (path == tokenizer)
            raise ConfigError(f"{path} exists; remove it, or name another file{hint}")
        if not is_dir(path.parent):
            raise ConfigError(f"the folder {path.parent} of {path.name} does not exist")
        if path in outputs and path.suffix != ".safetensors":
            raise ConfigError(f"{path} must end in .safetensors, which is its format")


@contextlib.contextmanager
def _progress(verb: str, files: list[TextFile]) -> Iterator[Callable[[int], None]]:
    """Shows the bytes done: a bar, or a line now and then."""
    from rich.progress import Progress, TransferSpeedColumn

    total = sum(file.path.stat().st_size for file in files)
    bar = Progress(*Progress.get_default_columns(), TransferSpeedColumn())
    task = bar.add_task(f"{verb} {counted(len(files), 'files')}", total=total)
    bar.disable = not bar.console.is_terminal
    begun = last_report = time.monotonic()

    def report(count: int) -> None:
        nonlocal last_report
        bar.advance(task, count)
        now = time.monotonic()
        if bar.disable and now - last_report >= REPORT_SECONDS:
            last_report, completed = now, bar.tasks[0].completed
            rate = completed / (now - begun) / 1e6
            try:
                print(f"{verb} {completed / total:.0%}, {rate:.1f} MB/s", flush=True)
            except OSError:  # The work goes on where nobody reads of it.
                last_report = math.inf

    with bar:
        yield report
