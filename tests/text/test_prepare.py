"""From text to token files: exact tokens, bounded memory, nothing half-written."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import models, pre_tokenizers

from haiku_template.data import BatchSpec
from haiku_text.data import Tokenizer
from haiku_text.data import documents as text
from haiku_text.data import tokens as token_data
from haiku_text.data.files import TokenWriter, write_new
from haiku_text.data.tokenizer import learn_tokenizer

ROOT = Path(__file__).parents[2]
END = "<|endoftext|>"


def write_texts(folder, number=30):
    """Python's own source with some of everything: spaces, tabs, ends of line."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(json.__file__).with_name("decoder.py").read_text()
    for i in range(number):
        content = f"{source[i * 97 : i * 97 + 400]}\r\n\n\t  größer\u3000{END} {i} ☃\n"
        (folder / f"{i:02}.py").write_text(content, newline="")
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A tokenizer.json of 600 tokens, learned from text like that of `write_texts`."""
    folder = tmp_path_factory.mktemp("bpe")
    files = text.text_files(str(write_texts(folder / "texts")))
    texts = (piece for file in files for piece in text.pieces(file))
    write_new(folder / "bpe.json", learn_tokenizer(texts, 600))
    return folder / "bpe.json"


def start(*flags, **options):
    command = [sys.executable, "-m", "haiku_template.prepare", *map(str, flags)]
    options = {"cwd": ROOT, "capture_output": True, "text": True} | options
    return subprocess.run(command, check=False, timeout=120, **options)


def tokenize(source, tokenizer, output, *flags, **options):
    given = (f"--input={source}", f"--tokenizer={tokenizer}", f"--output={output}")
    return start(*given, *flags, **options)


def assert_fails(done, *words, code=64):
    """One sentence with all the words, in order, and the exit code."""
    pattern = ".*".join(re.escape(str(word)) for word in words)
    assert re.fullmatch(f"error: [^\n]*{pattern}[^\n]*\n", done.stderr), done.stderr
    assert done.returncode == code


def expected(tokenizer_file, files, end=True):
    """What the whole texts give at once, each with the token that ends it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    tokenizer.encode_special_tokens = True
    ids = []
    for file in files:
        ids += tokenizer.encode(file.read_bytes().decode()).ids
        ids += [tokenizer.token_to_id(END)] * end
    return ids


# The command


def test_a_folder_becomes_tokens_that_training_reads(tmp_path, bpe):
    source, output = write_texts(tmp_path / "in"), tmp_path / "out" / "a.safetensors"
    output.parent.mkdir()
    done = tokenize(source, bpe, output)
    assert (done.returncode, done.stderr) == (0, "")
    tokens = load_file(output)["tokens"]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected(bpe, sorted(source.iterdir()))
    words = f"{output}: {len(tokens):,} tokens (uint16) of 30 files; the vocabulary has"
    assert done.stdout == f"{words} 600\n"
    assert sorted(p.name for p in output.parent.iterdir()) == [
        "a.safetensors",
        "tokenizer.json",
    ]
    data = token_data(BatchSpec(4), path=str(output), context=32)
    assert data.num_outputs == 600
    assert Path(data.text).read_bytes() == bpe.read_bytes()
    decoded = tokenizers.Tokenizer.from_file(data.text).decode(
        data.evaluation.batch(0)["inputs"][0].tolist()
    )
    assert decoded in "".join(p.read_bytes().decode() for p in sorted(source.iterdir()))


def test_a_tokenizer_is_learned_from_the_same_text(tmp_path):
    source, output = write_texts(tmp_path / "in"), tmp_path / "a.safetensors"
    done = tokenize(source, tmp_path / "new.json", output, "--train_vocab_size=400")
    assert (done.returncode, done.stderr) == (0, "")
    assert Tokenizer(tmp_path / "new.json").size == 400
    tokens = load_file(output)["tokens"].tolist()
    assert tokens == expected(tmp_path / "new.json", sorted(source.iterdir()))
    # It has learned something: fewer tokens than bytes.
    assert len(tokens) < 0.7 * sum(p.stat().st_size for p in source.iterdir())
    assert max(tokens) < 400


def test_learning_gives_the_same_tokenizer_in_every_process(tmp_path):
    source, learned = write_texts(tmp_path / "in"), []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        env = os.environ | {"PYTHONHASHSEED": seed}
        flags = (folder / "t.json", folder / "a.safetensors", "--train_vocab_size=300")
        assert tokenize(source, *flags, env=env).returncode == 0
        learned.append((folder / "t.json").read_bytes())
    assert learned[0] == learned[1]


