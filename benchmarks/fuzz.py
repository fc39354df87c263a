"""Fuzzes each reader of outside data: nothing but documented errors, in bounds.

    make fuzz [MINUTES=10] [READERS=weights,data] [PARALLEL=2]

Each reader of `benchmarks/readers.py` gets files that the project's own writers made,
with changes: of bytes, of values of JSON, of what is inside of archives. Atheris
chooses among them by the lines that they reach. A finding is an exception without an
exit code, which the reader does not document; more than a GiB of memory beyond what it
had; more than 20 seconds; or the end of the process. Exit code 1 if there was any;
`--findings` is a folder for the files that showed them.
"""

import argparse
import contextlib
import gc
import gzip
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY, SECONDS = 2**30, 20  # More than a process has; of one file.
LONGEST = 2**17  # Bytes of a changed file.
PACKAGES = ("haiku_template", "haiku_text", "jax_doctor")
# What a reader may not expect, in the place of any value of JSON.
ODD = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), "", "a", "\0", "\ud800", "../a", "/", "é" * 9, "1e999", "9" * 5000),
    *([], [0], [[]], [None], {}, {"a": {}}, [1, 2, 3], ["a", "b"], {"": 0}),
)
PACKED = {  # How compressed files begin.
    b"\x1f\x8b": (gzip.decompress, lambda x: gzip.compress(x, 1)),
    b"\x78": (zlib.decompress, lambda x: zlib.compress(x, 1)),
}
Mutate = Callable[[bytes], bytes]


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    """Changes, removes, repeats or inserts a few bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(data) + 1)
        stop = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64)))
        how = rng.randrange(6)
        if how == 0:
            data[at:stop] = b""
        elif how == 1:
            data[at:at] = data[at:stop] * rng.choice((1, 2, 100))
        elif how == 2:
            data[at:stop] = rng.randbytes(stop - at)
        elif how == 3 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 4:
            data[at:at] = rng.choice((b"\0", b"\n", b"[" * 200, b"\xff" * 8, b"9" * 20))
        else:
            del data[at if rng.random() < 0.2 else len(data) :]
    return bytes(data[:LONGEST])


def change_value(value: Any, rng: random.Random) -> Any:
    """Changes one value, or one key, in a tree of JSON."""
    is_tree = isinstance(value, dict | list) and len(value) > 0
    keys = [*value] if isinstance(value, dict) else range(len(value) if is_tree else 0)
    if not is_tree or rng.random() < 0.1:
        if isinstance(value, int | float) and rng.random() < 0.5:
            return value * rng.choice((-1, 2, 10, 0)) + rng.choice((-1, 0, 1))
        return rng.choice(ODD)
    value, key = value.copy(), rng.choice(keys)
    how = rng.randrange(12)
    if how == 0:
        del value[key]
    elif how == 1 and isinstance(value, dict):
        value[rng.choice(("", "a", "b" * 300, *keys))] = value.pop(key)
    elif how == 1:
        value.insert(key, value[rng.choice(keys)])
    elif how == 2:
        value[key] = value[rng.choice(keys)]
    else:
        value[key] = change_value(value[key], rng)
    return value


def change_json(content: bytes, rng: random.Random) -> bytes:
    """Changes a value of JSON, of one line or of all; raises `ValueError` if none."""
    with contextlib.suppress(ValueError):
        return json.dumps(change_value(json.loads(content), rng)).encode()
    lines = content.splitlines(keepends=True)
    at = rng.randrange(len(lines)) if lines else 0
    lines[at : at + 1] = [change_json(line, rng) + b"\n" for line in lines[at : at + 1]]
    if len(lines) < 2:
        raise ValueError("no lines")
    return b"".join(lines)


def change_header(content: bytes, rng: random.Random) -> bytes:
    """Changes the header of a safetensors file, and corrects its length."""
    size = int.from_bytes(content[:8], "little")
    header = change_json(content[8 : 8 + size], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def change_archive(content: bytes, rng: random.Random) -> bytes:
    """Changes a member of a zip file, and packs it again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info, archive.read(info)) for info in archive.infolist()]
    at, packed = rng.randrange(len(members)), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for number, (info, data) in enumerate(members):
            data = change_bytes(data, rng) if number == at else data
            archive.writestr(info, data)
    return packed.getvalue()


