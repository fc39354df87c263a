"""How fast a folder of pictures is decoded by a thread of a run, and by two processes.

    python -m benchmarks.workers

Writes 2,000 PNGs of 160 x 160 to a temporary folder. `examples/pictures.py` decodes 50
of them for a batch, cuts 128 x 128 out of each and mirrors half. Readers take turns,
each through all pictures: the prefetch thread of a run with `data.workers` of 0 and of
2, and the same data set under Grain's `mp_prefetch` with two processes, where Grain is
installed. All must give the same bits in the same order. The first batches of a turn
are not timed: processes start with them. Beside the wall's seconds are those that all
processes computed, and the one that computed most: the ratio of the latter is what free
cores would give, and holds where others use the machine, too. Prints medians, quartiles
and ratios, and writes them to benchmarks/results/workers-YYYY-MM-DD.json.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from examples.pictures import pictures
from haiku_template.data import BatchSpec, ahead
from haiku_template.data.worker import digests
from haiku_template.data.workers import in_workers

RESULTS = Path(__file__).resolve().parent / "results"
SIZE, CLASSES = 160, 10  # Pixels of a side.
UNTIMED = 8  # Batches.
THREAD = "one thread"
KINDS = ("wall", "cores", "busiest")


def write_pictures(root: Path, count: int) -> None:
    """Smooth shapes with noise, which PNG packs as it does photographs."""
    rng = np.random.default_rng(0)
    for i in range(-CLASSES, count):
        folder = root / ("train" if i >= 0 else "test") / str(i % CLASSES)
        folder.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(256, size=(10, 10, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        noise = rng.integers(0, 12, size=(SIZE, SIZE, 3))
        pixels = np.clip(np.asarray(smooth).astype(int) + noise, 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:05}.png")


@contextlib.contextmanager
def of_this_package(workers: int, spec: BatchSpec, path: str, stop: int) -> Any:
    """Batches as a run reads them."""
    from haiku_template.training.feed import Prefetcher

    train = in_workers(workers, pictures, spec, path=path).train
    with ahead(train, 0, stop), Prefetcher(train.batch, range(stop)) as batches:
        yield iter(batches)


@contextlib.contextmanager
def of_grain(spec: BatchSpec, path: str, stop: int) -> Any:
    """Batches of Grain's processes."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Its processes start only then.
    source = grain.MapDataset.range(stop).map(pictures(spec, path=path).train.batch)
    options = grain.MultiprocessingOptions(num_workers=2)
    # Or each process makes 500 batches ahead, in 16 threads.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    batches = iter(source.to_iter_dataset(reading).mp_prefetch(options))
    yield batches
    batches.close()


def readers() -> dict[str, Callable[..., Any]]:
    """Readers by name; Grain's where it is installed."""
    table = {
        THREAD: lambda *args: of_this_package(0, *args),
        "2 workers": lambda *args: of_this_package(2, *args),
    }
    if importlib.util.find_spec("grain"):
        table["Grain, 2 processes"] = of_grain
    return table


def core_seconds() -> dict[int, float]:
    """Seconds of a core that this process and its children have used, by process."""
    lists = Path("/proc/self/task").glob("*/children")
    pids = [os.getpid(), *(int(pid) for x in lists for pid in x.read_text().split())]
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        seconds[pid] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def turn(reader: Any, spec: BatchSpec, path: str, count: int) -> dict[str, Any]:
    """Seconds a picture: of the wall, of all cores, of the process that uses most."""
    with reader(spec, path, UNTIMED + count) as batches:
        first = [digests(next(batches)) for _ in range(UNTIMED)]
        before, begin = core_seconds(), time.perf_counter()
        for _ in itertools.islice(batches, count - 1):
            pass
        # While all processes are there.
        wall, after = time.perf_counter() - begin, core_seconds()
        next(batches)
    cores = [seconds - before.get(pid, 0.0) for pid, seconds in after.items()]
    seconds = {"wall": wall, "cores": sum(cores), "busiest": max(cores)}
    pictures = (count - 1) * spec.batch_size
    return {"first": first} | {k: x / pictures for k, x in seconds.items()}


def measure(path: str, flags: Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a picture of each reader in each round."""
    spec, table = BatchSpec(flags.batch_size, seed=1), readers()
    count = flags.pictures // flags.batch_size
    times = {name: {kind: [] for kind in KINDS} for name in table}
    for number in range(flags.rounds):
        names = list(table)[number % len(table) :] + list(table)[: number % len(table)]
        first = []
        for name in names:
            result = turn(table[name], spec, path, count)
            first.append(result["first"])
            for kind in KINDS:
                times[name][kind].append(1e3 * result[kind])
        if any(digest != first[0] for digest in first):
            raise AssertionError("the readers gave different batches")
        print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}", flush=True)
    return times


def ratios(times: Any, name: str, kind: str) -> list[float]:
    """Times one thread, in each round."""
    pairs = zip(times[THREAD][kind], times[name][kind], strict=True)
    return [one / other for one, other in pairs]


def show(times: dict[str, dict[str, list[float]]]) -> str:
    """Formats one table: medians, and ratios within a round with their quartiles."""
    table = io.StringIO()
    heads = "ms/picture: wall, all cores, busiest process; times one thread: wall, busy"
    print(f"\n{'':>20}  {heads}", file=table)
    for name, kinds in times.items():
        medians = (f"{statistics.median(kinds[kind]):8.2f}" for kind in KINDS)
        columns = []
        for kind in ("wall", "busiest"):
            low, middle, high = statistics.quantiles(ratios(times, name, kind))
            columns.append(f"{middle:6.2f} ({low:.2f} to {high:.2f})")
        print(f"{name:>20}  {''.join(medians)}   {''.join(columns)}", file=table)
    return table.getvalue()


def parse() -> Namespace:
    """The flags."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--batch_size", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes."""
    flags = parse()
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), flags.pictures)
        times = measure(folder, flags)
    print(show(times))
    date = time.strftime("%Y-%m-%d")
    about = {
        "date": date,
        "command": " ".join(["python -m benchmarks.workers", *sys.argv[1:]]),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "milliseconds": times,
    }
    output = flags.output or RESULTS / f"workers-{date}.json"
    output.write_text(json.dumps(about, indent=2) + "\n")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