def test_held_out_files_go_to_a_file_of_their_own(tmp_path, bpe):
    source, output = write_texts(tmp_path / "in"), tmp_path / "a.safetensors"
    held_out = tmp_path / "b.safetensors"
    flags = (f"--validation_output={held_out}", "--validation_fraction=0.3")
    assert tokenize(source, bpe, output, *flags).returncode == 0
    parts = text.split_documents(text.text_files(str(source)), 0.3)
    assert 2 < len(parts[1]) < 20
    for path, part in zip((output, held_out), parts, strict=True):
        ids = expected(bpe, [file.path for file in part])
        assert load_file(path)["tokens"].tolist() == ids


def test_a_tokenizer_learns_nothing_from_held_out_files(tmp_path):
    source = write_texts(tmp_path / "in")
    flags = ("--train_vocab_size=300", "--validation_fraction=0.3")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        validation = f"--validation_output={tmp_path / name / 'v.safetensors'}"
        paths = (tmp_path / name / "t.json", tmp_path / name / "a.safetensors")
        assert tokenize(source, *paths, *flags, validation).returncode == 0
        for file in text.split_documents(text.text_files(str(source)), 0.3)[1]:
            file.path.write_text("zzzzzzzz qqqqqqqq " * 500)
    learned = [(tmp_path / name / "t.json").read_bytes() for name in ("a", "b")]
    assert learned[0] == learned[1]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    vocab = {f"w{i}": i for i in range(70_000)}
    words = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "in.txt").write_text("w65536 w1 w69999 unknown")
    words.save(str(tmp_path / "words.json"))
    done = tokenize(
        tmp_path / "in.txt", tmp_path / "words.json", tmp_path / "a.safetensors"
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokens = load_file(tmp_path / "a.safetensors")["tokens"]
    assert tokens.dtype == np.uint32
    # This tokenizer has no token that ends a text.
    assert tokens.tolist() == [65536, 1, 69999, 0]


def test_the_token_that_ends_a_text_can_be_named(tmp_path, bpe):
    source = write_texts(tmp_path / "in", 2)
    tokenizer = tokenizers.Tokenizer.from_file(str(bpe))
    output = tmp_path / "a.safetensors"
    assert tokenize(source, bpe, output, "--end_of_text=q").returncode == 0
    ids = load_file(output)["tokens"]
    assert ids[-1] == tokenizer.token_to_id("q")
    done = tokenize(source, bpe, tmp_path / "b.safetensors", "--end_of_text=<none>")
    assert_fails(done, "no token '<none>'")


def test_help_answers_without_the_libraries():
    code = (
        "import sys\nfrom absl import app\n"
        "import haiku_template.prepare\n"
        "assert not {'jax', 'tokenizers', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    done = start("--help")
    assert "--train_vocab_size" in done.stdout


REPORTING = """
from haiku_template import cli
from haiku_text import prepare
prepare.REPORT_SECONDS = 0
cli.run(prepare.main)
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(tmp_path, bpe, terminal):
    source, output = write_texts(tmp_path / "in"), tmp_path / "a.safetensors"
    flags = (f"--input={source}", f"--tokenizer={bpe}", f"--output={output}")
    ours, theirs = os.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", REPORTING, *flags],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        stdout=theirs,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # So a terminal tells that nobody writes.
        while chunk := os.read(ours, 2**16):
            said += chunk
    os.close(ours)
    assert (process.communicate()[1], process.returncode) == (b"", 0)
    assert (b"write 30 files" in said) == terminal
    assert bool(re.search(rb"^write 100%, \d+\.\d MB/s$", said, re.M)) != terminal
    assert b"tokens (uint16) of 30 files" in said


@pytest.mark.parametrize("where", ["a reader that is gone", "a full disk"])
def test_what_cannot_be_printed_loses_no_work(tmp_path, bpe, where):
    source, out = write_texts(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    flags = [f"--input={source}", f"--tokenizer={bpe}", f"--output={out}/a.safetensors"]
    flags.append(f"--validation_output={out}/v.safetensors")
    reader, writer = os.pipe()
    os.close(reader)
    if where == "a full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writer)
    done = subprocess.run(
        [sys.executable, "-c", REPORTING, *flags],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    if where == "a full disk":
        assert_fails(done, "standard output: No space left on device", code=74)
    else:
        assert (done.stderr, done.returncode) == ("", 0)
    names = ["a.safetensors", "tokenizer.json", "v.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == names


# What it refuses


def test_nothing_is_overwritten(tmp_path, bpe):
    source, output = write_texts(tmp_path / "in", 2), tmp_path / "a.safetensors"
    output.write_text("mine")
    assert_fails(tokenize(source, bpe, output), output, "exists")
    other = tmp_path / "b.safetensors"
    flags = ("--train_vocab_size=300",)
    own = tmp_path / "own.json"
    own.write_text("mine")
    assert_fails(tokenize(source, own, other, *flags), own, "exists")
    done = tokenize(source, bpe, other, f"--validation_output={output}")
    assert_fails(done, output, "exists")
    done = tokenize(source, bpe, other, f"--validation_output={other}")
    assert_fails(done, "--output and --validation_output are both")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert_fails(tokenize(source, bpe, other), "tokenizer.json is another tokenizer")
    names = {"a.safetensors", "in", "own.json", "tokenizer.json"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert output.read_text() == own.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--output=tokens.bin"], "must end in .safetensors"),
        (["--output=nowhere/a.safetensors"], "the folder nowhere of a.safetensors"),
        (["--tokenizer=nowhere.json"], "nowhere.json does not exist"),
        (["--input=nowhere"], "nowhere does not exist"),
        (["--train_vocab_size=256", "--tokenizer=new.json"], "256 is too small"),
        (["--train_vocab_size=many"], "a whole number is needed"),
        (["--validation_output=v.safetensors"], "00.py is a single text"),
        (
            ["--validation_output=v.safetensors", "--validation_fraction=0"],
            "holds no files when --validation_fraction is 0",
        ),
        (["--validation_fraction=1.5"], "validation_fraction"),
        (["--validation_fraction=0.3"], "needs --validation_output, which is for"),
        (["--tokenizer=bytes"], "the data set bytes reads text as it is"),
        (["--input="], "--input is needed"),
        (["--validation_output="], "--validation_output= is empty"),
        (["--end_of_text="], "--end_of_text= is empty"),
        (["--input=/dev/null"], "/dev/null is no regular file"),
        (["surplus"], "unexpected argument 'surplus'"),
    ],
)
def test_flags_that_cannot_be_used_are_named(tmp_path, bpe, flags, words):
    write_texts(tmp_path / "in", 1)
    defaults = ["--input=in", f"--tokenizer={bpe}", "--output=a.safetensors"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = start(*defaults, *flags, cwd=tmp_path, env=env)
    assert_fails(done, words)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_folder_without_text_is_refused(tmp_path, bpe):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "in" / "empty.txt").touch()
    done = tokenize(tmp_path / "in", bpe, tmp_path / "a.safetensors")
    assert_fails(done, tmp_path / "in", "holds no text")


def test_text_that_is_not_utf_8_is_named_and_nothing_stays(tmp_path, bpe):
    source = write_texts(tmp_path / "in", 3)
    (source / "01b.py").write_bytes("größer".encode("latin-1"))
    done = tokenize(source, bpe, tmp_path / "a.safetensors")
    assert_fails(done, source / "01b.py", "is not UTF-8 text")
    flags = (
        tmp_path / "new.json",
        tmp_path / "a.safetensors",
        "--train_vocab_size=300",
    )
    assert_fails(tokenize(source, *flags), source / "01b.py", "is not UTF-8 text")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("contents", ["", "{}", "[1, 2]"])
def test_a_damaged_tokenizer_is_named(tmp_path, contents):
    (tmp_path / "t.json").write_text(contents)
    source = write_texts(tmp_path / "in", 1)
    done = tokenize(source, tmp_path / "t.json", tmp_path / "a.safetensors")
    assert_fails(done, tmp_path / "t.json", "damaged, or of another kind")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "t.json"]


def test_a_tokenizer_that_cannot_encode_the_text_is_told(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("b")
    paths = (tmp_path / "words.json", tmp_path / "a.safetensors")
    assert_fails(tokenize(tmp_path / "in.txt", *paths), "cannot encode the text")
    assert not (tmp_path / "a.safetensors").exists()


WITH_LITTLE_DISK = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
runpy.run_module("haiku_template.prepare", run_name="__main__")
"""


def test_a_full_disk_is_named_and_nothing_stays(tmp_path, bpe):
    source = write_texts(tmp_path / "in", 200)
    flags = (
        f"--input={source}",
        f"--tokenizer={bpe}",
        f"--output={tmp_path / 'a.safetensors'}",
    )
    done = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_DISK, *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert_fails(done, tmp_path, "cannot be written: File too large", code=74)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# Pieces, and memory


def byte_level(prefix):
    """A tokenizer like GPT-2's: learned merges inside words, spaces before them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text()], trainer)
    return tokenizer


def words_of_pieces():
    tokenizer = tokenizers.Tokenizer(models.WordPiece({}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator([Path(json.__file__).read_text()], trainer)
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [lambda: byte_level(False), lambda: byte_level(True), words_of_pieces],
    ids=["bytes", "bytes with prefix", "words"],
)
@pytest.mark.parametrize("size", [64, 500])
def test_pieces_give_the_token_data_the_whole(tmp_path, monkeypatch, make, size):
    folder = write_texts(tmp_path / "in")
    content = "".join(p.read_bytes().decode() for p in sorted(folder.iterdir()))
    (tmp_path / "whole.txt").write_text(content, newline="")
    monkeypatch.setattr(text, "PIECE", size)
    parts = list(text.pieces(text.TextFile("whole", tmp_path / "whole.txt")))
    assert len(parts) > len(content) / size / 8
    assert "".join(parts) == content
    tokenizer = make()
    whole = tokenizer.encode(content, add_special_tokens=False).ids
    ids = [i for p in parts for i in tokenizer.encode(p, add_special_tokens=False).ids]
    assert ids == whole


@pytest.mark.parametrize("content", ["x" * 900, " " * 900, "ä\n" * 450, "", "a b"])
def test_text_without_a_place_to_cut_is_cut_all_the_same(
    tmp_path, monkeypatch, content
):
    monkeypatch.setattr(text, "PIECE", 10)
    monkeypatch.setattr(text, "LONGEST_PIECE", 40)
    (tmp_path / "a.txt").write_text(content)
    parts = list(text.pieces(text.TextFile("a", tmp_path / "a.txt")))
    assert "".join(parts) == content
    assert all(0 < len(part) <= 50 for part in parts)


MEMORY = """
import sys
from pathlib import Path
from haiku_text import prepare
from haiku_text.data import Tokenizer, documents as text
from haiku_text.data.files import TokenWriter

def anonymous():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

source, tokenizer_file, output = map(Path, sys.argv[1:])
tokenizer = Tokenizer(tokenizer_file, literal=True)
seen, sizes = 0, {}
def report(count):
    global seen
    seen += count
    sizes[seen] = anonymous()
with TokenWriter(output, "uint16") as writer:
    files = [text.TextFile("a", source)]
    prepare.write_tokens(files, tokenizer, writer, report)
    writer.publish()
assert seen == source.stat().st_size, seen
early = max(size for done, size in sizes.items() if done <= seen / 4)
assert max(sizes.values()) < early + 40, sizes
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path, bpe):
    content = "".join(
        f"def function_{i}(argument, other):\n    return argument + {i} * other\n\n"
        for i in range(60_000)
    )
    (tmp_path / "a.py").write_text(content)
    assert len(content) > 4e6
    arguments = [tmp_path / "a.py", bpe, tmp_path / "a.safetensors"]
    command = [sys.executable, "-c", MEMORY, *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


def test_a_writer_that_is_left_early_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        TokenWriter(tmp_path / "a.safetensors", "uint16") as writer,
    ):
        writer.write([1, 2, 3])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_token_that_does_not_fit_is_not_written(tmp_path):
    with (
        TokenWriter(tmp_path / "a.safetensors", "uint16") as writer,
        pytest.raises(OverflowError),
    ):
        writer.write([65536])


@pytest.mark.parametrize("kind", ["prepend", "strip", "split", "words"])
def test_pieces_of_a_long_text_have_its_tokens(tmp_path, kind):
    """Llama's normalizer puts a mark before each text, and a piece is none."""
    words = [f"{'abcdefgh'[i % 8]}{'xyz'[i % 3] * (i % 4)}" for i in range(50)]
    content = " ".join(words[i * 7 % 50] for i in range(12_000))
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    norms = tokenizers.normalizers
    if kind == "prepend":
        marks = [norms.Prepend("\u2581"), norms.Replace(" ", "\u2581")]
        library.normalizer = norms.Sequence(marks)
    elif kind == "split":
        library.normalizer = norms.Replace(" ", "\u2581")
        split = pre_tokenizers.Split(" ", "merged_with_previous")
        library.pre_tokenizer = split
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.normalizer = norms.Strip() if kind == "strip" else None
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], show_progress=False
    )
    library.train_from_iterator([content[:5000]], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(content)
    tokenizer = Tokenizer(tmp_path / "tokenizer.json", literal=True)
    file = text.TextFile("a.txt", tmp_path / "a.txt")
    parts = list(text.pieces(file, tokenizer.splits))
    assert "".join(parts) == content and (len(parts) > 1) == (kind == "words")
    (whole,) = tokenizer.encode([content])
    assert whole == sum(tokenizer.encode(parts), [])
