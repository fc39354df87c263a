"""How fast random windows of tokens come from a file that is not in memory.

    python -m benchmarks.token_reader

Writes a file of 2 GB, drops it from the kernel's page cache, asks the kernel whether
that worked, and reads batches of random windows of 1,025 tokens from it: with this
package, with a plain `numpy.memmap`, and in other ways that people use, torch's
DataLoader among them where torch is installed. Readers take turns; each round reads
other windows, and every reader the same ones. A second table has the whole file in the
cache. Prints medians and ratios, writes them to
benchmarks/results/token-reader-YYYY-MM-DD.json, and removes the file.
"""

import ctypes
import gc
import importlib.util
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from benchmarks.rounds import processor
from haiku_text.data.files import TokenWriter, open_tokens

RESULTS = Path(__file__).resolve().parent / "results"
LENGTH = 1025  # Tokens in a window.
BATCH = 32  # Windows.
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
READ_AHEAD = "/sys/dev/block/{}:{}/queue/read_ahead_kb"

Starts = list[np.ndarray]
Reader = Callable[[Starts], Iterator[np.ndarray]]


def of_this_package(path: Path) -> Reader:
    """MADV_RANDOM, and all windows of a batch asked for before the first is read."""
    stream = open_tokens(path, random=True)
    return lambda batches: (stream.windows(starts, LENGTH) for starts in batches)


def plain_memmap(path: Path) -> Reader:
    """What nanoGPT does."""
    tokens = _memmap(path)
    return _sliced(tokens)


def advised_memmap(path: Path) -> Reader:
    """The same after MADV_RANDOM: no reading ahead, one page at a time."""
    tokens = _memmap(path)
    tokens._mmap.madvise(mmap.MADV_RANDOM)
    return _sliced(tokens)


def safetensors_slices(path: Path) -> Reader:
    """Slices of the `safetensors` package."""
    tokens = safe_open(path, framework="numpy").get_slice("tokens")
    return _sliced(tokens)


def unmapped(path: Path) -> Reader:
    """No mapping: POSIX_FADV_WILLNEED for all windows of a batch, then pread."""
    shard = open_tokens(path, random=False).shards[0]
    size, offset = shard.tokens.itemsize, shard.offset
    file = path.open("rb", buffering=0)
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(batches: Starts) -> Iterator[np.ndarray]:
        for starts in batches:
            result = np.empty((len(starts), LENGTH), shard.tokens.dtype)
            places = [offset + size * start for start in starts.tolist()]
            advice = (size * LENGTH, os.POSIX_FADV_WILLNEED)
            for place in places:
                os.posix_fadvise(file.fileno(), place, *advice)
            for row, place in zip(result, places, strict=True):
                os.preadv(file.fileno(), [row], place)
            yield result
        file.close()

    return read


def _memmap(path: Path) -> np.memmap:
    stream = open_tokens(path, random=False)
    offset = stream.shards[0].offset
    return np.memmap(path, stream.dtype, "r", offset, (len(stream),))


def _sliced(tokens: Any) -> Reader:
    return lambda batches: (
        np.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
        for starts in batches
    )


def torch_loader(workers: int) -> Callable[[Path], Reader]:
    """torch's DataLoader over a memmap, as its tutorials write it."""

    def make(path: Path) -> Reader:
        import torch

        class Windows(torch.utils.data.Dataset):
            def __init__(self) -> None:
                self.tokens = _memmap(path)

            def __len__(self) -> int:
                return len(self.tokens) - LENGTH

            def __getitem__(self, start: int) -> "torch.Tensor":
                window = self.tokens[start : start + LENGTH]
                return torch.from_numpy(window.astype(np.int64))

        windows = Windows()

        def read(batches: Starts) -> Iterator[np.ndarray]:
            order = [starts.tolist() for starts in batches]
            loader = torch.utils.data.DataLoader(
                windows, batch_sampler=order, num_workers=workers
            )
            return (batch.numpy() for batch in loader)

        return read

    return make


def readers() -> dict[str, Callable[[Path], Reader]]:
    """All of them; torch's where it is installed."""
    found = {
        "this package": of_this_package,
        "numpy.memmap": plain_memmap,
        "numpy.memmap, MADV_RANDOM": advised_memmap,
        "pread, WILLNEED": unmapped,
        "safetensors slices": safetensors_slices,
    }
    if importlib.util.find_spec("torch"):
        found["torch DataLoader"] = torch_loader(0)
        found["torch DataLoader, 2 workers"] = torch_loader(2)
    return found


