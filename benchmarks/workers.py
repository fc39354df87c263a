"""How fast a folder of pictures is decoded by a thread of a run, and by two processes.

    python -m benchmarks.workers

Writes 2,000 PNGs of 160 x 160 to a temporary folder. A batch decodes 50 of them, cuts
128 x 128 out of each and mirrors half. Readers take turns, each through all pictures:
the prefetch thread of a run with `data.workers` of 0 and of 2, and the same data set
under Grain's `mp_prefetch` with two processes, where Grain is installed. All must give
the same bits in the same order. The first batches of a turn are not timed: processes
start with them. Seconds of all cores beside the wall's tell how much of a ratio is the
machine's, which others may use too. Prints medians, quartiles and ratios, and writes
them to benchmarks/results/workers-YYYY-MM-DD.json.
"""

import contextlib
import importlib.util
import io
import itertools
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from haiku_template.data import BatchSpec, Data, ahead
from haiku_template.data.dataset import epochs
from haiku_template.data.worker import digests
from haiku_template.data.workers import in_workers

RESULTS = Path(__file__).resolve().parent / "results"
SIZE, CROP = 160, 128  # Pixels of a side, in a file and in a batch.
UNTIMED = 8  # Batches.
THREAD = "one thread"

Batches = Iterator[dict[str, np.ndarray]]


class Pictures:
    """Batches of a folder's pictures, cut out and mirrored at random."""

    def __init__(self, folder: str, spec: BatchSpec) -> None:
        self.paths, self.spec = sorted(Path(folder).glob("*.png")), spec

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """Decodes the pictures of a step: uint8 [B, 128, 128, 3]."""
        rows = epochs(len(self.paths), self.spec, step)[self.spec.share()]
        rng = np.random.default_rng((self.spec.seed, 1, step))
        pictures = np.empty((len(rows), CROP, CROP, 3), np.uint8)
        for picture, row in zip(pictures, rows, strict=True):
            top, left = rng.integers(0, SIZE - CROP + 1, 2)
            with Image.open(self.paths[row]) as file:
                box = (left, top, left + CROP, top + CROP)
                pixels = np.asarray(file.convert("RGB").crop(box))
            picture[:] = pixels[:, :: rng.choice((-1, 1))]
        return {"inputs": pictures, "labels": (rows % 10).astype(np.int32)}


def folder_of_pictures(spec: BatchSpec, *, path: str) -> Data:
    """Makes `Data` of a folder, as a config names it."""
    return Data(Pictures(path, spec), None, 10)


def write_pictures(folder: Path, count: int) -> None:
    """Smooth shapes with noise, which PNG packs as it does photographs."""
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = rng.integers(256, size=(10, 10, 3), dtype=np.uint8)
        smooth = Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
        noise = rng.integers(0, 12, size=(SIZE, SIZE, 3))
        pixels = np.clip(np.asarray(smooth).astype(int) + noise, 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:05}.png")


@contextlib.contextmanager
def of_this_package(workers: int, spec: BatchSpec, path: str, stop: int) -> Any:
    """Batches as a run reads them."""
    from haiku_template.training.feed import Prefetcher

    train = in_workers(workers, folder_of_pictures, spec, path=path).train
    with ahead(train, 0, stop), Prefetcher(train.batch, range(stop)) as batches:
        yield iter(batches)


@contextlib.contextmanager
def of_grain(spec: BatchSpec, path: str, stop: int) -> Any:
    """Batches of Grain's processes."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Its processes start only then.
    source = grain.MapDataset.range(stop).map(Pictures(path, spec).batch)
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


def cpu_seconds() -> float:
    """Seconds of all cores that this process and those that ended have used."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    usages = map(resource.getrusage, kinds)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def turn(reader: Any, spec: BatchSpec, path: str, count: int) -> dict[str, Any]:
    """Seconds of the wall a picture, of all cores a picture, and the first batches."""
    stop, before = UNTIMED + count, cpu_seconds()
    with reader(spec, path, stop) as batches:
        first = [digests(next(batches)) for _ in range(UNTIMED)]
        begin = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        seconds = time.perf_counter() - begin
    pictures = spec.batch_size
    return {
        "wall": seconds / (count * pictures),
        "cores": (cpu_seconds() - before) / (stop * pictures),
        "first": first,
    }


def measure(path: str, flags: Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a picture of each reader in each round."""
    spec, table = BatchSpec(flags.batch_size, seed=1), readers()
    count = flags.pictures // flags.batch_size
    times = {name: {"wall": [], "cores": []} for name in table}
    for number in range(flags.rounds):
        names = list(table)[number % len(table) :] + list(table)[: number % len(table)]
        first = []
        for name in names:
            result = turn(table[name], spec, path, count)
            first.append(result["first"])
            for kind, values in times[name].items():
                values.append(1e3 * result[kind])
        if any(digest != first[0] for digest in first):
            raise AssertionError("the readers gave different batches")
        print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}", flush=True)
    return times


def show(times: dict[str, dict[str, list[float]]]) -> str:
    """Formats one table; ratios are of one round each."""
    table = io.StringIO()
    heads = "ms/picture  (quartiles)      of all cores   times one thread (quartiles)"
    print(f"\n{'':>20}  {heads}", file=table)
    for name, kinds in times.items():
        wall, cores = kinds["wall"], statistics.median(kinds["cores"])
        pairs = zip(times[THREAD]["wall"], wall, strict=True)
        ratio = [one / other for one, other in pairs]
        low, middle, high = statistics.quantiles(wall)
        least, median, most = statistics.quantiles(ratio)
        print(
            f"{name:>20}  {middle:10.2f}  ({low:.2f} to {high:.2f})  {cores:12.2f}   "
            f"{median:10.2f} ({least:.2f} to {most:.2f})",
            file=table,
        )
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
    from benchmarks import workers  # Processes import functions of a module by name.

    workers.main()
