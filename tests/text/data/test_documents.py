"""Text as bytes: which files, in which order, and which of them are held out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from haiku_template.data import BatchSpec
from haiku_template.errors import ConfigError
from haiku_text.data import byte_text
from haiku_text.data import documents as text

ROOT = Path(__file__).parents[3]


def load(path=None, **keys):
    return byte_text(BatchSpec(4), path=path, **keys)


def contents(stream):
    return stream.windows(np.array([0]), len(stream)).tobytes()


def documents(stream):
    """The texts of a stream: each ends with a zero byte."""
    *texts, rest = contents(stream).split(b"\0")
    assert rest == b""
    return texts


def write_files(folder, number=40):
    for i in range(number):
        path = folder / f"sub{i % 3}" / f"file_{i:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"text of file {i}: {'äß' * i}\r\n".encode())
    return folder


def refuses(*words):
    pattern = ".*".join(re.escape(str(word)) for word in words)
    return pytest.raises(ConfigError, match=f"^[^\\n]*{pattern}[^\\n]*$")


def test_every_file_is_either_trained_on_or_held_out_whole(tmp_path):
    files = sorted(write_files(tmp_path).rglob("*.txt"))
    data = load(str(tmp_path), context=8, validation_fraction=0.3)
    train, held_out = documents(data.train.tokens), documents(data.evaluation.tokens)
    assert sorted(train + held_out) == sorted(file.read_bytes() for file in files)
    assert 3 < len(held_out) < 25
    # In the order of the names.
    for texts in (train, held_out):
        ordered = [f.read_bytes() for f in files if f.read_bytes() in texts]
        assert texts == ordered


def test_bytes_are_the_vocabulary(tmp_path):
    data = load(str(write_files(tmp_path)), context=8)
    assert (data.num_outputs, data.text) == (256, "bytes")
    batch = data.train.batch(0)
    assert batch["inputs"].dtype == np.uint8
    assert batch["inputs"].shape == (4, 8)
    assert data.preprocess(batch["inputs"]).dtype == np.int32
    assert data.evaluation.batch(0)["labels"].dtype == np.uint8


def test_held_out_files_stay_when_others_come_and_go(tmp_path):
    def held_out(fraction):
        parts = text.split_documents(text.text_files(str(tmp_path)), fraction)
        return {file.name for file in parts[1]}

    write_files(tmp_path, 60)
    before, more = held_out(0.2), held_out(0.4)
    assert before < more
    for path in list(tmp_path.rglob("*.txt"))[::2]:
        path.unlink()
    remaining = {f.name for f in text.text_files(str(tmp_path))}
    (tmp_path / "another.txt").write_text("text")
    assert held_out(0.2) - {"another.txt"} == before & remaining


def test_held_out_files_do_not_depend_on_the_place_of_the_folder(tmp_path):
    parts = []
    for name in ("a", "b"):
        files = text.text_files(str(write_files(tmp_path / name)))
        parts.append([f.name for f in text.split_documents(files, 0.2)[1]])
    assert parts[0] == parts[1]


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_of_few_files_some_are_left_on_both_sides(number, fraction):
    documents = [text.Document(f"{i}", b"text") for i in range(number)]
    train, held_out = text.split_documents(documents, fraction)
    assert min(len(train), len(held_out)) == 1
    assert sorted(train + held_out) == documents


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    (tmp_path / "input.txt").write_bytes(bytes(range(1, 201)))
    data = load(str(tmp_path / "input.txt"), context=8, validation_fraction=0.1)
    assert documents(data.train.tokens) == [bytes(range(1, 181))]
    assert documents(data.evaluation.tokens) == [bytes(range(181, 201))]


def test_without_validation_all_is_trained_on(tmp_path):
    files = write_files(tmp_path, 3)
    data = load(str(files), context=8, validation_fraction=0)
    assert data.evaluation is None
    assert len(documents(data.train.tokens)) == 3
    one = load(str(files / "sub0" / "file_00.txt"), context=8, validation_fraction=0)
    assert documents(one.train.tokens) == [b"text of file 0: \r\n"]


def test_several_paths_are_one_source(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(f"text {name}")
    (tmp_path / "c.txt").write_text("text c")
    paths = tuple(str(tmp_path / name) for name in ("b", "c.txt", "a"))
    names = [document.name for document in text.read_documents(paths)]
    assert names == ["a.txt", "b.txt", "c.txt"]


def test_hidden_empty_and_binary_files_are_left_out(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / ".hidden").write_text("text")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    names = [document.name for document in text.read_documents(str(tmp_path))]
    assert names == ["text.txt"]


def test_without_a_path_it_is_the_source_of_the_standard_library():
    data = load()
    train, held_out = documents(data.train.tokens), documents(data.evaluation.tokens)
    folder = Path(os.__file__).parent
    assert Path(os.__file__).read_bytes() in train + held_out
    assert (folder / "json" / "decoder.py").read_bytes() in train + held_out
    assert 3e6 < len(data.train.tokens) < 15e6
    share = len(data.evaluation.tokens) / len(data.train.tokens)
    assert 0.03 < share < 0.3
    # Packages that hold no more than a comment may be alike.
    assert sum(map(len, set(train) & set(held_out))) < 100


def test_the_standard_library_is_without_tests_tables_and_what_was_installed():
    names = [file.name for file in text.library_files()]
    assert names == sorted(names)
    parts = {part for name in names for part in name.split("/")[:-1]}
    assert {"json", "asyncio"} <= parts
    assert not parts & {"test", "tests", "site-packages", "idlelib", "encodings"}
    assert "pydoc_data/topics.py" not in names
    assert not [name for name in names if "sysconfigdata" in name]


def test_the_standard_library_is_the_same_in_every_process():
    code = (
        "import hashlib; from haiku_template.data import BatchSpec\n"
        "from haiku_text.data import byte_text\n"
        "batch = byte_text(BatchSpec(64)).train.batch(7)\n"
        "print(hashlib.sha256(batch['labels'].tobytes()).hexdigest())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


def test_pydoc_gives_the_topics_of_pythons_help():
    from pydoc_data.topics import topics

    data = load("pydoc", validation_fraction=0.2)
    train, held_out = documents(data.train.tokens), documents(data.evaluation.tokens)
    assert sorted(train + held_out) == sorted(t.encode() for t in topics.values())
    assert 5 < len(held_out) < len(train)


def test_a_python_without_the_topics_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with refuses("no pydoc_data.topics"):
        load("pydoc")


def test_a_python_without_its_source_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.pyc"))
    with refuses("Python's standard library holds no text"):
        load()


def test_a_folder_without_text_is_refused(tmp_path):
    with refuses(tmp_path, "holds no text"):
        load(str(tmp_path))
    (tmp_path / "a.bin").write_bytes(b"a\0b")
    with refuses(tmp_path, "holds no text"):
        load(str(tmp_path))
    with refuses(tmp_path / "a.bin", "holds no text", "without zero bytes"):
        load(str(tmp_path / "a.bin"))


def test_a_path_where_nothing_is_is_named(tmp_path):
    with refuses(tmp_path / "nowhere", "does not exist"):
        load(str(tmp_path / "nowhere"))
    (tmp_path / "a.txt").write_text("text")
    with refuses(tmp_path / "b.txt", "does not exist", "holds a.txt"):
        load((str(tmp_path / "a.txt"), str(tmp_path / "b.txt")))


@pytest.mark.parametrize("path", ["", ("a.txt", "")])
def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch, path):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    with refuses("bytes needs a text file", "--config.data.path=PATH"):
        load(path, context=1)


def test_a_path_may_be_a_number_or_no_text(tmp_path, monkeypatch):
    (tmp_path / "2024").write_text("text")
    monkeypatch.chdir(tmp_path)
    for path in (2024, Path("2024"), [Path("2024")]):
        assert [x.content for x in text.read_documents(path)] == [b"text"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    # Even root may open this one and not read it.
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")
    with refuses(tmp_path / "a.txt", "cannot be read: Input/output error"):
        load(str(tmp_path))


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")

    def denied(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", denied)
    with refuses("the folder", tmp_path, "cannot be read: Permission denied"):
        load(str(tmp_path))


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 2])
def test_a_fraction_that_leaves_nothing_is_refused(tmp_path, fraction):
    for number in (1, 4):
        path = write_files(tmp_path / str(number), number)
        with refuses(f"validation_fraction={fraction}; possible is from 0"):
            load(str(path), validation_fraction=fraction)


def test_a_context_longer_than_the_text_is_refused(tmp_path):
    path = str(write_files(tmp_path, 4))
    with refuses("context=5000", "tokens, and there are", "to train on"):
        load(path, context=5000)


def test_a_file_of_prompts_has_one_in_each_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffa\u2028b\r\nc\x0cd\n\ne\n".encode())
    assert text.prompt_file(str(path)) == ["a\u2028b", "c\x0cd", "", "e"]
    path.write_text("")
    assert text.prompt_file(str(path)) == []
    path.write_bytes(b"one\rline\nnext\r\n")
    assert text.prompt_file(str(path)) == ["one\rline", "next"]


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffä\r\n".encode())
    assert [x.content for x in text.read_documents(str(path))] == ["ä\r\n".encode()]
    assert [*text.pieces(text.TextFile("a.txt", path))] == ["ä\r\n"]