def write_file(path: Path, tokens: int) -> None:
    """Random tokens of GPT-2's vocabulary, on the disk when this returns."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, "uint16") as writer:
        for start in range(0, tokens, 10**7):
            size = min(10**7, tokens - start)
            writer.write(rng.integers(50257, size=size, dtype=np.uint16))
        writer.publish()


def drop_from_cache(path: Path) -> float:
    """Asks the kernel to forget the file; the share of its pages that it still has."""
    with path.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            pages = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
            contents = np.frombuffer(mapping, np.uint8)
            address, size = contents.ctypes.data, len(mapping)
            del contents  # It would keep the mapping from being closed.
            pointers = map(ctypes.c_void_p, (address, pages.ctypes.data))
            begin, where = pointers
            if ctypes.CDLL(None).mincore(begin, ctypes.c_size_t(size), where):
                raise OSError("the kernel does not say which pages it has")
    return float((pages & 1).mean())


def time_of(reader: Reader, batches: Starts) -> tuple[float, int]:
    """Seconds from the first batch to the last, and the sum of all tokens.

    The first is not timed: torch's workers start with it, and are then up to four
    batches ahead.
    """
    total, begun = 0, None
    for batch in reader(batches):
        total += int(batch.sum(dtype=np.int64))
        begun = begun or time.perf_counter()
    return time.perf_counter() - begun, total


def measure(path: Path, flags: Namespace, cold: bool) -> dict[str, Any]:
    """Windows per second of each reader: median and range over the rounds."""
    made = readers()
    rates: dict[str, list[float]] = {name: [] for name in made}
    resident = [0.0]
    if not cold:
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
    tokens = len(open_tokens(path, random=False))
    for turn in range(flags.rounds):
        rng = np.random.default_rng((turn, cold))
        batches = list(rng.integers(tokens - LENGTH, size=(flags.batches, BATCH)))
        sums = set()
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()  # A mapping of the last reader would keep its pages.
            if cold:
                resident.append(drop_from_cache(path))
            seconds, total = time_of(made[name](path), batches)
            rates[name].append((flags.batches - 1) * BATCH / seconds)
            sums.add(total)
        if len(sums) > 1:
            raise AssertionError(f"the readers read different tokens: {sums}")
    figures = {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
        for name, values in rates.items()
    }
    return {"windows_per_second": figures, "most_resident": max(resident)}


def show(title: str, found: dict[str, Any]) -> None:
    """Prints one table."""
    figures = found["windows_per_second"]
    own = figures["this package"]["median"]
    print(f"\n{title:>30}   windows/s  (least to most)         this package is")
    for name, f in figures.items():
        spread = f"({f['min']:,.0f} to {f['max']:,.0f})"
        times = "" if name == "this package" else f"{own / f['median']:8.2f} x as fast"
        print(f"{name:>30}  {f['median']:10,.0f}  {spread:24} {times}")


def place(path: Path) -> dict[str, Any]:
    """The file system and the read-ahead of the disk that a file is on."""
    command = ["df", "--output=fstype", path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    device = path.stat().st_dev
    setting = Path(READ_AHEAD.format(os.major(device), os.minor(device)))
    read_ahead = int(setting.read_text()) if setting.exists() else None
    return {"file_system": done.stdout.split()[-1], "read_ahead_kb": read_ahead}


def machine() -> dict[str, Any]:
    """Where this runs."""
    model = processor(Path("/proc/cpuinfo").read_text())
    torch = sys.modules.get("torch")
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} cores, {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch and torch.__version__,
    }


def parse() -> Namespace:
    """The flags."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=10**9, help="in the file")
    parser.add_argument("--batches", type=int, default=11, help="in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to measure; by default for /tmp")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes."""
    flags = parse()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        path = Path(folder) / "tokens.safetensors"
        where = place(Path(folder))
        print(f"{flags.tokens:,} tokens on {where}")
        write_file(path, flags.tokens)
        found = {"warm": measure(path, flags, cold=False)}
        show("file in the page cache", found["warm"])
        if where["file_system"] in IN_MEMORY or drop_from_cache(path) > 0.001:
            print(
                "\nthe file cannot be dropped from memory here: nothing cold to measure"
            )
        else:
            found["cold"] = measure(path, flags, cold=True)
            show("cold", found["cold"])
            print(f"of the file in memory before: {found['cold']['most_resident']:.2%}")
    if not importlib.util.find_spec("torch"):
        print("torch is not installed: no ratio to its DataLoader")
    date = time.strftime("%Y-%m-%d")
    command = " ".join(["python -m benchmarks.token_reader", *sys.argv[1:]])
    about = {"date": date, "command": command, **machine(), **where, **vars(flags)}
    about = {k: v for k, v in about.items() if k not in ("folder", "output")}
    output = flags.output or RESULTS / f"token-reader-{date}.json"
    output.write_text(json.dumps(about | found, indent=2) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