def changed(content: bytes, rng: random.Random, mutate: Mutate) -> bytes:
    """Changes a file: inside of what it is packed in, or as bytes by `mutate`."""
    with contextlib.suppress(Exception):  # Where it is not what it begins like.
        if rng.random() < 0.3:
            return mutate(content)
        if content[:2] == b"PK":
            return change_archive(content, rng)
        if content[8:9] == b"{":
            return change_header(content, rng)
        for magic, (unpack, pack) in PACKED.items():
            if content.startswith(magic):
                return pack(mutate(unpack(content)))
        return change_json(content, rng)
    return mutate(content)


class Fuzzed:
    """Reader in this process: runs it on inputs, and counts what comes of them.

    An input is the name of a file, a line, and then its content.
    """

    def __init__(self, name: str, folder: Path) -> None:
        from benchmarks.readers import READERS

        self.reader, self.folder = READERS[name], folder
        folder.mkdir(parents=True)
        self.reader.write(folder)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        self.files = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
        self.files = {k: x for k, x in self.files.items() if len(x) < LONGEST}
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, bytes] = {}  # The input that showed each first.

    def inputs(self) -> list[bytes]:
        """Whole files, as inputs."""
        return [f"{k}\n".encode() + content for k, content in self.files.items()]

    def mutated(self, data: bytes, seed: int, mutate: Mutate | None = None) -> bytes:
        """Changes the file of an input."""
        rng = random.Random(seed)
        name, _, content = data.partition(b"\n")
        if name.decode(errors="replace") not in self.files or rng.random() < 0.02:
            return rng.choice(self.inputs())
        own = mutate or (lambda content: change_bytes(content, rng))
        content = changed(content, rng, own)
        if rng.random() < 0.5:
            content = self.reader.repair(name.decode(), content)
        return name + b"\n" + content[:LONGEST]

    def run(self, data: bytes) -> None:
        """Reads the changed file as all do that may get it."""
        line, _, content = data.partition(b"\n")
        name = line.decode(errors="replace")
        if name not in self.files:
            return
        path = self.folder / name
        begun = time.process_time()
        for call in self._calls(path, name, content):
            try:
                call()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # Rust's panics are no `Exception`.
                is_documented = hasattr(error, "exit_code")
                self.counts["refused" if is_documented else "findings"] += 1
                if not is_documented:
                    self.find(error, data)
            else:
                self.counts["accepted"] += 1
        if time.process_time() - begun > SECONDS:
            self.findings[f"more than {SECONDS} s of a processor"] = data
        self.counts["executions"] += 1
        self._restore(path, name)

    def find(self, error: BaseException, data: bytes) -> None:
        """Keeps an input that showed something new."""
        place, message = cause(error)
        if place not in {sentence.partition(": ")[0] for sentence in self.findings}:
            self.findings[f"{place}: {message}"] = data

    def _calls(self, path: Path, name: str, content: bytes) -> Any:
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        return self.reader.calls(self.folder, name)

    def _restore(self, path: Path, name: str) -> None:
        """Puts back what was changed, here and by the reader itself."""
        path.unlink(missing_ok=True)
        path.write_bytes(self.files[name])
        for path, content in self.files.items():
            path = self.folder / path
            if not path.is_file() or path.stat().st_size != len(content):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        if self.counts["executions"] % 200 == 0:
            gc.collect()


def cause(error: BaseException) -> tuple[str, str]:
    """Kind of an error and where it came from, in the packages if so; its message."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [x for x in frames if any(f"/{name}/" in x.filename for name in PACKAGES)]
    place = (ours or frames)[-1]
    file = "/".join(Path(place.filename).parts[-2:])
    where = f"{type(error).__name__} in {file} {place.name} line {place.lineno}"
    return where, repr(str(error)[:100])


def virtual_memory() -> int:
    """Bytes of this process's addresses."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


def work(name: str, seconds: int, folder: Path) -> None:
    """Fuzzes a reader in this process; writes what it counted into `folder`."""
    import atheris

    logging.disable(logging.ERROR)
    with atheris.instrument_imports(include=[*PACKAGES]):
        fuzzed = Fuzzed(name, folder / "files")
        for data in fuzzed.inputs():  # Imports what it needs.
            fuzzed.run(data)
    corpus, last = folder / "corpus", 0.0
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(fuzzed.inputs()):
        (corpus / f"seed-{number}").write_bytes(data)

    def run(data: bytes) -> None:
        nonlocal last
        # Of one file: what TensorStore lists, it never frees.
        most = virtual_memory() + MEMORY, resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_AS, most)
        fuzzed.run(data)
        if time.monotonic() > last + 2:
            last = time.monotonic()
            report(fuzzed, folder)

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        def mutate(content: bytes) -> bytes:
            return atheris.Mutate(content, max(len(content) + 16, 64))

        return fuzzed.mutated(data, seed, mutate)[:most]

    options = [
        f"-max_total_time={seconds}",
        f"-timeout={15 * SECONDS}",
        "-rss_limit_mb=0",
    ]
    options += [f"-artifact_prefix={folder}/end-", f"-max_len={LONGEST + 100}"]
    options += ["-verbosity=0", "-print_final_stats=0", "-handle_int=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], run, custom_mutator=mutator)
    atheris.Fuzz()


def report(fuzzed: Fuzzed, folder: Path) -> None:
    """Writes what was counted so far, of this process."""
    findings = {k: data.hex() for k, data in fuzzed.findings.items()}
    new = folder / f"counts-{os.getpid()}.new"
    new.write_text(json.dumps([fuzzed.counts, findings]))
    new.rename(folder / f"counts-{os.getpid()}.json")


def watched(name: str, seconds: float, folder: Path) -> tuple[Counter, dict[str, str]]:
    """Fuzzes a reader in processes of its own, another one where one ends."""
    begun, ends = time.monotonic(), {}
    for path in folder.glob("counts-*.json"):  # Of an earlier run.
        path.unlink()
    while (remaining := int(seconds - (time.monotonic() - begun))) > 0:
        shutil.rmtree(folder / "files", ignore_errors=True)
        command = [sys.executable, "-m", "benchmarks.fuzz", f"--work={name}"]
        command += [f"--seconds={remaining}", f"--folder={folder}"]
        with (folder / "log").open("ab") as log:
            done = subprocess.run(
                command, stdout=log, stderr=log, env=environment(), check=False
            )
        artifacts = sorted(folder.glob("end-*"), key=lambda x: x.stat().st_mtime)
        for path in artifacts:
            kind = path.name.split("-")[1]
            if kind == "slow":  # Beside other processes; what counts is above.
                path.rename(path.with_name(f"was-{path.name}"))
                continue
            ends.setdefault(f"the process ended ({kind})", path.read_bytes().hex())
            path.rename(path.with_name(f"was-{path.name}"))
        if done.returncode and not artifacts and remaining > 5:
            ends[f"the process ended with {done.returncode}: see the log"] = ""
            break
    counts: Counter[str] = Counter()
    findings: dict[str, str] = {}
    for path in folder.glob("counts-*.json"):
        more, others = json.loads(path.read_text())
        counts.update(more)
        findings = others | findings
    return counts, findings | ends


def environment() -> dict[str, str]:
    """Variables of a process that fuzzes: one thread where a library asks."""
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | threads | {"JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"}


def fuzz(names: list[str], seconds: float, parallel: int, kept: Path | None) -> bool:
    """Prints a line for each reader, and each finding; True if there is none."""
    from concurrent.futures import ThreadPoolExecutor

    print(f"{'reader':<12}{'executions':>12}{'accepted':>12}{'refused':>12}  findings")
    total = 0
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(parallel) as pool:
        folders = {name: Path(kept or scratch) / name for name in names}
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        done = [pool.submit(watched, k, seconds, folders[k]) for k in names]
        for name, future in zip(names, done, strict=True):
            counts, findings = future.result()
            numbers = [counts[k] for k in ("executions", "accepted", "refused")]
            text = "".join(f"{n:>12,}" for n in numbers)
            print(f"{name:<12}{text}  {len(findings) or 'none'}", flush=True)
            for number, (sentence, data) in enumerate(findings.items()):
                print(f"    {sentence}", flush=True)
                (folders[name] / f"finding-{number}").write_bytes(bytes.fromhex(data))
            total += len(findings)
    return not total


def main() -> None:
    """Parses the flags; fuzzes all readers, or one in this process."""
    from benchmarks.readers import READERS

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--readers", default=",".join(READERS))
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    parser.add_argument("--findings", type=Path)
    for name, kind in (("work", str), ("seconds", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return work(options.work, options.seconds, options.folder)
    names = options.readers.split(",")
    if absent := [name for name in names if name not in READERS]:
        possible = f"possible are {', '.join(READERS)}"
        parser.error(f"--readers={options.readers} names {absent[0]!r}; {possible}")
    whole = fuzz(names, 60 * options.minutes, options.parallel, options.findings)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
